"""Convolutions: their law finds the rate and bandwidth they were made with, more images never take less time, and one
that was not measured is told by those of its direction and layout."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import hypot

import numpy as np
import pytest

from flopcast.kernels.shapes import Call, Operand
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.fit.convolution import conv_prior
from flopcast.roofline.gpu.fit.surface import Points, fit_surface
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import arrays_of
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import ConvVariant, SurfaceKey

FLOOR, PEAK, BANDWIDTH = 2e-6, 1e15, 4e12
VARIANTS = tuple(f"fwd/bf16/{layout}/{form}" for layout in ("nchw", "nhwc") for form in ("point", "dense"))


def packed(*shape: int, dtype: str = "bf16") -> Operand:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return Operand(shape, tuple(stride), dtype)


def convolution(
    batch: int, channels: int, out: int, side: int, window: int, stride: int = 1, groups: int = 1, nhwc: bool = False
) -> Call:
    places = side // stride
    data, weight = packed(batch, channels, side, side), packed(out, channels // groups, window, window)
    result = packed(batch, out, places, places)
    if nhwc:
        data, result = last(data), last(result)
    args = [{"t": 0}, {"t": 1}, None, [stride] * 2, [window // 2] * 2, [1, 1], False, [0, 0], groups]
    return Call("aten.convolution.default", (data, weight), (result,), json.dumps(args))


def last(operand: Operand) -> Operand:
    """The operand with its channels last."""
    _, channels, rows, columns = operand.shape
    return replace(operand, stride=(channels * rows * columns, 1, channels * columns, channels))


def seconds_of(variant: str, work: Work) -> float:
    """Channels first are laid out anew: two passes more over all tensors."""
    converted = 2 * work.bytes / (0.5 * BANDWIDTH) if "nchw" in variant else 0.0
    return 3 * FLOOR + converted + hypot(work.flops / (0.5 * PEAK), work.bytes / BANDWIDTH)


def drawn(variant: str, count: int, seed: int) -> list[Work]:
    rng = np.random.default_rng(seed)
    window = 3 if "dense" in variant else 1
    return [
        describe(
            convolution(
                int(2 ** rng.integers(4, 7)), int(2 ** rng.integers(6, 10)), int(2 ** rng.integers(6, 10)),
                # 14 and 7: rows of places that are not aligned, which a window of one place needs
                int(rng.choice([7, 14])), window, nhwc="nhwc" in variant,
            )
        )
        for _ in range(count)
    ]  # fmt: skip


KEYS = [SurfaceKey.parse(f"torch/conv/{variant}/cold") for variant in VARIANTS]


@cache  # not while tests are collected, which every process does
def surfaces() -> dict[SurfaceKey, Surface]:
    found = {}
    for variant, key in zip(VARIANTS, KEYS, strict=True):
        works = drawn(variant, 8, 3)
        seconds = np.array([seconds_of(variant, work) for work in works])
        features, bytes_, flops = (
            np.array(column, float) for column in zip(*((w.features, w.bytes, w.flops) for w in works), strict=True)
        )
        points = Points(features, bytes_, flops, seconds, np.full(len(works), 0.005))
        assert isinstance(key.variant, ConvVariant)
        prior = conv_prior(key.variant, FLOOR, BANDWIDTH, {"bf16": PEAK})
        found[key] = fit_surface("conv", key.variant, points, prior)
    return found


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_new_sizes_are_told_within_a_seventh(key: SurfaceKey) -> None:
    works = drawn(str(key.variant), 4, 8)
    found = surfaces()[key].predict(*arrays_of(works))
    assert found.seconds == pytest.approx([seconds_of(str(key), work) for work in works], rel=0.12)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, name) for layout in ("nchw", "nhwc") for name in ("dense", "few", "depthwise")),
        ("nchw", "point/converted"), ("nchw", "unaligned/converted"),
    ],
)  # fmt: skip
def test_more_images_never_take_less(layout: str, name: str) -> None:
    """Of the shipped profile, residual and all, through sizes that were measured and around them. Direct products are
    not among them: 12 images of 49 places, 2,048 channels and 512 results take an H200 60 us, 16 take 16."""
    profile = find_profile("nvidia-h200")
    batches = [*range(1, 24), *range(24, 200, 7), 512, 1000, 4096]
    keys = [key for key in profile.surfaces if str(key.variant).endswith(f"{layout}/{name}")]
    assert keys
    for key in keys:
        surface = profile.surfaces[key]
        for row in surface.features[::5]:
            features = np.array([(np.log2(batch), *row[1:]) for batch in batches])
            nothing = np.zeros(len(batches))
            assert np.all(np.diff(np.log(surface.predict(features, nothing, nothing).seconds)) > -1e-9), (key, row)


def test_a_kind_that_was_not_measured_is_told_by_its_relatives() -> None:
    numbers = {"kernel_floor": Number(FLOOR, FLOOR, FLOOR, "measured")}
    known = {key: surface for key, surface in surfaces().items() if "dense" not in str(key)}
    profile = Profile("g", "measured", {"type": "cuda"}, {}, numbers, known)
    work = describe(convolution(64, 256, 256, 14, 3))
    assert str(work.variant) == "fwd/bf16/nchw/dense"
    [found] = profile.estimate([(work, "torch", "cold")])
    assert found.basis == "extrapolated"
    assert found.seconds == pytest.approx(seconds_of(str(work.variant), work), rel=0.3)
    kept = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert kept.estimate([(work, "torch", "cold")]) == [found]


@pytest.mark.parametrize(
    ("call", "form"),
    [
        (convolution(8, 64, 128, 28, 1), "point"), (convolution(8, 64, 128, 14, 1, stride=2), "dense"),
        (convolution(8, 64, 128, 14, 1), "unaligned"), (convolution(8, 64, 128, 1, 1), "pooled"),
        (convolution(8, 64, 20, 1, 1), "pooled-few"),
        (convolution(8, 64, 128, 14, 3), "dense"), (convolution(8, 3, 64, 14, 7), "few"),
        (convolution(8, 64, 64, 14, 3, groups=64), "depthwise"), (convolution(8, 64, 64, 14, 3, groups=8), "grouped"),
    ],
)  # fmt: skip
def test_a_convolution_is_named_by_its_form(call: Call, form: str) -> None:
    assert describe(call).variant.tokens[-1] == form


def test_a_transposed_one_is_the_gradient_of_another() -> None:
    data, weight, result = packed(8, 32, 14, 14), packed(32, 16, 2, 2), packed(8, 16, 28, 28)
    args = [{"t": 0}, {"t": 1}, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1]
    work = describe(Call("aten.convolution.default", (data, weight), (result,), json.dumps(args)))
    assert work.variant.tokens[0] == "dgrad"
    assert work.flops == 2 * 8 * 14 * 14 * 32 * 16 * 4  # each place of the input with each weight
    assert work.features[3] > work.features[4]  # the forward that it is the gradient of goes the other way


@pytest.mark.parametrize(
    ("mask", "direction"),
    [([True, True, False], "bwd"), ([True, False, False], "dgrad"), ([False, True, True], "wgrad")],
)
def test_a_backward_is_named_by_what_it_computes(mask: list[bool], direction: str) -> None:
    data, weight, gradient = packed(8, 16, 28, 28), packed(32, 16, 3, 3), packed(8, 32, 28, 28)
    args = [{"t": 0}, {"t": 1}, {"t": 2}, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask]
    call = Call("aten.convolution_backward.default", (gradient, data, weight), (data, weight), json.dumps(args))
    work = describe(call)
    assert work.variant.tokens[0] == direction
    assert work.flops == 2 * 8 * 28 * 28 * 32 * 16 * 9 * sum(mask[:2])
