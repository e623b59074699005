"""The rooms of the code, from the ground up, and the picture of them in CONTRIBUTING.

    python -m studies.house                 # draws docs/rooms.svg, prints lines, modules and imports of each room

A room is a folder, or a module that stands by itself. It imports rooms that stand above it in `ROOMS`, never one below:
`tests/test_imports.py` holds every import to that, those inside functions and those for type checkers too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from studies.command import parser_of
from studies.imports import FACES, ROOT, arrows, sources

# From the ground up. A module belongs to the longest entry that its name begins with.
ROOMS = (
    # what all share
    "flopcast.errors", "flopcast.files", "flopcast.bounds", "flopcast.json_files", "flopcast.decode",
    "flopcast.child", "flopcast.renewed", "flopcast.gc_pause", "flopcast.progress",
    # what can be run
    "flopcast.kernels",
    # how it is measured
    "flopcast.microbench.zoo", "flopcast.microbench.images", "flopcast.microbench.recipe",
    "flopcast.microbench.records", "flopcast.microbench.timing", "flopcast.microbench.sweep",
    "flopcast.microbench.hosts", "flopcast.microbench.steps", "flopcast.microbench.collectives",
    "flopcast.microbench.tuning", "flopcast.microbench",
    # what it means
    "flopcast.roofline.base",
    "flopcast.roofline.stream.model", "flopcast.roofline.stream.ops", "flopcast.roofline.stream.compiled",
    "flopcast.roofline.stream.lowering", "flopcast.roofline.stream.tracer", "flopcast.roofline.stream.tracer.parallel",
    "flopcast.roofline.stream.tracer.compiler",
    "flopcast.roofline.stream.library",
    "flopcast.roofline.gpu.laws", "flopcast.roofline.gpu.catalogue", "flopcast.roofline.gpu.links",
    "flopcast.roofline.gpu.profile",
    "flopcast.roofline.gpu.projection", "flopcast.roofline.gpu.suites", "flopcast.roofline.gpu.library",
    "flopcast.roofline.gpu.fit",
    "flopcast.roofline.step", "flopcast.roofline.step.questions", "flopcast.roofline.api",
    "flopcast.roofline.validation", "flopcast.roofline.dollars", "flopcast.roofline.widths",
    "flopcast.roofline.views.figures", "flopcast.roofline.views.terminal", "flopcast.roofline.views.page",
    "flopcast.roofline.cli.shared", "flopcast.roofline.cli.gpu", "flopcast.roofline.cli.step",
    "flopcast.roofline.cli.choose", "flopcast.roofline.cli",
    # what only makes evidence, or remakes what ships
    "studies",
)  # fmt: skip


def room_of(module: str) -> str:
    """The room that a module stands in. Raises LookupError for one that no entry holds."""
    found = [room for room in ROOMS if module == room or module.startswith(room + ".")]
    if not found:
        raise LookupError(f"{module} stands in no room: add it to ROOMS in studies/house.py, after what it imports")
    return max(found, key=len)


# --- the picture


@dataclass(frozen=True)
class Door:
    """A box of the picture: what one enters by to the rooms behind it. `part` chooses its colour."""

    name: str
    part: str
    purpose: str


# The rows of the picture, the upper ones first. Modules at the top of the package, which all share, are one door.
DOORS = (
    (Door("studies", "studies", "evidence, and what remakes the data that ship; not in the wheel"),),
    (Door("cli", "roofline", "the command line, one file per command"),),
    (Door("views", "roofline", "what a person sees"),),
    (
        Door("api", "roofline", "the same from Python"),
        Door("validation", "roofline", "how it is checked: real steps, two runs, two GPUs"),
        Door("dollars", "roofline", "what it costs in dollars"),
        Door("widths", "roofline", "which widths to choose"),
    ),
    (Door("step", "roofline", "what a step costs: timeline, memory, power, interval"),),
    (Door("gpu", "roofline", "what a GPU does"),),
    (Door("stream", "roofline", "what a step launches"),),
    (
        Door("microbench", "microbench", "how it is measured"),
        Door("base", "roofline", "numbers with deviations, units, CSV, shipped data"),
    ),
    (Door("kernels", "kernels", "what can be run: one file per operation"),),
    (Door("shared", "shared", "what all share"),),
)  # fmt: skip
SIZE = 880, 1148
BOX_HEIGHT, ROW_HEIGHT, TOP = 74, 108, 52
WIDTHS = {1: 460, 2: 400, 4: 200}  # of a box, by how many stand in its row
STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a; text-anchor: middle }
  .part { text-anchor: start }
  .name { font-size: 16px; font-weight: 600; fill: #1f2328 }
  .rooms { font-size: 12px; fill: #818b98 }
  .box { fill: #ffffff; stroke-width: 1.6 }
  .arrow { fill: none; stroke: #9aa4af; stroke-width: 1.6 }
  .head { fill: #9aa4af }
  .kernels { stroke: #bc4c00 } .microbench { stroke: #1a7f37 } .roofline { stroke: #0969da }
  .studies, .shared { stroke: #818b98 }
  .fill-kernels { fill: #bc4c00 } .fill-microbench { fill: #1a7f37 } .fill-roofline { fill: #0969da }
  .fill-studies { fill: #818b98 }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 } .name { fill: #f0f6fc } .rooms { fill: #7d8590 }
    .box { fill: #151b23 } .arrow { stroke: #656c76 } .head { fill: #656c76 }
    .kernels { stroke: #f0883e } .microbench { stroke: #3fb950 } .roofline { stroke: #58a6ff }
    .fill-kernels { fill: #f0883e } .fill-microbench { fill: #3fb950 } .fill-roofline { fill: #58a6ff }
  }
"""


