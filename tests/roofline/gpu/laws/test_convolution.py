"""Convolutions: their law finds the rate and bandwidth they were made with, and a kind that was not measured is told by
those of its direction and layout."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flopcast.kernels.shapes import Call, Operand
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.fit.convolution import conv_priors
from flopcast.roofline.gpu.fit.surface import Points, fit_surface
from flopcast.roofline.gpu.laws.laws import LAWS
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import SurfaceKey, parse_variant

FLOOR, PEAK, BANDWIDTH, SM_COUNT = 2e-6, 1e15, 4e12, 132.0
VARIANTS = tuple(f"fwd/bf16/{layout}/k{kernel}s1x1" for layout in ("nchw", "nhwc") for kernel in ("1x1", "3x3"))


def packed(*shape: int, dtype: str = "bf16") -> Operand:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return Operand(shape, tuple(stride), dtype)


def convolution(batch: int, channels: int, out: int, side: int, window: int, stride: int = 1) -> Call:
    data, weight = packed(batch, channels, side, side), packed(out, channels, window, window)
    places = side // stride
    args = [{"t": 0}, {"t": 1}, None, [stride] * 2, [window // 2] * 2, [1, 1], False, [0, 0], 1]
    return Call("aten.convolution.default", (data, weight), (packed(batch, out, places, places),), json.dumps(args))


def seconds_of(variant: str, bytes_: float, flops: float) -> float:
    """Channels first are laid out anew: three times the bytes."""
    return 3 * FLOOR + flops / (0.5 * PEAK) + bytes_ * (3 if "nchw" in variant else 1) / BANDWIDTH


def surfaces() -> dict[SurfaceKey, Surface]:
    rng = np.random.default_rng(3)
    groups = {}
    for variant in VARIANTS:
        # enough channels for blocks to fill rounds: what the last round leaves idle is another test's
        m, n = 2.0 ** rng.integers(14, 18, 6), 2.0 ** rng.integers(7, 11, 6)
        k = 2.0 ** rng.integers(7, 12, 6)
        flops, bytes_ = 2 * m * n * k, 2 * (m * k + n * k + m * n)
        seconds = np.array([seconds_of(variant, b, f) for b, f in zip(bytes_, flops, strict=True)])
        features = np.log2(np.column_stack([m, n, k]))
        groups[SurfaceKey.parse(f"torch/conv/{variant}/cold")] = Points(
            features, bytes_, flops, seconds * np.exp(rng.normal(0, 0.01, 6)), np.full(6, 0.005)
        )
    priors = conv_priors(groups, FLOOR, BANDWIDTH, {"bf16": PEAK}, SM_COUNT)
    return {key: fit_surface("conv", key.variant, points, priors[key]) for key, points in groups.items()}


SURFACES = surfaces()


@pytest.mark.parametrize("key", SURFACES, ids=str)
def test_new_sizes_are_told_within_a_tenth(key: SurfaceKey) -> None:
    sizes = np.array([[2.0**16, 512, 1024], [2.0**17, 256, 2048], [2.0**15, 1024, 512]])
    m, n, k = sizes.T
    flops, bytes_ = 2 * m * n * k, 2 * (m * k + n * k + m * n)
    found = SURFACES[key].predict(np.log2(sizes), bytes_, flops)
    wanted = [seconds_of(str(key), b, f) for b, f in zip(bytes_, flops, strict=True)]
    assert found.seconds == pytest.approx(wanted, rel=0.12)


def test_more_work_never_takes_less() -> None:
    params = SURFACES[SurfaceKey.parse("torch/conv/fwd/bf16/nhwc/k3x3s1x1/cold")].params
    m = np.arange(1, 4000, 37.0)
    features = np.log2(np.column_stack([m, np.full(len(m), 64.0), np.full(len(m), 576.0)]))
    law = LAWS["conv"].log_seconds(
        parse_variant("fwd/bf16/nhwc/k3x3s1x1"), params, features, 2 * m * 640, 2 * m * 64 * 576
    )
    assert np.all(np.diff(law) > -1e-12)


def test_a_kind_that_was_not_measured_is_told_by_its_relatives() -> None:
    numbers = {"kernel_floor": Number(FLOOR, FLOOR, FLOOR, "measured")}
    profile = Profile("g", "measured", {"type": "cuda"}, {}, numbers, SURFACES)
    work = describe(convolution(64, 256, 256, 56, 3, stride=2))
    assert str(work.variant) == "fwd/bf16/nchw/k3x3s2x2"
    [found] = profile.estimate([(work, "torch", "cold")])
    assert found.basis == "extrapolated"
    assert found.seconds == pytest.approx(seconds_of(str(work.variant), work.bytes, work.flops), rel=0.3)
    kept = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert kept.estimate([(work, "torch", "cold")]) == [found]


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
