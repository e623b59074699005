"""The committed page in a real browser: nothing from the network, no error, hover, sorting, CSV, phone, dark, print.

The browser is driven by its remote debugging protocol over a pipe: no driver, no port, no network.
"""

from __future__ import annotations

import base64
import csv
import fcntl
import io
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flopcast.roofline.views.figures.colours import CARD, DARK_COLOURS

REPORTS = Path(__file__).resolve().parents[4] / "reports"
PAGE = REPORTS / "nvidia-h200" / "report.html"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-quic", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 90.0  # for one answer, on a busy machine


def find() -> str | None:
    """The browser of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser, offline. `faults`: errors, warnings and requests for anything but files and data."""

    def __init__(self, program: str, folder: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def place() -> None:  # where the browser reads and writes, whatever their numbers are now
            reads, writes = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out))
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self.process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={folder / 'browser'}", "about:blank"],
            close_fds=False, preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.reading, self.writing = ours_in, ours_out
        self.buffer, self.number, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def close(self) -> None:
        self.session = ""
        try:
            self.call("Browser.close")
            self.process.wait(20)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.reading)
        os.close(self.writing)

    def call(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self.number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self.events.append(found)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reading], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self.reading, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError(f"no answer from the browser within {SECONDS:.0f} s")
            self.buffer += chunk
        text, self.buffer = self.buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, page: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Loads a page at a size in CSS pixels; under 600 as a phone does."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    @property
    def faults(self) -> list[str]:
        """What was logged, thrown or asked for elsewhere since the page was opened."""
        self.run("0")  # whatever was under way is read
        found = []
        for event in self.events:
            method, said = event.get("method"), event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                found.append(json.dumps(said)[:400])
            if method == "Network.requestWillBeSent":
                url = said["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:")):
                    found.append(url)
        return found

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian's package: chromium)")
    if not PAGE.is_file():
        pytest.skip("no page beside the code")
    try:
        made = Browser(program, tmp_path_factory.mktemp("browser"))
    except (OSError, TimeoutError) as fault:  # a package that is only a pointer to another, as Ubuntu's
        pytest.skip(f"{program} does not start: {fault}")
    yield made
    made.close()


def colour(browser: Browser, selector: str, name: str) -> str:
    """rgb(1, 2, 3) -> #010203"""
    script = f"getComputedStyle(document.querySelector({selector!r})).{name}"
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", browser.run(script))[:3])


def test_it_loads_without_network_and_without_a_word_in_the_console(browser: Browser) -> None:
    browser.open(PAGE)
    assert browser.faults == []
    assert PAGE.stat().st_size < 3_000_000
    shown = browser.run("[...document.querySelectorAll('.card svg')].map((svg) => svg.getBoundingClientRect().height)")
    assert len(shown) >= 8
    assert all(height > 100 for height in shown)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert "of its" in browser.run("document.querySelector('.numbers').textContent")


def test_every_figure_has_words_and_hovering_a_point_shows_its_values(browser: Browser) -> None:
    browser.open(PAGE)
    names = browser.run("[...document.querySelectorAll('figure')].map((figure) => figure.id)")
    assert {"figure-roofline", "figure-map", "figure-anatomy", "figure-agreement"} <= set(names)
    for name in names:
        words = browser.run(f"document.querySelector('#{name} svg').getAttribute('aria-label')")
        assert len(words) > 40
        assert browser.run(f"document.querySelector('#{name} svg').getAttribute('role')") == "img"
        at = browser.run(f"""(() => {{
          const group = document.querySelector('#{name} [data-tips]');
          if (!group) return null;
          group.scrollIntoView({{ block: 'center', behavior: 'instant' }});
          const mark = group.querySelector('use') ?? group.querySelector('path:not(defs path)') ?? group;
          const area = mark.getBoundingClientRect();
          return [area.x + area.width / 2, area.y + area.height / 2];
        }})()""")
        assert at is not None, name
        browser.run("document.querySelector('#tip').className = ''")
        browser.hover(1, 1)
        browser.hover(*at)
        said = browser.run("[document.querySelector('#tip').className, document.querySelector('#tip').textContent]")
        assert said[0] == "shown", name
        assert re.search(r"\d", said[1]), name
        box = browser.run("""(() => {
          const r = document.querySelector('#tip').getBoundingClientRect();
          return [r.left >= 0, r.right <= innerWidth, r.top >= 0, r.bottom <= innerHeight];
        })()""")
        assert all(box), name
    browser.hover(1, 1)
    assert browser.run("document.querySelector('#tip').className") == ""


