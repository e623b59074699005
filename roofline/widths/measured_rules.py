"""Derives width rules from one GPU's own measurements: "keep to a multiple of 64: 4.1% median, 11% worst".

Every measured product of a linear layer has two widths, the layer's inputs and outputs, besides the tokens: for nt and
nn the widths are n and k, for tn, the gradient of the weights, m and n. A product whose widths are not both multiples
of 64 is compared with the linear interpolation between its aligned neighbours (four of them where both widths are
unaligned) at the same number of tokens. The neighbours' times come from the profile's surface, which passes through
measured points and is a few percent wrong elsewhere (`Comparison.sigma`). A product of multiples of 64 that are not
multiples of 128 is compared with multiples of 128, and so on up to 256.

`measured_rules` gives the rows of a table, `comparisons` each product. Needs numpy where it forecasts, and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product as combinations
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.widths.penalties import ALIGNED, MULTIPLES, TOP_MULTIPLE, neighbours, power_of_two

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.variants import GemmVariant

LEAST_SIDE = 512  # smallest width compared: of smaller ones a step of 64 is a large part
LEAST_SECONDS = 8e-6  # shortest product compared: of shorter ones launching takes most of the time
LEAST_COUNT = 5  # fewest comparisons that make a rule

# Cached rules of profiles asked about before; they take some seconds per profile to derive.
_known: list[tuple[Profile, list[MeasuredRule]]] = []
_MOST_PROFILES = 8


@dataclass(frozen=True)
class Comparison:
    """One measured product compared with its aligned neighbours. `multiple`: the largest power of two that divides both
    widths; `expected`: the interpolated seconds of the neighbours; `penalty`: 0.1 for 10% longer than that; `sigma`:
    the standard deviation of the log of `expected`."""

    shape: Gemm
    multiple: int
    seconds: float
    expected: float
    sigma: float

    @property
    def penalty(self) -> float:
        return self.seconds / self.expected - 1.0


@dataclass(frozen=True, kw_only=True)
class MeasuredRule:
    """The cost of widths that are multiples of `multiple` and of no higher power of two. `layout`: nt, nn, tn or all.

    `low` and `high`: the tenth and the ninetieth percentile of the penalties; `worst_shape`: m x n x k of the worst;
    `sigma`: the error of a single comparison, as the median over all of them.
    """

    multiple: int
    against: int
    layout: str
    count: int
    median: float
    low: float
    high: float
    best: float
    worst: float
    worst_shape: str
    sigma: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        """The rule in words: "keep widths to a multiple of 64: those of 8 cost 4.1% at the median, 11% at worst"."""
        kind = "odd ones" if self.multiple == 1 else f"those of {self.multiple}"
        return (
            f"keep widths to a multiple of {self.against}: {kind} cost {_percent(self.median)} at the median, "
            f"{_percent(self.worst)} at worst"
        )


def _percent(value: float) -> str:
    return f"{value:.0%}" if abs(value) >= 0.0995 else f"{value:.1%}"


def comparisons(profile: Profile, dtype: str = "bf16", cache: str = "cold") -> list[Comparison]:
    """Compares every measured product whose widths are not both multiples of 256 with its aligned neighbours; returns
    an empty list where no products were measured.

    Products of less than 8 us, or with a width under 512, are left out.
    """
    found: list[tuple[Gemm, int, float, list[tuple[Gemm, float]]]] = []
    for shape, seconds in _measured(profile, dtype, cache):
        widths = _widths(shape)
        if min(widths.values()) < LEAST_SIDE or seconds < LEAST_SECONDS:
            continue
        multiple = min(power_of_two(value) for value in widths.values())
        if multiple >= TOP_MULTIPLE:
            continue
        against = ALIGNED if multiple < ALIGNED else multiple * 2
        found.append((shape, multiple, seconds, list(_corners(shape, widths, against))))
    asked = [(_work(corner), "torch", cache) for *_, corners in found for corner, _ in corners]
    estimates = iter(profile.estimate(asked))
    compared = []
    for shape, multiple, seconds, corners in found:
        expected, spread = 0.0, 0.0
        for _, share in corners:
            estimate = next(estimates)
            expected += share * estimate.seconds
            spread += share * estimate.seconds * estimate.sigma  # added linearly: neighbours' errors are correlated
        compared.append(Comparison(shape, multiple, seconds, expected, spread / expected))
    return compared


def measured_rules(profile: Profile, found: Sequence[Comparison] | None = None) -> list[MeasuredRule]:
    """Returns a rule for each multiple, over all layouts and by layout, least aligned first; a rule needs at least five
    products.

    `found`: the result of `comparisons`, if the caller already has it.
    """
    if found is None:
        known_rules = next((rules for one, rules in _known if one is profile), None)
        if known_rules is None:
            known_rules = measured_rules(profile, comparisons(profile))
            _known.append((profile, known_rules))
            del _known[:-_MOST_PROFILES]
        return known_rules
    rules = []
    for multiple, layout in combinations(MULTIPLES, ("all", "nt", "nn", "tn")):
        mine = [c for c in found if c.multiple == multiple and layout in ("all", c.shape.layout)]
        if len(mine) < LEAST_COUNT:
            continue
        values = sorted(c.penalty for c in mine)
        tenths = quantiles(values, n=10, method="inclusive")
        worst = max(mine, key=lambda c: c.penalty)
        rules.append(
            MeasuredRule(
                multiple=multiple, against=ALIGNED if multiple < ALIGNED else multiple * 2, layout=layout,
                count=len(mine), median=median(values), low=tenths[0], high=tenths[-1], best=values[0],
                worst=values[-1], worst_shape=f"{worst.shape.m}x{worst.shape.n}x{worst.shape.k}",
                sigma=median(c.sigma for c in mine),
            )
        )  # fmt: skip
    return rules


def _measured(profile: Profile, dtype: str, cache: str) -> Iterator[tuple[Gemm, float]]:
    """Yields (product, seconds) of the measured points of torch's unbatched products."""
    for key, surface in profile.own_surfaces.items():
        variant = key.variant
        if (key.backend, key.cache) != ("torch", cache) or not isinstance(variant, GemmVariant):
            continue
        if variant.form or variant.dtype != dtype or len(surface.features[0]) != 3:
            continue
        for features, seconds in zip(surface.features, surface.seconds, strict=True):
            m, n, k = (round(2.0**size) for size in features)
            yield Gemm(m=m, n=n, k=k, dtype=dtype, layout=variant.layout), seconds


def _widths(shape: Gemm) -> dict[str, int]:
    """Returns the two dimensions that are a layer's inputs and outputs; the third is the tokens."""
    names = ("m", "n") if shape.layout == "tn" else ("n", "k")
    return {name: getattr(shape, name) for name in names}


def _corners(shape: Gemm, widths: dict[str, int], against: int) -> Iterator[tuple[Gemm, float]]:
    """Yields a product's aligned neighbours with their weights in the linear (or bilinear) interpolation."""
    choices = []
    for name, value in widths.items():
        below, above = neighbours(value, against)
        if value == below or below == 0:
            choices.append([(name, value if value == below else above, 1.0)])
        else:
            share = (value - below) / against
            choices.append([(name, below, 1.0 - share), (name, above, share)])
    for corner in combinations(*choices):
        sides = {"m": shape.m, "n": shape.n, "k": shape.k} | {name: value for name, value, _ in corner}
        share = 1.0
        for *_, part in corner:
            share *= part
        yield Gemm(m=sides["m"], n=sides["n"], k=sides["k"], dtype=shape.dtype, layout=shape.layout), share


def _work(shape: Gemm) -> Work:
    return describe(shape, "torch")
