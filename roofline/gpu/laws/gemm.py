"""The law of matrix products: a tile's blocks in waves over the SMs, never faster than its bytes through memory. numpy.

Which tile, and whether k is split, is learnt where the measured rows name their kernels (`gemm_choice.py`; parameters
"tile/..."), and the law is the mean log time of the likeliest choices; the times of kernels for unaligned rows are
learnt, too (`gemm_unaligned.py`; "unaligned/..."). Where rows name none, it is the cheapest of tiles that libraries
have.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flopcast.roofline.gpu.laws import gemm_unaligned
from flopcast.roofline.gpu.laws.gemm_choice import K_STEP_BYTES, Choice, Sizes, Tiles, choose, sizes_of
from flopcast.roofline.gpu.laws.law import Law, Params
from flopcast.roofline.gpu.laws.smooth import SOFT_STEP, Array, soft_max, soft_min, trailing_zeros
from flopcast.roofline.stream.lowering.variants import GemmVariant

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
TILE_NAMES = tuple(_TILES)  # one parameter per kind: the share of the peak that its inner loop reaches
_FAMILIES = (("tile_common", "tile_odd"), ("tile_aligned_4",), ("tile_aligned_2",))  # by alignment
# Kernels for unaligned rows put two small blocks on an SM; one alone waits for its loads.
_PAIRED_AREA, _LONE = 128 * 128, 1.5
_REACHED = ("tile_common", "tile_aligned_4", "tile_aligned_2")  # of a chosen tile, by family
SPLITS = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0])
FADE_FLOPS = 2.0**36  # a product of 0.1 ms on a large part: above it the clock falls
# Of (columns, rows at most, sum at most) cuBLAS 13 takes tiles of 64 columns in clusters of two on an H200, on each
# side of these in clusters of four or larger tiles: one row by 1,024 columns takes 13.6 us at k = 2,560, by 960 columns
# 9.0. The time is a start and one for each 64 of the sum: 8% off at the median of 16 such products, before residuals.
_PAIRED, _PAIRED_STEP_SUM = (1024.0, 6.0, 2560.0), 64.0
_PAIRED_START, _PAIRED_STEP = 2.9e-6, 0.27e-6
WRITE_BUFFER_SHARE = 0.6  # of the L2 that results may fill before they are waited for

# By how much operands whose rows start at multiples of so many bytes (log2) are misaligned: tensor cores
# are fed by 16-byte copies, so the cliff lies below 2^4; from 128 bytes on nothing is left to gain.
_MISALIGNMENT = np.array([3.5, 3.0, 2.5, 2.0, 0.6, 0.4, 0.2, 0.0])
_FAMILY_EDGES = (1.0, 2.75)  # worst misalignment from which on the families of 4 and of 2 bytes take over

TILE_PREFIX = "tile/"
FAMILIES = ("aligned", "align2", "align1")  # of kernels, by _FAMILY_EDGES
OF_TILE = "step", "block", "bias"
COMMON = ("split_bias", "split_cost", "split_bandwidth", "sharpness")

PARAMETERS = frozenset({
    "peak", "sm_count", "l2_bytes", *TILE_NAMES, "prologue", "epilogue", "fade", "floor", "bandwidth",
    "l2_bandwidth", "absorbed", "split", "split_bandwidth", "quantised",
})  # fmt: skip


def log_seconds(variant: GemmVariant, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
    m, n, _, batch = sizes_of(features)
    family = _family(variant, features)
    matrix = np.empty(len(m))
    for i, name in enumerate(FAMILIES):
        rows = family == i
        if rows.any() and gemm_unaligned.is_learnt(params, name):
            sizes, reached = _sizes_and_alignment(variant, features[rows]), params[_REACHED[i]]
            matrix[rows] = gemm_unaligned.matrix_seconds(params, name, sizes, reached, variant.item_bytes)
        elif rows.any() and is_learnt(params, name):
            matrix[rows] = _chosen_blocks(variant, params, features[rows], i)
        elif rows.any():
            matrix[rows] = _gemm_blocks(variant, params, features[rows], i)
    # results that fit the L2 are not waited for on their way to memory
    written = variant.item_bytes * m * n * batch
    absorbed = params["absorbed"] / (1.0 + (written / (WRITE_BUFFER_SHARE * params["l2_bytes"])) ** 2)
    memory = (bytes_ - absorbed * written) / params["bandwidth"]
    seconds = params["floor"] + soft_max(matrix, memory)
    if variant.form == "few" and is_learnt(params, FAMILIES[0]):
        waiting = _PAIRED_START + _PAIRED_STEP * np.exp2(features[:, 2]) / _PAIRED_STEP_SUM
        seconds = np.where(_is_paired(features), waiting, seconds)
    return np.log(seconds)


def _is_paired(features: Array) -> NDArray[np.bool_]:
    m, n, k, _ = sizes_of(features)
    columns, rows, sums = _PAIRED
    return np.asarray((n == columns) & (m <= rows) & (k <= sums))


def _gemm_blocks(variant: GemmVariant, params: Params, features: Array, family: int) -> Array:
    """Seconds of the cheapest tile and split of a family, over rows of `features`.

    A step of the inner loop takes as long as its products or its loads, whichever is more."""
    m, n, k, batch = (size[:, None] for size in sizes_of(features))
    sm_count, quantised = params["sm_count"], params["quantised"]
    tile_m, tile_n = np.array([tile for name in _FAMILIES[family] for tile in _TILES[name]], float).T
    reached = np.array([params[name] for name in _FAMILIES[family] for _ in _TILES[name]])
    advance = K_STEP_BYTES / variant.item_bytes
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


def _chosen_blocks(variant: GemmVariant, params: Params, features: Array, family: int) -> Array:
    """Seconds by the likeliest choices of tile and split: the exponential of their mean log."""
    m, n, k, batch = (size[:, None] for size in sizes_of(features))
    tiles, choice = likeliest_tiles(variant, params, features, family)
    tile_m, tile_n = tiles.rows[choice.tile], tiles.columns[choice.tile]
    sm_count, quantised = params["sm_count"], params["quantised"]
    advance = K_STEP_BYTES / variant.item_bytes
    reached = params[_REACHED[family]]
    products = 2.0 * tile_m * tile_n * advance * sm_count / (params["peak"] * reached)
    loads = (tile_m + tile_n) * K_STEP_BYTES * sm_count / params["l2_bandwidth"]
    step = soft_max(products, loads, SOFT_STEP)
    slower = 1.0 + params["fade"] * np.log2(1.0 + 2.0 * m * n * k * batch / FADE_FLOPS)
    fixed = params["prologue"] + params["epilogue"] * tile_m * tile_n / (128 * 128)
    waves = np.ceil(m / tile_m) * np.ceil(n / tile_n) * batch * choice.parts / sm_count
    waves = np.maximum(quantised * np.ceil(waves) + (1.0 - quantised) * waves, 1.0)
    busy = waves * (slower * step * np.ceil(k / choice.parts / advance) + fixed)
    added = params["split"] + 8.0 * choice.parts * m * n * batch / params["split_bandwidth"]
    busy = busy + np.where(choice.parts > 1.0, added, 0.0)
    return np.asarray(np.exp((choice.share * np.log(busy)).sum(axis=1)))


def is_learnt(params: Params, family: str) -> bool:
    """Whether the choice among a family's tiles was learnt from names of kernels."""
    return f"{TILE_PREFIX}{family}/sharpness" in params


