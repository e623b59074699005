"""Physics first: the law that a kernel's time follows before any residual is learnt. numpy only.

Three laws, each a few parameters fitted per surface (`regress.py`), each monotone in the work:

memory      floor + bytes / bandwidth; of operands meant to lie in L2, what does not fit comes from memory.
            Where there is a third size (results of a reduction along rows, rows of one down columns, indices of an
            embedding's gradient), a time for each of it; a reduction takes a time a step besides, however few bytes
            it reads
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

# Block tiles (rows of m, columns of n) by kind of kernel. Every cuBLAS has the common ones; from the names of what
# cuBLAS 13 launches on an H200, it has many more there, to fill the last wave; where rows do not start at multiples of
# 16 bytes, of 4, it falls back to older kernels.
_COMMON = [(256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64), (64, 256), (256, 64)]
_COLUMNS = {
    24: (64,), 32: (64,), 40: (64,), 48: (64,), 80: (64, 128), 96: (64, 192), 160: (128,), 512: (64,),
    64: (24, 32, 80, 96, 160, 168, 176, 224, 320, 384, 448), 128: (80, 96, 112, 144, 168, 192, 320), 192: (128, 192),
}  # fmt: skip
_TILES = {
    "tile_common": _COMMON,
    "tile_odd": [(rows, columns) for rows, many in _COLUMNS.items() for columns in many],
    "tile_aligned_4": [(128, 128), (256, 128), (128, 256), (64, 128), (128, 64)],
    "tile_aligned_2": [(128, 128), (256, 128), (128, 256), (64, 64)],
}
TILE_NAMES = tuple(_TILES)  # a parameter each: the share of the peak that its inner loop reaches
_FAMILIES = (("tile_common", "tile_odd"), ("tile_aligned_4",), ("tile_aligned_2",))  # by alignment
# Kernels for unaligned rows put two small blocks on an SM; one alone waits for its loads.
_PAIRED_AREA, _LONE = 128 * 128, 1.5
SPLITS = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0])
K_STEP_BYTES = 128.0  # a block's inner loop advances by so much of a row
FADE_FLOPS = 2.0**36  # a product of 0.1 ms on a large part: above it the clock falls
SPILL_SHARE = 0.75  # of the L2 that operands may fill before they are fetched from memory again
L2_SHARE = 0.6  # of the L2 that results may fill before they are waited for
QUERY_BLOCK = 128.0  # query rows of an attention block

# Exponents of the smooth minimum over configurations and of the smooth maximum of matrix and memory time.
# A higher one is nearer to min and max; 60 leaves 4% between one configuration and ten equal ones.
SOFT_MIN, SOFT_MAX, SOFT_STEP = 60.0, 4.0, 6.0

# By how much operands whose rows start at multiples of so many bytes (log2) are misaligned: tensor cores
# are fed by 16-byte copies, so the cliff lies below 2^4; from 128 bytes on nothing is left to gain.
_MISALIGNMENT = np.array([3.5, 3.0, 2.5, 2.0, 0.6, 0.4, 0.2, 0.0])
_FAMILY_EDGES = (1.0, 2.75)  # worst misalignment from which on the families of 4 and of 2 bytes take over

# What each law reads; of memory also `spill` (with `l2_bytes`), `step` and `each`, where they apply.
PARAMETERS = {
    "memory": {"floor", "bandwidth"},
    "gemm": {
        "peak", "sm_count", "l2_bytes", *TILE_NAMES, "prologue", "epilogue", "fade", "floor", "bandwidth",
        "l2_bandwidth", "absorbed", "split", "split_bandwidth", "quantised",
    },
    "attention": {
        "peak", "sm_count", "efficiency", "ramp", "prologue", "floor", "bandwidth", "quantised", "tail",
    },
}  # fmt: skip


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
    return _memory(params, features, bytes_)


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


# --- kernels that move bytes --------------------------------------------------------------------------------


def _memory(params: Params, features: Array, bytes_: Array) -> Array:
    moving = bytes_ / params["bandwidth"]
    if "spill" in params:
        filled = bytes_ / (SPILL_SHARE * params["l2_bytes"])
        moving = moving + bytes_ / params["spill"] * filled**4 / (1.0 + filled**4)
    if "step" in params:
        moving = np.hypot(moving, params["step"] * np.exp2(features[:, 1]))
    if "each" in params:
        moving = moving + params["each"] * np.exp2(features[:, 2])
    return np.asarray(np.log(params["floor"] + moving))


# --- matrix products ----------------------------------------------------------------------------------------


def _gemm(variant: str, params: Params, features: Array, bytes_: Array) -> Array:
    m, n, _, batch = _gemm_sizes(features)
    family = np.digitize(np.maximum(*_gemm_misalignment(variant, features)), _FAMILY_EDGES)
    matrix = np.empty(len(m))
    for i in range(len(_FAMILIES)):
        rows = family == i
        if rows.any():
            matrix[rows] = _gemm_blocks(variant, params, features[rows], i)
    # results that fit the L2 are not waited for on their way to memory
    written = _item_bytes(variant) * m * n * batch
    absorbed = params["absorbed"] / (1.0 + (written / (L2_SHARE * params["l2_bytes"])) ** 2)
    memory = (bytes_ - absorbed * written) / params["bandwidth"]
    return np.log(params["floor"] + _soft_max(matrix, memory))


def _gemm_blocks(variant: str, params: Params, features: Array, family: int) -> Array:
    """Seconds of the cheapest tile and split of a family, over rows of `features`.

    A step of the inner loop takes as long as its products or its loads, whichever is more."""
    m, n, k, batch = (size[:, None] for size in _gemm_sizes(features))
    sm_count, quantised = params["sm_count"], params["quantised"]
    tile_m, tile_n = np.array([tile for name in _FAMILIES[family] for tile in _TILES[name]], float).T
    reached = np.array([params[name] for name in _FAMILIES[family] for _ in _TILES[name]])
    advance = K_STEP_BYTES / _item_bytes(variant)
    products = 2.0 * tile_m * tile_n * advance * sm_count / (params["peak"] * reached)
    loads = (tile_m + tile_n) * K_STEP_BYTES * sm_count / params["l2_bandwidth"]
    step = _soft_max(products, loads, SOFT_STEP)
    # long products run at the clock that the power limit allows
    slower = 1.0 + params["fade"] * np.log2(1.0 + 2.0 * m * n * k * batch / FADE_FLOPS)
    fixed = params["prologue"] + params["epilogue"] * tile_m * tile_n / (128 * 128)
    blocks = np.ceil(m / tile_m) * np.ceil(n / tile_n) * batch / sm_count  # [rows, tiles]
    partial_bytes = 8.0 * m * n * batch  # fp32, written and read
    lone = np.where((tile_m * tile_n <= _PAIRED_AREA) & (family > 0), _LONE, 1.0)
    best = np.empty((len(features), len(SPLITS)))
    for i, split in enumerate(SPLITS):
        waves = blocks * split
        waves = np.maximum(quantised * np.ceil(waves) + (1.0 - quantised) * waves, lone)
        busy = waves * (slower * step * np.ceil(k / split / advance) + fixed)
        if split > 1.0:
            busy += params["split"] + split * partial_bytes / params["split_bandwidth"]
        best[:, i] = _soft_min(busy)
    return _soft_min(best)


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


def _item_bytes(variant: str) -> int:
    return next((DTYPE_BYTES[part] for part in variant.split("/") if part in DTYPE_BYTES), 2)


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


def _soft_max(a: Array, b: Array, power: float = SOFT_MAX) -> Array:
    greater = np.maximum(a, b)
    lesser = np.minimum(a, b)
    return np.asarray(greater * (1.0 + (lesser / greater) ** power) ** (1.0 / power))
