"""Physics first: the law that a kernel's time follows before any residual is learnt. numpy only.

Three laws, each a few parameters fitted per surface (`regress.py`), each monotone in the work:

memory      floor + bytes / bandwidth
gemm        floor + the cheapest of a set of tile configurations, whose blocks run in waves over the SMs;
never
            faster than its bytes through memory. Tile and wave quantisation are explicit, split-K is a
            choice.
attention   floor + blocks of 128 query rows in waves; a causal one waits for its longest row of blocks

A law maps features (log2 sizes as `lower.describe` gives them), bytes and flops to log seconds; `inputs`
gives what the residual is learnt over: the features and what quantisation and alignment do to them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flopcast.kernels.shapes import DTYPE_BYTES

Array = NDArray[np.float64]
Params = Mapping[str, float]

KINDS = ("memory", "gemm", "attention")

# Block tiles (rows, columns) that cuBLAS and Triton choose from; 8 of them stand for the rest.
TILES = np.array(
    [(256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64), (64, 256), (256, 64)], float
)
TILE_NAMES = tuple(f"tile_{int(rows)}x{int(columns)}" for rows, columns in TILES)
SPLITS = np.array([1.0, 2.0, 4.0, 8.0])
K_STEP = 32.0  # a block's inner loop advances by so many k
FADE_FLOPS = 2.0**36  # a product of 0.1 ms on a large part: above it the clock falls
L2_SHARE = 0.6  # of the L2 that results may fill before they are waited for
QUERY_BLOCK = 128.0  # query rows of an attention block

# Exponents of the smooth minimum over configurations and of the smooth maximum of matrix and memory time.
# A higher one is nearer to min and max, and harder to fit; 12 leaves 2% between two equal configurations
# of 32.
SOFT_MIN, SOFT_MAX = 12.0, 4.0

# By how much operands whose rows start at multiples of so many bytes (log2) are misaligned: tensor cores
# are fed by 16-byte copies, so the cliff lies below 2^4; from 128 bytes on nothing is left to gain.
_MISALIGNMENT = np.array([3.5, 3.0, 2.5, 2.0, 0.6, 0.4, 0.2, 0.0])
_CLIFF = 0.6


def kind_of(op_class: str) -> str:
    """The law of an operation class."""
    return op_class if op_class in ("gemm", "attention") else "memory"


def log_seconds(
    kind: str, variant: str, params: Params, features: Array, bytes_: Array, flops: Array
) -> Array:
    """log of seconds. features[rows, sizes] in log2, bytes and flops[rows]."""
    if kind == "gemm":
        return _gemm(variant, params, features, bytes_)
    if kind == "attention":
        return _attention(variant, params, features, bytes_, flops)
    return np.log(params["floor"] + bytes_ / params["bandwidth"])


def inputs(kind: str, variant: str, params: Params, features: Array) -> Array:
    """What the residual depends on, [rows, inputs]: features scaled so that a length scale of a few suits
    each."""
    if kind == "gemm":
        return _gemm_inputs(variant, params, features)
    if kind == "attention":
        blocks = _attention_blocks(features) / params["sm_count"]
        waves = np.log2(np.ceil(blocks) / blocks).clip(0.0, 3.0) * 2.0
        return np.column_stack([features, waves])
    if features.shape[1] > 1:  # rows that cannot be read 16 bytes at a time
        return np.column_stack([features, 3.0 - _trailing_zeros(features[:, 1]).clip(0.0, 3.0)])
    return features


def sensitivities(kind: str, params: Params, bytes_: Array) -> Array:
    """How log seconds moves with what is uncertain in the law, [rows, terms]: with log floor and -log
    bandwidth for memory, with the level of the whole law for the others."""
    if kind != "memory":
        return np.ones((len(bytes_), 1))
    moving = bytes_ / params["bandwidth"]
    share = moving / (params["floor"] + moving)
    return np.column_stack([1.0 - share, share])


# --- matrix products ----------------------------------------------------------------------------------------


def _gemm(variant: str, params: Params, features: Array, bytes_: Array) -> Array:
    m, n, k, batch = _gemm_sizes(features)
    sm_count, quantised = params["sm_count"], params["quantised"]
    rates = params["peak"] / sm_count * np.array([params[name] for name in TILE_NAMES])
    slower = _gemm_misaligned(variant, params, features)
    # long products run at the clock that the power limit allows
    slower = slower * (1.0 + params["fade"] * np.log2(1.0 + 2.0 * m * n * k * batch / FADE_FLOPS))
    area, edges = TILES[:, 0] * TILES[:, 1], TILES[:, 0] + TILES[:, 1]
    blocks = np.ceil(m[:, None] / TILES[:, 0]) * np.ceil(n[:, None] / TILES[:, 1]) * batch[:, None]
    depth = np.ceil(k[:, None] / SPLITS / K_STEP) * K_STEP
    # [rows, tiles, splits]
    block = slower[:, None, None] * (2.0 * area / rates)[None, :, None] * depth[:, None, :]
    block = block + (params["prologue"] + params["epilogue"] * area / (128 * 128))[None, :, None]
    waves = blocks[:, :, None] * SPLITS / sm_count
    waves = quantised * np.ceil(waves) + (1.0 - quantised) * np.maximum(waves, 1.0)
    partial_bytes = 8.0 * SPLITS * (batch * m * n)[:, None]  # fp32, written and read
    reduce = np.where(SPLITS > 1, params["split"] + partial_bytes / params["split_bandwidth"], 0.0)
    loads = _item_bytes(variant) * edges * k[:, None] * blocks / params["l2_bandwidth"]
    busy = _soft_max(waves * block + reduce[:, None, :], loads[:, :, None])
    matrix = _soft_min(busy.reshape(len(m), -1))
    # results that fit the L2 are not waited for on their way to memory
    written = _item_bytes(variant) * m * n * batch
    absorbed = params["absorbed"] / (1.0 + (written / (L2_SHARE * params["l2_bytes"])) ** 2)
    memory = (bytes_ - absorbed * written) / params["bandwidth"]
    return np.log(params["floor"] + _soft_max(matrix, memory))


def _gemm_inputs(variant: str, params: Params, features: Array) -> Array:
    m, n, _, batch = _gemm_sizes(features)
    columns = [*features.T]
    for rows, cols in ((128, 128), (256, 128), (128, 256), (64, 64)):
        blocks = np.ceil(m / rows) * np.ceil(n / cols) * batch / params["sm_count"]
        columns.append(np.log2(np.ceil(blocks) / blocks).clip(0.0, 3.0) * 2.0)
    columns.append(np.log2(np.ceil(m / 128) * 128 / m) * 4.0)
    columns.append(np.log2(np.ceil(n / 128) * 128 / n) * 4.0)
    columns.extend(_gemm_misalignment(variant, features))
    return np.column_stack(columns)


def _gemm_sizes(features: Array) -> tuple[Array, Array, Array, Array]:
    sizes = np.asarray(np.round(np.exp2(features)), np.float64)
    return sizes[:, 0], sizes[:, 1], sizes[:, 2], sizes[:, 3] if sizes.shape[1] > 3 else np.ones(len(sizes))


def _gemm_misaligned(variant: str, params: Params, features: Array) -> Array:
    """What misalignment multiplies a block's time by: exp(`misaligned`) for operands of odd bf16 rows."""
    operands, result = _gemm_misalignment(variant, features)
    off = params["misaligned"] * (operands - _CLIFF).clip(0.0)
    return np.exp((off + params["misaligned_result"] * (result - _CLIFF).clip(0.0)) / 2.4)


