"""Compares recorded compiled steps, in both modes, with their forecasts: the step, its interval and the host.

    python -m studies.compiled.timeline [--out timeline.md]

The launches are those of the recorded code; the host is the shipped one, with the costs of graphs that were fitted to
the recorded steps. Up to three other processes ran on the recorded host, so that steps which it bounds say little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.gpu.profile.host_graphs import MODES
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.uncertainty import Interval
from flopcast.roofline.stream.compiled.to_stream import to_stream
from studies.command import parser_of
from studies.compiled.host import SEVERAL_CALLS, recorded_host
from studies.compiled.record import CASES
from studies.compiled.recorded import FOLDER, eager_stream, graphs_of, record_of, run_of
from studies.compiled.steps import GPU
from studies.markdown import table

TOLD = """# Recorded compiled steps beside their forecasts, in both modes

`python -m studies.compiled.timeline`. The launches are those of the recorded code; device times are of the laws as they
are today, some of which were fitted to kernels of these steps (`generated.md`, `kernels.md`); the host is the shipped
one, but for its costs of compiled graphs, which were fitted to these very steps (held out one by one: `python -m
studies.compiled.host`). So this shows that the parts fit together; steps that nothing was fitted to are in
[compiled-validation](../compiled-validation/README.md).
"""


@dataclass(frozen=True)
class Timed:
    """A recorded step in one mode. `bound`: what bounds its forecast."""

    name: str
    mode: str
    measured: float
    forecast: Interval
    bound: str
    device: float
    host: float
    measured_host: float

    @property
    def error(self) -> float:
        return self.forecast.value / self.measured - 1.0

    @property
    def is_within(self) -> bool:
        return self.forecast.low <= self.measured <= self.forecast.high


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path, help="file for the page")
    options = parser.parse_args()
    text = report(list(timed_steps()))
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


def report(found: list[Timed]) -> str:
    """The page: what the steps are, a row each, and how many lie in their intervals."""
    columns = ["step", "mode", "ms", "forecast", "90%", "error", "bound by", "device, ms", "host, ms", "host, forecast"]
    within = f"{sum(one.is_within for one in found)} of {len(found)} within their intervals"
    return "\n".join([TOLD, table(columns, [row_of(one) for one in found]), "", within, ""])


def row_of(one: Timed) -> list[str]:
    milliseconds = [f"{seconds * 1e3:.2f}" for seconds in (one.measured, *one.forecast)]
    return [
        one.name, one.mode, *milliseconds[:2], " to ".join(milliseconds[2:]), f"{one.error:+.1%}", one.bound,
        f"{one.device * 1e3:.2f}", f"{one.measured_host * 1e3:.2f}", f"{one.host * 1e3:.2f}",
    ]  # fmt: skip


def timed_steps(names: Collection[str] | None = None) -> Iterator[Timed]:
    """The recorded steps that were timed, of `names` or all, beside their forecasts by the shipped profile and host."""
    profile = find_profile(GPU).with_host(recorded_host(default_host()))
    for case in CASES:
        if names is not None and case.name not in names:
            continue
        times = {m: t for m, t in record_of(FOLDER, case.name)["timed"].items() if "step_seconds" in t}
        if not times or case.name in SEVERAL_CALLS:
            continue
        stream = to_stream(graphs_of(FOLDER, case.name), eager_stream(case))
        for mode in MODES:
            if mode not in times:
                continue
            step = PricedStep(
                replace(stream, meta={**stream.meta, "mode": mode}), replace(run_of(case), mode=mode), profile
            )
            yield Timed(
                case.name, mode, median(times[mode]["step_seconds"]), step.interval, step.bound,
                step.timeline.device_seconds, step.timeline.host_seconds, median(times[mode]["host_seconds"]),
            )  # fmt: skip


if __name__ == "__main__":
    main()
