"""Represents a ladder's steps on one GPU at one price as points and a curve. Pure arithmetic over forecasts.

A point is one forecast step; a curve is the points of one GPU at one price. Between points, logarithms are
interpolated along log parameters; outside the first and the last point that fits into memory there is no value.

Intervals: `low` and `high` of a step's seconds are the ends of a 90% interval. In a ratio of two GPUs, errors that both
forecasts share cancel as far as both depend on them: `StepPoint.shared` names their causes (one host that feeds both;
the bias of an operation class that was estimated on the one profile from which both derive) and how far each moves the
step. A cause named in only one of the two, and all error that is not named, is independent: half-widths (of logarithms)
add in quadrature. `curves.step_point` sets which causes are named.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import exp, hypot, log, sqrt

from flopcast.errors import UsageError
from flopcast.roofline.gpu.catalogue.prices import Price, unranked
from flopcast.roofline.step.priced_step import CALLS, HOST, STEP

# The log change of a value when a cause is at the low and at the high end of its 90% interval.
Moves = tuple[float, float]
OF_HOST = (HOST, CALLS, STEP)  # what causes begin with that steps share which one host feeds
HOST_FACTORS = (0.0, 0.5, 2.0)  # multiples of the host's cost in `StepPoint.with_host`: no host at all, half, twice


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """A forecast step. `flops_counted` and `tokens` are per step; `fits`: whether it fits into the GPU's memory.

    `shared`: by cause, the log change of the step's seconds at the cause's low and high end. `bound`: what bounds the
    step (matrix, memory, host). `num_gpus`: on which it runs, and which are paid for. `with_host`: seconds, low and
    high with the host's cost multiplied by the key (0: no host at all).
    """

    n_params: int
    width: int | None = None
    depth: int | None = None
    step_seconds: float
    low: float
    high: float
    flops_counted: float
    tokens: int
    fits: bool = True
    shared: Mapping[str, Moves] = field(default_factory=dict)
    bound: str = ""
    device_seconds: float | None = None
    host_seconds: float | None = None
    needed_bytes: int | None = None
    memory_bytes: int | None = None
    num_gpus: int = 1
    with_host: Mapping[float, tuple[float, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.n_params <= 0 or not 0 < self.low <= self.step_seconds <= self.high:
            raise UsageError(
                "a step point needs n_params > 0 and 0 < low <= step_seconds <= high, given "
                f"{self.n_params}, {self.low}, {self.step_seconds}, {self.high}"
            )

    @property
    def seconds(self) -> Ranged:
        """The step's seconds with the ends of their interval."""
        return Ranged(self.step_seconds, self.low, self.high, self.shared)

    def host_times(self, factor: float) -> StepPoint:
        """Returns the step on a host with `factor` times the cost. Raises KeyError for a factor that was not
        forecast."""
        seconds, low, high = self.with_host[factor]
        shared = self.shared if factor else {k: v for k, v in self.shared.items() if not k.startswith(OF_HOST)}
        return replace(self, step_seconds=seconds, low=low, high=high, shared=shared, with_host={})


@dataclass(frozen=True)
class Ranged:
    """A positive number and the ends of its 90% interval. `shared`: by cause, as in `StepPoint`."""

    value: float
    low: float
    high: float
    shared: Mapping[str, Moves] = field(default_factory=dict, compare=False)

    def over(self, other: Ranged) -> Ranged:
        """Returns self / other, in which shared errors cancel as far as both depend on them; the rest is
        independent."""
        value = self.value / other.value
        common = [cause for cause in self.shared if cause in other.shared]  # no set, whose order changes the last bit
        moves = {
            cause: (self.shared[cause][0] - other.shared[cause][0], self.shared[cause][1] - other.shared[cause][1])
            for cause in common
        }
        down = hypot(self._own(common)[0], other._own(common)[1], *(_down(m) for m in moves.values()))
        up = hypot(self._own(common)[1], other._own(common)[0], *(_up(m) for m in moves.values()))
        return Ranged(value, value * exp(-down), value * exp(up))

    def _own(self, common: Iterable[str]) -> tuple[float, float]:
        """Returns the half-widths (of logarithms) downwards and upwards, without the causes in `common`."""
        found = [self.shared[cause] for cause in common]
        down = log(self.value / self.low) ** 2 - sum(_down(m) ** 2 for m in found)
        up = log(self.high / self.value) ** 2 - sum(_up(m) ** 2 for m in found)
        return sqrt(max(0.0, down)), sqrt(max(0.0, up))

    def scaled(self, factor: float) -> Ranged:
        return Ranged(self.value * factor, self.low * factor, self.high * factor, self.shared)


def _down(moves: Moves) -> float:
    return max(0.0, -min(moves))


def _up(moves: Moves) -> float:
    return max(0.0, max(moves))


