"""Grouped products: those that torch runs group by group, and groups of unequal sizes.

In dtypes other than bf16 torch runs one product per group. A call's time is the number of groups times that of one
product of a group's mean size, with cold caches because each group has its own operands. On an H200 the error is 6.6%
at the median of 15 measured calls and 16% at worst (fp32, 32 groups of 128 and 512 rows), none of them fitted; a
surface fitted to four calls per layout, each left out in turn, has 14% and 40%. A call that was measured takes its
measured time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, log2
from typing import TypeGuard

from flopcast.kernels.shapes import Call, Gemm
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import GemmVariant, Variant

# A recorded op of no kernel: the host calls one group's product in a loop of Python, whose kernel is in the grouped
# product's time. Its arguments: the number of views that the call takes.
ONE_CALL = "flopcast.product_of_a_group"
IMBALANCE = 0.1  # std of log seconds: groups differ in size, and idle parts of the device are not shared
_TILE = 128  # rows, and columns, of a block of bf16's grouped kernel


def is_grouped(variant: Variant) -> TypeGuard[GemmVariant]:
    return isinstance(variant, GemmVariant) and variant.form == "grouped"


def is_group_by_group(variant: Variant) -> TypeGuard[GemmVariant]:
    """Whether work of this variant is a grouped product that runs group by group."""
    return is_grouped(variant) and variant.dtype != "bf16"


def product_of(variant: GemmVariant, features: tuple[float, ...]) -> tuple[Work, int]:
    """Returns (one group's product, number of groups) for a grouped call's variant and log2 sizes: a group's m, n and
    k, and the number of groups."""
    m, n, k, groups = (max(1, round(2**size)) for size in features)
    return describe(Gemm(m=m, n=n, k=k, layout=variant.layout, dtype=variant.dtype)), groups


# --- groups of unequal sizes


@dataclass(frozen=True)
class Groups:
    """So many `groups`, each of so many `rows`: of the dimension that the groups share, which are tokens."""

    rows: int
    groups: int


def even_groups(work: Work) -> Groups:
    """Returns the groups of a grouped product, taken to be of one size."""
    return Groups(round(2 ** work.features[_shared(work)]), round(2 ** work.features[3]))


def uneven_groups(even: Groups, imbalance: float, ranks: int = 1) -> list[Groups]:
    """Returns groups of which the fullest has `imbalance` times the mean and each next one the same share of the one
    before, the fullest first; of experts on several ranks those of the fullest rank, all of `imbalance` times the mean.

    Loads that fall geometrically are what untrained routers come near to: `studies.experts` sets the products of real
    steps beside these, beside equal ones and beside those that the steps had."""
    if ranks > 1:
        return [Groups(round(imbalance * even.rows), even.groups)]
    shares = _falling(min(imbalance, even.groups), even.groups)
    total, reached, before = even.rows * even.groups, 0.0, 0
    rows = []
    for share in shares:
        reached += share
        rows.append(round(reached * total) - before)
        before += rows[-1]
    return [Groups(one, len(list(same))) for one, same in groupby(sorted(rows, reverse=True))]


def _falling(imbalance: float, groups: int) -> list[float]:
    """Returns the share of all rows that each group has, falling by one ratio, the first `imbalance` times the mean."""

    def shares(ratio: float) -> list[float]:
        each = [ratio**place for place in range(groups)]
        return [one / sum(each) for one in each]

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if shares(middle)[0] * groups > imbalance else (low, middle)
    return shares(high)


def products_of(work: Work, groups: Sequence[Groups]) -> list[tuple[Work, int]]:
    """Returns (one group's product, number of such groups) for each size; of a group without rows nothing runs."""
    assert is_grouped(work.variant)
    found, shared = [], _shared(work)
    for one in groups:
        if one.rows:
            sizes = [log2(one.rows) if place == shared else work.features[place] for place in range(3)]
            found.append(product_of(work.variant, (*sizes, log2(one.groups))))
    return found


def seconds_in_one_kernel(work: Work, groups: Sequence[Groups], sm_count: int) -> float:
    """Returns how long one kernel over all groups takes, in an unknown unit: two such times have a ratio.

    Its blocks of 128 x 128 are dealt out to the SMs as these become free, the last perhaps when all others have ended
    (Graham's bound). A law of what the kernel does, not fitted: no profile holds rows of it."""
    products = [(one.shape, count) for one, count in products_of(work, groups)]
    gemms = [(shape, count) for shape, count in products if isinstance(shape, Gemm)]
    blocks = sum(count * ceil(one.m / _TILE) * ceil(one.n / _TILE) * one.k for one, count in gemms)
    return blocks / sm_count + max((one.k for one, _ in gemms), default=0)


def _shared(work: Work) -> int:
    """Which of a group's m, n and k the groups share: m where there is a matrix of b per group, n with one of a, and k
    with none of both."""
    assert isinstance(work.shape, Call)
    a, b = work.shape.inputs[:2]
    return 2 if len(a.shape) == len(b.shape) else 0 if len(a.shape) == 2 else 1
