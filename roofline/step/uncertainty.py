"""How far a forecast may be off: 90% intervals of device and step time. Standard deviations of log seconds throughout.

Errors are not independent, so that a step of a thousand kernels is not known a thousand times better than one:

- a shape's own error (`TimedOp.sigma`: the fit's residuals and the measurement's noise, `gpu/fit/surface.py`): the
  same in each of its repeats, independent from shape to shape;
- what was not measured at all (`gpu/profile/unmeasured.py`) is guessed by one rule for all shapes of a class: one error
  for them;
- a class's bias: kernels measured alone and kernels among others in a step differ by something that all of a class
  share, whatever the shape (`Spreads.classes`);
- what all kernels share, the clock and memory of the part (`Spreads.common`), and what the cards of a kind differ by,
  where that is known (`Profile.card_spread`);
- a projection's error, of one datasheet figure for all classes (`project.common_sigma`);
- the power that the step draws (`power_limit.SIGMA`), where a little more of it meets the part's limit;
- the gap between kernels, measured for tiny kernels and for wide ones: the truth of a step lies between; the forecast
  takes the wide ones', and the interval reaches as far to either side;
- what a step that the device bounds is off although its kernels' times are right (`Spreads.beyond`): gaps that are
  neither a tiny kernel's nor a wide one's, a host that falls behind for a while;
- the host: `HostCosts.sigma`, which says how far processes lie apart, or, calibrated in the same run, how far the host
  moved between its samples (`validation.host_of_run.RunHost.sigma`) and what steps were off besides
  (`Spreads.host_same_run`).

`Spreads` are estimated from real steps that are neither fitted nor validated: those of group "intervals" that
`flopcast validate` runs (`validation/step_plans.py`). This remakes data/intervals.json from a folder of steps:

    python -m studies.shipped.intervals DIR [--gpu PROFILE]
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import exp, hypot, log, sqrt
from typing import Any, NamedTuple

from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.unmeasured import OTHER_CACHE
from flopcast.roofline.step import power_limit
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.simulation import Timeline, is_synchronous
from flopcast.roofline.stream.lowering.classes import group_of

FILE = DATA / "intervals.json"


@dataclass(frozen=True, kw_only=True)
class Spreads:
    """Spreads of steps about their forecasts, standard deviations of log seconds.

    `classes`: by group of operation classes (`stream.lowering.classes.GROUPS`); `default` for one without entry.
    `beyond`: of steps that the device bounds about what their kernels' true times would have given. `host_same_run`: of
    the host where tiny models ran beside the step. `source`: of which steps, how many, on which card and day.

    The defaults are a guess, until steps have been run to tell: 2% a class, 1.5% for all and beyond the kernels.
    """

    classes: Mapping[str, float] = field(default_factory=dict)
    default: float = 0.02
    common: float = 0.015
    beyond: float = 0.015
    host_same_run: float = 0.05
    source: Mapping[str, Any] = field(default_factory=dict)

    def of_group(self, group: str) -> float:
        return self.classes.get(group, self.default)


@cache
def spreads() -> Spreads:
    """The shipped estimates; the defaults without them."""
    return Spreads(**json.loads(FILE.read_text())) if FILE.is_file() else Spreads()


def device_log_sigma(ops: Sequence[TimedOp], profile: Profile, known: Spreads | None = None) -> float:
    """Of the summed kernel time."""
    known = spreads() if known is None else known
    total = sum(op.seconds for op in ops)
    if not total:
        return 0.0
    numbers: dict[tuple[Any, float], int] = {}  # of shapes, each with its sigma; a shape takes long to hash,
    known_as: dict[tuple[int, float], int] = {}  # hence once a work, not once an operation
    shapes: list[float] = []
    guessed: dict[str, float] = defaultdict(float)
    classes: dict[str, float] = defaultdict(float)
    least = 0.0 if profile.projected_kinds else OTHER_CACHE  # what is lent is off by one projection's error
    for op in ops:
        if op.work is not None:
            if op.basis == "extrapolated" and op.sigma >= least:
                guessed[op.work.op_class] += op.seconds * op.sigma
            else:
                number = known_as.get((id(op.work), op.sigma))
                if number is None:
                    number = numbers.setdefault((op.work.shape, op.sigma), len(numbers))
                    known_as[id(op.work), op.sigma] = number
                    shapes += [0.0] * (len(numbers) - len(shapes))
                shapes[number] += op.seconds
            classes[op.work.op_class] += op.seconds
    groups: dict[str, float] = defaultdict(float)
    for op_class, seconds in classes.items():
        groups[group_of(op_class)] += seconds
    own = sum((seconds * sigma) ** 2 for (_, sigma), seconds in zip(numbers, shapes, strict=True))
    own += sum(value**2 for value in guessed.values())
    shared = sum((seconds * known.of_group(group)) ** 2 for group, seconds in groups.items())
    projected = 0.0
    if profile.basis != "measured":
        from flopcast.roofline.gpu.projection.project import common_sigma

        projected = sum(seconds * common_sigma(profile, name) for name, seconds in classes.items())
    cards = card_sigma(classes, profile)
    return sqrt((own + shared + projected**2) / total**2 + known.common**2 + cards**2)


def card_sigma(classes: Mapping[str, float], profile: Profile) -> float:
    """Deviation from card to card of a step of so many seconds a class; 0 where nothing is known of it."""
    measured: Mapping[str, Any] = profile.card_spread.get("classes") or {}
    factors = {name: entry["factors"] for name, entry in measured.items() if entry.get("factors")}
    names = {name for entry in factors.values() for name in entry}
    if len(names) < 2:
        return 0.0
    logs = []
    for card in names:
        seconds = sum(value * factors.get(f"{op_class}/cold", {}).get(card, 1.0) for op_class, value in classes.items())
        logs.append(log(seconds / sum(classes.values())))
    mean = sum(logs) / len(logs)
    times: float = profile.card_spread.get("times", 1.0)
    return times * sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))


def gap_log_sigma(profile: Profile) -> float:
    """Of the gap between kernels: half the way, in logs, from that of tiny kernels to that of a step's sizes."""
    wide = profile.ceiling("kernel_gap", 0.0)
    tiny = profile.ceiling("kernel_gap_tiny", 0.0)
    return abs(log(wide / tiny)) / 2 if wide > 0 and tiny > 0 else 0.25


class Interval(NamedTuple):
    """Seconds and the ends of their 90% interval."""

    value: float
    low: float
    high: float


def step_interval(timeline: Timeline, host: HostCosts, device_sigma: float) -> Interval:
    """How far the step moves with the errors of device, host, gaps and power, independent; and, as far as it follows
    the device, by what steps are off beyond their kernels."""
    run = timeline.step_seconds
    step = run()
    if not step:
        return Interval(0.0, 0.0, 0.0)
    gap_sigma = 0.0 if is_synchronous(timeline.profile) else gap_log_sigma(timeline.profile)
    beyond = spreads().beyond

    def moved(sign: int) -> float:
        by_device = log(run(device_factor=exp(sign * Z_90 * device_sigma)) / step)
        follows = abs(by_device) / (Z_90 * device_sigma) if device_sigma else 0.0
        parts = (
            run(host_factor=exp(sign * Z_90 * host.sigma)),
            run(gap_factor=exp(sign * Z_90 * gap_sigma)),
            run(power_factor=exp(sign * Z_90 * power_limit.SIGMA)),
        )
        return hypot(by_device, Z_90 * beyond * follows, *(log(part / step) for part in parts))

    return Interval(step, step * exp(-moved(-1)), step * exp(moved(1)))
