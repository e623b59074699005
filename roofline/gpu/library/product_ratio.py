"""By how much our products are slower than the library's at a shape, where the two were timed side by side.

Both estimates of a profile are off by several percent, and partly for the same reasons: a ratio is known better than
either. log(ours / the library's) = that of the estimates + a correction, linear in TERMS of the shape, fitted to pairs
timed in turn at random shapes (`python -m studies.kernels.ratio`). GPUs without such pairs go by the estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from flopcast.decode import load
from flopcast.kernels.shapes import DTYPE_BYTES, Gemm
from flopcast.roofline.base.shipped import DATA

FILE = DATA / "product_ratio.json"
LAYOUTS = ("nt", "nn", "tn")
OCTAVES = 4.0  # from 1,024 on which a size still counts: 64 to 16,384
LINE, SECTOR = 64, 16  # elements of 128 and of 32 bytes
TERMS = (
    "one", "m", "n", "k", "mm", "nn", "kk", "mn", "mk", "nk", "sector a", "sector b", "sector c", "line a", "line b",
    "line c", "sectors", "sector a, m", "sector b, n", "sector c, k", "line a, m", "line b, n", "line c, k", "is nn",
    "is tn", "estimate", "distance",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The coefficients of TERMS for one GPU, of log(ours / the library's)."""

    gpu: str
    coefficients: tuple[float, ...]

    def corrected(self, shape: Gemm, estimate: float) -> float:
        """log(ours / the library's) by that of the estimates."""
        return estimate + float(terms(shape, estimate) @ np.array(self.coefficients))


@cache
def fitted() -> Ratio:
    return load(Ratio, FILE, "a law of products' ratios", hint="`python -m studies.kernels.ratio` makes it")


def is_for(gpu: str, shape: Gemm) -> bool:
    """Whether pairs of such products were timed on this GPU: of 16 bits, rows of whole 16 bytes."""
    whole = all(size % 8 == 0 for size in (shape.m, shape.n, shape.k))
    return gpu == fitted().gpu and shape.layout in LAYOUTS and DTYPE_BYTES[shape.dtype] == 2 and whole


def terms(shape: Gemm, estimate: float) -> NDArray[np.float64]:
    """The values of TERMS: sizes in octaves from 1,024; whether rows of A, B and C begin within a sector of 32 bytes,
    or a line of 128; the estimates' log(ours / the library's) and its distance from 0."""
    m, n, k = np.clip(np.log2([shape.m, shape.n, shape.k]) - 10.0, -OCTAVES, OCTAVES).tolist()
    row_a, row_b = {"nt": (shape.k, shape.k), "nn": (shape.k, shape.n), "tn": (shape.m, shape.n)}[shape.layout]
    rows = np.array([row_a, row_b, shape.n])
    (sa, sb, sc), (la, lb, lc) = (rows % SECTOR != 0).tolist(), (rows % LINE != 0).tolist()
    return np.array([
        1, m, n, k, m * m, n * n, k * k, m * n, m * k, n * k, sa, sb, sc, la, lb, lc, sa * sb, sa * m, sb * n, sc * k,
        la * m, lb * n, lc * k, shape.layout == "nn", shape.layout == "tn", estimate, abs(estimate),
    ], float)  # fmt: skip
