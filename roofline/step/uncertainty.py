"""Computes 90% intervals of device and step time. All spreads are standard deviations of log seconds.

Errors are not independent, so the time of a step of a thousand kernels is not known a thousand times better than that
of one kernel:

- a shape's own error (`TimedOp.sigma`: the fit's residuals and the measurement's noise, `gpu/fit/surface.py`) is the
  same in each of its repeats and independent from shape to shape;
- what was not measured at all (`gpu/profile/unmeasured.py`) is estimated by one rule for all shapes of a class, which
  share one error; where that is a factor (`gpu/profile/unlike_bytes.py`), the interval reaches farther up than down;
- a class's bias: kernels measured in isolation and kernels within a step differ by an error common to all shapes of a
  class (`Spreads.classes`);
- what all kernels share, the clock and memory of the part (`Spreads.common`), and the variation among cards of one
  model, where that is known (`Profile.card_spread`);
- how much the machine itself varies, where it was measured: a processor runs other processes too, and a step meets
  another moment of it than the profile did (`drift_sigma`);
- a projection's error, that of one datasheet figure for all classes (`gpu.projection.project.common_sigma`);
- the error of the power that the step draws (`power_limit.SIGMA`), which matters near the part's limit;
- of compiled steps, products that timings pad or leave (`unsure_pads`): all padded at the lower end, none at the upper;
- the gap between kernels, measured for tiny kernels and for wide ones: a step's true gap lies between; the forecast
  takes that of the wide ones, and the interval reaches equally far to either side;
- the error of a device-bound step whose kernel times are right (`Spreads.beyond`): gaps that are neither a tiny
  kernel's nor a wide one's, or a host that falls behind for a while;
- the link's collectives, by themselves and beside kernels, and what steps on several GPUs err beyond them;
- the host: `HostCosts.sigma`, the spread from process to process, or, for a host calibrated in the same run, how far
  its costs moved between samples (`validation.host_of_run.RunHost.sigma`) together with the further error of steps
  (`Spreads.host_same_run`). Of compiled steps `GraphCosts.sigma`, always with that further error.

`Spreads` are estimated from real steps that are neither fitted nor validated: those of group "intervals" that
`flopcast validate` runs (`validation/step_plans.py`). Compiled steps, of other kernels, have spreads of their own.
These remake both from folders of steps:

    python -m studies.shipped.intervals DIR [--gpu PROFILE]
    python -m studies.compiled.intervals
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import exp, hypot, log, sqrt
from typing import Any, NamedTuple

from flopcast.bounds import Deviation
from flopcast.decode import load
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.unmeasured import OTHER_CACHE
from flopcast.roofline.step import power_limit
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.simulation import is_synchronous
from flopcast.roofline.step.timeline import Timeline
from flopcast.roofline.stream.lowering.classes import group_of
from flopcast.roofline.stream.lowering.variants import KernelKind

FILE, COMPILED_FILE = DATA / "intervals.json", DATA / "intervals_compiled.json"
# From this deviation of log seconds on, a factor of 2.7 either way, a time is known within a factor only. What is
# estimated by bytes and FLOPs alone has 0.5.
ROUGH = 0.6
# Deviation of the log gap between nodes of a replayed graph: recorded steps had none to twice `simulation.NODE_GAP`.
NODE_GAP_SIGMA = 0.5
# Of collectives: the deviation of their log seconds beside kernels is 0.02 to 0.17, by what bounds those
# (`gpu.links.contention`). Of device-bound steps on several GPUs beyond the error of their kernels: what five steps of
# small models on two H200s had (`studies.parallel.timeline`).
BESIDE_SIGMA, LANES_BEYOND = 0.1, 0.024
# Of compiled steps on several GPUs twelve were measured, too few for spreads of their own: their errors beyond the
# kernels, those of compiled steps and those of steps on several GPUs, are taken to add, not to be independent; the law
# of kernels beside collectives, which was measured with those of libraries, to err twice as far for generated ones.
GENERATED_BESIDE = 2.0


@dataclass(frozen=True, kw_only=True)
class Spreads:
    """Spreads of steps about their forecasts, as standard deviations of log seconds.

    `classes`: by group of operation classes (`stream.lowering.classes.GROUPS`); `default` for a group without an entry.
    `common`: of what all kernels share. `beyond`: of device-bound steps about what their kernels' true times would have
    given. `host_same_run`: of the host where tiny models ran beside the step. `source`: the steps they were estimated
    from, their number, the card and the day.

    The defaults are a guess for use until steps have been run: 2% per class, 1.5% common to all, and 1.5% beyond the
    kernels.
    """

    classes: Mapping[str, Deviation] = field(default_factory=dict)
    default: Deviation = 0.02
    common: Deviation = 0.015
    beyond: Deviation = 0.015
    host_same_run: Deviation = 0.05
    source: Mapping[str, Any] = field(default_factory=dict)

    def of_group(self, group: str) -> float:
        return self.classes.get(group, self.default)


@cache
def spreads(mode: str = "eager") -> Spreads:
    """Returns the shipped estimates for steps of this mode, or the defaults where none are shipped."""
    file, study = (FILE, "shipped.intervals") if mode == "eager" else (COMPILED_FILE, "compiled.intervals")
    if not file.is_file():
        return Spreads()
    return load(Spreads, file, "the spreads of steps", hint=f"`python -m studies.{study}` makes it")


def device_log_sigma(ops: Sequence[TimedOp], profile: Profile, known: Spreads | None = None) -> float:
    """Returns the standard deviation of the log of the summed kernel time, but for what is known within a factor only
    (`is_rough`), whose error is no such deviation: `device_moves` has it."""
    known = spreads() if known is None else known
    total = sum(op.seconds for op in ops if op.collective is None)
    if not total:
        return 0.0
    classes: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.work is not None:
            classes[op.work.op_class] += op.seconds
    groups: dict[str, float] = defaultdict(float)
    for op_class, seconds in classes.items():
        groups[group_of(op_class)] += seconds
    own = sum(own_variances(ops, profile).values())
    shared = sum((seconds * known.of_group(group)) ** 2 for group, seconds in groups.items())
    projected = 0.0
    if profile.basis != "measured":
        from flopcast.roofline.gpu.projection.project import common_sigma

        projected = sum(seconds * common_sigma(profile, name) for name, seconds in classes.items())
    cards = card_sigma(classes, profile)
    machine = hypot(cards, drift_sigma(profile))
    return sqrt((own + shared + projected**2) / total**2 + known.common**2 + machine**2)


def own_variances(ops: Sequence[TimedOp], profile: Profile) -> dict[str, float]:
    """Returns by group of classes the variance of its summed seconds, in square seconds, by the errors of shapes and of
    what was not measured at all."""
    numbers: dict[tuple[Any, float], int] = {}  # index of each (shape, sigma); a shape takes long to hash,
    known_as: dict[tuple[int, float], int] = {}  # hence once per work and not once per operation
    shapes: list[tuple[str, float]] = []  # class and seconds
    guessed: dict[str, float] = defaultdict(float)
    lent = {key.kind for key in profile.projected_kinds}  # these share one projection's error
    for op in ops:
        if op.work is None or is_rough(op):
            continue
        if op.basis == "extrapolated" and (
            op.sigma >= OTHER_CACHE
            or op.work.op_class == "generated"  # by a law of another GPU's, whose error they share
            or (lent and KernelKind(op.work.op_class, op.work.variant) in lent)
        ):
            guessed[op.work.op_class] += op.seconds * op.sigma
            continue
        number = known_as.get((id(op.work), op.sigma))
        if number is None:
            number = numbers.setdefault((op.work.alike, op.sigma), len(numbers))
            known_as[id(op.work), op.sigma] = number
            if number == len(shapes):
                shapes.append((op.work.op_class, 0.0))
        shapes[number] = shapes[number][0], shapes[number][1] + op.seconds
    found: dict[str, float] = defaultdict(float)
    for (op_class, seconds), (_, sigma) in zip(shapes, numbers, strict=True):
        found[group_of(op_class)] += (seconds * sigma) ** 2
    for op_class, seconds in guessed.items():
        found[group_of(op_class)] += seconds**2
    return dict(found)


def drift_sigma(profile: Profile) -> float:
    """Returns the standard deviation of the log time of a product that was timed throughout the measurements
    (`scalar/reference`); 0 where there is none, as of GPUs."""
    found = profile.ceilings.get("reference")
    return 0.0 if found is None else log(found.high / found.low) / (2 * Z_90)


class Moves(NamedTuple):
    """How far the ends of a 90% interval lie below and above, as logarithms."""

    down: float
    up: float


def is_rough(op: TimedOp) -> bool:
    """Whether an operation's time is known within a factor only."""
    return op.basis == "extrapolated" and op.sigma >= ROUGH