def tile_params(family: str, tiles: Tiles) -> dict[str, float]:
    """The parameters that say what was learnt of a family; rounded to a thousandth, finer than they are known."""
    found = {f"{TILE_PREFIX}{family}/{name}": round(getattr(tiles, name), 3) for name in COMMON}
    for i in range(len(tiles.rows)):
        tile = f"{TILE_PREFIX}{family}/{tiles.rows[i]:.0f}x{tiles.columns[i]:.0f}"
        for name in OF_TILE:
            found[f"{tile}/{name}"] = round(float(getattr(tiles, name)[i]), 3)
    return found


def likeliest_tiles(variant: GemmVariant, params: Params, features: Array, family: int) -> tuple[Tiles, Choice]:
    """The tiles of a family and the choice among them. Kept between calls: a fit asks for the same products hundreds of
    times, with other parameters of the time but the same of the choice."""
    start = f"{TILE_PREFIX}{FAMILIES[family]}/"
    given = tuple((name[len(start) :], value) for name, value in params.items() if name.startswith(start))
    features = np.ascontiguousarray(features)
    return _choice_of(given, features.tobytes(), features.shape[1], params["sm_count"], variant.item_bytes)


@lru_cache(maxsize=64)
def _choice_of(
    given: tuple[tuple[str, float], ...], packed: bytes, width: int, sm_count: float, item_bytes: int
) -> tuple[Tiles, Choice]:
    values = dict(given)
    names = [name.removesuffix("/step") for name in values if name.endswith("/step")]
    rows, columns = np.array([name.split("x") for name in names], float).T
    step, block, bias = np.array([[values[f"{name}/{what}"] for name in names] for what in OF_TILE])
    tiles = Tiles(rows, columns, step, block, bias, *(values[name] for name in COMMON))
    features = np.frombuffer(packed).reshape(-1, width)
    sizes = Sizes(*(size[:, None] for size in sizes_of(features)))
    return tiles, choose(tiles, sizes, sm_count, item_bytes)


