"""Compiled steps that were measured a second time, on four other cards and after a rest, beside the first time.

    python -m studies.power.again [--out reports/nvidia-h200/compiled-validation/again/README.md]

The first time steps that meet the power limit were profiled right after their timed rounds, the second after a rest
(`flopcast.microbench.steps.measure`). Nothing is fitted to either, and forecasts are set beside the first alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flopcast.microbench.records import records
from flopcast.microbench.records.rows import StepKernelsRow, StepRow, select
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.validation.compare_steps import StepsFolder, compare_folders, plan_of, step_folders
from flopcast.roofline.validation.step_comparison import StepComparison
from studies.command import parser_of
from studies.compiled.validate import MODES
from studies.compiled.validation import FOLDERS, breaks, kept_stream
from studies.markdown import table

FOLDER = FOLDERS["nvidia-h200"] / "again"
LONG_SECONDS = 0.015  # of kernels, from which on a step's rounds meet the power limit
LEAST_SHARE = 0.9  # of a step that its kernels take where the device bounds it


@dataclass(frozen=True)
class Twice:
    """A step measured twice: its name and mode, seconds of the step, and of its kernels where both have them; what NVML
    said of the clock in the rounds, and the multiprocessors' mean clock under the second profile, in MHz."""

    name: str
    mode: str
    steps: tuple[float, float]
    kernels: tuple[float, float] | None
    clock_mhz: float | None
    mean_clock_mhz: float | None

    @property
    def is_long(self) -> bool:
        """Whether the device bounds it both times, for long enough to meet the power limit."""
        if self.kernels is None:
            return False
        of_steps = [kernels / step for kernels, step in zip(self.kernels, self.steps, strict=True)]
        return self.kernels[1] > LONG_SECONDS and min(of_steps) > LEAST_SHARE


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "README.md")
    given = parser.parse_args()
    given.out.write_text(page(twice()))


def twice() -> list[Twice]:
    first = [run for mode in MODES for run in step_folders(FOLDER.parent / mode)]
    before = {key: found for run in reversed(first) for key, found in _measured(run)}
    return [
        Twice(
            f"{plan_of(step).name} {plan_of(step).batch}x{plan_of(step).seq}", plan_of(step).mode,
            (before[key][0]["value"] or 0.0, step["value"] or 0.0), _both(before[key][1], kernels),
            step["clock_mhz"], None if kernels is None else kernels.get("mean_clock_mhz"),
        )
        for run in step_folders(FOLDER)
        for key, (step, kernels) in _measured(run)
        if key in before
    ]  # fmt: skip


def compared() -> list[StepComparison]:
    """The second measurements beside their forecasts by the shipped profile."""
    profile = find_profile("nvidia-h200")
    folders = compare_folders([StepsFolder(run, profile) for run in step_folders(FOLDER)], find_stream=kept_stream)
    return [row for rows in folders for row in rows if row.step.error is not None and not breaks(row)]


def page(rows: list[Twice]) -> str:
    long = [row for row in rows if row.is_long]
    steps = _told([row.steps for row in long])
    kernels = _told([row.kernels for row in long if row.kernels is not None])
    head = ["step", "mode", "step, ms", "again", "", "kernels, ms", "after a rest", "", "clock", "mean clock"]
    about = f"""# Compiled steps measured a second time

`python -m studies.power.again`, of steps that `python -m studies.compiled.validate` ran on four other H200s of two
hosts (torch 2.11), with their kernels profiled after a rest. Of {len(long)} steps whose kernels take longer than
{LONG_SECONDS * 1e3:.0f} ms and {LEAST_SHARE:.0%} of the step, the step takes {steps},
its kernels {kernels}.
The host is another: what it bounds compares hosts. Products of 1,023 columns are slower by half where inductor, which
times both, has not padded them; kernels of the ViT take longer than its step, as if others had run beside them.
Clocks in MHz: what NVML said in the rounds, and the mean by the multiprocessors' own counters while the kernels were
profiled.

"""
    ordered = sorted(rows, key=lambda row: (row.mode, row.name))
    return about + table(head, [_row(row) for row in ordered]) + "\n"


def _told(pairs: Sequence[tuple[float, float]]) -> str:
    """Says by how much the second of each pair differs from the first."""
    changes = [second / first - 1.0 for first, second in pairs]
    return f"{median(changes):+.1%} at the median ({min(changes):+.1%} to {max(changes):+.1%})"


def _row(row: Twice) -> list[str]:
    kernels = ["-"] * 3 if row.kernels is None else _pair(row.kernels)
    clocks = ["-" if clock is None else f"{clock:,.0f}" for clock in (row.clock_mhz, row.mean_clock_mhz)]
    return [row.name, row.mode, *_pair(row.steps), *kernels, *clocks]


def _pair(seconds: tuple[float, float]) -> list[str]:
    first, second = seconds
    return [f"{first * 1e3:.2f}", f"{second * 1e3:.2f}", f"{second / first - 1.0:+.1%}"]


def _measured(run: Path) -> Iterator[tuple[str, tuple[StepRow, StepKernelsRow | None]]]:
    rows = records.read(run).rows
    kernels = {_key(row): row for row in select(rows, StepKernelsRow) if row["status"] == "ok"}
    for row in select(rows, StepRow):
        if row["status"] == "ok":
            yield _key(row), (row, kernels.get(_key(row)))


def _key(row: StepRow | StepKernelsRow) -> str:
    return row["key"].partition("/")[2]


def _both(first: StepKernelsRow | None, second: StepKernelsRow | None) -> tuple[float, float] | None:
    if first is None or second is None or not first["device_seconds"] or not second["device_seconds"]:
        return None
    return first["device_seconds"], second["device_seconds"]


if __name__ == "__main__":
    main()
