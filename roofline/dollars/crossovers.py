"""Compares the FLOPs per dollar of several GPUs: crossovers, break-even prices, the best GPU at a size, scenarios.

Pure arithmetic over the curves of `points`, whose docstring says what the intervals of ratios take as shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, pairwise
from math import exp, log

from flopcast.roofline.dollars.points import HOST_FACTORS, CostCurve, Ranged, ladder_sizes

NOT_SEPARABLE = "not separable at these prices"
NO_COMMON_SIZE = "no common size"


# --- crossovers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """How two GPUs' FLOPs per dollar compare over the sizes that both can train.

    `status`: "crossover", "leads" (one gives more throughout), "not separable at these prices", "no common
    size". At a crossover, `below` names the GPU that gives more for models smaller than `n_params`, and `above` that
    for larger ones; the crossover lies between `low` and `high` parameters, where None means that it may lie beyond the
    sizes compared. For "leads" both name the leader, and `low` and `high` bound the widest range of sizes at which the
    intervals separate the two, None where they do so at every size compared. When not separable, `n_params` is where
    the central estimates cross, if they do.
    """

    gpu_a: str
    gpu_b: str
    status: str
    below: str | None = None
    above: str | None = None
    n_params: float | None = None
    low: float | None = None
    high: float | None = None
    compared_from: float | None = None
    compared_to: float | None = None


def crossovers(curves: Sequence[CostCurve]) -> list[Crossover]:
    """Compares every pair of curves whose prices decide; a pair that crosses several times gives a row for each
    crossing."""
    return [row for a, b in combinations(ranked(curves), 2) for row in _compare(a, b)]


def ranked(curves: Sequence[CostCurve]) -> list[CostCurve]:
    """The curves whose prices decide which GPU is the better buy."""
    return [curve for curve in curves if curve.unranked is None]


@dataclass(frozen=True)
class _Gap:
    """log(FLOPs/$ of a / FLOPs/$ of b) at a size (log parameters), and its interval."""

    size: float
    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 where the interval says that a gives more, -1 where it says that b does, 0 where it holds both."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


def _compare(a: CostCurve, b: CostCurve) -> list[Crossover]:
    gaps = _gaps(a, b)
    if not gaps:
        return [Crossover(gpu_a=a.gpu, gpu_b=b.gpu, status=NO_COMMON_SIZE)]
    base = Crossover(
        gpu_a=a.gpu, gpu_b=b.gpu, status=NOT_SEPARABLE, compared_from=exp(gaps[0].size), compared_to=exp(gaps[-1].size)
    )
    crossings = [gap.size for gap in gaps if gap.value == 0.0]
    if not any(gap.sign for gap in gaps):
        middle = exp(crossings[len(crossings) // 2]) if crossings else None
        return [replace(base, n_params=middle)]
    found: list[Crossover] = []
    for stretch in _open_stretches(gaps):
        signs = [gap.value > 0 for gap in stretch if gap.value]
        if signs and signs[0] != signs[-1]:
            inside = [gap.size for gap in stretch if gap.value == 0.0]
            found.append(
                replace(
                    base,
                    status="crossover",
                    below=a.gpu if signs[0] else b.gpu,
                    above=b.gpu if signs[0] else a.gpu,
                    n_params=exp(inside[len(inside) // 2]),
                    # the outermost open sizes: there an end of the interval is zero
                    low=exp(stretch[1].size) if stretch[0].sign else None,
                    high=exp(stretch[-2].size) if stretch[-1].sign else None,
                )
            )
    if found:
        return found
    leader = a.gpu if next(gap.sign for gap in gaps if gap.sign) > 0 else b.gpu
    ends: tuple[float | None, float | None] = (None, None)
    if not all(gap.sign for gap in gaps):
        ends = max(_decided_stretches(gaps), key=lambda pair: pair[1] / pair[0])
    return [replace(base, status="leads", below=leader, above=leader, low=ends[0], high=ends[1])]


def _open_stretches(gaps: Sequence[_Gap]) -> Iterator[Sequence[_Gap]]:
    """Yields runs of sizes at which the intervals leave the order open, each with the decided neighbour on either side,
    if any."""
    start = 0
    for open_, run in groupby(range(len(gaps)), key=lambda i: gaps[i].sign == 0):
        stop = start + len(list(run))
        if open_:
            yield gaps[max(start - 1, 0) : stop + 1]
        start = stop


def _decided_stretches(gaps: Sequence[_Gap]) -> Iterator[tuple[float, float]]:
    """Yields (from, to), in parameters, of each run of sizes at which the intervals decide the order; a run extends to
    the neighbours on either side, where an end of the interval is zero."""
    for decided, run in groupby(range(len(gaps)), key=lambda i: gaps[i].sign != 0):
        if decided:
            inside = list(run)
            last = min(inside[-1] + 1, len(gaps) - 1)
            yield exp(gaps[max(inside[0] - 1, 0)].size), exp(gaps[last].size)


def _gaps(a: CostCurve, b: CostCurve) -> list[_Gap]:
    """Returns the gaps at every size of either curve that both reach, and in between (linear in log parameters)
    wherever the gap or an end of its interval is zero, so that nothing changes sign between neighbours."""
    nodes = []
    for size in sorted({point.step.n_params for curve in (a, b) for point in curve.fitting}):
        one, two = a.flops_per_usd_at(size), b.flops_per_usd_at(size)
        if one is not None and two is not None:
            ratio = one.over(two)
            nodes.append(_Gap(log(size), log(ratio.value), log(ratio.low), log(ratio.high)))
    gaps: list[_Gap] = []
    for left, right in pairwise(nodes):
        gaps.append(left)
        ends = ((left.value, right.value), (left.low, right.low), (left.high, right.high))
        zeros = sorted((x / (x - y), which) for which, (x, y) in enumerate(ends) if x < 0 < y or y < 0 < x)
        for share, which in zeros:
            value, low, high = (0.0 if i == which else x + share * (y - x) for i, (x, y) in enumerate(ends))
            if which == 1:  # rounding must not turn the order low <= value <= high
                value = max(value, 0.0)
            elif which == 2:
                value = min(value, 0.0)
            at = left.size + share * (right.size - left.size)
            gaps.append(_Gap(at, value, min(low, value), max(high, value)))
    return gaps + nodes[-1:]


def sentence(row: Crossover) -> str:
    """Puts a comparison in words: "a gives more below 310M parameters, b above (250M to 400M)"."""
    pair = f"{row.gpu_a} and {row.gpu_b}"
    if row.status == NO_COMMON_SIZE:
        return f"{pair}: no common size"
    span = f"{_millions(row.compared_from)} to {_millions(row.compared_to)} parameters"
    if row.status == NOT_SEPARABLE:
        where = f" (the middle estimates cross at {_millions(row.n_params)})" if row.n_params else ""
        return f"{pair}: {NOT_SEPARABLE}, {span}{where}"
    if row.status == "leads":
        other = row.gpu_b if row.below == row.gpu_a else row.gpu_a
        part = f"; beyond the intervals from {_millions(row.low)} to {_millions(row.high)}" if row.low else ""
        return f"{row.below} gives more FLOPs per dollar than {other}, {span}{part}"
    low = _millions(row.low) if row.low else f"below {_millions(row.compared_from)}"
    high = _millions(row.high) if row.high else f"above {_millions(row.compared_to)}"
    size = _millions(row.n_params)
    return f"{row.below} gives more below {size} parameters, {row.above} above ({low} to {high})"


def _millions(n_params: float | None) -> str:
    if n_params is None:
        return "?"
    return f"{n_params / 1e9:.3g}B" if n_params >= 0.9995e9 else f"{n_params / 1e6:.3g}M"


# --- at one size --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """The ratio price(a) / price(b) at which both GPUs give the same FLOPs per dollar at one size.

    It depends on speed alone, so it stays valid when prices change: below it a is the better buy, above it b.
    `price_ratio` is today's, None where one of the two has no price that decides; `better` names the better buy, or
    None while the interval contains today's ratio.
    """

    gpu_a: str
    gpu_b: str
    n_params: float
    ratio: float
    low: float
    high: float
    price_ratio: float | None

    @property
    def better(self) -> str | None:
        if self.price_ratio is None:
            return None
        if self.price_ratio < self.low:
            return self.gpu_a
        return self.gpu_b if self.price_ratio > self.high else None


def break_even_price_ratio(a: CostCurve, b: CostCurve, n_params: float) -> BreakEven | None:
    """Returns the break-even price ratio of two GPUs at one size; None where one of them has no value at this size (out
    of memory, or outside its ladder)."""
    one, two = a.flops_per_second_at(n_params), b.flops_per_second_at(n_params)
    if one is None or two is None:
        return None
    ratio = one.over(two)
    return BreakEven(
        gpu_a=a.gpu,
        gpu_b=b.gpu,
        n_params=n_params,
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        price_ratio=price_ratio(a, b),
    )


def price_ratio(a: CostCurve, b: CostCurve) -> float | None:
    """price(a) / price(b); None where one of the two has no price that decides."""
    if a.price is None or b.price is None or len(ranked((a, b))) < 2:
        return None
    return a.price.usd_per_hour / b.price.usd_per_hour


@dataclass(frozen=True, kw_only=True)
class Best:
    """The GPU with the most FLOPs per dollar at one size. `contenders`: others that may be best, by the intervals."""

    n_params: float
    gpu: str
    flops_per_usd: Ranged
    contenders: tuple[str, ...]

    @property
    def separable(self) -> bool:
        return not self.contenders


def best_gpu(curves: Sequence[CostCurve], n_params: float) -> Best | None:
    """Returns the GPU with the most FLOPs per dollar at one size; None where no curve whose price decides has a value
    there."""
    candidates = ((curve.gpu, curve.flops_per_usd_at(n_params)) for curve in ranked(curves))
    values = [(gpu, value) for gpu, value in candidates if value is not None]
    if not values:
        return None
    gpu, best = max(values, key=lambda pair: pair[1].value)
    rivals = [(name, value) for name, value in values if name != gpu and best.over(value).low <= 1.0]
    rivals.sort(key=lambda pair: -pair[1].value)
    return Best(n_params=n_params, gpu=gpu, flops_per_usd=best, contenders=tuple(name for name, _ in rivals))


# --- if things change ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The best GPU at one size with the host's cost multiplied by `host_factor` (0: no host, a bound for compiled steps
    of the same kernels) and `batch` sequences per micro-batch."""

    host_factor: float
    batch: int
    best: Best


def scenarios(curves: Sequence[CostCurve], larger: Mapping[int, Sequence[CostCurve]], batch: int) -> list[Scenario]:
    """Returns the best GPU at each size for the steps as given, on other hosts (where `curves` hold them), and with the
    batch multiplied (`larger`: factor -> curves)."""
    others = [f for f in HOST_FACTORS if all(f in p.step.with_host for c in curves for p in c.points)]
    changed = [(1.0, batch, curves)]
    changed += [(f, batch, [curve.with_host(f) for curve in curves]) for f in others]
    changed += [(1.0, batch * factor, found) for factor, found in larger.items()]
    return [
        Scenario(host_factor=factor, batch=sequences, best=best)
        for factor, sequences, found in changed
        for size in ladder_sizes(curves)
        if (best := best_gpu(found, size)) is not None
    ]
