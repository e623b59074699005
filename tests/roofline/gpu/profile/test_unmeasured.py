"""What is answered for normalisations, convolutions and grouped products that were not measured: real calls of fake
tensors, against what their kernels cannot be quicker than, or much slower."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

import pytest

from flopcast.kernels.shapes import Call, Operand
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.passes import DEFAULT_FLOOR, Rates
from flopcast.roofline.gpu.profile.unmeasured import Fallback
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.uncertainty import device_log_sigma
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import Variant, parse_variant

RATE, PEAK = 4e12, 1e15
CEILINGS = {"hbm_copy": RATE, "matrix_sustained/bf16": 6e14, "matrix_sustained/fp32": 5e13}
NOTHING_MEASURED = Fallback({}, Rates({"bf16": PEAK, "fp32": 6e13}, CEILINGS, clock_mhz=2000, sm_count=132), {})


@dataclass(frozen=True)
class Piece:
    """A work as `estimate` reads it."""

    op_class: str
    variant: Variant
    features: tuple[float, ...]
    bytes: int
    flops: int = 0


def piece(op_class: str, variant: str, features: tuple[float, ...], bytes_: int, flops: int = 0) -> Piece:
    return Piece(op_class, parse_variant(variant), features, bytes_, flops)


def seconds(piece: Piece, fallback: Fallback = NOTHING_MEASURED) -> float:
    ((found, sigma, _),) = fallback.estimate([(piece, "torch", "cold")])
    assert sigma >= 0.3
    return found


def test_norms_pass_over_their_tensors_more_than_once() -> None:
    layer = piece("reduction", "native_layer_norm|fp32+fp32>fp32|row", (28.0, 10.0, 17.0), 1 << 28)
    once = layer.bytes / RATE
    assert seconds(layer) == pytest.approx(1.5 * once + DEFAULT_FLOOR)
    backward = replace(layer, variant=parse_variant("native_layer_norm_backward|fp32+fp32>fp32|row"))
    assert 2 * once < seconds(backward) < 3 * once


def test_norms_are_not_taken_for_sums() -> None:
    """Where sums were measured and no norm of this kind was: no group norm is in the shipped H200."""
    profile = find_profile("nvidia-h200")
    assert not any("native_group_norm" in str(key) for key in profile.surfaces)
    layer = piece("reduction", "native_group_norm|fp32+fp32>fp32|row", (28.0, 10.0, 17.0), 1 << 28)
    (found,) = profile.estimate([(layer, "torch", "cold")])
    copied = layer.bytes / profile.ceilings["hbm_copy"].value
    assert copied < found.seconds < 2 * copied
    assert found.basis == "extrapolated"


def test_batch_norm_of_few_channels_waits_for_its_loads() -> None:
    """64 images of 112 x 112: of 64 channels half the multiprocessors have no block, of 512 all."""
    size = 64 * 112**2
    few, many = (
        piece("reduction", "native_batch_norm|bf16+fp32>bf16|mix", (0.0, count, channels), 4 << 26)
        for count, channels in ((19.615, 6.0), (16.615, 9.0))
    )
    assert 2 ** few.features[1] == pytest.approx(size, rel=0.01)
    assert seconds(few) > 3 * seconds(many)
    assert seconds(many) > many.bytes / RATE


def test_convolutions_are_products_and_are_laid_out_anew() -> None:
    first = piece("conv", "fwd/bf16/nhwc/k3x3s1x1", (18.0, 8.0, 11.0), 1 << 28, 10**12)
    assert seconds(first) == pytest.approx(10**12 / 6e14 + DEFAULT_FLOOR)
    last = replace(first, variant=parse_variant("fwd/bf16/nchw/k3x3s1x1"))
    assert seconds(last) - seconds(first) == pytest.approx(2 * last.bytes / RATE + 2 * DEFAULT_FLOOR)
    exact = replace(first, variant=parse_variant("fwd/fp32/nchw/k3x3s1x1"))  # no other layout is wanted
    assert seconds(exact) == pytest.approx(10**12 / 5e13 + DEFAULT_FLOOR)


def test_a_guess_is_one_error_for_all_shapes_of_a_class() -> None:
    """A hundred shapes costed by one rule are not known ten times better than one."""
    from flopcast.kernels.shapes import Gemm
    from flopcast.roofline.stream.lowering.describe import describe

    profile = find_profile("nvidia-h200")
    works = [describe(Gemm(m=64 * i, n=64, k=64)) for i in range(1, 101)]

    def sigma(basis: str) -> float:
        ops = [TimedOp("forward", "launch", 0.0, work, 1e-3, 0.5, 1, basis) for work in works]
        return device_log_sigma(ops, profile)

    assert sigma("extrapolated") == pytest.approx(0.5, abs=0.02)
    assert sigma("interpolated") < 0.12


def test_a_sum_over_a_dimension_between_is_like_one_over_the_first() -> None:
    """Pairs of key heads added up, 8 x 4 x 2 x 1024 x 128: taken for rows of two they took 0.5 ms."""
    profile = find_profile("nvidia-h200")
    moved = (1 << 25) + (1 << 24)
    pairs = piece("reduction", "sum|fp32>fp32|mix", (log2(moved), 1.0, 22.0), moved)
    (found,) = profile.estimate([(pairs, "torch", "cold")])
    assert moved / profile.ceilings["hbm_copy"].value / 2 < found.seconds < 250e-6


# Tokens, vocabulary and seconds of torch's fill of bf16 logits in recorded compiled steps of Qwen3-0.6B and
# Llama-3.2-1B (reports/nvidia-h200/compiled-steps).
FILLS = [(1024, 151_936, 92.545e-6), (4096, 151_936, 367.231e-6), (8192, 128_256, 620.032e-6)]


@pytest.mark.parametrize(("tokens", "vocab", "seconds"), FILLS)
def test_a_fill_goes_by_fills_of_its_result_whatever_made_it(tokens: int, vocab: int, seconds: float) -> None:
    """Of bf16 they write 3.4 TB/s on an H200, of fp32 4.5. The largest fill of bf16 that was measured alone is of
    67 MB: by it these take 2.1 to 2.3% too long."""
    result = Operand((tokens, vocab), (vocab, 1), "bf16")
    found = find_profile("H200").estimate([(describe(Call("aten.full.default", (), (result,))), "torch", "cold")])[0]
    assert found.seconds == pytest.approx(seconds, rel=0.025)


@pytest.mark.parametrize("pattern", ["mix~", "mix"])
@pytest.mark.parametrize("results", [14, 18, 22, 25])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_sums_of_few_elements_each_take_about_what_they_read(pattern: str, results: int, count: int) -> None:
    """The gradients of repeated heads, permuted: no profile holds any, and those of biases, thousands of elements for
    each of 128 results, say nothing of them. Qwen3-Next's, 2 for each of 2^22, took 29 us and were forecast at 440."""
    read = 2 * (2 ** (results + count) + 2**results)
    asked = piece("reduction", f"sum|bf16>bf16|{pattern}", (log2(read), float(count), float(results)), read)
    ((found,),) = [find_profile("nvidia-h200").estimate([(asked, "torch", "cold")])]
    assert read / 4.8e12 < found.seconds < 6 * read / 4e12 + 6e-6
