"""Says how a step scales over GPUs: strong scaling divides its sequences among them, weak scaling gives each as many.

Each number of GPUs takes the fastest of the layouts asked for that fit (`layouts.try_all`). A doubling pays where the
GPUs added do at least the share `worth` of what as many did before. Where it does not, `next_batch` and `next_width`
look for the step from which it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from flopcast.errors import UsageError
from flopcast.microbench.recipe.layout import DATA_KINDS, PARTS, Layout
from flopcast.microbench.recipe.settings import ONE_GPU
from flopcast.roofline.dollars.layouts import (
    AUTO,
    LaidOut,
    Progress,
    Workload,
    check_gpus,
    forecast_runs,
    gpus_of_a_host,
    layouts_on,
    seconds_of,
    trace_ahead,
    try_all,
)
from flopcast.roofline.dollars.points import Ranged
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.stream.library.modules import Module
from flopcast.roofline.stream.model.models import Config

STRONG, WEAK = "strong", "weak"
ALL = "all"  # in place of a pattern: every layout
WORTH = 0.5
MOST_TIMES = 64  # of the sequences asked for, up to which a batch is looked for
WIDTH_STEP, MOST_WIDTH = 256, 8192


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A step of `sequences` on `num_gpus`: in the fastest layout, or the `reason` why there is none. `efficiency`: its
    throughput per GPU over that of the fewest GPUs that it fits on."""

    num_gpus: int
    sequences: int
    best: LaidOut | None = None
    efficiency: float | None = None
    reason: str = ""

    @property
    def forecast(self) -> Forecast | None:
        return None if self.best is None else self.best.forecast

    @property
    def per_second(self) -> float | None:
        """Tokens, or samples."""
        return None if self.forecast is None else self.forecast.tokens_per_second

    @property
    def per_usd(self) -> float | None:
        """Tokens per dollar; None without a price."""
        found = self.forecast
        usd = None if found is None else found.usd_per_step
        return None if not usd or found is None else found.tokens_per_second * found.step_seconds / usd

    def to_json(self) -> dict[str, Any]:
        laid_out = {} if self.best is None else self.best.to_json()
        return {
            **laid_out, "num_gpus": self.num_gpus, "sequences_per_step": self.sequences, "efficiency": self.efficiency,
            "tokens_per_usd": self.per_usd, "reason": self.reason or None,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Doubling:
    """From one number of GPUs to twice as many: `gain`, the throughput of the GPUs added over that of as many before,
    1 if ideal, with the ends of its 90% interval."""

    num_gpus: int
    gain: float
    low: float
    high: float

    def pays(self, worth: float) -> bool:
        return self.gain >= worth

    def is_decided(self, worth: float) -> bool:
        return self.low >= worth or self.high < worth


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A step on 1, 2, 4, ... GPUs. `last`: the number of GPUs up to which every doubling pays, None where all of them
    do; `turns`: the doubling from there that does not."""

    kind: str
    points: tuple[Scaled, ...]
    doublings: tuple[Doubling, ...]
    worth: float

    @property
    def turns(self) -> Doubling | None:
        return next((one for one in self.doublings if not one.pays(self.worth)), None)

    @property
    def last(self) -> int | None:
        return None if self.turns is None else self.turns.num_gpus // 2

    def at(self, num_gpus: int) -> Scaled:
        return next(point for point in self.points if point.num_gpus == num_gpus)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "worth": self.worth, "stops_paying_after": self.last,
            "points": [point.to_json() for point in self.points],
            "doublings": [
                {**vars(one), "pays": one.pays(self.worth), "decided": one.is_decided(self.worth)}
                for one in self.doublings
            ],
        }  # fmt: skip


def scaling(
    work: Workload, kind: str, most: int, pattern: str = AUTO, worth: float = WORTH,
    progress: Progress = lambda done, total: None,
) -> Scaling:  # fmt: skip
    """Forecasts `work` on 1, 2, 4, ... up to `most` GPUs. Its sequences are those on one GPU; its nodes those that the
    most GPUs lie on, fewer GPUs filling as few. Raises UsageError for what is not valid."""
    check_gpus(most, work.run.nodes)
    check_pattern(pattern)
    if not 0 < worth <= 1:
        raise UsageError(f"worth is {worth:g}: valid is a share above 0, at most 1")
    per_host = gpus_of_a_host(most, work.run.nodes)
    numbers = [2**power for power in range(most.bit_length())]
    tries = [_trials(work, kind, number, per_host, pattern) for number in numbers]
    trace_ahead([(own, layout) for own, layouts in tries for layout in layouts], "batch")
    points: list[Scaled] = []
    for place, (own, layouts) in enumerate(tries):
        points.append(_scaled(own, numbers[place], layouts))
        progress(place + 1, len(numbers))
    base = next((point for point in points if point.per_second), None)
    points = [replace(point, efficiency=_efficiency(point, base)) for point in points]
    times = {point.num_gpus: seconds_of(work, point.best, "batch") for point in points if point.best is not None}
    doublings = tuple(
        _doubling(before, after, times) for before, after in pairwise(points) if before.best and after.best
    )
    return Scaling(kind=kind, points=tuple(points), doublings=doublings, worth=worth)


def _trials(work: Workload, kind: str, number: int, per_host: int, pattern: str) -> tuple[Workload, list[str]]:
    """What is done on so many GPUs, and the layouts to try."""
    sequences = work.sequences * (number if kind == WEAK else 1)
    hosts = max(number // per_host, 1)
    own = replace(work, sequences=sequences, run=replace(work.run, nodes=hosts if number > 1 else 0))
    if number == 1:
        own = replace(own, run=replace(own.run, link="auto"))
    return own, list(layouts_of(pattern, number, min(per_host, number)))


def _scaled(work: Workload, number: int, layouts: Sequence[str]) -> Scaled:
    """The fastest of the layouts that fit."""
    point = Scaled(num_gpus=number, sequences=work.sequences)
    if not layouts:
        return replace(point, reason=f"the layout's other parts do not divide {number} GPUs")
    found = try_all(work, layouts, vary="batch")
    fitting = [one for one in found if one.fits]
    if fitting:
        return replace(point, best=min(fitting, key=lambda one: one.seconds))
    reasons = [one.reason for one in found if one.reason]
    return replace(point, reason=reasons[0] if len(reasons) == len(found) else "out of memory")


def _efficiency(point: Scaled, base: Scaled | None) -> float | None:
    if base is None or base.per_second is None or point.per_second is None:
        return None
    return point.per_second / point.num_gpus / (base.per_second / base.num_gpus)


def _doubling(before: Scaled, after: Scaled, times: Mapping[int, Ranged]) -> Doubling:
    """The gain of a doubling, from the ratio of the two steps' times, in which what both err in alike cancels."""
    assert before.per_second is not None
    assert after.per_second is not None
    faster = times[before.num_gpus].over(times[after.num_gpus])
    scale = after.per_second / before.per_second / faster.value  # of the sequences
    ends = (end * scale - 1 for end in (faster.value, faster.low, faster.high))
    gain, low, high = ends
    return Doubling(num_gpus=after.num_gpus, gain=gain, low=low, high=high)


# --- layouts by number of GPUs ------------------------------------------------------------------------


def check_pattern(pattern: str) -> None:
    """Raises UsageError for what `layouts_of` does not take."""
    if pattern in (AUTO, ALL):
        return
    parts = pattern.split(",")
    is_open = [part for part in parts if "=" not in part]
    if len(is_open) != 1 or is_open[0].strip() not in PARTS:
        raise UsageError(
            f"parallel {pattern!r}: valid are auto, all, or a layout one part of which has no number and takes the "
            f"GPUs that are left, such as fsdp or tp=2,fsdp; parts are {', '.join(PARTS)}"
        )
    (name,) = is_open
    Layout.parse(",".join("hsdp=1x2" if part == "hsdp" else f"{part}=2" if part == name else part for part in parts))


def layouts_of(pattern: str, number: int, per_host: int) -> Iterator[str]:
    """Yields the layouts of a pattern over so many GPUs: of "auto" ddp and fsdp, and hsdp where there are several hosts
    of several GPUs."""
    if number == 1:
        yield ONE_GPU
    elif pattern == ALL:
        yield from layouts_on(number, per_host)
    elif pattern == AUTO:
        yield f"ddp={number}"
        yield f"fsdp={number}"
        if 1 < per_host < number:
            yield f"hsdp={number // per_host}x{per_host}"
    elif (filled := _filled(pattern, number, number // per_host)) is not None:
        yield filled


def _filled(pattern: str, number: int, hosts: int) -> str | None:
    """A pattern with the number of its open part; None where the others do not divide the GPUs."""
    parts = [part.strip() for part in pattern.split(",")]
    given = [part for part in parts if "=" in part]
    (name,) = (part for part in parts if "=" not in part)
    taken = Layout.parse(",".join(given)).world if given else 1
    left, rest = divmod(number, taken)
    if rest or not left:
        return None
    if left == 1:
        return ",".join(given) or ONE_GPU
    if name == DATA_KINDS[-1]:  # hsdp: replicas over hosts, shards within
        size = f"hsdp={hosts}x{left // hosts}" if hosts > 1 and left % hosts == 0 and left > hosts else f"fsdp={left}"
        return ",".join([*given, size])
    return ",".join([*given, f"{name}={left}"])


# --- from where the next doubling pays ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turning:
    """From which `value` of `what` (the batch or the width) on the doubling to `num_gpus` pays; None where no value up
    to `most` does."""

    what: str
    num_gpus: int
    value: int | None
    most: int

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def next_batch(work: Workload, found: Scaling) -> Turning | None:
    """The least sequences per step from which the doubling after `found.last` pays, in the layouts it has there and
    without more micro-batches: doubled, then halved down to an eighth of the way. None where all doublings pay, or
    the batch cannot be varied."""
    after = found.turns
    if after is None or (isinstance(work.model, Module) and not work.model.takes("batch")):
        return None
    few, many = (found.at(number).best for number in (after.num_gpus // 2, after.num_gpus))
    assert few is not None
    assert many is not None
    ranks = many.run.layout.data
    asked = found.at(after.num_gpus).sequences

    def pays(sequences: int) -> bool | None:
        steps = [_with_sequences(work, one, sequences) for one in (few, many)]
        if any(step is None or not step.fits for step in steps):
            return None
        one, two = (step.forecast for step in steps if step is not None)
        assert one is not None
        assert two is not None
        return two.tokens_per_second / one.tokens_per_second - 1 >= found.worth

    low, high, most = asked, asked, asked
    while (found_it := pays(2 * high)) is False and 2 * high <= MOST_TIMES * asked:
        low = high = most = 2 * high
    if not found_it:
        return Turning(what="batch", num_gpus=after.num_gpus, value=None, most=most)
    low, high = high, 2 * high
    for _ in range(3):
        middle = (low + high) // 2 // ranks * ranks
        if not low < middle < high:
            break
        low, high = (low, middle) if pays(middle) else (middle, high)
    return Turning(what="batch", num_gpus=after.num_gpus, value=high, most=high)


def _with_sequences(work: Workload, found: LaidOut, sequences: int) -> LaidOut | None:
    """The same layout with other sequences; None where they do not divide."""
    run = found.run
    batch, rest = divmod(sequences, run.layout.data * run.accumulate)
    if rest or not batch:
        return None
    (one,) = forecast_runs(work, [replace(run, batch=batch)], "batch")
    return one


def next_width(
    work: Workload, found: Scaling, width: int, at_width: Callable[[int], Config], pattern: str = AUTO
) -> Turning | None:
    """The least width, of those about half again as large each, from which the doubling after `found.last` pays at the
    same sequences. `at_width` makes the model. None where all doublings pay."""
    after = found.turns
    if after is None:
        return None
    few = after.num_gpus // 2
    per_host = gpus_of_a_host(found.points[-1].num_gpus, work.run.nodes)
    tried = width
    for wider in _wider(width):
        model = replace(work, model=at_width(wider))
        tries = [(number, *_trials(model, found.kind, number, per_host, pattern)) for number in (few, 2 * few)]
        points = [_scaled(own, number, layouts) for number, own, layouts in tries]
        one, two = (point.per_second for point in points)
        if one is None or two is None:
            break
        if two / one - 1 >= found.worth:
            return Turning(what="width", num_gpus=2 * few, value=wider, most=wider)
        tried = wider
    return Turning(what="width", num_gpus=2 * few, value=None, most=tried)


def _wider(width: int) -> Sequence[int]:
    found, factor = [], 1.5
    while (wider := round(width * factor / WIDTH_STEP) * WIDTH_STEP) <= MOST_WIDTH:
        if wider > width and wider not in found:
            found.append(wider)
        factor *= 1.4
    return found
