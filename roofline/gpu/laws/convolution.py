"""How long a convolution takes: the equivalent matrix product, and moving its tensors. numpy only.

cuDNN multiplies matrices (implicit GEMM). Tensors that are not channels last, or whose channels are no multiple of 8,
it converts to another layout before and after, in kernels of their own. None of this overlaps, so the times add up:
floor + FLOPs at a rate lowered by partly filled rounds of thread blocks + bytes at a bandwidth, fitted per variant.
"""

from __future__ import annotations

import numpy as np

from flopcast.roofline.gpu.laws.law import Law, Params
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.stream.lowering.variants import ConvVariant

TILE = 128.0  # of results that a thread block computes, either way; smaller where there are fewer


def log_seconds(variant: ConvVariant, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
    """log of seconds. features: log2 of m (images x places), n (channels out) and k (channels in x window)."""
    idle = 2.0 ** _idle_log2(params, features)
    return np.asarray(np.log(params["floor"] + flops * idle / params["rate"] + bytes_ / params["bandwidth"]))


def inputs(variant: ConvVariant, params: Params, features: Array) -> Array:
    """The residual's inputs: the sizes, and how idle the rounds of blocks are."""
    return np.column_stack([features[:, :3], 2.0 * _idle_log2(params, features)])


def _idle_log2(params: Params, features: Array) -> Array:
    """log2 of the results that full rounds of whole blocks would compute over those asked for, at most 3."""
    m, n = np.exp2(features[:, 0]), np.exp2(features[:, 1])
    rows, columns = np.minimum(m, TILE), np.minimum(n, TILE)
    rounds = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) / params["sm_count"])
    return np.asarray(np.log2(rounds * params["sm_count"] * rows * columns / (m * n)).clip(0.0, 3.0))


LAW = Law(frozenset({"floor", "rate", "bandwidth", "sm_count"}), log_seconds, inputs)
