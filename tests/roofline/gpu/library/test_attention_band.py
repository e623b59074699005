"""Attention with sliding windows by the blocks that its kernels visit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flopcast.kernels.attention_blocks import is_banded
from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.library.attention_band import dealt, fitted, part_of, seconds, with_band
from flopcast.roofline.gpu.library.attention_dropout import plain
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.stream.lowering.describe import describe
from studies.shipped.attention_bands import rows_of

REPORTS = Path(__file__).resolve().parents[4] / "reports"
SHAPE = Attention(batch=2, heads=16, kv_heads=8, seq=8192, head_dim=128, window=1024)


def priced(shape: Attention, gpu: str = "nvidia-h200") -> Estimate:
    profile, work = find_profile(gpu), describe(shape, "triton")
    return with_band(work, profile.estimate([(plain(work), "triton", "cold")])[0], profile)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_wider_window_takes_longer_and_none_as_long_as_the_triangle(direction: str) -> None:
    part = part_of(find_profile("nvidia-h200"), "bf16")
    assert part is not None
    shape = replace(SHAPE, direction=direction)
    windows = (1, 128, 1000, 1024, 2048, 4096, 8191, 8192)
    found = [seconds(replace(shape, window=window), part, fitted()) for window in windows]
    assert found == sorted(found)
    assert found[-1] == seconds(replace(shape, window=0), part, fitted())
    # of 8,192 tokens a window of 1,024 leaves 1/4 of the pairs, and blocks at both edges
    assert 0.25 < found[3] / found[-1] < 0.4


def test_causal_calls_of_a_card_that_was_not_fitted() -> None:
    """Rows of `reports/nvidia-h200/measurements/gpu2/run1`, when Hopper's attention ran on the plain kernels."""
    part = part_of(find_profile("nvidia-h200"), "bf16")
    assert part is not None
    for batch, heads, kv_heads, seq, direction, measured in (
        (4, 32, 16, 2048, "bwd", 1532.7e-6), (8, 16, 8, 1024, "bwd", 451.4e-6), (16, 6, 3, 384, "fwd", 29.5e-6),
    ):  # fmt: skip
        shape = Attention(batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=128, direction=direction)
        assert seconds(shape, part, fitted()) == pytest.approx(measured, rel=0.05)


def test_windows_and_documents_of_a_card_that_was_not_fitted() -> None:
    """All rows of `reports/nvidia-h200/bands/kernels`: nothing is fitted to them but the deviation."""
    part = part_of(find_profile("nvidia-h200"), "bf16")
    assert part is not None
    rows = [row for row in rows_of(REPORTS / "nvidia-h200", ["bands/kernels"]) if is_banded(row.shape)]
    errors = sorted(abs(seconds(row.shape, part, fitted()) / row.seconds - 1.0) for row in rows)
    assert len(errors) == 92
    assert errors[46] < 0.07
    assert errors[83] < 0.15
    assert errors[-1] < 0.23


def test_what_is_known_of_it() -> None:
    causal = priced(replace(SHAPE, window=0))
    here, there = priced(SHAPE), priced(SHAPE, "nvidia-h100-sxm")
    assert (causal.basis, here.basis, there.basis) == ("interpolated", "extrapolated", "extrapolated")
    assert causal.sigma < fitted().sigma == here.sigma < there.sigma < 0.6
    cpu = replace(find_profile("nvidia-h200"), device={"type": "cpu"})
    assert with_band(describe(SHAPE, "triton"), causal, cpu) == causal


def test_tiles_are_dealt_in_order() -> None:
    assert dealt((3.0, 1.0), 2, 2) == 4.0
    assert dealt((1.0,) * 5, 1, 2) == 3.0
    # beyond a few thousand all but the last fill the multiprocessors evenly
    assert dealt((1.0,) * 100, 1320, 132) == pytest.approx(1000.0)
    assert dealt((1.0, 1.0), 10**6, 132) == pytest.approx(2e6 / 132, rel=1e-4)
