"""Sets what real steps took of a GPU's memory beside forecasts.

    python -m studies.memory.table [--out reports/nvidia-h200/memory/README.md]

Reads the rows of `studies.memory.measure`. Needs no GPU. No law is fitted to these rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.gpu.library.profiles import SOURCE, find_profile
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


@dataclass(frozen=True)
class Compared:
    """A step's memory in bytes by PARTS, measured and forecast."""

    plan: StepPlan
    measured: Mapping[str, int]
    forecast: Mapping[str, int]

    def error(self, part: str) -> float:
        return self.forecast[part] / self.measured[part] - 1

    def cells(self) -> list[str]:
        """GB measured and errors, "" for what was not measured."""
        gigabytes = [f"{self.measured[part] / 1e9:.2f}" if part in self.measured else "" for part in PARTS]
        return gigabytes + [f"{self.error(part):+.1%}" if part in self.measured else "" for part in PARTS]


def compared(row: Row) -> Compared:
    plan, profile = StepPlan(**row["plan"]), find_profile(SOURCE)
    run = Run(**plan.settings)
    stream, target = stream_of(plan, run, profile), target_of(profile, run.mode)
    measured = {"allocated": max(row["allocated"]), "reserved": max(row["reserved"]), "least": row["least"]}
    return Compared(plan, {part: bytes_ for part, bytes_ in measured.items() if bytes_}, {
        "allocated": peak_bytes(stream, target), "reserved": reserved_bytes(stream, target),
        "least": least_reserved_bytes(stream, target),
    })  # fmt: skip


def load(folder: Path = FOLDER) -> list[Compared]:
    return [compared(row) for path in sorted(folder.glob("*.jsonl")) for row in rows_in(path)]


def summary(found: Sequence[Compared]) -> list[list[str]]:
    """Absolute errors by mode and part: number, median, worst."""
    cells = []
    for mode in dict.fromkeys(one.plan.mode for one in found):
        for part in PARTS:
            errors = [abs(one.error(part)) for one in found if one.plan.mode == mode and part in one.measured]
            if errors:
                cells.append([f"{mode}, {part}", f"{len(errors)}", f"{median(errors):.2%}", f"{max(errors):.2%}"])
    return cells


ABOUT = """`python -m studies.memory.table`, of the rows of `python -m studies.memory.measure`: each step alone in a
process of its own. *Allocated* and *reserved* are the most that torch's allocator counts in three steps, with plenty of
memory; *least* is what it may take of the GPU at least for these steps to run, to 0.5% of what is allocated
(`torch.cuda.set_per_process_memory_fraction`, by bisection). A GPU must have the least and the context, 0.6 GB. The law
was written before any of these steps ran. Errors, forecast / measured - 1:"""


def report(found: Sequence[Compared]) -> str:
    head = ["step", *(f"{part}, GB" for part in PARTS), *(f"{part}, forecast" for part in PARTS)]
    rows = [[StepComparison(one.plan, "ok").label_with_optimizer, *one.cells()] for one in found]
    title = "# Memory of steps that a seed drew, on an NVIDIA H200"
    parts = [title, ABOUT, table(["", "steps", "median", "worst"], summary(found)), table(head, rows)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "README.md")
    options = parser.parse_args()
    options.out.write_text(report(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
