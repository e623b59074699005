"""Fits the law of unaligned matrix products (`laws/gemm_unaligned.py`) to products whose kernel names are recorded.

First the kernels' times are fitted by least squares, then the choice among them by a softmax; both are maximum a
posteriori. scipy, at fit time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopcast.kernels.shapes import DTYPE_BYTES, Gemm
from flopcast.roofline.gpu.laws import gemm_unaligned
from flopcast.roofline.gpu.laws.gemm_unaligned import (
    COMMON,
    MODES,
    OF_TILE,
    OPERANDS,
    SHARE,
    SHIFTS,
    SLOPES,
    Kernels,
    Sizes,
    log_sizes,
    log_times,
    waves,
    weighed,
)
from flopcast.roofline.gpu.laws.smooth import Array

# cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_64x3_nn_align2, cutlass_75_..._128x256_nn_align1: cuBLAS
# computes the transpose, so the first number is the tile's size along n; 64 is the depth of a step along k, 32 where
# the name gives none.
_NAME = re.compile(r"cutlass_\w+?gemm_\w+?_(\d+)x(\d+)_(?:(\d+)x\d+_)?[nt]{2}_align([12])\b")
DEPTH = 32
LEAST_NAMES = 60  # fewest products per family and layout
LEAST_SEEN = 3  # fewest products per tile
NEVER = 50.0  # penalty of a tile's mode that was never seen
ROBUST = 0.03  # log seconds; larger errors count linearly
# Corrections by row shift: weight of the prior of zero in products, bound on one product's error, number of sweeps.
FEW, MOST_OFF, SWEEPS = 3.0, 0.15, 3
# In units of two bytes: how near to a multiple of PITCH is close, and the alignment from which all rows behave alike.
CLOSE, LARGEST = (16, 64)
# Priors (value, standard deviation); those of times are of their logarithms.
_FIXED = np.log(2e-6), 1.0
_STEP_SD, _ALIGNED_SD, _BIAS_SD, _SLOPE_SD = 0.5, 0.1, 2.0, 0.5
_COMMON = {
    "fade": (0.0, 0.03), "outside": (0.3, 0.4), "in_step": (0.7, 0.2), "alone": (0.2, 0.2),
    "small_alone": (0.7, 0.5), "serial_step": (0.05, 0.1),
    "serial_fixed": (1.0, 0.7), "reduced_step": (0.05, 0.1), "reduced": (np.log(3e-6), 0.7),
    "reduced_bandwidth": (np.log(2.5e12), 0.7),
}  # fmt: skip
_SHARPNESS = np.log(20.0), 0.7
_LAUNCH = np.log(2e-6), 0.5  # the launch's own time, which the surface's law accounts for


class Ran(NamedTuple):
    """A product and the kernel that a profiler saw: tile (along m, along n, depth of a step), mode, family, seconds."""

    shape: Gemm
    tile: tuple[int, int, int]
    mode: int
    family: str
    seconds: float


def ran(shape: Gemm, kernels: Sequence[Sequence[Any]]) -> Ran | None:
    """Parses a product's kernels ([name, seconds] each); None where no name is of a known kind."""
    names = [str(name) for name, *_ in kernels]
    found = next((match for name in names if (match := _NAME.search(name))), None)
    if found is None:
        return None
    is_reduced = any("splitKreduce" in name for name in names)
    mode = 2 if is_reduced else int(any(name.startswith("Memset") for name in names))
    tile = int(found[2]), int(found[1]), int(found[3] or DEPTH)
    return Ran(shape, tile, mode, f"align{found[4]}", sum(float(seconds) for _, seconds, *_ in kernels))


def learn(rows: Sequence[Ran], sm_count: float, peak: float) -> dict[str, float]:
    """Learns a surface's parameters from the products of one layout and dtype; leaves out a family that too few
    products name. `peak`: FLOP/s of aligned products."""
    found: dict[str, float] = {}
    for family in SHARE:
        mine = [row for row in rows if row.family == family and row.seconds > 0.0]
        seen = Counter(row.tile for row in mine)
        mine = [row for row in mine if seen[row.tile] >= LEAST_SEEN]
        if len(mine) >= LEAST_NAMES:
            found |= gemm_unaligned.to_params(family, fit_kernels(mine, sm_count, SHARE[family] * peak))
    return found