def device_moves(ops: Sequence[TimedOp], sigma: float, less_seconds: float = 0.0, more_seconds: float = 0.0) -> Moves:
    """Returns the ends of the summed kernel time, given its deviation without what is known within a factor only. Of
    that each class errs as one, and independently of others; its ends add to the sum, they do not multiply it.
    `less_seconds`, `more_seconds`: by how much chance makes it shorter or longer (`unsure_pads`), which the lower and
    the upper end have whole."""
    ends = _moves(ops, sigma)
    if not (less_seconds or more_seconds):
        return ends
    total = sum(op.seconds for op in ops if op.collective is None)
    return Moves(-log(exp(-ends.down) - less_seconds / total), log(exp(ends.up) + more_seconds / total))


def _moves(ops: Sequence[TimedOp], sigma: float) -> Moves:
    total = sum(op.seconds for op in ops if op.collective is None)
    less: dict[str, float] = defaultdict(float)
    more: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.work is not None and is_rough(op):
            less[op.work.op_class] += op.seconds * (1 - exp(-Z_90 * op.sigma))
            more[op.work.op_class] += op.seconds * (exp(Z_90 * op.sigma) - 1)
    if not more:
        return Moves(Z_90 * sigma, Z_90 * sigma)
    down = -log(1 - min(hypot(*less.values()) / total, 1 - 1e-6))
    return Moves(hypot(Z_90 * sigma, down), hypot(Z_90 * sigma, log(1 + hypot(*more.values()) / total)))