def door_of(room: str) -> str:
    """The door that a room, or a module, lies behind: `flopcast.roofline.gpu.fit` -> gpu."""
    first, *rest = room.removeprefix("flopcast.").split(".")
    if first == "roofline":
        return rest[0]
    return first if first in ("kernels", "microbench", "studies") else "shared"


def needed(imports: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """(door, door that it imports), without those that follow from others: its imports import them already."""
    direct: dict[str, set[str]] = {door.name: set() for row in DOORS for door in row}
    for importer, imported in imports:
        if door_of(importer) != door_of(imported):
            direct[door_of(importer)].add(door_of(imported))
    behind: dict[str, set[str]] = {}  # with what is imported at whatever distance
    for row in reversed(DOORS):
        behind |= {door.name: direct[door.name].union(*(behind[to] for to in direct[door.name])) for door in row}
    return {
        (door, to)
        for door, found in direct.items()
        for to in found
        if not any(to in behind[other] for other in found - {to})
    }


def svg(imports: Iterable[tuple[str, str]]) -> str:
    """The picture: boxes from the ground up, and an arrow from a door to each that it imports (`needed`)."""
    width, height = SIZE
    centres = {
        door.name: (width * (2 * place + 1) / (2 * len(row)), TOP + ROW_HEIGHT * level)
        for level, row in enumerate(DOORS)
        for place, door in enumerate(row)
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        "<title>The rooms of flopcast and their imports</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5.5" markerHeight="5.5" '
        'orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for part, x in (("kernels", 257), ("microbench", 347), ("roofline", 464), ("studies", 558)):
        lines.append(
            f'<circle class="fill-{part}" cx="{x}" cy="18" r="5"/>'
            f'<text class="part" x="{x + 11}" y="22.5">{part}</text>'
        )
    for importer, to in sorted(needed(imports)):
        (begin, top), (end, floor) = centres[importer], centres[to]
        start, middle = top + BOX_HEIGHT, (top + BOX_HEIGHT + floor) / 2
        lines.append(
            f'<path class="arrow" marker-end="url(#head)" '
            f'd="M{begin:g} {start:g}C{begin:g} {middle:g} {end:g} {middle:g} {end:g} {floor - 1:g}"/>'
        )
    for row in DOORS:
        for door in row:
            lines += _box(door, WIDTHS[len(row)], *centres[door.name])
    lines.append(
        f'<text class="rooms" x="{width / 2:g}" y="{height - 16}">An arrow: imports. Imports go down only; those that '
        "follow from others are not drawn.</text>"
    )
    return "\n".join([*lines, "</svg>\n"])


def _box(door: Door, width: int, x: float, y: float) -> list[str]:
    """The name, what the door is for, and the rooms behind it."""
    rooms = [room.removeprefix("flopcast.").rpartition(".")[2] for room in ROOMS if door_of(room) == door.name]
    rooms = [room for room in rooms if room != door.name]
    texts = [("purpose", line) for line in wrap(door.purpose, width // 7)]
    texts += [("rooms", " · ".join(rooms))] if rooms else []
    first = y + BOX_HEIGHT / 2 - 9 * len(texts) + 6
    lines = [
        f'<rect class="box {door.part}" x="{x - width / 2:g}" y="{y:g}" width="{width}" height="{BOX_HEIGHT}" rx="8"/>'
    ]
    for number, (kind, text) in enumerate([("name", door.name), *texts]):
        lines.append(f'<text class="{kind}" x="{x:g}" y="{first + 18 * number:g}">{escape(text)}</text>')
    return lines


# --- the table


def table(known: dict[str, str]) -> list[str]:
    """Lines of text: lines and modules of each room, and how many rooms it imports and is imported by."""
    modules = {module: source for module, source in known.items() if module not in FACES}
    inside = [(module, room) for module in modules for room in [_room_or_none(module)] if room is not None]
    count = Counter(room for _, room in inside)
    lines = Counter[str]()
    for module, room in inside:
        lines[room] += known[module].count("\n")
    between = {(a, b) for pair in arrows(known) for a, b in [tuple(map(room_of, pair))] if a != b}
    out, into = Counter(a for a, _ in between), Counter(b for _, b in between)
    shown = [f"{'room':34}{'lines':>8}{'modules':>9}{'imports':>9}{'imported by':>13}"]
    shown += [f"{room:34}{lines[room]:8,}{count[room]:9}{out[room]:9}{into[room]:13}" for room in ROOMS]
    total = f"{lines.total():8,}{count.total():9}{len(between):9}"
    return [*shown, f"{'all':34}{total}"]


def _room_or_none(module: str) -> str | None:
    try:
        return room_of(module)
    except LookupError:
        return None  # a package that holds its docstring alone


def main() -> None:
    """Draws the picture and prints the table."""
    parser_of(__spec__, __doc__).parse_args()
    known = sources()
    path = ROOT / "docs" / "rooms.svg"
    path.write_text(svg(arrows(known)))
    print("\n".join(table(known)))
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