def fit_kernels(rows: Sequence[Ran], sm_count: float, pace: float) -> Kernels:
    """Fits the times of the kernels that `rows` name, then the choice among them. `pace`: reference FLOP/s of steps."""
    tiles = sorted({row.tile for row in rows})
    sizes = sizes_of([row.shape for row in rows])
    tile = np.array([tiles.index(row.tile) for row in rows])
    mode = np.array([row.mode for row in rows])
    kernels = _fit_times(rows, tiles, tile, mode, sizes, sm_count, pace)
    times = weighed(
        log_times(kernels, sizes, waves(kernels, sizes, sm_count), pace, sm_count),
        sizes,
        DTYPE_BYTES[rows[0].shape.dtype],
    )
    return _fit_choice(kernels, sizes, times, tile, mode)


def sizes_of(shapes: Sequence[Gemm]) -> Sizes:
    sides = np.array([(s.m, s.n, s.k, s.batch) for s in shapes], float)
    rows = [(s.k if s.layout[0] == "n" else s.m, s.k if s.layout[1] == "t" else s.n, s.n) for s in shapes]
    item_bytes = np.array([[DTYPE_BYTES[s.dtype]] for s in shapes])
    return gemm_unaligned.sizes_of(sides, np.array(rows) * item_bytes)


def _fit_times(
    rows: Sequence[Ran],
    tiles: Sequence[tuple[int, int, int]],
    tile: NDArray[np.intp],
    mode: NDArray[np.intp],
    sizes: Sizes,
    sm_count: float,
    pace: float,
) -> Kernels:
    from scipy.optimize import least_squares

    count = len(tiles)
    measured = np.log([row.seconds for row in rows])
    item_bytes = DTYPE_BYTES[rows[0].shape.dtype]
    m, n, k, batch = (size[:, 0] for size in sizes[:4])
    memory = item_bytes * (m * n + m * k + n * k) * batch / gemm_unaligned.MEMORY_BANDWIDTH
    shared = [name for name in COMMON if name != "sharpness"]
    believed = [_COMMON.get(name, (0.0, _ALIGNED_SD)) for name in shared]
    center = np.concatenate(
        [np.zeros(count), np.full(count, _FIXED[0]), [value for value, _ in believed], [_LAUNCH[0]]]
    )
    width = np.concatenate(
        [np.full(count, _STEP_SD), np.full(count, _FIXED[1]), [sd for _, sd in believed], [_LAUNCH[1]]]
    )
    sides = np.array(tiles, float)
    own_sides = sides[tile]
    own = Kernels(own_sides[:, [0]], own_sides[:, [1]], own_sides[:, [2]], {}, {})
    at = waves(own, sizes, sm_count)
    line = np.arange(len(rows))

    def made(theta: Array, which: NDArray[np.intp] | None) -> Kernels:
        """The kernels of `theta`: all tiles, or each row's own tile as columns [rows, 1]."""
        step, fixed = theta[:count], theta[count : 2 * count]
        common = dict(zip(shared, theta[2 * count : -1].tolist(), strict=True))
        if which is None:
            return Kernels(sides[:, 0], sides[:, 1], sides[:, 2], {"step": step, "fixed": fixed}, common)
        gathered = {"step": step[which][:, None], "fixed": fixed[which][:, None]}
        return Kernels(own.rows, own.columns, own.depth, gathered, common)

    def misfit(theta: Array) -> Array:
        times = log_times(made(theta, tile), sizes, at, pace, sm_count)[line, 0, mode]
        seconds = np.logaddexp(4.0 * times, 4.0 * np.log(memory)) / 4.0
        off = np.logaddexp(seconds, theta[-1]) - measured
        return np.concatenate([off / ROBUST, (theta - center) / width])

    best = least_squares(misfit, center, loss="soft_l1", max_nfev=40).x
    off = -ROBUST * misfit(best)[: len(rows)]
    return replace(made(best, None), shifted=_besides(off, tile, count, sizes))


