"""Fits cuBLAS's choice of tile and split to kernel names: a softmax, maximum a posteriori. scipy, at fit time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopcast.kernels.shapes import DTYPE_BYTES, Gemm, Shape
from flopcast.roofline.gpu.fit import gemm_unaligned
from flopcast.roofline.gpu.fit.gemm_unaligned import Ran
from flopcast.roofline.gpu.laws.gemm import tile_params
from flopcast.roofline.gpu.laws.gemm_choice import Candidates, Sizes, Tiles, candidates, scores
from flopcast.roofline.gpu.laws.smooth import Array

# cuBLAS computes the transpose (its matrices are column-major), so the first number of its tile is the size along
# n: nvjet_sm90_tst_128x160_64x5_1x2_h_bz_NTT. Kernels for unaligned rows: `fit/gemm_unaligned.py`.
_NVJET = re.compile(r"nvjet_\w+?_(\d+)x(\d+)_\d+x\d+_")
_FAMILY = "aligned"  # one of `laws.gemm.FAMILIES`
_SHARE_OF_PEAK = 0.75
LEAST_NAMES = 150  # fewer products cannot determine a hundred tiles
LEAST_SEEN = 2  # one sighting of a tile does not show when it is picked
STEP_SD, BLOCK_SD, BIAS_SD = 0.2, 1.0, 1.5


class Launched(NamedTuple):
    """A kernel as its name describes it: tile size along m and along n, and whether k is split."""

    rows: int
    columns: int
    is_split: bool


def launched(kernels: Sequence[Sequence[Any]]) -> Launched | None:
    """Parses a row's kernels ([name, seconds] each); None where no name is of a known kind."""
    names = [str(name) for name, *_ in kernels]
    is_split = any("splitKreduce" in name for name in names)
    for name in names:
        if found := _NVJET.search(name):
            return Launched(int(found[2]), int(found[1]), is_split)
    return None


def learn_tiles(
    rows: Iterable[tuple[Shape, Sequence[Sequence[Any]]]], sm_count: float, peaks: Mapping[str, float]
) -> dict[tuple[int, str], dict[str, float]]:
    """Learns the library's choices of kernel as the law's parameters, by (bytes per item, layout); leaves out groups
    with too few names. `rows`: (shape, kernels); `peaks`: FLOP/s by dtype."""
    aligned: dict[int, dict[Gemm, Launched]] = defaultdict(dict)
    unaligned: dict[tuple[int, str], dict[Gemm, Ran]] = defaultdict(dict)
    for shape, kernels in rows:
        if not isinstance(shape, Gemm):
            continue
        item_bytes = DTYPE_BYTES[shape.dtype]
        if (name := launched(kernels)) is not None:
            aligned[item_bytes][shape] = name
        elif item_bytes == 2 and (one := gemm_unaligned.ran(shape, kernels)) is not None:
            own = unaligned[item_bytes, shape.layout]
            if shape not in own or one.seconds > own[shape].seconds:  # keeps cold operands where both were measured
                own[shape] = one
    learnt: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for item_bytes, found in aligned.items():
        if len(found) < LEAST_NAMES:
            continue
        columns = np.array([(s.m, s.n, s.k, s.batch) for s in found], float)
        sizes = Sizes(*(columns[:, [i]] for i in range(4)))
        peak = max((peaks[s.dtype] for s in found if s.dtype in peaks), default=1e14)
        layouts = [shape.layout for shape in found]
        fitted = fit_tiles(sizes, list(found.values()), sm_count, item_bytes, _SHARE_OF_PEAK * peak, layouts)
        for layout, tiles in fitted.items():
            learnt[item_bytes, layout].update(tile_params(_FAMILY, tiles))
    for kind, ones in unaligned.items():
        peak = max((peaks[s.dtype] for s in ones if s.dtype in peaks), default=1e14)
        learnt[kind].update(gemm_unaligned.learn(list(ones.values()), sm_count, peak))
    return {kind: params for kind, params in learnt.items() if params}