def blocks(variant: GemmVariant, params: Params, features: Array) -> Array:
    """Thread blocks of the likeliest choice, [rows], each of which has a multiprocessor to itself; 0 where no choice
    was learnt. Of an H200's 1,070 products of 1 GFLOP or more it says in nine of ten cases how many waves they take."""
    found = np.zeros(len(features))
    family = _family(variant, features)
    for i, name in enumerate(FAMILIES):
        rows = np.flatnonzero(family == i)
        if len(rows) and is_learnt(params, name):
            m, n, _, batch = sizes_of(features[rows])
            tiles, choice = likeliest_tiles(variant, params, features[rows], i)
            best = np.arange(len(rows)), choice.share.argmax(axis=1)
            tile = choice.tile[best]
            along = np.ceil(m / tiles.rows[tile]) * np.ceil(n / tiles.columns[tile])
            found[rows] = along * batch * choice.parts[best]
    return found


def inputs(variant: GemmVariant, params: Params, features: Array) -> Array:
    """The residual's inputs. Of few rows also whether cuBLAS pairs blocks where it could group four (`_PAIRED`)."""
    found = _inputs_by_kernels(variant, params, features)
    if variant.form != "few":
        return found
    return np.column_stack([found, 4.0 * _is_paired(features)])


def _inputs_by_kernels(variant: GemmVariant, params: Params, features: Array) -> Array:
    if any(gemm_unaligned.is_learnt(params, name) for name in FAMILIES):
        return _unaligned_inputs(variant, params, features)
    if any(is_learnt(params, name) for name in FAMILIES):
        return _choice_inputs(variant, params, features)
    m, n, _, batch = sizes_of(features)
    columns = [*features.T]
    for rows, cols in ((128, 128), (256, 128), (128, 256), (64, 64)):
        blocks = np.ceil(m / rows) * np.ceil(n / cols) * batch / params["sm_count"]
        columns.append(np.log2(np.ceil(blocks) / blocks).clip(0.0, 3.0) * 2.0)
    columns.append(np.log2(np.ceil(m / 128) * 128 / m) * 4.0)
    columns.append(np.log2(np.ceil(n / 128) * 128 / n) * 4.0)
    columns.extend(_gemm_misalignment(variant, features))
    return np.column_stack(columns)


def learnt_for(variant: GemmVariant, learnt: Mapping[tuple[int, str], Mapping[str, float]]) -> dict[str, float]:
    """Of what was learnt by bytes of an item and layout (`kernel_choice.learn_tiles`) that of the families that a
    variant's products run on."""
    found = learnt.get((variant.item_bytes, variant.layout), {})
    families = FAMILIES[:1] if variant.is_aligned else FAMILIES[1:]
    starts = tuple(f"{start}{name}/" for start in (TILE_PREFIX, gemm_unaligned.PREFIX) for name in families)
    return {name: value for name, value in found.items() if name.startswith(starts)}


