"""Sets what the power limit does to kernels and steps in a row beside the law.

    python -m studies.power.table [--out reports/nvidia-h200/power-limit/README.md]
    python -m studies.power.table --streams      makes the streams that are missing, as `predict` does

Reads the rows of `studies.power.kernels` and `studies.power.steps`. Needs no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flopcast.microbench.records import records
from flopcast.microbench.records.rows import StepKernelsRow, select
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.validation.compare_steps import step_folders, stream_of
from studies.command import parser_of
from studies.markdown import table
from studies.power.steps import PLANS

GPU = "nvidia-h200"
FOLDER = Path("reports", GPU, "power-limit")
FITTED = ("w2048-d2", "w1024-d3-long", "w1024-d3-h64", "w4096-d1")  # steps that chose the law's constants
STREAMS = FOLDER / "streams"

ABOUT = """# What the power limit does to kernels and to steps in a row, on an H200

`python -m studies.power.table`, from what `python -m studies.power.kernels` and `studies.power.steps` measured on H200s
(torch 2.11, 700 W). The clock is the mean of the multiprocessors' own counters, the power that of the GPU's counter of
energy.

By themselves, after a rest, kernels run at clocks of their own, products lowest; NVML says 1,980 MHz for all of them.
In a row for a second the limit holds them lower, and in turn with products, 6 ms of each, all run at one clock:
products and attention take as much longer as that is lower, sums and SwiGLU no longer at all.
"""

STEPS = """## Steps

Compiled steps in a row for a second and a half, beside the law (`flopcast.roofline.step.power_limit`) and beside what
it gives if nothing held the clock. The first four chose the law's constants; the others, which ran after, judge it:
{told}. They ran on two cards: "again" is what another took, whose
kernels are not kept. A card that draws less than its limit on the mean of a step while its clock is held, as under the
2,304 wide one, has waited in between, for which the law knows no reason.
"""

EAGER = """## Eager steps under the profiler

