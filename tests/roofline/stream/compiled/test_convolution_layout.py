"""A convolution's operands are copied first where they lie in another order than ATen runs it in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._prims_common import suggest_memory_format

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.compiled.convolution_layout import is_like_channels_last, relaid
from flopcast.roofline.stream.ops import op_stream

STREAMS = Path(__file__).parents[4] / "reports" / "nvidia-h200" / "random" / "torch-2.11"
DATA = Operand((24, 96, 48, 48), (221184, 1, 4608, 96), "bf16")
WEIGHTS = Operand((96, 1, 7, 7), (49, 1, 7, 1), "bf16")  # contiguous and channels last
TURNED = Operand(DATA.shape, (221184, 1, 96, 4608), "bf16")  # rows and columns the other way round


@given(
    shape=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    gaps=st.lists(st.integers(1, 2), min_size=4, max_size=4),
)
def test_strides_are_read_as_torch_reads_them(shape: list[int], order: list[int], gaps: list[int]) -> None:
    stride, step = [0] * 4, 1
    for dimension, gap in zip(order, gaps, strict=True):
        stride[dimension] = step
        step *= shape[dimension] * gap
    tensor = torch.empty_strided(shape, stride)
    wanted = suggest_memory_format(tensor) == torch.channels_last
    assert is_like_channels_last(Operand(tuple(shape), tuple(stride), "fp32")) == wanted


def test_what_lies_in_another_order_is_copied_to_that_of_data_and_weights() -> None:
    assert relaid([TURNED, DATA, WEIGHTS]) == [DATA, None, None]
    assert relaid([DATA, DATA, WEIGHTS]) == [None, None, None]
    first = Operand(DATA.shape, (221184, 2304, 48, 1), "bf16")
    dense = Operand((96, 96, 3, 3), (864, 9, 3, 1), "bf16")
    assert relaid([first, dense, Operand((96,), (1,), "bf16")]) == [None, None, None]  # the last is a bias
    # weights of one channel that may be channels last make it so
    assert relaid([first, WEIGHTS]) == [DATA, None]


def test_other_than_two_dimensions_in_space_are_left_as_they_are() -> None:
    data, weights = Operand((4, 8, 32), (256, 1, 8), "bf16"), Operand((8, 1, 3), (3, 3, 1), "bf16")
    assert relaid([data, weights, None]) == [None, None, None]


@pytest.mark.parametrize(
    ("name", "copies", "convolutions"), [("convnext_tiny@192", {24, 25}, 22), ("resnet50@128", {0}, 53)]
)  # fmt: skip
def test_a_backward_has_the_copies_that_ran(name: str, copies: set[int], convolutions: int) -> None:
    """An H200 launched 25: of gradients before convolutions, and four of weights' gradients after them."""
    paths = list(STREAMS.glob(f"{name}*.json.gz"))
    assert len(paths) >= 1
    for path in paths:
        names = [op.name for op in op_stream.load(path).ops if op.phase == "backward"]
        assert names.count("aten.clone.default") in copies
        assert names.count("aten.convolution_backward.default") == convolutions
