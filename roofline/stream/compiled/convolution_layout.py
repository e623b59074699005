"""In which order of memory ATen runs a convolution by cuDNN, and which operands it copies to that order first.

A convolution runs channels last where the strides of its data or of its weights are like that, else with channels
first (`cudnn_conv_suggest_memory_format`, aten/src/ATen/native/ConvUtils.h), and every operand that lies otherwise is
copied (`contiguous`, native/cudnn/ConvShared.cpp). Weights of one channel, as depthwise convolutions have them, may be
of both orders: then they count as channels last.
"""

from __future__ import annotations

from collections.abc import Sequence

from flopcast.kernels.shapes import Operand

NCHW, NHWC = (0, 1, 2, 3), (0, 2, 3, 1)  # dimensions from the one that varies slowest


def relaid(operands: Sequence[Operand | None]) -> list[Operand | None]:
    """For each operand of a convolution (data, weights, bias) or its backward (gradient, data, weights) the tensor that
    it is copied to, None for one that is used as it is. Those of one or three dimensions in space are left out."""
    in_space = [operand for operand in operands if operand is not None and len(operand.shape) == 4]
    if len(in_space) < 2:
        return [None] * len(operands)
    order = NHWC if any(map(is_like_channels_last, in_space[-2:])) else NCHW
    found: list[Operand | None] = []
    for operand in operands:
        dense = None if operand is None or len(operand.shape) != 4 else _dense(operand, order)
        is_as_wanted = dense is None or _strides(dense) == _strides(operand)
        found.append(None if is_as_wanted else dense)
    return found


def is_like_channels_last(operand: Operand) -> bool:
    """Whether strides order four dimensions channels last (`is_channels_last_strides_2d_s4`, c10/core/MemoryFormat.h):
    sizes of one do not make that impossible."""
    least = 0
    if operand.stride[1] == 0:
        return False
    for dimension in reversed(NHWC):
        if operand.shape[dimension] == 0 or operand.stride[dimension] < least:
            return False
        if dimension == 0 and least == operand.stride[1]:
            return False
        least = operand.stride[dimension] * max(1, operand.shape[dimension])
    return True


def _dense(operand: Operand, order: Sequence[int]) -> Operand:
    stride = [0] * len(order)
    step = 1
    for dimension in reversed(order):
        stride[dimension] = step
        step *= operand.shape[dimension]
    return Operand(operand.shape, tuple(stride), operand.dtype)


def _strides(operand: Operand | None) -> list[int]:
    """Strides of the dimensions that have more than one place."""
    if operand is None:
        return []
    return [step for size, step in zip(operand.shape, operand.stride, strict=True) if size != 1]
