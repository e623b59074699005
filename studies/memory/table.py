"""Sets what real steps took of a GPU's memory beside forecasts.

    python -m studies.memory.table [--out reports/nvidia-h200/memory/README.md]

Reads the rows of `studies.memory.measure`. Needs no GPU. No law is fitted to these rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from flopcast.files import read
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.gpu.library.profiles import SOURCE, find_profile
from flopcast.roofline.step.memory.allocator import CachingAllocator, replay
from flopcast.roofline.step.memory.peak import least_reserved_bytes, peak_bytes, reserved_bytes
from flopcast.roofline.step.priced_step import target_of
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.validation.compare_steps import stream_of
from flopcast.roofline.validation.step_comparison import StepComparison
from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table
from studies.memory.measure import Row, rows_in

FOLDER = ROOT / "reports" / "nvidia-h200" / "memory"
PARTS = ("allocated", "reserved", "least")
OVER_ALLOCATED = 1.04  # what was said to be needed before blocks were followed


@dataclass(frozen=True)
class Compared:
    """A step's memory in bytes by PARTS, measured and forecast; `replayed`: what the simulated allocator comes to where
    it is asked for what torch's was."""

    plan: StepPlan
    measured: Mapping[str, int]
    forecast: Mapping[str, int]
    replayed: Mapping[str, int]

    def error(self, part: str) -> float:
        return self.forecast[part] / self.measured[part] - 1

    def cells(self) -> list[str]:
        """GB measured and errors, "" for what was not measured."""
        gigabytes = [f"{self.measured[part] / 1e9:.2f}" if part in self.measured else "" for part in PARTS]
        return gigabytes + [f"{self.error(part):+.1%}" if part in self.measured else "" for part in PARTS]


def measured_bytes(row: Row) -> dict[str, int]:
    """A row's bytes by PARTS, the least where it was searched for."""
    found = {"allocated": max(row["allocated"]), "reserved": max(row["reserved"]), "least": row["least"]}
    return {part: bytes_ for part, bytes_ in found.items() if bytes_}


def replayed(row: Row, folder: Path = FOLDER) -> dict[str, int]:
    """What the simulated allocator comes to in bytes, allocated and reserved, by a step's own requests."""
    by_step = json.loads(read(folder / "requests" / row["requests"]))
    allocator = CachingAllocator()
    replay([(asked, 0) for asked in chain.from_iterable(by_step)], allocator)
    return {"allocated": allocator.most_allocated, "reserved": allocator.reserved}


def compared(row: Row) -> Compared:
    plan, profile = StepPlan(**row["plan"]), find_profile(SOURCE)
    run = Run(**plan.settings)
    stream, target = stream_of(plan, run, profile), target_of(profile, run.mode)
    ways = {"allocated": peak_bytes, "reserved": reserved_bytes, "least": least_reserved_bytes}
    forecast = {part: way(stream, target) for part, way in ways.items()}
    return Compared(plan, measured_bytes(row), forecast, replayed(row))


def rows(folder: Path = FOLDER) -> list[Row]:
    return [row for path in sorted(folder.glob("*.jsonl"), reverse=True) for row in rows_in(path)]


def summary(found: Sequence[Compared]) -> list[list[str]]:
    """Absolute errors by mode and part: number, median, worst; what 4% over the allocated would say of the least, and
    what the allocator comes to by the steps' own requests."""
    cells = []
    for mode in dict.fromkeys(one.plan.mode for one in found):
        own = [one for one in found if one.plan.mode == mode]
        for part in PARTS:
            cells += _spread(f"{mode}, {part}", [one.error(part) for one in own if part in one.measured])
        over = [
            OVER_ALLOCATED * one.forecast["allocated"] / one.measured["least"] - 1 for one in own if mode == "eager"
        ]
        cells += _spread(f"{mode}, least, as 4% over what is allocated", over)
    for part in PARTS[:2]:
        cells += _spread(f"replayed, {part}", [one.replayed[part] / one.measured[part] - 1 for one in found])
    return cells


def _spread(name: str, errors: Sequence[float]) -> list[list[str]]:
    sizes = list(map(abs, errors))
    return [[name, f"{len(sizes)}", f"{median(sizes):.2%}", f"{max(sizes):.2%}"]] if sizes else []


ABOUT = """`python -m studies.memory.table`, of the rows of `python -m studies.memory.measure`: each step alone in a
process of its own. *Allocated* and *reserved* are the most that torch's allocator counts in three steps, with plenty of
memory; *least* is what it may take of the GPU at least for these steps to run, to 0.5% of what is allocated
(`torch.cuda.set_per_process_memory_fraction`, by bisection). A GPU must have the least and the context, 0.6 GB.

What was allocated and reserved was forecast before any of these steps ran, but for two compiled ones: that autograd
copies gradients of every layer was found in the one in fp32, 5.0% too low before, and that parts of a layer's backward
do not each run for all layers in the checkpointed one, 8.3% too high. The rule for the least was written after: a
first one, by which segments are given back before each that is taken, was 4.0 / 14.9% off. *Replayed*: the simulated
allocator, asked for what the real step asked for. Errors, forecast / measured - 1:"""


def report(found: Sequence[Compared]) -> str:
    head = ["step", *(f"{part}, GB" for part in PARTS), *(f"{part}, forecast" for part in PARTS)]
    steps = [[StepComparison(one.plan, "ok").label_with_optimizer, *one.cells()] for one in found]
    title = "# Memory of steps that a seed drew, on an NVIDIA H200"
    parts = [title, ABOUT, table(["", "steps", "median", "worst"], summary(found)), table(head, steps)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "README.md")
    options = parser.parse_args()
    options.out.write_text(report([compared(row) for row in rows()]), encoding="utf-8")


if __name__ == "__main__":
    main()
