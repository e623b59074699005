"""The law of matrix products: the cheapest of a set of tile configurations, in waves. numpy only.

floor + the cheapest of a set of tile configurations, whose blocks run in waves over the SMs; never faster than its
bytes through memory. Tile and wave quantisation are explicit, split-K is a choice.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flopcast.kernels.shapes import DTYPE_BYTES
from flopcast.roofline.smooth import SOFT_STEP, Array, soft_max, soft_min, trailing_zeros

Params = Mapping[str, float]

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
L2_SHARE = 0.6  # of the L2 that results may fill before they are waited for

# By how much operands whose rows start at multiples of so many bytes (log2) are misaligned: tensor cores
# are fed by 16-byte copies, so the cliff lies below 2^4; from 128 bytes on nothing is left to gain.
_MISALIGNMENT = np.array([3.5, 3.0, 2.5, 2.0, 0.6, 0.4, 0.2, 0.0])
_FAMILY_EDGES = (1.0, 2.75)  # worst misalignment from which on the families of 4 and of 2 bytes take over

PARAMETERS = {
    "peak", "sm_count", "l2_bytes", *TILE_NAMES, "prologue", "epilogue", "fade", "floor", "bandwidth",
    "l2_bandwidth", "absorbed", "split", "split_bandwidth", "quantised",
}  # fmt: skip


def log_seconds(variant: str, params: Params, features: Array, bytes_: Array) -> Array:
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
    return np.log(params["floor"] + soft_max(matrix, memory))


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
    step = soft_max(products, loads, SOFT_STEP)
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
        best[:, i] = soft_min(busy)
    return soft_min(best)


def inputs(variant: str, params: Params, features: Array) -> Array:
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
    zeros = [trailing_zeros(features[:, i]) for i in range(3)]
    a, b = zeros[2 if layout[0] == "n" else 0], zeros[2 if layout[1] == "t" else 1]
    of = [_MISALIGNMENT[(z + shift).clip(0, 7).astype(int)] for z in (a, b, zeros[1])]
    return np.maximum(of[0], of[1]), of[2]