def _unaligned_inputs(variant: GemmVariant, params: Params, features: Array) -> Array:
    """The sizes, what the likeliest kernels are and leave idle, and how rows are aligned."""
    found = np.zeros((len(features), gemm_unaligned.INPUTS))
    family = _family(variant, features)
    for i, name in enumerate(FAMILIES):
        rows = family == i
        if rows.any() and gemm_unaligned.is_learnt(params, name):
            sizes = _sizes_and_alignment(variant, features[rows])
            found[rows] = gemm_unaligned.inputs(params, name, sizes, variant.item_bytes)
    sizes = _sizes_and_alignment(variant, features)
    return np.column_stack([features, found, *gemm_unaligned.row_inputs(sizes)])


def _sizes_and_alignment(variant: GemmVariant, features: Array) -> gemm_unaligned.Sizes:
    sides, along = np.column_stack(sizes_of(features)), [*variant.row_axes, 1]  # rows of both operands and the result
    row_bytes = np.minimum(sides[:, along], 2.0**50).astype(np.int64) * variant.item_bytes
    return gemm_unaligned.sizes_of(sides, row_bytes)


def _choice_inputs(variant: GemmVariant, params: Params, features: Array) -> Array:
    """The sizes, what the likeliest tiles are and what they leave idle, and how rows are aligned."""
    found = np.zeros((len(features), 9))
    family = _family(variant, features)
    for i, name in enumerate(FAMILIES):
        rows = family == i
        if rows.any() and is_learnt(params, name):
            found[rows] = _tile_inputs(variant, params, features[rows], i)
    worst, result = _gemm_misalignment(variant, features)
    apart = _apart(variant, features)
    return np.column_stack([features, found, apart, worst, result])


def _tile_inputs(variant: GemmVariant, params: Params, features: Array, family: int) -> Array:
    m, n, _, batch = (size[:, None] for size in sizes_of(features))
    tiles, choice = likeliest_tiles(variant, params, features, family)
    tile_m, tile_n = tiles.rows[choice.tile], tiles.columns[choice.tile]
    along_m, along_n = np.ceil(m / tile_m), np.ceil(n / tile_n)
    waves = along_m * along_n * batch * choice.parts / params["sm_count"]
    columns = [
        2.0 * np.log2(tile_m),
        2.0 * np.log2(tile_n),
        2.0 * np.log2(np.ceil(waves)),
        2.0 * np.log2(np.ceil(waves) / waves),
        2.0 * np.log2(choice.parts),
        4.0 * np.log2(along_m * tile_m / m),
        4.0 * np.log2(along_n * tile_n / n),
        # clusters pair blocks: of a few waves that are odd both ways some wait, and a single row or column of blocks
        # shares no loads (one-wave products of 64 x 64 tiles: up to 1.75 times as long)
        2.0 * (along_m % 2.0) * (along_n % 2.0) * (waves < 4.0),
        2.0 * ((along_m == 1.0) | (along_n == 1.0)),
    ]
    return np.column_stack([(choice.share * column).sum(axis=1) for column in columns])


def _family(variant: GemmVariant, features: Array) -> NDArray[np.intp]:
    return np.asarray(np.digitize(np.maximum(*_gemm_misalignment(variant, features)), _FAMILY_EDGES))


def _apart(variant: GemmVariant, features: Array) -> Array:
    """The misalignment of the better aligned of the two operands."""
    return np.asarray(_operand_misalignment(variant, features).min(axis=0))


def _gemm_misalignment(variant: GemmVariant, features: Array) -> tuple[Array, Array]:
    """Misalignments (worse operand, result). "nt" reads rows of k and k, "nn" of k and n, "tn" of m and n."""
    of = _operand_misalignment(variant, features)
    shift = np.log2(variant.item_bytes)
    result = _MISALIGNMENT[(trailing_zeros(features[:, 1]) + shift).clip(0, 7).astype(int)]
    return of.max(axis=0), result


def _operand_misalignment(variant: GemmVariant, features: Array) -> Array:
    """The misalignment of both operands, [2, rows]."""
    shift = np.log2(variant.item_bytes)
    both = [trailing_zeros(features[:, axis]) for axis in variant.row_axes]
    return np.array([_MISALIGNMENT[(zeros + shift).clip(0, 7).astype(int)] for zeros in both])


LAW = Law(PARAMETERS, log_seconds, inputs)
