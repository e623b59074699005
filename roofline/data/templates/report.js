"use strict";
// Sorting and CSV of the tables; data-v holds each cell's value in SI units.
(() => {
  const cells = (row) => Array.from(row.children);
  const rows = (table) => Array.from(table.tBodies[0].rows);

  function sortBy(table, index) {
    const head = cells(table.tHead.rows[0]);
    const down = head[index].getAttribute("aria-sort") === "ascending";
    head.forEach((th) => th.removeAttribute("aria-sort"));
    head[index].setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.children[index].dataset.v;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === ""); // what is missing stays last
      const order = x - y;
      return (down ? -1 : 1) * (Number.isNaN(order) ? x.localeCompare(y) : order);
    };
    table.tBodies[0].append(...rows(table).sort(compare));
  }

  function csv(table) {
    const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const head = cells(table.tHead.rows[0]).map((th) => th.dataset.key);
    const body = rows(table).map((row) => cells(row).map((td) => td.dataset.v));
    return [head, ...body].map((line) => line.map(quote).join(",")).join("\n") + "\n";
  }

  for (const table of document.querySelectorAll("table")) {
    cells(table.tHead.rows[0]).forEach((th, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort by this column";
      button.append(...th.childNodes);
      button.addEventListener("click", () => sortBy(table, index));
      th.append(button);
    });
  }
  for (const button of document.querySelectorAll("button.csv")) {
    button.addEventListener("click", () => {
      const name = button.dataset.table;
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([csv(document.querySelector(`table[data-name="${name}"]`))], { type: "text/csv" }));
      link.download = `${name}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }
  // Folded tables are printed too.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
})();