def fit_tiles(
    sizes: Sizes, names: Sequence[Launched], sm_count: float, item_bytes: int, rate: float, layouts: Sequence[str]
) -> dict[str, Tiles]:
    """Fits the tiles of one family, by layout, to products and the kernels launched for them.

    `rate`: prior FLOP/s of a tile. Costs are common to all layouts; each layout has its own biases around common
    ones."""
    from scipy.optimize import minimize

    seen = Counter((name.rows, name.columns) for name in names)
    kept = sorted(tile for tile, count in seen.items() if count >= min(LEAST_SEEN, len(names)))
    kept = kept or sorted(seen)
    index = {tile: i for i, tile in enumerate(kept)}
    use = np.array([(name.rows, name.columns) in index for name in names])
    sizes = Sizes(*(size[use] for size in sizes))
    names = [name for name, used in zip(names, use, strict=True) if used]
    kinds = sorted(set(layouts))
    layout = np.array([kinds.index(one) for one, used in zip(layouts, use, strict=True) if used])
    tile_m, tile_n = np.array(kept, float).T
    found = candidates(tile_m, tile_n, sizes, sm_count, item_bytes)
    count = len(kept)
    label = np.array([index[name.rows, name.columns] + count * name.is_split for name in names])
    # nothing can be learnt from a split that the model holds to be impossible
    possible = (label < count) | (found.parts[np.arange(len(label)), label % count] > 1.0)
    sizes, layout, label = Sizes(*(s[possible] for s in sizes)), layout[possible], label[possible]
    found = Candidates(*(column[possible] for column in found))
    center = np.concatenate([
        np.log(2.0 * tile_m * tile_n * 128.0 / item_bytes * sm_count / rate), np.full(count, np.log(1e-6)),
        np.zeros(count * (1 + len(kinds))), [-1.0, np.log(3e-6), np.log(8e12), np.log(25.0)],
    ])  # fmt: skip
    width = np.concatenate([
        np.full(count, STEP_SD), np.full(count, BLOCK_SD), np.full(count, BIAS_SD),
        np.full(count * len(kinds), BIAS_SD / 2), [2.0, 0.7, 0.7, 0.5],
    ])  # fmt: skip
    at = (sizes, found, layout, label, len(kinds))
    best = minimize(
        _negative_log_posterior, center, args=(*at, center, width), jac=True, method="L-BFGS-B",
        options={"maxiter": 150},
    ).x  # fmt: skip
    return {kind: _tiles(best, tile_m, tile_n, i) for i, kind in enumerate(kinds)}


def _tiles(theta: Array, tile_m: Array, tile_n: Array, layout: int) -> Tiles:
    count = len(tile_m)
    step, block, common, *own = theta[:-4].reshape(-1, count)
    split_bias, split_cost, split_bandwidth, sharpness = theta[-4:].tolist()
    return Tiles(
        tile_m, tile_n, step, block, common + own[layout], split_bias, split_cost, split_bandwidth,
        float(np.exp(sharpness)),
    )  # fmt: skip


def _negative_log_posterior(
    theta: Array,
    sizes: Sizes,
    found: Candidates,
    layout: NDArray[np.intp],
    label: NDArray[np.intp],
    kinds: int,
    center: Array,
    width: Array,
) -> tuple[float, Array]:
    count = found.waves.shape[1]
    off = (theta - center) / width
    value, gradient = 0.5 * float(off @ off), off / width
    for i in range(kinds):
        rows = layout == i
        if not rows.any():
            continue
        tiles = _tiles(theta, np.empty(count), np.empty(count), i)
        part, some = Candidates(*(c[rows] for c in found)), Sizes(*(s[rows] for s in sizes))
        score = scores(tiles, some, part)
        score -= score.max(axis=1, keepdims=True)
        log_share = score - np.log(np.exp(score).sum(axis=1, keepdims=True))
        own = np.arange(len(score)), label[rows]
        value -= float(log_share[own].sum())
        slope = np.exp(log_share)
        slope[own] -= 1.0  # d value / d score
        whole, split = slope[:, :count], slope[:, count:]
        step, block = np.exp(tiles.step), np.exp(tiles.block)
        of_whole = part.steps * step + block
        moved = 8.0 * some.m * some.n * some.batch * part.parts * np.exp(-tiles.split_bandwidth)
        fixed = float(np.exp(tiles.split_cost))
        of_split = part.split_waves * (part.split_steps * step + block) + moved + fixed
        beta = tiles.sharpness
        gradient[:count] -= beta * (
            whole * part.steps * step / of_whole + split * part.split_waves * part.split_steps * step / of_split
        ).sum(axis=0)
        gradient[count : 2 * count] -= beta * (
            whole * block / of_whole + split * part.split_waves * block / of_split
        ).sum(axis=0)
        both = (whole + split).sum(axis=0)
        gradient[2 * count : 3 * count] += both
        gradient[(3 + i) * count : (4 + i) * count] += both
        gradient[-4] += float(split.sum())
        gradient[-3] -= beta * float((split * fixed / of_split).sum())
        gradient[-2] += beta * float((split * moved / of_split).sum())
        gradient[-1] -= beta * float((whole * np.log(part.waves * of_whole) + split * np.log(of_split)).sum())
    return value, gradient
