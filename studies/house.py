"""The rooms of the code, from the ground up, and the picture of them in CONTRIBUTING.

    python -m studies.house                 # draws docs/rooms.svg

A room is a folder, or a module that stands by itself. It imports rooms that stand above it in `ROOMS`, never one below:
`tests/test_imports.py` holds every import to that, those inside functions and those for type checkers too.
"""

from __future__ import annotations

# From the ground up. A module belongs to the longest entry that its name begins with.
ROOMS = (
    # what all share
    "flopcast.errors", "flopcast.files", "flopcast.gc_pause", "flopcast.progress",
    # what can be run
    "flopcast.kernels",
    # how it is measured
    "flopcast.microbench.zoo", "flopcast.microbench.records", "flopcast.microbench.recipe",
    "flopcast.microbench.timing", "flopcast.microbench.sweep", "flopcast.microbench.hosts", "flopcast.microbench.steps",
    "flopcast.microbench.tuning", "flopcast.microbench",
    # what it means
    "flopcast.roofline.base",
    "flopcast.roofline.stream.model", "flopcast.roofline.stream.ops", "flopcast.roofline.stream.lowering",
    "flopcast.roofline.stream.tracer", "flopcast.roofline.stream.library",
    "flopcast.roofline.gpu.laws", "flopcast.roofline.gpu.catalogue", "flopcast.roofline.gpu.profile",
    "flopcast.roofline.gpu.projection", "flopcast.roofline.gpu.suites", "flopcast.roofline.gpu.library",
    "flopcast.roofline.gpu.fit",
    "flopcast.roofline.step", "flopcast.roofline.api",
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
