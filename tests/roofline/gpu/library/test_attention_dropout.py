"""Attention with masks, which profiles time, and with dropout, by a law, on an H200 and on other GPUs."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt, prod

import pytest

from flopcast.kernels.shapes import Attention, Call, Operand, shape_from_json, shape_to_json
from flopcast.roofline.gpu.library.attention_dropout import plain, with_dropout
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.step.device_work import backend_of
from flopcast.roofline.stream.lowering.attention_calls import attention_of
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.model.run import Run

SHAPE = Attention(batch=8, heads=16, kv_heads=16, seq=1024, head_dim=128, causal=False, mask=True)


def priced(shape: Attention, gpu: str) -> Estimate:
    profile, work = find_profile(gpu), describe(shape)
    backend = backend_of(work, Run(batch=8, seq=1024), profile.default_attention)
    return with_dropout(work, profile.estimate([(plain(work), backend, "cold")])[0], profile)


def test_a_mask_costs_and_is_less_known_elsewhere() -> None:
    unmasked = replace(SHAPE, mask=False)
    here, without = priced(SHAPE, "nvidia-h200"), priced(unmasked, "nvidia-h200")
    assert here.seconds == pytest.approx(1.8 * without.seconds, rel=0.05)
    there = priced(SHAPE, "nvidia-h100-sxm")
    assert (here.basis, there.basis) == ("interpolated", "extrapolated")
    assert there.seconds > 1.7 * priced(unmasked, "nvidia-h100-sxm").seconds
    assert there.sigma > here.sigma


def test_dropout_costs_and_is_less_known() -> None:
    dropped = replace(SHAPE, dropout=True)
    for gpu in ("nvidia-h200", "nvidia-h100-sxm"):
        assert priced(dropped, gpu).seconds > priced(SHAPE, gpu).seconds
        assert priced(dropped, gpu).sigma > priced(SHAPE, gpu).sigma


def test_over_a_static_cache_a_mask_costs_though_keys_outnumber_queries() -> None:
    """In a compiled prefill of Llama-3.2-1B, 4 x 1,344 tokens, on an H200 a call took 298 us."""

    def call(is_masked: bool) -> Call:
        queries, keys, mask = ((4, 32, 1344, 64), (4, 32, 1472, 64), (4, 1, 1344, 1472))
        shapes = (queries, keys, keys, *[mask] * is_masked)
        operands = tuple(Operand(shape, tuple(prod(shape[i + 1 :]) for i in range(4)), "bf16") for shape in shapes)
        arguments = '[{"t":0},{"t":1},{"t":2},' + ('{"t":3}' if is_masked else "null") + ",false]"
        return Call("aten._scaled_dot_product_cudnn_attention.default", operands, operands[:1], arguments)

    def seconds(is_masked: bool, gpu: str = "nvidia-h200") -> float:
        profile, work = find_profile(gpu), describe(call(is_masked))
        backend = backend_of(work, Run(batch=4, seq=1344), profile.default_attention)
        return with_dropout(work, profile.estimate([(plain(work), backend, "cold")])[0], profile).seconds

    assert seconds(True) == pytest.approx(298e-6, rel=0.08)
    assert seconds(True) > 1.6 * seconds(False)
    shape = attention_of(call(True))
    assert shape is not None
    assert shape.seq == isqrt(1344 * 1472)


def test_in_fp32_a_mask_is_read() -> None:
    """In a compiled step of 12 heads, 640 tokens and 128 columns on an H200 a call took 74 and 205 us."""
    shape = Attention(batch=12, heads=1, kv_heads=1, seq=640, head_dim=128, causal=False, mask=True, dtype="fp32")
    for direction, measured in (("fwd", 74.2e-6), ("bwd", 204.9e-6)):
        one = replace(shape, direction=direction)
        assert priced(one, "nvidia-h200").seconds == pytest.approx(measured, rel=0.08)
        assert priced(one, "nvidia-h200").seconds > priced(replace(one, mask=False), "nvidia-h200").seconds


def test_where_flash_is_the_default_a_mask_is_left_to_the_memory_efficient_kernel() -> None:
    run = Run(batch=8, seq=1024)
    backends = [
        backend_of(describe(one), run, sdpa)
        for one in (SHAPE, replace(SHAPE, mask=False))
        for sdpa in ("sdpa-flash", "sdpa-cudnn")
    ]
    assert backends == ["sdpa-efficient", "sdpa-cudnn", "sdpa-flash", "sdpa-cudnn"]


def test_shapes_without_masks_are_written_as_ever() -> None:
    assert "mask" not in shape_to_json(replace(SHAPE, mask=False))
    for shape in (SHAPE, replace(SHAPE, mask=False, dropout=True)):
        assert shape_from_json(shape_to_json(shape)) == shape
    assert len({SHAPE.key, replace(SHAPE, mask=False).key, replace(SHAPE, dropout=True).key}) == 3
