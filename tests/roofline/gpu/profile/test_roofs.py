"""Roofs, ridge points and points: what the command and its figures are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.catalogue.device import device_peaks
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.roofs import best_points, points_of, roofs_of, to_json
from flopcast.roofline.views.figures.kernels import both_figures, main_dtype


@pytest.fixture(scope="module")
def h200() -> Profile:
    return find_profile("nvidia-h200")


def thinned(profile: Profile) -> Profile:
    """With every fourth surface: quicker to draw."""
    return replace(profile, surfaces=dict(list(profile.surfaces.items())[::4]))


def test_a_ridge_is_where_the_memory_roof_meets_the_matrix_roof(h200: Profile) -> None:
    roofs = roofs_of(h200)
    assert {roof.dtype for roof in roofs.matrix} == {"fp8", "bf16", "fp16", "tf32", "fp32", "fp64"}
    assert roofs.copy is not None
    assert roofs.cache is not None
    for roof in roofs.matrix:
        assert roof.ridge_memory is not None
        assert roof.ridge_cache is not None
        assert roof.ridge_memory * roofs.copy.value == pytest.approx(roof.lasting.value)
        assert roof.ridge_cache < roof.ridge_memory  # the cache is faster than memory
    sizes = [size for size, _ in roofs.working_sets]
    assert sizes == sorted(sizes)
    assert roofs.cache.value == max(n.value for s, n in roofs.working_sets if s <= h200.l2_bytes)


def test_points_are_the_measured_kernels_with_their_bytes_and_flops(h200: Profile) -> None:
    points = points_of(h200)
    assert len(points) == sum(len(surface.seconds) for surface in h200.own_surfaces.values())
    assert {p.op_class for p in points} >= {"gemm", "attention", "pointwise", "optimizer", "reduction", "copy"}
    assert {p.backend for p in points if p.op_class == "attention"} >= {"sdpa-cudnn", "sdpa-flash"}
    assert all(p.basis == "measured" and p.seconds > 0 and p.bytes > 0 for p in points)
    assert {p.dtype for p in points if p.op_class == "gemm"} >= {"bf16"}
    best = [b for b in best_points(roofs_of(h200), points) if b.op_class == "gemm" and b.backend == "torch"]
    # what large products reach lies near the burst roof: nowhere far above, and not half of it
    assert 0.8 < max(b.share or 0.0 for b in best) < 1.15


def test_a_projection_says_that_it_is_one(h200: Profile) -> None:
    profile = find_profile("nvidia-l4")
    roofs = roofs_of(profile)
    assert {p.basis for p in points_of(profile)} == {"extrapolated"}
    assert all(roof.best.low < roof.best.value < roof.best.high for roof in roofs.matrix)
    assert roofs.working_sets == ()  # a sweep of the H200's cache says nothing of this one's
    figure = both_figures(thinned(profile))
    assert figure is not None
    assert "EXTRAPOLATED" in figure.title
    assert "90% intervals" in figure.basis


def test_a_rate_above_the_datasheet_is_a_warning(h200: Profile) -> None:
    assert roofs_of(h200).warnings == ()
    half = {name: replace(n, value=n.value / 2) for name, n in h200.peaks.items()}
    found = roofs_of(replace(h200, peaks=half)).warnings
    assert any("bf16 products reach 16" in warning for warning in found)


def test_an_unknown_gpu_gets_its_peaks_from_what_it_says_of_itself(h200: Profile) -> None:
    device = {**h200.device, "name": "NVIDIA H200 NVL", "clock_mhz": 1785}
    profile = replace(h200, gpu="nvidia-h200-nvl", device=device, peaks=device_peaks(device, h200.ceilings))
    roofs = roofs_of(profile)
    bf16 = roofs.of("bf16")
    assert bf16 is not None
    assert bf16.peak is not None
    assert (bf16.peak.basis, bf16.peak.value) == ("datasheet", 132 * 1785e6 * 4096)
    assert roofs.reference_bandwidth is None
    assert both_figures(thinned(profile)) is not None


def test_what_was_not_measured_is_left_out() -> None:
    exact = Number(5e11, 5e11, 5e11, "measured")
    profile = Profile(
        gpu="x", basis="measured", device={}, peaks={}, ceilings={"matrix_burst/fp32": exact}, surfaces={}
    )
    roofs = roofs_of(profile)
    assert main_dtype(roofs, []) == "fp32"
    assert (roofs.matrix[0].ridge_memory, roofs.cache, roofs.floor) == (None, None, None)
    assert both_figures(profile) is None  # no memory roof: no roofline
    assert to_json(profile, roofs, [])["matrix"][0]["sustained_flops_per_second"] is None