def card_sigma(classes: Mapping[str, float], profile: Profile) -> float:
    """Returns the standard deviation, among cards of one model, of the log time of a step with the given seconds per
    class; 0 where it is not known."""
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
    """Returns the standard deviation of the log gap between kernels: half the log distance from the gap of tiny kernels
    to that of kernels of a step's sizes."""
    wide = profile.ceiling("kernel_gap", 0.0)
    tiny = profile.ceiling("kernel_gap_tiny", 0.0)
    return abs(log(wide / tiny)) / 2 if wide > 0 and tiny > 0 else 0.25


class Interval(NamedTuple):
    """A time in seconds and the ends of its 90% interval."""

    value: float
    low: float
    high: float


def step_interval(timeline: Timeline, host_sigma: float, device: Moves, known: Spreads | None = None) -> Interval:
    """Returns the step's seconds and their 90% interval, from the independent errors of device, host, gaps and power,
    and, as far as the step follows the device, from the error of steps beyond their kernels. `host_sigma`: standard
    deviation of the log of the host's seconds."""
    run = timeline.step_seconds
    step = run()
    if not step:
        return Interval(0.0, 0.0, 0.0)
    gap_sigma = 0.0 if is_synchronous(timeline.profile) else gap_log_sigma(timeline.profile)
    if any(op.replay for op in timeline.ops):
        gap_sigma = NODE_GAP_SIGMA
    beyond = (spreads() if known is None else known).beyond
    sent = [op for op in timeline.ops if op.collective is not None and op.seconds]
    link_sigma = 0.0
    if sent:  # on one link, and so with one error
        is_compiled = any(op.work is not None and op.work.op_class == "generated" for op in timeline.ops)
        beyond = beyond + LANES_BEYOND if is_compiled else hypot(beyond, LANES_BEYOND)
        own = sum(op.seconds * op.sigma for op in sent) / sum(op.seconds for op in sent)
        link_sigma = hypot(own, BESIDE_SIGMA * GENERATED_BESIDE if is_compiled else BESIDE_SIGMA)

    def moved(sign: int) -> float:
        far = device.up if sign > 0 else device.down
        by_device = log(run(device_factor=exp(sign * far)) / step)
        follows = abs(by_device) / far if far else 0.0
        parts = (
            run(host_factor=exp(sign * Z_90 * host_sigma)),
            run(gap_factor=exp(sign * Z_90 * gap_sigma)),
            run(power_factor=exp(sign * Z_90 * power_limit.SIGMA)),
            run(link_factor=exp(sign * Z_90 * link_sigma)) if sent else step,
        )
        return hypot(by_device, Z_90 * beyond * follows, *(log(part / step) for part in parts))

    return Interval(step, step * exp(-moved(-1)), step * exp(moved(1)))
