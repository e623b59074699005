"""The rules of widths that one GPU's own measurements give: "keep to a multiple of 64: 4.1% median, 11% worst".

Every measured product of a linear layer has two widths, the layer's inputs and outputs, and the tokens: of nt and nn
the widths are n and k, of tn, the gradient of the weights, m and n. A product whose widths are not both multiples of
64 is held against the line between its neighbours that are (four of them where both widths are off), at the same
tokens: these come from the profile's surface, which goes through what was measured and is a few percent wrong where
it was not (`Comparison.sigma`). A product of multiples of 64 that are none of 128 is held against 128, and so to 256.

`measured_rules` gives the rows of a table, `comparisons` each product. numpy where it forecasts, no torch.
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

LEAST_SIDE = 512  # of a width: below, a step of 64 is a large part of it
LEAST_SECONDS = 8e-6  # of a product: below, launching it is most of it
LEAST_COUNT = 5  # comparisons that make a rule

# Rules of profiles that were asked before: some seconds each.
_known: list[tuple[Profile, list[MeasuredRule]]] = []
_MOST_PROFILES = 8


@dataclass(frozen=True)
class Comparison:
    """One measured product against its aligned neighbours. `multiple`: the largest power of two that divides both
    widths; `penalty` 0.1: 10% longer; `sigma`: of the neighbours' time, in logs."""

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
    """What widths cost that are multiples of `multiple` and of no higher power of two. `layout`: nt, nn, tn or all.

    `low` and `high`: the tenth and the ninetieth percent of the penalties; `worst_shape`: m x n x k of the worst;
    `sigma`: how far a single comparison may be off, the median of theirs.
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
        """keep widths to a multiple of 64: those of 8 cost 4.1% at the median, 11% at worst"""
        kind = "odd ones" if self.multiple == 1 else f"those of {self.multiple}"
        return (
            f"keep widths to a multiple of {self.against}: {kind} cost {_percent(self.median)} at the median, "
            f"{_percent(self.worst)} at worst"
        )


def _percent(value: float) -> str:
    return f"{value:.0%}" if abs(value) >= 0.0995 else f"{value:.1%}"


def comparisons(profile: Profile, dtype: str = "bf16", cache: str = "cold") -> list[Comparison]:
    """Every measured product whose widths are not both multiples of 256. Empty where no products were measured.

    Products of less than 8 us, or of a width under 512, are left out.
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
            spread += share * estimate.seconds * estimate.sigma  # neighbours of one another: not independent
        compared.append(Comparison(shape, multiple, seconds, expected, spread / expected))
    return compared


def measured_rules(profile: Profile, found: Sequence[Comparison] | None = None) -> list[MeasuredRule]:
    """A rule for each multiple, all layouts together and by layout, least aligned first; only of five products on.

    `found`: as `comparisons` gives them, where they are at hand.
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
    """(product, seconds) of the points of torch's surfaces, one product at a time."""
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
    """The sides that are a layer's inputs and outputs; the third are tokens."""
    names = ("m", "n") if shape.layout == "tn" else ("n", "k")
    return {name: getattr(shape, name) for name in names}


def _corners(shape: Gemm, widths: dict[str, int], against: int) -> Iterator[tuple[Gemm, float]]:
    """Aligned neighbours and their shares of the line (or plane) between them."""
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
        yield Gemm(**sides, dtype=shape.dtype, layout=shape.layout), share


def _work(shape: Gemm) -> Work:
    return describe(shape, "torch")
