"""The law of products whose rows do not all start at multiples of 16 bytes: kernels of older GPUs. numpy only.

Hopper's tensor memory accelerator copies 16 bytes at least, so cuBLAS falls back: on an H200 to Ampere's kernels
(mma.sync, cp.async of 4 bytes, "align2" of bf16) where the worst of both operands and the result starts at multiples
of 4 or 8 bytes, at a third of the pace of aligned ones, and to Turing's ("align1", loads of single elements) where it
is 2, at a fifth. Either kind has a few tiles, and each runs

whole     one thread block per tile, in waves over the SMs; what of a block lies outside the result is not loaded
serial    k divided so finely that waves come out even, its parts added up in turn (a memset of flags comes first)
reduced   k divided, the parts added up by a kernel of its own

The time of each is fitted to products whose kernels are named (`fit/gemm_unaligned.py`), and so is which one is picked:
a softmax of -sharpness x log(time), and what else speaks for a kernel by the sizes. The law is the mean log time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopcast.roofline.gpu.laws.law import Params
from flopcast.roofline.gpu.laws.smooth import Array

PREFIX = "unaligned/"
# Share of the peak that `step` is relative to, by family; a surface's fit moves it by a parameter of its own.
SHARE = {"align2": 0.25, "align1": 0.125}
MODES = ("whole", "serial", "reduced")
# How an operand's rows start: the power of two that divides their bytes, lines have 128. Where that is less than 16,
# rows may start each within SHIFT bytes of the last one's place in a line, as those of a width beside a multiple of 64
# do, or "apart", which takes 2 to 8% longer (nt, rows of 4 bytes, k of 3,458 and 2,262: 35 and 39 ns per element).
_BYTES = (2, 4, 8, 16, 32, 64, 128)
ROWS = (*(str(power) for power in _BYTES), *(f"{power}_apart" for power in _BYTES[:3]))
LINE, SHIFT = 128, 8
# What a tile's rows take besides, by how far they are from multiples of PITCH, in steps of two bytes: nt whose rows of
# 4 or 8 bytes are within 24 of a multiple takes 6% less than the mean of its kind.
PITCH = 512
SHIFTS = PITCH // 4 + 1
OPERANDS = "abc"
LEAST_BESIDES = 0.002  # log seconds; smaller extra times are not kept
SLOPES = ("", "_m", "_n", "_k")  # what speaks for a tile's mode: a constant, and by log2 of the sizes
CENTER = np.array([11.0, 11.0, 10.0])  # log2 of m, n and k that the constants are for
OF_TILE = ("step", "fixed", *(f"{mode}{slope}" for mode in MODES for slope in SLOPES))
COMMON = (
    "sharpness", "fade", "outside", "in_step", "alone", "small_alone", "serial_step", "serial_fixed", "reduced_step",
    "reduced", "reduced_bandwidth", *(f"{operand}{aligned}" for operand in "abc" for aligned in ROWS),
)  # fmt: skip
KNOWN = 8.0, 14.0  # log2 of sizes that a choice is learnt at
FADE_FLOPS, LEAST_SLOWER = 2.0**36, 0.7
PAIRED = 128 * 128  # tiles of this area are two to an SM, smaller ones more
MEMORY_BANDWIDTH = 3.5e12  # bytes/s assumed for the choice; times use the surface's own
PARTS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)  # that k is divided into


class Sizes(NamedTuple):
    """Of products, [rows, 1]: m, n, k, batch, and of operands and result, [rows], indices into ROWS and shifts, as
    `row_shift` has them."""

    m: Array
    n: Array
    k: Array
    batch: Array
    aligned: tuple[NDArray[np.intp], ...]
    shifted: tuple[NDArray[np.intp], ...]


def sizes_of(sides: Array, row_bytes: NDArray[np.int64]) -> Sizes:
    """From m, n, k and batch, [rows, 4], and the bytes of a row of both operands and the result, [rows, 3]."""
    return _sizes(sides, row_kind(row_bytes), row_shift(row_bytes))


def _sizes(sides: Array, aligned: NDArray[np.intp], shifted: NDArray[np.intp]) -> Sizes:
    m, n, k, batch = (sides[:, [i]] for i in range(4))
    return Sizes(m, n, k, batch, tuple(aligned.T), tuple(shifted.T))


def row_shift(row_bytes: NDArray[np.int64]) -> NDArray[np.intp]:
    """The distance of rows' bytes, an even number, from the nearest multiple of PITCH, in units of two bytes."""
    return np.asarray(np.minimum(row_bytes % PITCH, -row_bytes % PITCH) // 2, np.intp)


def row_kind(row_bytes: NDArray[np.int64]) -> NDArray[np.intp]:
    """The index into ROWS for each number of bytes per row, at least two."""
    power = np.minimum(row_bytes & -row_bytes, LINE)
    level = np.maximum(np.frexp(power)[1] - 2, 0)
    shift = np.minimum(row_bytes % LINE, -row_bytes % LINE)
    return np.asarray(np.where((shift > SHIFT) & (power <= SHIFT), level + len(_BYTES), level), np.intp)


@dataclass(frozen=True)
class Kernels:
    """A family of kernels for one layout. `rows`, `columns`: of the tile; `depth`: of k, that a step of the inner loop
    takes. `of_tile`, `common`: by the names of OF_TILE ([tiles]) and COMMON; times are logs. `shifted`: by operand what
    rows take besides, [tiles, SHIFTS]; none of an operand without."""

    rows: Array
    columns: Array
    depth: Array
    of_tile: dict[str, Array]
    common: dict[str, float]
    shifted: dict[str, Array] = field(default_factory=dict)


class Waves(NamedTuple):
    """[rows, tiles]: blocks along m and n, the share of them that lies outside the result, blocks per SM, and how many
    the busiest SM has, resident or in turn."""

    along_m: Array
    along_n: Array
    beside_m: Array
    beside_n: Array
    even: Array
    busiest: Array


def waves(kernels: Kernels, sizes: Sizes, sm_count: float) -> Waves:
    """Grids are launched with n's blocks filled up to a multiple of 2, 4 or 8 (CUTLASS's threadblock swizzle); the
    idle ones leave at once, but where all fit the SMs together they decide which SMs get two.

    Seen: 128 x 128 tiles, 17 x 5 blocks (of 17 x 8) take 31 us, 17 x 4 ones 16."""
    along_m, along_n = np.ceil(sizes.m / kernels.rows), np.ceil(sizes.n / kernels.columns)
    multiple = np.where(along_n >= 6, 8.0, np.where(along_n >= 3, 4.0, np.where(along_n >= 2, 2.0, 1.0)))
    even = along_m * along_n * sizes.batch / sm_count
    placed = along_m * np.ceil(along_n / multiple) * multiple * sizes.batch / sm_count
    shares = kernels.rows * kernels.columns <= PAIRED
    busiest = np.ceil(np.where(shares & (placed <= 2.0), placed, even))
    beside = 1.0 - sizes.m / (along_m * kernels.rows), 1.0 - sizes.n / (along_n * kernels.columns)
    return Waves(along_m, along_n, *beside, even, busiest)


def log_times(kernels: Kernels, sizes: Sizes, at: Waves, pace: float, sm_count: float) -> Array:
    """Log seconds of each tile and mode, [rows, tiles, modes], without what memory and launch take. `pace`: FLOP/s
    that `step` is relative to."""
    area = kernels.rows * kernels.columns
    own, common = kernels.of_tile, kernels.common
    a, b, c = (
        np.array([common[f"{operand}{aligned}"] for aligned in ROWS])[index][:, None]
        for operand, index in zip("abc", sizes.aligned, strict=True)
    )
    besides = sum((of[:, at_].T for of, at_ in _shifts(kernels, sizes)), np.zeros(1))
    step = 2.0 * area * sm_count / pace * np.exp(own["step"] + a + b + besides)  # seconds per element of k
    fixed = np.exp(own["fixed"] + c)
    # two blocks of an SM hide one another's loads: an odd one at the end is longer alone
    odd = at.busiest + np.expm1(common["alone"]) * (at.busiest % 2.0)
    alone = np.maximum(at.busiest, np.exp(common["small_alone"]))
    busiest = np.where(area == PAIRED, odd, np.where(area < PAIRED, alone, at.busiest))
    k = np.ceil(sizes.k / kernels.depth) * kernels.depth
    outside, in_step = (min(max(common[name], 0.0), 1.0) for name in ("outside", "in_step"))
    even = at.even * (1.0 - outside * at.beside_m) * (1.0 - outside * at.beside_n)
    whole = (in_step * busiest + (1.0 - in_step) * np.maximum(even, np.minimum(busiest, 1.0))) * (step * k + fixed)
    divided = np.full(whole.shape, np.inf), np.full(whole.shape, np.inf)
    stretch = np.exp(common["serial_step"]), np.exp(common["reduced_step"])
    each = fixed * np.exp(common["serial_fixed"]), fixed
    moved = 8.0 * sizes.m * sizes.n * sizes.batch / np.exp(common["reduced_bandwidth"])
    for parts in PARTS:
        part = step * np.ceil(sizes.k / (parts * kernels.depth)) * kernels.depth
        turns = in_step * np.ceil(at.even * parts) + (1.0 - in_step) * np.maximum(even * parts, 1.0)
        for i, added in enumerate((0.0, moved)):
            np.minimum(divided[i], turns * (part * stretch[i] + each[i]) + parts * added, out=divided[i])
    serial, reduced = divided[0], divided[1] + np.exp(common["reduced"])
    work = 2.0 * sizes.m * sizes.n * sizes.k * sizes.batch
    slower = np.maximum(1.0 + common["fade"] * np.log2(1.0 + work / FADE_FLOPS), LEAST_SLOWER)
    return np.asarray(np.log(np.stack([whole, serial, reduced], axis=-1) * slower[..., None]))


def _shifts(kernels: Kernels, sizes: Sizes) -> list[tuple[Array, NDArray[np.intp]]]:
    of = zip(OPERANDS, sizes.shifted, strict=True)
    return [(kernels.shifted[name], index) for name, index in of if name in kernels.shifted]


def log_sizes(sizes: Sizes) -> Array:
    """[rows, slopes]: one, and log2 of m, n and k less those that constants are for; beyond KNOWN as at its ends."""
    logs = np.log2(np.concatenate([sizes.m, sizes.n, sizes.k], axis=1)).clip(*KNOWN) - CENTER
    return np.concatenate([np.ones((len(logs), 1)), logs], axis=1)


def scores(kernels: Kernels, sizes: Sizes, times: Array) -> Array:
    """Log of unnormalised probabilities, [rows, tiles, modes]."""
    for_it = np.array([[kernels.of_tile[f"{mode}{slope}"] for slope in SLOPES] for mode in MODES])
    speaks = np.einsum("rs,mst->rtm", log_sizes(sizes), for_it)
    return np.asarray(speaks - kernels.common["sharpness"] * times)


def weighed(times: Array, sizes: Sizes, item_bytes: int) -> Array:
    """`log_times` smoothly bounded below by the time of the bytes through memory, by which kernels are picked."""
    m, n, k = sizes.m, sizes.n, sizes.k
    moved = item_bytes * (m * n + m * k + n * k) * sizes.batch / MEMORY_BANDWIDTH
    return np.asarray(np.logaddexp(4.0 * times, 4.0 * np.log(moved)[..., None]) / 4.0)


def probabilities(score: Array) -> Array:
    flat = score.reshape(len(score), -1)
    share = np.exp(flat - flat.max(axis=1, keepdims=True))
    return np.asarray((share / share.sum(axis=1, keepdims=True)).reshape(score.shape))


# --- as a surface's parameters


def is_learnt(params: Params, family: str) -> bool:
    return f"{PREFIX}{family}/sharpness" in params


def to_params(family: str, kernels: Kernels) -> dict[str, float]:
    """The kernels as a surface's parameters, rounded to a thousandth, finer than they are known."""
    start = f"{PREFIX}{family}/"
    found = {f"{start}{name}": round(value, 3) for name, value in kernels.common.items()}
    for i, tile in enumerate(zip(kernels.rows, kernels.columns, kernels.depth, strict=True)):
        of = "x".join(f"{size:.0f}" for size in tile)
        for name in OF_TILE:
            found[f"{start}{of}/{name}"] = round(float(kernels.of_tile[name][i]), 3)
        for operand, table in kernels.shifted.items():
            for shift in np.flatnonzero(np.abs(table[i]) >= LEAST_BESIDES).tolist():
                found[f"{start}{of}/{operand}+{2 * shift}"] = round(float(table[i, shift]), 3)
    return found


@lru_cache(maxsize=64)
def _kernels(given: tuple[tuple[str, float], ...]) -> Kernels:
    values = dict(given)
    tiles = [name.removesuffix("/step") for name in values if name.endswith("/step")]
    rows, columns, depth = np.array([tile.split("x") for tile in tiles], float).T
    of_tile = {name: np.array([values[f"{tile}/{name}"] for tile in tiles]) for name in OF_TILE}
    # older profiles have no parameters for rows apart
    common = {name: values.get(name, values.get(name.removesuffix("_apart"), 0.0)) for name in COMMON}
    shifted = {operand: np.zeros((len(tiles), SHIFTS)) for operand in OPERANDS}
    for i, tile in enumerate(tiles):
        for name, value in values.items():
            if name.startswith(f"{tile}/") and "+" in name:
                operand, shift = name.split("/")[1].split("+")
                shifted[operand][i, int(shift) // 2] = value
    shifted = {operand: table for operand, table in shifted.items() if table.any()}
    return Kernels(rows, columns, depth, of_tile, common, shifted)


def _given(params: Params, family: str) -> tuple[tuple[str, float], ...]:
    start = f"{PREFIX}{family}/"
    return tuple((name[len(start) :], value) for name, value in params.items() if name.startswith(start))


def matrix_seconds(params: Params, family: str, sizes: Sizes, reached: float, item_bytes: int) -> Array:
    """Seconds of the blocks, [rows]; `reached`: the surface's own share of the peak, which `SHARE` stands in for."""
    log_time, _ = _means(params, family, sizes, item_bytes)
    return np.asarray(np.exp(log_time) * (SHARE[family] / reached))


def inputs(params: Params, family: str, sizes: Sizes, item_bytes: int) -> Array:
    """What the likeliest kernels are and leave idle, [rows, INPUTS]."""
    return _means(params, family, sizes, item_bytes)[1]


def row_inputs(sizes: Sizes) -> list[Array]:
    """What power of two divides the rows of operands and result, one column each."""
    return [(kind % len(_BYTES)).astype(float) for kind in sizes.aligned]


INPUTS = 8


def _means(params: Params, family: str, sizes: Sizes, item_bytes: int) -> tuple[Array, Array]:
    """(mean log seconds, inputs), cached: a fit asks for the same products hundreds of times."""
    columns = np.concatenate([*sizes[:4], np.array([*sizes.aligned, *sizes.shifted], float).T], axis=1)
    pace = SHARE[family] * params["peak"] if "peak" in params else 0.0
    return _means_of(_given(params, family), columns.tobytes(), pace, params["sm_count"], item_bytes)


@lru_cache(maxsize=64)
def _means_of(
    given: tuple[tuple[str, float], ...], packed: bytes, pace: float, sm_count: float, item_bytes: int
) -> tuple[Array, Array]:
    columns = np.frombuffer(packed).reshape(-1, 10)
    sizes = _sizes(columns[:, :4], columns[:, 4:7].astype(np.intp), columns[:, 7:].astype(np.intp))
    kernels = _kernels(given)
    at = waves(kernels, sizes, sm_count)
    times = log_times(kernels, sizes, at, pace or 1e14, sm_count)
    share = probabilities(scores(kernels, sizes, weighed(times, sizes, item_bytes)))
    of_tile = share.sum(axis=2)
    found = [
        2.0 * np.log2(kernels.rows),
        2.0 * np.log2(kernels.columns),
        2.0 * np.log2(np.ceil(at.even)),
        4.0 * np.log2(at.along_m * kernels.rows / sizes.m),
        4.0 * np.log2(at.along_n * kernels.columns / sizes.n),
    ]
    whole = share[..., 0] * 2.0 * np.log2(at.busiest / at.even).clip(0.0, 3.0)
    means = [(of_tile * column).sum(axis=1) for column in found] + [whole.sum(axis=1)]
    means += [2.0 * share[..., mode].sum(axis=1) for mode in (1, 2)]
    return np.asarray((share * times).sum(axis=(1, 2))), np.column_stack(means)