With the profiler on the host launches an eager step so slowly that the device is idle in between and keeps its clock,
whether it was hot, as the first time, or had rested, as on another card: kernels take {told}.
"""


@dataclass(frozen=True)
class Step:
    """A measured step beside its forecast: seconds in a row, of both; those if nothing held the clock, by the forecast;
    the clock in MHz after a rest and in a row, and watts; the seconds on another card, where there are any."""

    name: str
    seconds: float
    forecast: float
    free: float
    rested_mhz: float
    mhz: float
    watts: float | None
    again: float | None = None

    @property
    def error(self) -> float:
        return self.forecast / self.seconds - 1.0

    @property
    def error_again(self) -> float | None:
        return None if self.again is None else self.forecast / self.again - 1.0


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "README.md")
    parser.add_argument("--streams", action="store_true")
    given = parser.parse_args()
    if given.streams:
        make_streams()
    given.out.write_text(page(kernels(), steps()))


def make_streams() -> None:
    profile = find_profile(GPU)
    STREAMS.mkdir(exist_ok=True)
    for plan in PLANS.values():
        path = STREAMS / f"{plan.name}.json.gz"
        if not path.is_file():
            streams.save(stream_of(plan, Run(**plan.settings), profile), path)


def kernels() -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "kernels.jsonl").read_text().splitlines()]


def steps() -> list[Step]:
    profile, found = find_profile(GPU), []
    lines = map(json.loads, (FOLDER / "again.jsonl").read_text().splitlines())
    again = {row["name"]: row["in_a_row"]["seconds"] for row in lines}
    for plan in PLANS.values():
        row = json.loads((FOLDER / "steps" / f"{plan.name}.json").read_text())
        run = Run(**plan.settings)
        timeline = PricedStep(streams.load(STREAMS / f"{plan.name}.json.gz"), run, profile).timeline
        found.append(
            Step(
                plan.name, forecast=timeline.step_seconds(), free=timeline.step_seconds() - timeline.power.seconds,
                rested_mhz=row["rested"]["mhz"], again=again.get(plan.name), **row["in_a_row"],
            )
        )  # fmt: skip
    return found


def eager_kernels() -> dict[str, tuple[float, float]]:
    """By eager step the seconds of its kernels, both times."""
    first = {key: seconds for run in step_folders(FOLDER.parent / "steps") for key, seconds in _kernels_of(run)}
    return {key: (first[key], seconds) for key, seconds in _kernels_of(FOLDER / "eager") if key in first}


def _kernels_of(run: Path) -> Iterator[tuple[str, float]]:
    for row in select(records.read(run).rows, StepKernelsRow):
        if row["status"] == "ok" and row["device_seconds"]:
            yield row["key"].partition("/")[2], row["device_seconds"]


def page(rows: Sequence[Mapping[str, Any]], measured: Sequence[Step]) -> str:
    head = ["kernel", "after a rest, MHz", "in a row, MHz", "watts", "time", "in turn with products, MHz", "time"]
    told = ["step", "ms", "law", "error", "again, ms", "error", "nothing held, ms", "after a rest, MHz",
            "in a row, MHz", "watts"]  # fmt: skip
    eager = eager_kernels()
    again = [second / first - 1.0 for first, second in eager.values()]
    both = f"{median(again):+.1%} at the median of {len(again)}, {min(again):+.1%} to {max(again):+.1%}"
    parts = [
        ABOUT,
        table(head, [_kernel(row) for row in rows]),
        "",
        STEPS.format(told=_errors([step for step in measured if step.name not in FITTED])),
        table(told, [_step(step) for step in measured]),
        "",
        EAGER.format(told=both),
        table(["step", "ms", "again, ms", ""], [_twice(key, *pair) for key, pair in eager.items()]),
    ]
    return "\n".join(parts) + "\n"


def _errors(steps: Sequence[Step]) -> str:
    found = [error for step in steps for error in (step.error, step.error_again) if error is not None]
    return f"{median(found):+.1%} at the median of {len(found)}, {min(found):+.1%} to {max(found):+.1%}"


def longer(row: Mapping[str, Any], how: str) -> float:
    """Returns by what factor the kernel that takes most of a row's time takes longer "in_a_row_kernels" or
    "in_turn_kernels" than after a rest."""
    rested = row["rested"]["kernels"]
    most = max(rested, key=lambda name: rested[name][0] * rested[name][1])
    return float(row[how]["kernels"][most][0] / rested[most][0])


def _kernel(row: Mapping[str, Any]) -> list[str]:
    in_a_row, in_turn = row["in_a_row"], row.get("in_turn")
    told = [row["name"], f"{row['rested']['mhz']:,.0f}", f"{in_a_row['mhz']:,.0f}", _watts(in_a_row["watts"]),
            f"x {longer(row, 'in_a_row_kernels'):.2f}"]  # fmt: skip
    if in_turn is None:
        return [*told, "-", "-"]
    return [*told, f"{in_turn['mhz']:,.0f}", f"x {longer(row, 'in_turn_kernels'):.2f}"]


def _step(step: Step) -> list[str]:
    plan = PLANS[step.name]
    return [f"{step.name} {plan.batch}x{plan.seq}", f"{step.seconds * 1e3:.2f}", f"{step.forecast * 1e3:.2f}",
            f"{step.error:+.1%}", *_again(step), f"{step.free * 1e3:.2f}", f"{step.rested_mhz:,.0f}",
            f"{step.mhz:,.0f}", _watts(step.watts)]  # fmt: skip


def _again(step: Step) -> list[str]:
    if step.again is None or step.error_again is None:
        return ["-", "-"]
    return [f"{step.again * 1e3:.2f}", f"{step.error_again:+.1%}"]


def _twice(key: str, first: float, second: float) -> list[str]:
    name, _, how = key.split("/", 2)
    return [f"{name} {how}", f"{first * 1e3:.2f}", f"{second * 1e3:.2f}", f"{second / first - 1.0:+.1%}"]


def _watts(watts: float | None) -> str:
    return "-" if watts is None else f"{watts:.0f}"


if __name__ == "__main__":
    main()
