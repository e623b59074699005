"""By how much our products are slower than the library's at a shape, where the two were timed side by side.

Both estimates of a profile are off by several percent, and partly for the same reasons: a ratio is known better than
either. log(ours / the library's) = that of the estimates + a correction, fitted to pairs timed in turn at random shapes
(`python -m studies.kernels.ratio`): linear in TERMS of the shape, and what of the pairs near it the line leaves over (a
Gaussian process over `place`). GPUs without such pairs go by the estimates.

The library itself is no steadier: of 4,981 times that one H200 took for a product of 20 us and more beside another
H200's, 6.5% differ by a factor beyond 1 / 0.93, the most by 1.42. No law keeps 0.93 of the better one at each of 300
shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, NamedTuple

import numpy as np

from flopcast.decode import load
from flopcast.kernels.shapes import DTYPE_BYTES, Gemm, Size
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.laws.smooth import Array

FILE = DATA / "product_ratio.json"
LAYOUTS = ("nt", "nn", "tn")
OCTAVES = 4.0  # from 1,024 on which a size still counts: 64 to 16,384
LINE, SECTOR = 64, 16  # elements of 128 and of 32 bytes
TERMS = (
    "one", "m", "n", "k", "mm", "nn", "kk", "mn", "mk", "nk", "sector a", "sector b", "sector c", "line a", "line b",
    "line c", "sectors", "sector a, m", "sector b, n", "sector c, k", "line a, m", "line b, n", "line c, k", "is nn",
    "is tn", "estimate", "distance",
)  # fmt: skip


class Pair(NamedTuple):
    """A product timed by both: `estimate` is log(ours / the library's) by the profile, `weight` the process's."""

    layout: Annotated[str, LAYOUTS]
    m: Size
    n: Size
    k: Size
    estimate: float
    weight: float

    @property
    def shape(self) -> Gemm:
        return Gemm(m=self.m, n=self.n, k=self.k, layout=self.layout)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """For one GPU, of log(ours / the library's): the coefficients of TERMS, and the pairs with their weights."""

    gpu: str
    coefficients: tuple[float, ...]
    pairs: tuple[Pair, ...] = ()

    def corrected(self, shape: Gemm, estimate: float) -> float:
        """log(ours / the library's) by that of the estimates."""
        linear = estimate + float(terms(shape, estimate) @ np.array(self.coefficients))
        if not self.pairs:
            return linear
        near = likeness(self._places, place(shape, estimate)[None])[:, 0]
        return linear + float(near @ np.array([pair.weight for pair in self.pairs]))

    @cached_property
    def _places(self) -> Array:
        return np.array([place(pair.shape, pair.estimate) for pair in self.pairs])


@cache
def fitted() -> Ratio:
    return load(Ratio, FILE, "a law of products' ratios", hint="`python -m studies.kernels.ratio` makes it")


def is_for(gpu: str, shape: Gemm) -> bool:
    """Whether pairs of such products were timed on this GPU: of 16 bits, rows of whole 16 bytes."""
    whole = all(size % 8 == 0 for size in (shape.m, shape.n, shape.k))
    return gpu == fitted().gpu and shape.layout in LAYOUTS and DTYPE_BYTES[shape.dtype] == 2 and whole


# How far a property of a product reaches in the process: octaves of a size, whether rows begin within a sector or a
# line, the layout, the estimates' log ratio. By sixfold cross-validation of the pairs that it is fitted to.
REACH = (1.4, 1.4, 1.4, *[2.0] * 6, *[1.0] * 3, 0.4)
AMPLITUDE = 0.1  # of the process, log


def place(shape: Gemm, estimate: float) -> Array:
    """Where a product lies for the process, in reaches."""
    starts = [rows % size != 0 for size in (SECTOR, LINE) for rows in _rows(shape)]
    values = [*np.log2([shape.m, shape.n, shape.k]), *starts, *(shape.layout == layout for layout in LAYOUTS)]
    return np.asarray(np.array([*values, min(max(estimate, -0.5), 0.5)], float) / np.array(REACH))


def likeness(one: Array, other: Array) -> Array:
    """The process's covariance of places [p, q] and [r, q]: [p, r]."""
    return np.asarray(AMPLITUDE**2 * np.exp(-0.5 * ((one[:, None] - other[None]) ** 2).sum(-1)))


def _rows(shape: Gemm) -> tuple[int, int, int]:
    """Elements of a row of A, B and C."""
    row_a, row_b = {"nt": (shape.k, shape.k), "nn": (shape.k, shape.n), "tn": (shape.m, shape.n)}[shape.layout]
    return row_a, row_b, shape.n


def terms(shape: Gemm, estimate: float) -> Array:
    """The values of TERMS: sizes in octaves from 1,024; whether rows of A, B and C begin within a sector of 32 bytes,
    or a line of 128; the estimates' log(ours / the library's) and its distance from 0."""
    m, n, k = np.clip(np.log2([shape.m, shape.n, shape.k]) - 10.0, -OCTAVES, OCTAVES).tolist()
    rows = np.array(_rows(shape))
    (sa, sb, sc), (la, lb, lc) = (rows % SECTOR != 0).tolist(), (rows % LINE != 0).tolist()
    return np.array([
        1, m, n, k, m * m, n * n, k * k, m * n, m * k, n * k, sa, sb, sc, la, lb, lc, sa * sb, sa * m, sb * n, sc * k,
        la * m, lb * n, lc * k, shape.layout == "nn", shape.layout == "tn", estimate, abs(estimate),
    ], float)  # fmt: skip
