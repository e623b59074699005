"use strict";
// Values of points on hover, sorting and CSV of tables. data-v holds each cell's value in SI units.
(() => {
  const cells = (row) => Array.from(row.children);
  const rows = (table) => Array.from(table.tBodies[0].rows);
  const headings = (table) => cells(table.tHead.rows[table.tHead.rows.length - 1]);
  const make = (tag, props) => Object.assign(document.createElement(tag), props);

  // --- tables

  function sortBy(table, index) {
    const head = headings(table);
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
    const head = headings(table).map((th) => th.dataset.key);
    const body = rows(table).map((row) => cells(row).map((td) => td.dataset.v));
    return [head, ...body].map((line) => line.map(quote).join(",")).join("\n") + "\n";
  }

  for (const table of document.querySelectorAll("table")) {
    headings(table).forEach((th, index) => {
      const button = make("button", { type: "button", title: "Sort by this column" });
      button.append(...th.childNodes);
      button.addEventListener("click", () => sortBy(table, index));
      th.append(button);
    });
  }
  for (const button of document.querySelectorAll("button.csv")) {
    button.addEventListener("click", () => {
      const name = button.dataset.table;
      const text = csv(document.querySelector(`table[data-name="${name}"]`));
      const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: `${name}.csv` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }

  // --- figures: the nearest point to the pointer, or the next one by arrow keys

  const REACH = 14; // CSS pixels
  const tip = make("div", { id: "tip", role: "status" });
  let ring = null;
  document.body.append(tip);
  const known = new WeakMap();

  function marksOf(svg) {
    if (known.has(svg)) return known.get(svg);
    const found = [];
    for (const group of svg.querySelectorAll("[data-tips]")) {
      const words = group.dataset.tips.split("|");
      const head = group.dataset.head ?? "";
      const image = group.matches("image") ? group : group.querySelector("image");
      if (image) {
        found.grid ??= [];
        found.grid.push({ image, words, head, columns: +group.dataset.columns });
        continue;
      }
      let marks = Array.from(group.querySelectorAll("use"));
      const outline = marks.length === 0; // a few paths of their own, or a bar
      if (outline) marks = Array.from(group.querySelectorAll("path")).filter((path) => !path.closest("defs"));
      marks.forEach((mark, i) => {
        const box = outline ? mark.getBBox() : null;
        const x = box ? box.x + box.width / 2 : +mark.getAttribute("x");
        const y = box ? box.y + box.height / 2 : +mark.getAttribute("y");
        found.push({ x, y, box, text: head + words[i] });
      });
    }
    known.set(svg, found);
    return found;
  }

  function nearest(svg, event) {
    const marks = marksOf(svg);
    const matrix = svg.getScreenCTM();
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
    let best = null;
    let least = (REACH / matrix.a) ** 2;
    for (const mark of marks) {
      const inside = mark.box && Math.abs(at.x - mark.x) <= mark.box.width / 2 && Math.abs(at.y - mark.y) <= mark.box.height / 2;
      const far = inside ? 1e-9 : mark.box && mark.box.width > 8 ? Infinity : (mark.x - at.x) ** 2 + (mark.y - at.y) ** 2;
      if (far < least) [best, least] = [mark, far];
    }
    return best ?? (marks.grid ?? []).map((grid) => cellAt(grid, event, svg)).find(Boolean) ?? null;
  }

  function cellAt({ image, words, head, columns }, event, svg) {
    const area = image.getBoundingClientRect();
    const lines = words.length / columns;
    const [column, line] = [
      Math.floor(((event.clientX - area.left) / area.width) * columns),
      Math.floor(((area.bottom - event.clientY) / area.height) * lines),
    ];
    if (column < 0 || column >= columns || line < 0 || line >= lines) return null;
    const centre = new DOMPoint(
      area.left + ((column + 0.5) / columns) * area.width,
      area.bottom - ((line + 0.5) / lines) * area.height,
    ).matrixTransform(svg.getScreenCTM().inverse());
    return { x: centre.x, y: centre.y, box: null, text: head + words[line * columns + column] };
  }

  function show(svg, mark) {
    const matrix = svg.getScreenCTM();
    const at = new DOMPoint(mark.x, mark.y).matrixTransform(matrix);
    tip.textContent = mark.text;
    tip.classList.add("shown");
    const left = Math.min(Math.max(8, at.x + 12), document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = at.y - tip.offsetHeight - 12;
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(above < 4 ? at.y + 14 : above)}px)`;
    ring ??= document.createElementNS(svg.namespaceURI, "circle");
    for (const [name, value] of [["id", "ring"], ["cx", mark.x], ["cy", mark.y], ["r", 5]]) ring.setAttribute(name, value);
    svg.append(ring);
  }

  function hide() {
    tip.classList.remove("shown");
    ring?.remove();
  }

  for (const svg of document.querySelectorAll(".card svg")) {
    svg.addEventListener("pointermove", (event) => {
      const mark = nearest(svg, event);
      if (mark) show(svg, mark);
      else hide();
    });
    svg.addEventListener("pointerdown", (event) => {
      const mark = nearest(svg, event);
      if (mark) show(svg, mark);
    });
    svg.addEventListener("pointerleave", hide);
    let place = -1;
    const card = svg.closest(".card");
    card.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const marks = marksOf(svg);
      if (event.key === "Escape") hide();
      if (!step || !marks.length) return;
      event.preventDefault();
      place = (place + step + marks.length) % marks.length;
      show(svg, marks[place]);
    });
    card.addEventListener("blur", hide);
  }
  addEventListener("scroll", hide, { passive: true });

  // Folded tables are printed too.
  addEventListener("beforeprint", () => {
    hide();
    document.querySelectorAll("details").forEach((part) => { part.open = true; });
  });
})();
