"""Grouped products as torch runs them in other dtypes than bf16: group by group, a product of its own each.

So a call takes as often as there are groups what one product of a group's mean size takes, cold, because each group
has its own operands. On an H200 that is 6.6% off at the median of 15 measured calls, 16% at worst (fp32, 32 groups of
128 and 512 rows), none of them fitted; a surface of its own, of four calls a layout, left out each in turn, 14 and 40%.
A measured call is answered by what was measured.
"""

from __future__ import annotations

from typing import TypeGuard

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import GemmVariant, Variant

IMBALANCE = 0.1  # deviation of log seconds: groups are not alike, and a product that leaves the device idle shares none


def is_group_by_group(variant: Variant) -> TypeGuard[GemmVariant]:
    """Whether a work of this variant is such a call."""
    return isinstance(variant, GemmVariant) and variant.form == "grouped" and variant.dtype != "bf16"


def product_of(variant: GemmVariant, features: tuple[float, ...]) -> tuple[Work, int]:
    """(one group's product, how many), of a grouped call's variant and log2 sizes (m, n, k of a group, groups)."""
    m, n, k, groups = (max(1, round(2**size)) for size in features)
    return describe(Gemm(m=m, n=n, k=k, layout=variant.layout, dtype=variant.dtype)), groups
