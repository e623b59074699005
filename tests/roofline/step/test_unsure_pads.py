"""Paddings that depend on timings: what their products would take longer, and how far the interval reaches for it."""

from __future__ import annotations

from math import exp

import pytest

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.uncertainty import device_moves
from flopcast.roofline.step.unsure_pads import SHARE_LEFT, unsure_pads_of, with_expected_seconds
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
    found = unsure_pads_of([padded, other], [PAD], H200)
    assert list(found) == [0]
    assert found[0].more_seconds == pytest.approx(9.14e-3 - 4.97e-3, rel=0.05)
    twice = product(50264, 9984, 768, count=2)
    assert unsure_pads_of([twice], [PAD], H200)[0].more_seconds == pytest.approx(2 * found[0].more_seconds)
    assert not unsure_pads_of([padded, other], [], H200)
    assert not unsure_pads_of([other], [PAD], H200)


def test_what_the_host_decides_takes_the_mean_of_hosts_and_what_the_gpu_decides_is_padded() -> None:
    ops = [product(50264, 9984, 768), product(4096, 1024, 1024), product(4096, 2048, 1024)]
    found = unsure_pads_of(ops, [PAD, (4096, 1023, 1023)], H200)
    taken = with_expected_seconds(ops, found)
    assert taken[0] == ops[0]
    assert found[1].more_seconds > 0
    assert taken[1].seconds == pytest.approx(ops[1].seconds + found[1].more_seconds * SHARE_LEFT)
    assert taken[2] is ops[2]


def test_the_ends_have_all_of_it_and_none() -> None:
    ops = [product(50264, 9984, 768), product(9984, 768, 50264)]
    total = sum(op.seconds for op in ops)
    without, within = device_moves(ops, 0.05), device_moves(ops, 0.05, total / 4, total)
    assert exp(within.up) == pytest.approx(exp(without.up) + 1)
    assert exp(-within.down) == pytest.approx(exp(-without.down) - 1 / 4)
