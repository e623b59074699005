"""Compares the memory of measured parallel steps with the forecast of each rank, by part.

    python -m studies.parallel.memory [--only ddp,tp] [--out reports/parallel/memory.md]

Reads reports/parallel/steps.csv (`studies.parallel.measured`); every step is traced, which takes two minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.step.memory.needed import (
    CONTEXT_BYTES,
    WATCHDOG_SECONDS,
    first_bucket_bytes,
    holds_first_buckets,
    nccl_bytes,
)
from flopcast.roofline.step.memory.peak import PARTS, Target, peak_bytes, peak_parts
from flopcast.roofline.step.priced_step import PricedStep
from studies.command import parser_of
from studies.markdown import table
from studies.parallel.measured import read
from studies.parallel.steps import Measured, Step
from studies.parallel.timeline import GPU, run_of, stream_of

H200 = Target(capability=(9, 0), sm_count=132)
MIB = 1024**2


@dataclass(frozen=True)
class Compared:
    """A step's memory in bytes: forecast of a steady step, of each rank (`forecasts`; those of a pipeline differ) and
    by part of the fullest (`parts`), and of the buckets of the first one, which quick steps hold; measured of each
    rank, at the peak (`measured`) and outside of torch's allocator (`outside`)."""

    step: Step
    forecasts: tuple[int, ...]
    parts: dict[str, int]
    first_buckets: int
    outside_forecast: int
    measured: tuple[int, ...]
    outside: tuple[int, ...]

    @property
    def forecast(self) -> int:
        return sum(self.parts.values())

    @property
    def fullest(self) -> int:
        return max(self.measured)

    @property
    def error(self) -> float:
        """Of the fullest rank."""
        return (self.forecast + self.first_buckets) / self.fullest - 1

    @property
    def steady_errors(self) -> list[float]:
        """Of each rank, by the steady step."""
        return [forecast / one - 1 for forecast, one in zip(self.forecasts, self.measured, strict=True)]


def compared(step: Step, ranks: Sequence[Measured]) -> Compared:
    run = run_of(step, ranks[0].ranks)
    run.check()
    last = stream_of(step)
    stages = (*last.stages_before, last)
    peaks = [peak_bytes(stage, H200) for stage in stages]
    stream = stages[peaks.index(max(peaks))]
    parts = dict(peak_parts(stream, H200))
    assert sum(parts.values()) == max(peaks)
    seconds = PricedStep(last, run, find_profile(GPU), default_host()).timeline.step_seconds()
    return Compared(
        step, tuple(peaks[rank * len(peaks) // len(ranks)] for rank in range(len(ranks))), parts,  # a stage's in a row
        first_bucket_bytes(stream) if holds_first_buckets(seconds) else 0, CONTEXT_BYTES + nccl_bytes(run.layout),
        tuple(rank.peak_bytes for rank in ranks), tuple(rank.used_bytes - rank.reserved_bytes for rank in ranks),
    )  # fmt: skip


def report(found: Sequence[Compared]) -> str:
    head = ["step", "fullest rank, GB", "forecast", "error", "ranks by the steady step", *PARTS, "first buckets",
            "outside, MiB", "forecast"]  # fmt: skip
    rows = [
        [
            one.step.name, f"{one.fullest / 1e9:.3f}", f"{(one.forecast + one.first_buckets) / 1e9:.3f}",
            f"{one.error:+.2%}", ", ".join(f"{error:+.2%}" for error in one.steady_errors),
            *(f"{one.parts[part] / 1e9:.2f}" for part in PARTS),
            f"{one.first_buckets / 1e9:.2f}" if one.first_buckets else "",
            ", ".join(f"{bytes_ / MIB:,.0f}" for bytes_ in one.outside), f"{one.outside_forecast / MIB:,.0f}",
        ]
        for one in found
    ]  # fmt: skip
    errors = sorted(abs(one.error) for one in found)
    steady = sorted(min(map(abs, one.steady_errors)) for one in found)
    return "\n".join([
        "# Memory of parallel steps on two and four H200s beside the forecast of each rank", "",
        "`python -m studies.parallel.memory`. Measured: the peak that torch's allocator read over the third step, of "
        "the fuller rank, and what the driver says is in use beyond what the allocator holds. Forecast: the peak of a "
        "steady step by part, in GB, to which nothing was fitted, and *first buckets*.", "",
        table(head, rows), "",
        f"- Fullest rank: {len(found)} steps, {median(errors):.2%} at the median, {errors[-1]:.2%} at worst.",
        f"- The rank nearest to the steady step: {median(steady):.2%} at the median, {steady[-1]:.2%} at worst.", "",
        NOTES,
    ])  # fmt: skip


_WATCHED = f"{WATCHDOG_SECONDS * 1e3:.0f} ms"
NOTES = f"""- *First buckets*: DistributedDataParallel lays out its buckets anew when the second step begins. What the
  first ones reduced is held until torch's watchdog of collectives, which looks every {_WATCHED}, has seen it done. Of
  five steps of 27 to 59 ms one rank held one more copy of the gradients in the third step, the other did not. They are
  counted for steps of which one and a half, from the first backward to the third, take less than {_WATCHED}, here by
  the forecast's time. That rule was made after these ranks were seen; its number is torch's.
- *Outside*: what CUDA, the libraries and NCCL hold. The forecast was read off these very steps: that of one group off
  the first two, that of tensor parallel off the first of it, on the rank that receives. A process that has run tensor
  parallel once holds as much ever after, which is why steps below it have it, too. Pipelines, divided
  sequences and experts ran one after the other in one process, which kept the groups of all before: each takes 486 MiB
  more."""


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--only", default="", help="kinds of layout, with commas between")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else []
    measured = {s: ranks for s, ranks in read().items() if not wanted or s.layout.partition("=")[0] in wanted}
    shown = report([compared(step, ranks) for step, ranks in measured.items()])
    print(shown)
    if options.out:
        options.out.write_text(shown + "\n")


if __name__ == "__main__":
    main()