@dataclass(frozen=True)
class CostPoint:
    """A step on a GPU at a price. Without a price (None) the properties in dollars raise ValueError."""

    gpu: str
    step: StepPoint
    price: Price | None

    @property
    def usd_per_hour(self) -> float:
        if self.price is None:
            raise ValueError(f"no price of {self.gpu}")
        return self.price.usd_per_hour * self.step.num_gpus

    @property
    def flops_per_second(self) -> Ranged:
        return self._per_second(self.step.flops_counted)

    @property
    def flops_per_usd(self) -> Ranged:
        return self.flops_per_second.scaled(3600.0 / self.usd_per_hour)

    @property
    def tokens_per_second(self) -> Ranged:
        return self._per_second(self.step.tokens)

    def _per_second(self, amount: float) -> Ranged:
        step = self.step
        value, low, high = (amount / seconds for seconds in (step.step_seconds, step.high, step.low))
        return Ranged(value, low, high, {cause: (-a, -b) for cause, (a, b) in step.shared.items()})

    @property
    def usd_per_step(self) -> float:
        return self.step.step_seconds * self.usd_per_hour / 3600.0

    @property
    def usd_per_million_tokens(self) -> Ranged:
        return self.step.seconds.scaled(1e6 / self.step.tokens * self.usd_per_hour / 3600.0)


@dataclass(frozen=True)
class CostCurve:
    """One GPU at one price, with points in order of rising n_params. `basis`: its profile's (measured, projected)."""

    gpu: str
    price: Price | None
    points: tuple[CostPoint, ...]
    basis: str = ""

    @property
    def unranked(self) -> str | None:
        """Why the GPU is in no ranking by dollars; None where it is."""
        return unranked(self.price)

    @cached_property
    def fitting(self) -> tuple[CostPoint, ...]:
        """The points that fit into memory: the curve is drawn through these."""
        return tuple(point for point in self.points if point.step.fits)

    @property
    def largest_fitting(self) -> int | None:
        """Parameters of the largest model of the ladder that fits; None if none does."""
        return self.fitting[-1].step.n_params if self.fitting else None

    @property
    def smallest_failing(self) -> int | None:
        """Parameters of the first model that runs out of memory; None if all fit."""
        return next((point.step.n_params for point in self.points if not point.step.fits), None)

    @property
    def memory_limit(self) -> float | None:
        """Parameters at which the GPU runs out of memory, interpolated between the largest model that fits and the
        first that does not, with memory linear in parameters. None where all fit, or none, or the memory needed is not
        known."""
        failing = next((point.step for point in self.points if not point.step.fits), None)
        if failing is None or not self.fitting or failing.n_params < self.fitting[-1].step.n_params:
            return None
        last = self.fitting[-1].step
        if last.needed_bytes is None or failing.needed_bytes is None or last.memory_bytes is None:
            return None
        share = (last.memory_bytes - last.needed_bytes) / (failing.needed_bytes - last.needed_bytes)
        return last.n_params + share * (failing.n_params - last.n_params)

    def flops_per_second_at(self, n_params: float) -> Ranged | None:
        """Returns the interpolated FLOP/s at a size; None outside the points that fit."""
        nodes = self.fitting
        sizes = [float(point.step.n_params) for point in nodes]
        if not sizes or not sizes[0] <= n_params <= sizes[-1]:
            return None
        right = bisect_left(sizes, n_params)
        if sizes[right] == n_params:
            return nodes[right].flops_per_second
        a, b = nodes[right - 1].flops_per_second, nodes[right].flops_per_second
        share = log(n_params / sizes[right - 1]) / log(sizes[right] / sizes[right - 1])
        ends = ((a.value, b.value), (a.low, b.low), (a.high, b.high))
        value, low, high = (exp(log(x) + share * log(y / x)) for x, y in ends)
        shared = {
            cause: (x[0] + share * (y[0] - x[0]), x[1] + share * (y[1] - x[1]))
            for cause, x in a.shared.items()
            if (y := b.shared.get(cause)) is not None
        }
        return Ranged(value, low, high, shared)

    def flops_per_usd_at(self, n_params: float) -> Ranged | None:
        """Returns the interpolated FLOPs per dollar at a size; None without a price and outside the points that fit."""
        rate = self.flops_per_second_at(n_params)
        return None if rate is None or self.price is None else rate.scaled(3600.0 / self.fitting[0].usd_per_hour)

    def with_host(self, factor: float) -> CostCurve:
        """Returns the curve of the same GPU fed by a host with `factor` times the cost (0: none). Raises KeyError for a
        factor that was not forecast."""
        return replace(self, points=tuple(replace(p, step=p.step.host_times(factor)) for p in self.points))

    def at_price(self, price: Price) -> CostCurve:
        """Returns the curve of the same GPU at another price."""
        return replace(self, price=price, points=tuple(replace(p, price=price) for p in self.points))


def cost_curve(gpu: str, steps: Iterable[StepPoint], price: Price | None, basis: str = "") -> CostCurve:
    """Returns the curve through the steps. Raises UsageError when two steps have the same number of parameters, since a
    curve has one value per size."""
    ordered = sorted(steps, key=lambda step: step.n_params)
    for one, two in pairwise(ordered):
        if one.n_params == two.n_params:
            raise UsageError(f"two configurations of {one.n_params} parameters on {gpu}: a curve needs one")
    return CostCurve(gpu, price, tuple(CostPoint(gpu, step, price) for step in ordered), basis)


def ladder_sizes(curves: Iterable[CostCurve]) -> list[float]:
    """Returns the parameters of every model on the curves in rising order, including those that do not fit."""
    return sorted({float(point.step.n_params) for curve in curves for point in curve.points})
