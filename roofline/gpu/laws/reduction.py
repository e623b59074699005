"""How torch divides a reduction among threads and thread blocks, by its own rules. numpy only.

A reduction of few results is not bound by what it reads but by how many loads a thread does one after another (0.4 us
each from an H200's memory), and by how many blocks' partial sums the last block adds up (0.25 us each). Both follow
from the sizes: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`) and ScanUtils.cuh of torch 2.11.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.stream.lowering.variants import CallVariant

THREADS, WARP, SM_THREADS = 512.0, 32.0, 2048.0
UNROLLED = 4.0  # values that a thread loads at once
MIN_VALUES, MAX_VALUES = 16.0, 256.0  # per thread, where the input is divided among blocks
SPREAD_BLOCKS = 256.0 * 1024.0
LOSS_ROWS, LOSS_THREADS = 16.0, 1024.0
ROWS_LAST, PARTS_LAST, LEAST_PARTS_LAST = 16.0, 128.0, 8.0  # of a batch norm of channels last
VECTOR_FROM = 128.0  # elements of a contiguous row from which on it is read by vectors


class Plan(NamedTuple):
    """One entry per call: `loads` that a thread does one after another; `merged` partial sums that a thread of the last
    block adds up (0 where one block makes a result); `parts`: partial sums that blocks leave in memory for it (0 as
    well)."""

    loads: Array
    merged: Array
    parts: Array


def plan(variant: CallVariant, results: Array, count: Array, sm_count: float) -> Plan:
    """Of `results` results (for a scan: rows) of `count` elements each."""
    if variant.operation == "cumsum":
        return _scan(results, count)
    if "batch_norm" in variant.operation and variant.pattern == "mix~":
        return _channels_last(results, count)
    along = variant.pattern.startswith(("row", "all"))
    found = (_along_rows if along else columns)(results, count, sm_count)
    return found._replace(loads=np.where(count > 1, found.loads, 0.0))  # of one element: a copy


class PlanesPlan(NamedTuple):
    """One entry per call: rounds of the blocks that sum, one block per channel; loads that a thread does one after
    another over all rounds; rounds of the blocks that then write the result, one block per plane."""

    rounds: Array
    loads: Array
    spread: Array


def planes(count: Array, channels: Array, places: Array, sm_count: float) -> PlanesPlan:
    """The plan of a batch norm whose channels are not last, `count` elements per channel in planes of `places`
    (Normalization.cuh: `getNumThreads`, blocks of 512 threads; `batch_norm_elemt` by blocks of 64 or more)."""
    batch = np.maximum(np.round(count / places), 1.0)
    wide = _threads(places)
    high = np.maximum(np.floor(THREADS / wide), 1.0)
    rounds = np.ceil(channels * THREADS / (sm_count * SM_THREADS))
    loads = rounds * np.ceil(batch / high) * np.ceil(places / wide)
    threads = np.maximum(_threads(np.floor(places / 4.0)), np.minimum(_threads(places), 64.0))
    most = np.maximum(np.floor(SPREAD_BLOCKS / channels), 1.0)
    blocks = channels * np.minimum(most, np.ceil(batch / np.maximum(np.floor(64.0 / threads), 1.0)))
    return PlanesPlan(rounds, loads, blocks * threads / (sm_count * SM_THREADS))


def _threads(count: Array) -> Array:
    return np.asarray(np.exp2(np.ceil(np.log2(np.maximum(count, 1.0)))).clip(WARP, THREADS))


def loss_turns(rows: Array) -> Array:
    """Loads that a thread of a loss's forward does one after another: one block of a thread to 16 rows, to the nearest
    power of two, 32 to 1,024 (aten/src/ATen/native/cuda/NLLLoss.cu, `nll_loss_threads`)."""
    threads = np.exp2(np.round(np.log2(np.maximum(np.floor(rows / LOSS_ROWS), 1.0)))).clip(WARP, LOSS_THREADS)
    return np.asarray(np.ceil(rows / threads))


def _along_rows(results: Array, count: Array, sm_count: float) -> Plan:
    vector = np.where(count >= VECTOR_FROM, UNROLLED, 1.0)
    width, height = _block(np.floor(count / vector), results, np.full_like(count, THREADS))
    values = np.ceil(count / width)
    across = values >= np.minimum(16.0 * height, MAX_VALUES)  # all of a block for one result
    values = np.where(across, np.ceil(count / (width * height)), values)
    grid = np.where(across, results, np.ceil(results / height))
    parts = _parts(values, across, grid, width * height, sm_count)
    loads = np.ceil(values / parts / UNROLLED)
    merged = np.where(parts > 1, np.ceil(parts / (width * height)), 0.0)
    return Plan(loads, merged, np.where(parts > 1, results * parts, 0.0))


def columns(results: Array, count: Array, sm_count: float) -> Plan:
    """The plan of a sum down columns, `count` rows of `results`."""
    vector = np.where(results % 4 == 0, 4.0, np.where(results % 2 == 0, 2.0, 1.0))
    width, height = _block(results / vector, count, THREADS / vector)
    across = count >= np.minimum(16.0 * height, MAX_VALUES)
    values = np.where(across, np.ceil(count / height), count)
    grid = np.ceil(results / vector / np.where(across, width, width * height))
    parts = _parts(values, across, grid, width * height, sm_count)
    loads = np.ceil(np.ceil(values / parts) / UNROLLED)
    merged = np.where(parts > 1, np.ceil(parts / height), 0.0)
    return Plan(loads, merged, np.where(parts > 1, results * parts * width * vector, 0.0))


def _channels_last(channels: Array, count: Array) -> Plan:
    """A batch norm of channels last: blocks of 32 channels and 16 rows, of which each takes 16 rows one after another;
    fewer than eight beside one another are one (Normalization.cuh, `flexible_launch_configs`). 1,568 rows of 256
    channels take 51 us so, 3,136 take 17."""
    wide = np.minimum(_power_below(channels), WARP)
    high = np.minimum(_power_below(np.ceil(count / ROWS_LAST)), THREADS / wide)
    parts = np.minimum(np.ceil(count / (high * ROWS_LAST)), PARTS_LAST)
    parts = np.where(parts < LEAST_PARTS_LAST, 1.0, parts)
    merged = np.where(parts > 1.0, np.ceil(parts / high), 0.0)
    return Plan(np.ceil(count / (high * parts)), merged, np.where(parts > 1.0, channels * parts, 0.0))


def _scan(rows: Array, count: Array) -> Plan:
    """Blocks of 512 threads, shared between columns and rows; a row is scanned two elements per thread at a time. A
    single row is scanned by all blocks in one pass (cub)."""
    difference = np.ceil(np.log2(count)) - np.ceil(np.log2(rows))
    across = np.clip(np.floor((9.0 + difference) / 2.0), 4.0, 9.0)
    return Plan(
        np.where(rows > 1, np.ceil(count / np.exp2(across + 1.0)), 1.0), np.zeros_like(rows), np.zeros_like(rows)
    )


def _block(dim0: Array, dim1: Array, threads: Array) -> tuple[Array, Array]:
    """(width, height) of a block."""
    wide, high = (np.minimum(_power_below(dim), threads) for dim in (dim0, dim1))
    height = np.minimum(high, np.floor(threads / np.minimum(wide, WARP)))
    return np.minimum(wide, np.floor(threads / height)), height


def _power_below(size: Array) -> Array:
    return np.asarray(np.exp2(np.floor(np.log2(np.maximum(size, 1.0)))))


def _parts(values: Array, across: NDArray[np.bool_], grid: Array, threads: Array, sm_count: float) -> Array:
    """Blocks that share a result."""
    target = sm_count * np.floor(SM_THREADS / threads)
    parts = np.maximum(np.minimum(np.ceil(target / grid), np.ceil(values / MIN_VALUES)), np.ceil(values / MAX_VALUES))
    return np.where(across & (values >= MAX_VALUES) & (grid <= target), parts, 1.0)