def test_points_are_reached_by_keyboard_too(browser: Browser) -> None:
    browser.open(PAGE)
    browser.run("document.querySelector('#figure-agreement .card').focus()")
    browser.key("ArrowRight")
    first = browser.run("document.querySelector('#tip').textContent")
    browser.key("ArrowRight")
    second = browser.run("document.querySelector('#tip').textContent")
    assert "measured" in first
    assert first != second
    browser.key("Escape")
    assert browser.run("document.querySelector('#tip').className") == ""
    assert browser.faults == []


def test_tables_sort_and_download(browser: Browser) -> None:
    browser.open(PAGE)
    column = """(() => {
      const table = document.querySelector('table[data-name="validation"]');
      const index = [...table.tHead.rows[0].cells].findIndex((th) => th.dataset.key === 'step_error');
      const values = () => [...table.tBodies[0].rows].map((row) => row.cells[index].dataset.v);
      const button = table.tHead.rows[0].cells[index].querySelector('button');
      const found = [];
      for (let i = 0; i < 2; i++) { button.click(); found.push(values()); }
      return found;
    })()"""
    up, down = ([float(value) for value in values if value != ""] for values in browser.run(column))
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert len(up) > 40
    assert browser.run("document.querySelector('th[aria-sort=descending]').dataset.key") == "step_error"
    text = browser.run("""(async () => {
      let blob, name;
      URL.createObjectURL = (given) => { blob = given; return 'data:,'; };
      HTMLAnchorElement.prototype.click = function () { name = this.download; };
      document.querySelector('button.csv[data-table="validation"]').click();
      return name + '\\n' + await blob.text();
    })()""")
    name, _, body = text.partition("\n")
    rows = list(csv.DictReader(io.StringIO(body)))
    assert name == "validation.csv"
    assert [float(row["step_error"]) for row in rows if row["step_error"]] == down
    beside = list(csv.DictReader((PAGE.parent / "validation.csv").open(newline="")))
    assert len(rows) == len(beside)


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_readable_at_phone_width_in_light_and_dark(browser: Browser, dark: bool) -> None:
    browser.open(PAGE, 390, 844, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= 390  # tables and figures scroll, the page does not
    assert browser.faults == []
    ground = DARK_COLOURS[CARD] if dark else CARD
    assert colour(browser, ".card", "backgroundColor") == ground
    assert colour(browser, ".card svg path", "fill") == ground
    sizes = browser.run("""[...document.querySelectorAll('p, li, dd, td, figcaption')].map((e) =>
      parseFloat(getComputedStyle(e).fontSize))""")
    assert min(sizes) >= 12
    letters = browser.run("""[...document.querySelectorAll('.card svg')].map((svg) =>
      svg.getBoundingClientRect().width / svg.viewBox.baseVal.width * 8)""")
    assert min(letters) > 6.5  # of the smallest letters of a figure, in pixels
    assert browser.screenshot().startswith(b"\x89PNG")


def test_it_prints(browser: Browser) -> None:
    browser.open(PAGE)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    assert 5 < len(re.findall(rb"/Type\s*/Page\b", pdf)) < 60


def test_the_index_leads_to_every_page(browser: Browser) -> None:
    index = REPORTS / "index.html"
    browser.open(index, 390, 844)
    assert browser.faults == []
    assert browser.run("document.documentElement.scrollWidth") <= 390
    links = browser.run("[...document.querySelectorAll('a')].map((a) => a.getAttribute('href'))")
    assert "nvidia-h200/report.html" in links
    assert all((REPORTS / link).is_file() for link in links)
