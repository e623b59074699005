"""Grouped products in dtypes other than bf16, which torch runs group by group, one product per group.

A call's time is the number of groups times that of one product of a group's mean size, with cold caches because each
group has its own operands. On an H200 the error is 6.6% at the median of 15 measured calls and 16% at worst (fp32, 32
groups of 128 and 512 rows), none of them fitted; a surface fitted to four calls per layout, each left out in turn, has
14% and 40%. A call that was measured takes its measured time.
"""

from __future__ import annotations

from typing import TypeGuard

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import GemmVariant, Variant

IMBALANCE = 0.1  # std of log seconds: groups differ in size, and idle parts of the device are not shared


def is_group_by_group(variant: Variant) -> TypeGuard[GemmVariant]:
    """Whether work of this variant is a grouped product that runs group by group."""
    return isinstance(variant, GemmVariant) and variant.form == "grouped" and variant.dtype != "bf16"


def product_of(variant: GemmVariant, features: tuple[float, ...]) -> tuple[Work, int]:
    """Returns (one group's product, number of groups) for a grouped call's variant and log2 sizes: a group's m, n and
    k, and the number of groups."""
    m, n, k, groups = (max(1, round(2**size)) for size in features)
    return describe(Gemm(m=m, n=n, k=k, layout=variant.layout, dtype=variant.dtype)), groups
