"""Which tile and split the matrix library picks for a product, learnt from the names of the kernels it launched. numpy.

Libraries choose by a cost model of their own, made to fill the last wave: among cuBLAS's 116 tiles on an H200, the
cheapest by waves x (steps x time per step + time per block) is the one picked in two of three products, and one of the
cheapest three in nine of ten. So the choice is the softmax of -sharpness x log(cost) + bias over tiles, whole or with k
split, and what it is used for (`gemm.py`) is the mean over the likeliest few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopcast.roofline.gpu.laws.smooth import Array

K_STEP_BYTES = 128.0  # a block's inner loop advances by so much of a row
TOP = 3  # choices that are averaged


class Sizes(NamedTuple):
    """m, n, k and batch of products, [rows, 1] each."""

    m: Array
    n: Array
    k: Array
    batch: Array


def sizes_of(features: Array) -> tuple[Array, Array, Array, Array]:
    """m, n, k and batch, [rows] each, of their log2; the batch is 1 where there is no fourth."""
    sizes = np.asarray(np.round(np.exp2(features)), np.float64)
    return sizes[:, 0], sizes[:, 1], sizes[:, 2], sizes[:, 3] if sizes.shape[1] > 3 else np.ones(len(sizes))


@dataclass(frozen=True)
class Tiles:
    """A family of kernels: block tiles (rows of m, columns of n), what a step of the inner loop and a block cost
    (log seconds, up to a common factor), and what else speaks for a tile, whole (`bias`) or split along k.

    `split_cost` (log seconds) and `split_bandwidth` (log bytes/s): what adding up the parts is believed to cost."""

    rows: Array
    columns: Array
    step: Array
    block: Array
    bias: Array
    split_bias: float
    split_cost: float
    split_bandwidth: float
    sharpness: float


class Candidates(NamedTuple):
    """How each tile divides a product, [rows, tiles]: blocks along m and n, then waves and steps per block with k
    whole; the parts that k is split into to fill one wave (1 where it is not split), and its waves and steps."""

    along_m: Array
    along_n: Array
    waves: Array
    steps: Array
    parts: Array
    split_waves: Array
    split_steps: Array


class Choice(NamedTuple):
    """The likeliest choices, [rows, TOP]: index of the tile, parts of k, probability (sum 1)."""

    tile: NDArray[np.intp]
    parts: Array
    share: Array


def candidates(tile_m: Array, tile_n: Array, sizes: Sizes, sm_count: float, item_bytes: int) -> Candidates:
    along_m, along_n = np.ceil(sizes.m / tile_m), np.ceil(sizes.n / tile_n)
    blocks = along_m * along_n * sizes.batch
    steps = np.ceil(sizes.k * item_bytes / K_STEP_BYTES)
    parts = np.maximum(np.minimum(np.floor(sm_count / blocks), np.floor(steps / 4.0)), 1.0)
    return Candidates(
        along_m, along_n, np.ceil(blocks / sm_count), np.broadcast_to(steps, blocks.shape), parts,
        np.ceil(blocks * parts / sm_count), np.ceil(steps / parts),
    )  # fmt: skip


def scores(tiles: Tiles, sizes: Sizes, found: Candidates) -> Array:
    """log of unnormalised probabilities, [rows, 2 tiles]: whole, then split."""
    step, block = np.exp(tiles.step), np.exp(tiles.block)
    whole = found.waves * (found.steps * step + block)
    added = np.exp(tiles.split_cost) + 8.0 * sizes.m * sizes.n * sizes.batch * found.parts * np.exp(
        -tiles.split_bandwidth
    )
    split = found.split_waves * (found.split_steps * step + block) + added
    of_split = tiles.bias + tiles.split_bias - tiles.sharpness * np.log(split)
    return np.concatenate(
        [tiles.bias - tiles.sharpness * np.log(whole), np.where(found.parts > 1.0, of_split, -1e30)], axis=1
    )


def choose(tiles: Tiles, sizes: Sizes, sm_count: float, item_bytes: int) -> Choice:
    found = candidates(tiles.rows, tiles.columns, sizes, sm_count, item_bytes)
    score = scores(tiles, sizes, found)
    count = len(tiles.rows)
    top = min(TOP, score.shape[1])
    best = np.argpartition(-score, top - 1, axis=1)[:, :top]
    value = np.take_along_axis(score, best, axis=1)
    share = np.exp(value - value.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    tile = best % count
    parts = np.where(best < count, 1.0, np.take_along_axis(found.parts, tile, axis=1))
    return Choice(tile, parts, share)
