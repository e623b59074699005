"""Triton's products: the configuration that the kernels pick, and its cost, are what the law goes by."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest

from flopcast.decode import decode
from flopcast.kernels import matmul_law, matmul_table
from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.fit import priors, surface
from flopcast.roofline.gpu.fit.surface import Points
from flopcast.roofline.gpu.laws import gemm_triton
from flopcast.roofline.gpu.laws.laws import LAWS
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.gpu.projection.project import project_surface
from flopcast.roofline.stream.lowering.variants import GemmVariant, SurfaceKey, parse_variant

H200 = {"name": "NVIDIA H200", "capability": [9, 0], "sm_count": 132}
SIZES = [(8192, 3072, 1024), (1024, 4096, 4096), (2176, 2176, 1344), (8192, 1024, 3072), (512, 2688, 640),
         (4096, 2048, 8192), (1024, 151936, 1024), (768, 2560, 1024)]  # fmt: skip


def features(sizes: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array([[log2(size) for size in row] for row in sizes])


def surface_of(sizes: list[tuple[int, int, int]], scale: float) -> Surface:
    """Fitted to products that take `scale` times the cost of what the kernels pick."""
    table = matmul_table.find("NVIDIA H200", "")
    shapes = [Gemm(m=m, n=n, k=k, dtype="bf16", layout="nt") for m, n, k in sizes]
    seconds = [
        scale * matmul_law.seconds_of(matmul_table.choose(s, 132, (9, 0), tma=True, table=table), s, 132)
        for s in shapes
    ]
    points = Points(
        features(sizes), np.array([float(s.bytes) for s in shapes]), np.array([float(s.flops) for s in shapes]),
        np.array(seconds), np.full(len(sizes), 0.005),
    )  # fmt: skip
    number = gemm_triton.table_of(H200)
    assert number is not None
    return surface.fit_surface("tuned", GemmVariant("nt", "bf16"), points, priors.tuned_prior(989e12, 132.0, number))


def test_a_few_products_tell_the_factor_and_others_follow() -> None:
    found = surface_of(SIZES, 1.07)
    assert found.params["scale"] == pytest.approx(1.07, rel=0.01)
    others = [(8192, 6144, 2048), (1024, 1024, 1024), (3072, 960, 7360)]
    want = surface_of(others, 1.07)
    ones = np.ones(len(others))
    assert found.predict(features(others), ones, ones).seconds == pytest.approx(want.seconds, rel=0.03)
    again = decode(Surface, found.to_json(), "a surface")
    assert again.predict(features(others), ones, ones).seconds == pytest.approx(
        found.predict(features(others), ones, ones).seconds, rel=1e-5
    )


def test_which_surfaces_it_is_for() -> None:
    assert gemm_triton.is_for("triton", GemmVariant("tn", "bf16"))
    assert gemm_triton.is_for("triton", GemmVariant("nn", "fp16"))
    for other in ("nt/bf16/unaligned", "nt/fp32", "batched/nt/bf16"):
        assert not gemm_triton.is_for("triton", parse_variant(other))
    assert not gemm_triton.is_for("torch", GemmVariant("tn", "bf16"))
    assert gemm_triton.table_of(H200) == 1
    assert gemm_triton.table_of({**H200, "name": "NVIDIA H100 80GB HBM3"}) == 0
    assert gemm_triton.table_of({**H200, "capability": [8, 0]}) is None


@pytest.mark.parametrize(
    ("layout", "size", "partial"),
    [("nt", (100, 128, 64), 0), ("nt", (128, 128, 72), 1), ("nn", (128, 200, 64), 1), ("tn", (136, 128, 65), 1)],
)
def test_rows_of_whole_lines(layout: str, size: tuple[int, int, int], partial: int) -> None:
    assert gemm_triton.partial(GemmVariant(layout, "bf16"), features([size])).tolist() == [partial]
    params = {"scale": 1.0, "partial": 0.25, "sm_count": 132.0, "peak": 989e12, "table": 1.0}
    without = {**params, "partial": 0.0}
    ones = np.ones(1)
    variant = GemmVariant(layout, "bf16")
    seconds = [LAWS["tuned"].log_seconds(variant, p, features([size]), ones, ones) for p in (params, without)]
    assert seconds[0] - seconds[1] == pytest.approx(0.25 * partial)


def test_a_projection_takes_the_targets_rate() -> None:
    found = surface_of(SIZES, 1.0)
    own, slower = find_spec("nvidia-h200"), find_spec("nvidia-h100-pcie")
    moved = project_surface(SurfaceKey.parse("triton/gemm/nt/bf16/cold"), found, own, slower)
    assert moved is not None
    assert moved.params["scale"] > 1.1
    assert moved.params["sm_count"] == slower.sm_count
    assert all(there > here for here, there in zip(found.seconds, moved.seconds, strict=True))
