"""Compares the steps that H200s ran with their forecasts: the step, its interval, and what it is made of.

    python -m studies.parallel.timeline [--only w2048] [--groups larger] [--out reports/parallel/timeline.md]

Reads the committed measurements: steps.csv and steps-again.csv (`studies.parallel.measured`), kernels.csv
(`studies.parallel.overlap`), and host.json, host-2.json and host-4.json to host-11.json, what `flopcast fit`
made of the same machines' `bench --suite host`: of the first steps, of the larger and the first compiled ones, of the
larger ones again, of those over four GPUs again, of the larger compiled ones, of the compiled ones over four GPUs, of
the trained ones, of those over four and over two GPUs in which host and device take as long, and of those that the host
bounds, before and after them.
The first steps over four GPUs are forecast twice: as what ships says, and by the link as two GPUs alone tell it. Every
step is traced: that takes minutes.

Eager steps of models of stock shapes (named w*) and the first compiled ones of Qwen3-0.6B are those that
`studies.parallel.host` fits what Python spends around calls to; the device-bound ones of the former give
`uncertainty.LANES_BEYOND`. The others judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import HostCosts, default_host
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.timeline import Shares
from flopcast.roofline.step.uncertainty import Interval
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from studies.command import parser_of
from studies.imports import ROOT
from studies.links.shipped import by_two
from studies.markdown import table
from studies.parallel import overlap
from studies.parallel.measured import AGAIN, FILE, read
from studies.parallel.overlap import Spent
from studies.parallel.steps import COMPILED, GROUPS, MODELS, Measured, Step

FOLDER = ROOT / "reports" / "parallel"
HOST = FOLDER / "host.json"
GPU = "nvidia-h200"


@dataclass(frozen=True)
class Timed:
    """A step: seconds measured, over ranks and rounds the median, and forecast. `is_fitted`: whether a parameter was
    fitted to it; `bound`: what bounds its forecast."""

    step: Step
    is_fitted: bool
    measured: float
    host_measured: float
    spent: Sequence[Spent]
    forecast: Interval
    device: float
    shares: Shares
    sent: float
    host: float
    bound: str

    @property
    def error(self) -> float:
        return self.forecast.value / self.measured - 1

    @property
    def is_within(self) -> bool:
        return self.forecast.low <= self.measured <= self.forecast.high


def run_of(step: Step, ranks: int = 2) -> Run:
    return Run(**step.settings, parallel=step.layout.format(n=ranks))


@cache
def stream_of(step: Step) -> Stream:
    return get_stream(MODELS[step.model], run_of(step).traced_on("cuda" if step.mode == "eager" else "cuda 9.0 132"))


@dataclass(frozen=True)
class Section:
    """A group of steps as one run measured it. `host`: the file of the host as the run calibrated it. `by_two`: whether
    they are forecast besides by the link as two GPUs alone tell it. `is_profiled`: whether their kernels were measured
    too."""

    title: str
    host: Path | None = None
    file: Path = FILE
    by_two: bool = False
    is_profiled: bool = True

    def forecasts(self, folder: Path) -> list[tuple[str, HostCosts, str]]:
        """With what the steps are forecast: the words for it, a host and a link, of which one that does not ship is
        written to the folder."""
        found = [("shipped host", default_host(), "auto")]
        if self.host is not None:
            found.insert(0, ("host calibrated in the same run", HostCosts.load(self.host), "auto"))
        if self.by_two:
            link = folder / "two.json"
            by_two().save(link)
            found.append(("shipped host, collectives by what two GPUs say", default_host(), str(link)))
        return found


SECTIONS = {
    "first": Section("The first steps", HOST),
    "divided": Section("Pipelines, divided sequences and experts", is_profiled=False),
    "larger": Section("Steps chosen to be bound by the device", FOLDER / "host-2.json"),
    "larger again": Section("The same, on two other H200s", FOLDER / "host-4.json", AGAIN),
    "compiled": Section("Compiled steps", FOLDER / "host-2.json"),
    "compiled-larger": Section(
        "Compiled steps chosen to be bound by the device", FOLDER / "host-6.json", is_profiled=False
    ),
    "four": Section("Over four GPUs", by_two=True),
    "four again": Section("The same over four GPUs, on another host", FOLDER / "host-5.json", AGAIN),
    "four-balanced": Section(
        "Over four GPUs, where host and device take about as long", FOLDER / "host-9.json", is_profiled=False
    ),
    "balanced": Section(
        "Over two GPUs, where host and device take about as long", FOLDER / "host-10.json", is_profiled=False
    ),
    "host-bound": Section("Over two GPUs, bound by the host", FOLDER / "host-11.json", is_profiled=False),
    "compiled-four": Section("Compiled steps over four GPUs", FOLDER / "host-7.json", is_profiled=False),
    "trained": Section("Clipped, fine-tuned, and by optimizers of one GPU", FOLDER / "host-8.json"),
}


def run_with(step: Step) -> str:
    """Which of GROUPS a step was run with; of the first ones `divided` were run later, on a host that was not
    calibrated and without a profiler."""
    found = next(name for name, steps in GROUPS.items() if step in steps)
    return "divided" if found == "first" and step.layout.startswith(("pp", "cp", "ep")) else found


def is_fitted(step: Step) -> bool:
    """Whether `studies.parallel.host` fits a constant to it: of eager steps stock shapes, of the first compiled
    ones Qwen3-0.6B without micro-batches."""
    if step.mode == "eager":
        return step.model.startswith("w")
    return step in COMPILED and step.model == "qwen3-0.6b" and step.accumulate == 1


def timed(
    step: Step, ranks: Sequence[Measured], host: HostCosts, link: str = "auto", spent: Sequence[Spent] = ()
) -> Timed:
    priced = PricedStep(stream_of(step), replace(run_of(step), link=link), find_profile(GPU), host)
    timeline = priced.timeline
    return Timed(
        step, is_fitted(step), median(median(rank.step_seconds) for rank in ranks),
        mean(median(rank.host_seconds) for rank in ranks), [one for one in spent if one.step == step.name],
        priced.interval, timeline.device_seconds, timeline.shares,
        sum(op.seconds for op in priced.ops if op.collective is not None), timeline.enqueue_seconds, priced.bound,
    )  # fmt: skip


def timed_steps(name: str, host: HostCosts, link: str = "auto", only: Sequence[str] = ()) -> list[Timed]:
    """The steps of one of SECTIONS."""
    section, group = SECTIONS[name], name.partition(" ")[0]
    spent = overlap.read() if section.file == FILE else []
    return [
        timed(step, ranks, host, link, spent)
        for step, ranks in read(section.file).items()
        if run_with(step) == group and (not only or any(step.name.startswith(one) for one in only))
    ]


def page(found: Iterable[tuple[str, Sequence[Timed]]]) -> str:
    parts = ["# Parallel steps on two and four H200s beside their forecasts", "", _WORDS, ""]
    for host, steps in found:
        parts += [f"## {host}", "", table(_COLUMNS, [_row(one) for one in steps]), "", *_summary(steps), ""]
    return "\n".join(parts).rstrip() + "\n"


_WORDS = """`python -m studies.parallel.timeline`. Seconds in ms. Measured: the median of rounds and ranks; kernels as
profiled, by themselves and beside collectives together, the least of four profiled steps; communication from when the
last rank has come; exposed without waiting for the other rank, the least of both; host: until a step for idle GPUs is
enqueued, what it waits for included. A profiler slows the host down, so that kernels of host-bound steps were measured
in another order than those of the steps. Forecast: kernels by themselves + what collectives beside them add. Eager
steps of models named w*, and the first compiled ones of Qwen3-0.6B without micro-batches, are those that what Python
spends around calls was fitted to; they do not count below."""

_COLUMNS = ["step", "ms", "forecast", "90%", "error", "bound", "kernels", "forecast", "communication", "forecast",
            "exposed", "forecast", "host", "forecast"]  # fmt: skip


def _row(one: Timed) -> list[str]:
    ranks = one.spent
    low, high = ((f"{end * 1e3:.1f}") for end in one.forecast[1:])
    return [
        one.step.name, f"{one.measured * 1e3:.1f}", f"{one.forecast.value * 1e3:.1f}",
        f"{low} to {high}" + ("" if one.is_within else ", outside"), f"{one.error:+.1%}", one.bound,
        _ms(rank.compute for rank in ranks), f"{one.device * 1e3:.1f} + {one.shares.contention * 1e3:.1f}",
        _ms(rank.communication for rank in ranks), f"{one.sent * 1e3:.1f}",
        _ms(max(rank.exposed - rank.waiting, 0.0) for rank in ranks), f"{one.shares.exposed * 1e3:.1f}",
        f"{one.host_measured * 1e3:.1f}", f"{one.host * 1e3:.1f}",
    ]  # fmt: skip


def _ms(values: Iterable[float]) -> str:
    least = min(values, default=None)
    return "" if least is None else f"{least * 1e3:.1f}"


def _summary(steps: Sequence[Timed]) -> list[str]:
    held = [one for one in steps if not one.is_fitted]
    lines = []
    for name, some in (
        ("bound by the device", [one for one in held if one.bound != "host"]),
        ("bound by the host", [one for one in held if one.bound == "host"]),
    ):
        if some:
            errors = [abs(one.error) for one in some]
            lines.append(
                f"- {len(some)} steps {name}: error {median(errors):.1%} at the median, {max(errors):.1%} at most"
            )
    if held:
        within = sum(one.is_within for one in held)
        lines.append(f"- {within} of {len(held)} within their 90% intervals")
    return lines


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--groups", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    only = options.only.split(",") if options.only else []
    groups = options.groups.split(",")
    with TemporaryDirectory() as folder:
        parts = [
            (f"{section.title}: {told}", timed_steps(name, host, link, only))
            for name, section in SECTIONS.items()
            if name in groups
            for told, host, link in section.forecasts(Path(folder))
        ]
    text = page(parts)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
