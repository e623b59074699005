"""The law of matrix products on GPUs before Hopper: thread blocks of one tile each, in waves over the SMs. numpy only.

Kernels of Ampere and Ada (mma.sync, operands copied to shared memory by cp.async) are simple enough to be costed from
the datasheet. A step of a block's inner loop, 128 bytes along k, takes the longest of (smoothly)

matrix units    2 x rows x columns x items / (`peak` of an SM x `reach`)
shared memory   what its warps read, tiles of 64 x 64 (32 x 32 in a block of 64 x 64) each, and what is copied in
L2              (rows + columns) x 128 bytes of an SM's share: these GPUs have no multicast

A product takes waves x (steps x step + `prologue` + `epilogue` x tile), where a wave that is not full counts as
`quantised`; k may be split over blocks, whose sums go through memory. The library takes the cheapest tile and split
nearly always: the law is the mean log time, each weighted by time^-sharpness. Rows that are not aligned to 16 bytes
take older kernels at `align4` and `align2` of the pace. `throttle`: the busy share of the matrix units above which
the power limit lowers the clock (`catalogue/power.py`): it falls by sqrt(throttle / busy), and with it all of the above
but memory. Results that fit in L2 are not all waited for (`absorbed`).

Sources of the terms: CUTLASS's and cuBLAS's ampere_* and cutlass_80_* kernels (tiles and warp tiles in their names),
128 bytes per clock of shared memory (GA100, GA102 and Ada whitepapers).
"""

from __future__ import annotations

import numpy as np

from flopcast.roofline.gpu.laws import memory
from flopcast.roofline.gpu.laws.gemm_choice import sizes_of
from flopcast.roofline.gpu.laws.law import Law, Params
from flopcast.roofline.gpu.laws.smooth import SOFT_STEP, Array, soft_max, trailing_zeros
from flopcast.roofline.stream.lowering.variants import GemmVariant

# Block tiles: rows of m, columns of n.
TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64))
TILE_NAMES = tuple(f"tile/{rows}x{columns}" for rows, columns in TILES)  # log of a factor on a step
SPLITS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
STEP_BYTES = 128.0
WARP_TILE, SMALL_WARP_TILE, SMALL_BLOCK = 64.0, 32.0, 64 * 64
WRITE_BUFFER_SHARE = 0.6  # of the L2 that results may fill before they are waited for
OVERLAP = 3.0  # exponent of the smooth maximum of matrix and memory time
CLOCK_ROUNDS = 5  # of the fixed point of clock and busy share; each halves what is left of the error

PARAMETERS = frozenset({
    "peak", "reach", "sm_count", "l2_bytes", "shared_bandwidth", "l2_bandwidth", "bandwidth", "prologue", "epilogue",
    "floor", "split", "split_bandwidth", "sharpness", "quantised", "absorbed", "align4", "align2", "throttle",
    *TILE_NAMES,
})  # fmt: skip


def log_seconds(variant: GemmVariant, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
    """log of seconds. features: log2 of m, n, k and (if there is a fourth) of the batch."""
    m, n, k, batch = sizes_of(features)
    matrix = _blocks(variant, params, features) / _pace(variant, params, features)
    written = variant.item_bytes * m * n * batch
    absorbed = params["absorbed"] / (1.0 + (written / (WRITE_BUFFER_SHARE * params["l2_bytes"])) ** 2)
    memory = (bytes_ - absorbed * written) / params["bandwidth"]
    computing = 2.0 * m * n * k * batch / params["peak"]
    clock = np.ones(len(m))
    for _ in range(CLOCK_ROUNDS):
        seconds = params["floor"] + soft_max(matrix / clock, memory, OVERLAP)
        busy = computing / (clock * seconds)
        clock = np.sqrt(clock * np.minimum(1.0, np.sqrt(params["throttle"] / np.maximum(busy, 1e-9))))
    return np.asarray(np.log(params["floor"] + soft_max(matrix / clock, memory, OVERLAP)))


def _blocks(variant: GemmVariant, params: Params, features: Array) -> Array:
    """Seconds of the blocks at the highest clock."""
    m, n, k, batch = (size[:, None] for size in sizes_of(features))
    sm_count, quantised = params["sm_count"], params["quantised"]
    rows, columns = np.array(TILES, float).T
    warp = np.where(rows * columns <= SMALL_BLOCK, SMALL_WARP_TILE, WARP_TILE)
    warp_rows, warp_columns = np.minimum(rows, warp), np.minimum(columns, warp)
    read = (rows / warp_rows) * (columns / warp_columns) * (warp_rows + warp_columns)
    advance = STEP_BYTES / variant.item_bytes
    products = 2.0 * rows * columns * advance / (params["peak"] * params["reach"])
    shared = (read + rows + columns) * STEP_BYTES / params["shared_bandwidth"]
    loads = (rows + columns) * STEP_BYTES / params["l2_bandwidth"]
    step = soft_max(soft_max(products, shared, SOFT_STEP), loads, SOFT_STEP) * sm_count
    step = step * np.exp([params[name] for name in TILE_NAMES])
    fixed = params["prologue"] + params["epilogue"] * rows * columns / (128 * 128)
    blocks = np.ceil(m / rows) * np.ceil(n / columns) * batch
    steps = np.ceil(k / advance)
    costs = []
    for split in SPLITS:
        parts = np.minimum(split, steps)
        waves = blocks * parts / sm_count
        waves = quantised * np.ceil(waves) + (1.0 - quantised) * np.maximum(waves, 1.0)
        busy = waves * (np.ceil(steps / parts) * step + fixed)
        if split > 1.0:  # partial sums in fp32, written and read
            busy = busy + params["split"] + 8.0 * parts * m * n * batch / params["split_bandwidth"]
        costs.append(busy)
    logs = np.log(np.concatenate(costs, axis=1))
    share = np.exp(-params["sharpness"] * (logs - logs.min(axis=1, keepdims=True)))
    return np.asarray(np.exp((share * logs).sum(axis=1) / share.sum(axis=1)))


def _pace(variant: GemmVariant, params: Params, features: Array) -> Array:
    """The pace of the kernels for the alignment of the operands' rows, 1 from 16 bytes on."""
    zeros = np.minimum(*(trailing_zeros(features[:, axis]) for axis in variant.row_axes))
    aligned = variant.item_bytes * np.exp2(zeros)
    return np.where(aligned >= 16, 1.0, np.where(aligned >= 4, params["align4"], params["align2"]))


LAW = Law(PARAMETERS, log_seconds, memory.inputs)