def _besides(off: Array, tile: NDArray[np.intp], count: int, sizes: Sizes) -> dict[str, Array]:
    """Corrections in log seconds per tile and row shift, by operand, [tiles, SHIFTS].

    `off` is the log of measured over fitted seconds, per product. Its mean over the products of a tile and an
    alignment is taken first, then the means over those of a shift, each shrunk towards zero where few products
    contribute.

    On an H200, for products of widths left out of the fit and the kernel that ran, the median error (nn and tn, 4 and
    8 bytes) is 2.6 and 2.8% without the corrections, 1.9 and 1.5% with; the standard deviation of nt is 3.1 and
    2.9%."""
    left = np.clip(off, -MOST_OFF, MOST_OFF)
    tables = {operand: np.zeros((count, SHIFTS)) for operand in OPERANDS}
    shifts = np.arange(SHIFTS)
    power = np.where(shifts > 0, np.minimum(shifts & -shifts, LARGEST), LARGEST)
    alike = np.unique(power, return_inverse=True)[1]  # by power of two
    beside = np.where(shifts <= CLOSE, 1, np.where(SHIFTS - 1 - shifts <= CLOSE, 2, 0))  # of PITCH, of its half
    near = beside * SHIFTS // 4 + alike
    levels = ((alike, True), (near, False), (shifts, False))
    for _ in range(SWEEPS):
        for of_shift, is_of_tile in levels:
            for operand, shift in zip(OPERANDS, sizes.shifted, strict=True):
                kind = of_shift[shift] + (SHIFTS * tile if is_of_tile else 0)
                size = SHIFTS * (count if is_of_tile else 1)
                number = np.bincount(kind, minlength=size)
                mean = np.bincount(kind, left, minlength=size) / (number + FEW)
                left = left - mean[kind]
                tables[operand] += mean.reshape(-1, SHIFTS)[:, of_shift]
    return tables


def _fit_choice(
    kernels: Kernels, sizes: Sizes, times: Array, tile: NDArray[np.intp], mode: NDArray[np.intp]
) -> Kernels:
    from scipy.optimize import minimize

    count = len(kernels.rows)
    logs = log_sizes(sizes)
    seen = np.zeros((count, len(MODES)), bool)
    seen[tile, mode] = True
    times = np.where(seen, times, NEVER)
    sd = np.array([_BIAS_SD] + [_SLOPE_SD] * (len(SLOPES) - 1))

    def value_and_slope(theta: Array) -> tuple[float, Array]:
        return negative_log_posterior(theta, logs, times, tile, mode, sd)

    start = np.append(np.zeros(count * len(MODES) * len(SLOPES)), _SHARPNESS[0])
    best = minimize(value_and_slope, start, jac=True, method="L-BFGS-B", options={"maxiter": 150}).x
    speaks = best[:-1].reshape(count, len(MODES), len(SLOPES)).copy()
    speaks[~seen, 0], speaks[~seen, 1:] = -NEVER, 0.0
    of_tile = dict(kernels.of_tile) | {
        f"{name}{slope}": speaks[:, i, j] for i, name in enumerate(MODES) for j, slope in enumerate(SLOPES)
    }
    return Kernels(
        kernels.rows, kernels.columns, kernels.depth, {name: of_tile[name] for name in OF_TILE},
        {"sharpness": float(np.exp(best[-1])), **kernels.common}, kernels.shifted,
    )  # fmt: skip


def negative_log_posterior(
    theta: Array, logs: Array, times: Array, tile: NDArray[np.intp], mode: NDArray[np.intp], sd: Array
) -> tuple[float, Array]:
    """The negative log posterior of the choice of kernels, and its gradient.

    theta: the preference for each tile's modes, [tiles, modes, slopes], then log sharpness; logs[rows, slopes],
    times[rows, tiles, modes]; `tile`, `mode`: what was picked, [rows]."""
    speaks = theta[:-1].reshape(*times.shape[1:], logs.shape[1])
    sharpness = np.exp(theta[-1])
    score = np.einsum("rs,tms->rtm", logs, speaks) - sharpness * times
    score -= score.max(axis=(1, 2), keepdims=True)
    log_share = score - np.log(np.exp(score).sum(axis=(1, 2), keepdims=True))
    line = np.arange(len(tile))
    off = (theta[-1] - _SHARPNESS[0]) / _SHARPNESS[1]
    value = 0.5 * float(((speaks / sd) ** 2).sum()) + 0.5 * float(off**2)
    value -= float(log_share[line, tile, mode].sum())
    slope = np.exp(log_share)
    slope[line, tile, mode] -= 1.0  # d value / d score
    of_speaks = np.einsum("rs,rtm->tms", logs, slope) + speaks / sd**2
    of_sharpness = -sharpness * float((slope * times).sum()) + off / _SHARPNESS[1]
    return value, np.append(of_speaks.ravel(), of_sharpness)