def _item_bytes(variant: str) -> int:
    return DTYPE_BYTES.get(variant.split("/")[-1], 2)


def _gemm_misalignment(variant: str, features: Array) -> tuple[Array, Array]:
    """(of the worse operand, of the result). "nt" reads rows of k and k, "nn" of k and n, "tn" of m and n."""
    layout = next((part for part in variant.split("/") if part in ("nt", "nn", "tn", "tt")), "nt")
    shift = np.log2(_item_bytes(variant))
    zeros = [_trailing_zeros(features[:, i]) for i in range(3)]
    a, b = zeros[2 if layout[0] == "n" else 0], zeros[2 if layout[1] == "t" else 1]
    of = [_MISALIGNMENT[(z + shift).clip(0, 7).astype(int)] for z in (a, b, zeros[1])]
    return np.maximum(of[0], of[1]), of[2]


def _trailing_zeros(log2_size: Array) -> Array:
    """log2 of the largest power of two that divides the size, at most 7; 7 for sizes above 2^50."""
    size = np.round(np.exp2(np.minimum(log2_size, 50.0))).astype(np.int64)
    power = np.minimum(np.where(size > 0, size & -size, 128), 128)
    return np.asarray(np.frexp(power)[1] - 1.0)


# --- attention ----------------------------------------------------------------------------------------------


def _attention(variant: str, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
    sm_count, quantised = params["sm_count"], params["quantised"]
    seq = np.exp2(features[:, 2])
    blocks = _attention_blocks(features)
    padded = np.ceil(seq / QUERY_BLOCK) * QUERY_BLOCK / seq  # rows computed for rows asked for
    block = flops * padded / blocks / (params["peak"] * params["efficiency"] / sm_count)
    block = block * (1.0 + params["ramp"] / seq) + params["prologue"]
    waves = blocks / sm_count
    waves = quantised * np.ceil(waves) + (1.0 - quantised) * np.maximum(waves, 1.0)
    # the last rows of a causal mask see twice the mean: with few blocks they are what is waited for
    longest = 1.0 + (params["tail"] if "causal" in variant else 0.0)
    matrix = _soft_max(waves * block, longest * block)
    return np.log(params["floor"] + _soft_max(matrix, bytes_ / params["bandwidth"]))


def _attention_blocks(features: Array) -> Array:
    heads = np.asarray(np.round(np.exp2(features[:, 0])), np.float64)
    return heads * np.asarray(np.ceil(np.exp2(features[:, 2]) / QUERY_BLOCK), np.float64)


# --- smooth minimum and maximum -----------------------------------------------------------------------------


def _soft_min(times: Array) -> Array:
    """Over the last axis; relative to the least so that powers neither overflow nor vanish."""
    least = times.min(axis=-1, keepdims=True)
    mass = np.exp(-SOFT_MIN * np.log(times / least)).sum(axis=-1)
    return np.asarray(least[..., 0] * np.exp(-np.log(mass) / SOFT_MIN))


def _soft_max(a: Array, b: Array) -> Array:
    greater = np.maximum(a, b)
    lesser = np.minimum(a, b)
    return np.asarray(greater * (1.0 + (lesser / greater) ** SOFT_MAX) ** (1.0 / SOFT_MAX))
