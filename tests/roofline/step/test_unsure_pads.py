"""Paddings that depend on timings: what their products would take longer, and how far the interval reaches for it."""

from __future__ import annotations

from math import exp, log

import pytest

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.uncertainty import Moves, device_moves
from flopcast.roofline.step.unsure_pads import seconds_left_unpadded
from flopcast.roofline.stream.lowering.describe import describe

H200 = find_profile("nvidia-h200")
PAD = (50257, 9984, 768)  # m, k, n of the gradient of GPT-2's tokens' weights


def product(m: int, k: int, n: int, *, count: int = 1) -> TimedOp:
    work = describe(Gemm(m=m, n=n, k=k, layout="tn"))
    (found,) = H200.estimate([(work, "torch", "cold")])
    return TimedOp("backward", "launch", 0.0, work, seconds=count * found.seconds, count=count)


def test_a_product_that_an_h200_left_takes_as_much_longer_as_it_did() -> None:
    """The products of a drawn GPT-2's step, 39 x 256 tokens, took 9.14 ms where they were forecast at 4.97."""
    padded, other = product(50264, 9984, 768), product(9984, 768, 50264)
    assert seconds_left_unpadded([padded, other], [PAD], H200) == pytest.approx(9.14e-3 - 4.97e-3, rel=0.05)
    twice = product(50264, 9984, 768, count=2)
    assert seconds_left_unpadded([twice], [PAD], H200) == pytest.approx(
        2 * seconds_left_unpadded([padded], [PAD], H200)
    )
    assert seconds_left_unpadded([padded, other], [], H200) == 0
    assert seconds_left_unpadded([other], [PAD], H200) == 0


def test_the_upper_end_has_all_of_it_and_the_lower_none() -> None:
    ops = [product(50264, 9984, 768), product(9984, 768, 50264)]
    total = sum(op.seconds for op in ops)
    without, with_more = device_moves(ops, 0.05), device_moves(ops, 0.05, more_seconds=total)
    assert with_more == Moves(without.down, pytest.approx(log(exp(without.up) + 1)))  # type: ignore[arg-type]
