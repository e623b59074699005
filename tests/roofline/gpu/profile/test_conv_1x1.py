"""1x1 convolutions: their products come back as measured, a backward is the sum of its two, and the
nearest rows say which algorithm cuDNN takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from flopcast.kernels.shapes import Call
from flopcast.microbench.records import records
from flopcast.roofline.gpu.fit.cases import Case, Limits
from flopcast.roofline.gpu.fit.convolution import with_products
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.fit.rows import fit_rows
from flopcast.roofline.gpu.fit.surfaces import fit_surfaces
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.conv_1x1 import part_of
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.stream.lowering.conv_1x1 import CONVERTED, DIRECT, ways_of
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import ConvVariant, SurfaceKey
from studies.imports import ROOT
from studies.shipped.added import cases_of
from studies.suites.beside import convolution

GPU = "nvidia-h200"
TO_LAST, TO_FIRST = "void cudnn::engines_precompiled::nchwToNhwcKernel", "void cudnn::nhwcToNchwKernel"


def window(
    images: int, side: int, channels: int, results: int, *, is_last: bool = False, is_backward: bool = False
) -> Call:
    return convolution(images, side, channels, results, 1, 1, is_last, is_backward)


def estimate(call: Call, cache: str = "cold", profile: Profile | None = None) -> Estimate:
    [found] = (profile or find_profile(GPU)).estimate([(describe(call), "torch", cache)])
    return found


def masked(call: Call, *wanted: bool) -> Call:
    """A backward of which only some gradients are wanted."""
    arguments = json.loads(call.args)
    return replace(call, args=json.dumps([*arguments[:-1], list(wanted)]))


@pytest.mark.parametrize(
    ("images", "algorithm", "microseconds", "launches"), [(12, DIRECT, 59.6, 1), (16, CONVERTED, 15.9, 3)]
)
def test_sizes_that_were_measured_come_back(images: int, algorithm: str, microseconds: float, launches: int) -> None:
    """On an H200 cuDNN converts the images of the faster one alone, which has more of them."""
    found = estimate(window(images, 7, 2048, 512))
    assert found.basis == "measured"
    assert algorithm in found.source
    assert found.seconds * 1e6 == pytest.approx(microseconds, rel=0.02)
    assert found.launches == launches


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("side", [13, 28, 1])
def test_a_backward_is_the_sum_of_its_products(side: int, is_last: bool) -> None:
    backward = window(52, side, 200, 328, is_last=is_last, is_backward=True)
    both, of_input, of_weights = (
        estimate(masked(backward, *wanted))
        for wanted in ((True, True, False), (True, False, False), (False, True, False))
    )
    assert both.seconds == pytest.approx(of_input.seconds + of_weights.seconds)
    assert both.sigma < of_input.sigma + of_weights.sigma
    assert both.basis == "interpolated"


@pytest.mark.parametrize("side", [13, 28, 1])
@pytest.mark.parametrize("is_backward", [False, True])
def test_products_have_the_flops_of_the_whole(side: int, is_backward: bool) -> None:
    work = describe(window(52, side, 200, 328, is_backward=is_backward))
    assert isinstance(work.variant, ConvVariant)
    surfaces = find_profile(GPU).surfaces
    for ways in zip(*ways_of(work.variant), strict=True):  # of each algorithm
        parts = [part_of(work, way, surfaces) for way in ways]
        assert sum(part.flops for part in parts if part is not None) == work.flops
        assert all(0 < part.bytes <= work.bytes for part in parts if part is not None)


def test_twice_the_images_channels_last_take_as_long_at_least() -> None:
    """But for 2.5%, by which a product that fills its last wave of blocks is quicker."""
    works = [
        describe(window(2**octave, side, channels, results, is_last=True, is_backward=is_backward))
        for is_backward in (False, True)
        for side, channels, results in ((56, 64, 256), (28, 32, 192), (14, 1024, 256), (7, 320, 1280), (112, 16, 96))
        for octave in range(9)
    ]
    found = find_profile(GPU).estimate([(work, "torch", "cold") for work in works])
    seconds = np.array([one.seconds for one in found]).reshape(-1, 9)
    assert np.all(seconds[:, 1:] / seconds[:, :-1] > 0.975)


def test_fp16_takes_what_bf16_does_and_is_less_certain() -> None:
    call = window(40, 24, 160, 96)
    other = replace(
        call,
        inputs=tuple(replace(operand, dtype="fp16") for operand in call.inputs),
        outputs=tuple(replace(operand, dtype="fp16") for operand in call.outputs),
    )
    own, twin = estimate(call), estimate(other)
    assert twin.seconds == pytest.approx(own.seconds)
    assert twin.sigma > own.sigma
    assert twin.basis == "extrapolated"


def test_a_state_that_was_not_measured_is_told_by_the_other() -> None:
    shipped = find_profile(GPU)
    cold = replace(shipped, surfaces={key: one for key, one in shipped.surfaces.items() if key.cache == "cold"})
    call = window(4, 14, 64, 64)
    assert estimate(call, "hot", cold).seconds == pytest.approx(estimate(call, "cold", shipped).seconds)


def test_without_its_products_a_convolution_is_told_by_its_relatives() -> None:
    """And not by a product of another convolution, which has a size more."""
    shipped = find_profile(GPU)
    parts = {key for key in shipped.surfaces if getattr(key.variant, "form", "") == "point"}
    left = replace(shipped, surfaces={key: one for key, one in shipped.surfaces.items() if key not in parts})
    found = estimate(window(32, 28, 256, 128), profile=left)
    assert found.basis == "extrapolated"
    assert 0.2 < found.seconds / estimate(window(32, 28, 256, 128)).seconds < 5.0


# --- fit


def case_of(call: Call, kernels: list[tuple[str, float]]) -> Case:
    work = describe(call)
    seconds = sum(took for _, took in kernels)
    return Case(call.key, work, "torch", "cold", seconds, 0.005, False, False, "cupti", kernels)


def direct_seconds(work: Work, direction: str) -> float:
    assert isinstance(work.variant, ConvVariant)
    part = part_of(work, replace(work.variant, direction=direction, algorithm=DIRECT), find_profile(GPU).surfaces)
    assert part is not None
    return 1.3 * 2.0 ** part.features[-1] + 1e-6


def test_products_are_fitted_to_the_kernels_of_their_names() -> None:
    """Rows of a card whose products take 1.3 times as long as the law of products of matrices says, and 1 us; the
    gradient of the weights of small images is converted, and takes 50 us."""
    shipped = find_profile(GPU)
    rng = np.random.default_rng(5)

    def drawn() -> tuple[int, int, int, int]:
        side = 4 * int(rng.choice([3, 4, 5, 10, 11, 12, 13]))
        return 4 * int(rng.integers(4, 32)), side, *(8 * int(n) for n in rng.integers(8, 64, 2))

    def case() -> Case:
        call = window(*(sizes := drawn()), is_backward=True)
        work = describe(call)
        first = [("nvjet_sm90", direct_seconds(work, "dgrad")), ("cublasLt::splitKreduce_kernel", 0.0)]
        if sizes[1] <= 20:
            return case_of(call, [*first, (TO_LAST, 2e-5), (TO_LAST, 1e-5), ("sm90_xmma_wgrad", 2e-5)])
        return case_of(call, [("Memset", 0.0), *first, ("nvjet_sm90", direct_seconds(work, "wgrad"))])

    products = {key: one for key, one in shipped.surfaces.items() if key.op_class == "gemm"}
    peaks = {dtype: number.value for dtype, number in shipped.peaks.items()}
    fitted, _ = fit_surfaces([case() for _ in range(80)], Limits(shipped.device, peaks, shipped.ceilings), products)
    assert {key.variant.tokens[0::4] for key in fitted} == {
        ("dgrad", DIRECT), ("wgrad", DIRECT), ("wgrad", CONVERTED)
    }  # fmt: skip
    profile = replace(shipped, surfaces={**products, **fitted})
    held = [case() for _ in range(30)]
    found = profile.estimate([(one.work, "torch", "cold") for one in held])
    off = [abs(own.seconds / one.seconds - 1) for own, one in zip(found, held, strict=True)]
    assert np.median(off) < 0.02
    assert np.quantile(off, 0.9) < 0.1


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["nvjet", "nvjet", "reduce_wgrad"], 1),
        (["Memset", "nvjet", "splitKreduce", TO_LAST, TO_LAST, "sm90_xmma_wgrad"], 3),
        ([TO_LAST, "sm90_xmma_dgrad", TO_FIRST, "nvjet"], 3),
    ],
)
def test_kernels_are_told_apart_by_their_names(names: list[str], first: int) -> None:
    case = case_of(window(32, 28, 64, 96, is_backward=True), [(name, 1e-6) for name in names])
    parts = with_products([replace(case, seconds=1e-5)] * 3, find_profile(GPU).surfaces)
    own = [part for part in parts if part.work.variant.tokens[0] == "dgrad"]
    assert len(own) == 3
    assert own[0].seconds == pytest.approx(1e-5 * first / len(names))
    assert sum(part.seconds for part in parts) == pytest.approx(3e-5)


def test_rows_without_names_stay_whole() -> None:
    cases = [case_of(window(32, 28, 64, 96, is_backward=True), [])] * 3
    assert with_products(cases, find_profile(GPU).surfaces) == cases


def test_a_products_name_is_read_back() -> None:
    key = SurfaceKey("torch", "conv", ConvVariant("dgrad", "bf16", "nchw", "pooled-few", DIRECT), "hot")
    assert SurfaceKey.parse(str(key)) == key


def test_rows_of_both_cache_states_are_fitted_and_reported() -> None:
    """Products of matrices and convolutions of an H200, as a folder has them."""
    products = rows_of("measurements/gpu8", "gemm/nn/bf16", "gemm/nt/bf16")[::60]
    convolutions = [row for row in rows_of("images/kernels-2", "call/aten.convolution.") if "x1x1])" in row["key"]]
    machine = json.loads((ROOT / "reports" / GPU / "images" / "kernels-2" / "machine.json").read_text())
    profile, report = fit_rows([*products, *convolutions], machine)
    assert any(key.variant.tokens[-1] == DIRECT for key in profile.surfaces)
    found = {one.name: one for one in report.classes if "conv" in one.name}
    assert set(found) == {"torch/conv/cold", "torch/conv/hot"}
    for quality in found.values():
        assert quality.holdout_median is not None
        assert quality.holdout_median < 0.1
    assert not any("no surface" in warning for warning in report.warnings)


def rows_of(folder: str, *beginnings: str) -> list[FitRow]:
    found = records.read(ROOT / "reports" / GPU / folder).latest()
    return [cast(FitRow, row) for row in found if row["key"].startswith(beginnings)]


# --- how far they are off


@pytest.mark.parametrize(
    ("folder", "median", "ninth"),
    [("kernels-6", 0.038, 0.137), ("kernels-7", 0.045, 0.168), ("kernels-10", 0.036, 0.15)],
)
def test_convolutions_of_steps_that_no_row_was_taken_from(folder: str, median: float, ninth: float) -> None:
    """All those of ten steps each, in both layouts, that are no depthwise ones."""
    profile = find_profile(GPU)
    held = [
        case
        for case in cases_of(ROOT / "reports" / GPU / "images" / folder, profile)
        if case.is_held_out and case.cache == "cold" and "depthwise" not in str(case.surface)
    ]
    assert len(held) > 350
    found = profile.estimate([(case.work, case.backend, case.cache) for case in held])
    off = np.abs([one.seconds / case.seconds - 1 for one, case in zip(found, held, strict=True)])
    inside = np.mean(
        [abs(np.log(one.seconds / case.seconds)) < 1.645 * one.sigma for one, case in zip(found, held, strict=True)]
    )
    assert np.median(off) < median
    assert np.quantile(off, 0.9) < ninth
    assert inside > 0.87
