"""The products of `bench --suite products`: Triton's and cuBLAS's at the same random shapes.

Both are measured at each shape, since what decides between them (`--matmul best`) is the ratio of their times. Half of
the shapes are multiples of 64, half of 8; `microbench.tuning.shapes.drawn` says how they are drawn.
"""

from __future__ import annotations

from dataclasses import replace

from flopcast.microbench.tuning.shapes import drawn
from flopcast.roofline.gpu.suites import SuiteCase

COUNTS = {"fit": 240, "holdout": 60}  # shapes of each multiple
FP8_COUNTS = {"fit": 60, "holdout": 20}
SEEDS = {"fit": 11, "holdout": 12}
BACKENDS = ("torch", "triton")


def product_cases() -> list[SuiteCase]:
    """With cold operands, none of the holdout's shapes among the fit's."""
    shapes = {
        shape: role
        for role in ("fit", "holdout")  # the latter last: a shape of both is held out
        for multiple in (64, 8)
        for shape in drawn(multiple, COUNTS[role], SEEDS[role])
    }
    return [SuiteCase(shape, backend, "cold", role) for shape, role in shapes.items() for backend in BACKENDS]


def fp8_cases() -> list[SuiteCase]:
    """Of `bench --suite fp8`: forward products of e4m3 operands, in multiples of 16, scales per tensor and per row."""
    shapes = {
        replace(shape, dtype="fp8", layout="nt", row_scales=row_scales): role
        for role in ("fit", "holdout")
        for shape in drawn(16, FP8_COUNTS[role], SEEDS[role])
        for row_scales in (False, True)
    }
    return [SuiteCase(shape, backend, "cold", role) for shape, role in shapes.items() for backend in BACKENDS]
