"""How long an attention call takes: its thread blocks scheduled on the SMs, and the other kernels. numpy only.

An attention kernel gives some rows to each thread block, which walks over the other side in steps: in the forward,
rows of queries over keys; in the backward, rows of keys over queries. Under a causal mask blocks are of different
lengths, so the time is that of a schedule: blocks in launch order, each in the place that is free first (`dealt`). A
block of n steps takes prologue + n steps, and a length that leaves a block partly empty runs a slower kernel. The
backward has further kernels, which only move bytes: a dot product per row of the output, the rounding of the queries'
gradient from fp32 and, where several query heads share a key head, two sums over them.

Fixed parameters describe the kernels' schedules (`schedule_of`): flash's by its source (2.7, as torch
builds it: flash_fwd_launch_template.h, flash_bwd_launch_template.h, flash_api.cpp), cuDNN's by the tiles in its
kernels' names and by what fits 130 random shapes on an H200; the memory-efficient kernels' in fp32 by their names
(fmha_cutlassF_f32_aligned_64x64_rf_sm80, 64x128; fmha_cutlassB_f32_aligned_64x64_k64_sm80, 128x64) and by steps that
take 7.1 us where blocks of heads of 64 columns have an SM to themselves and 4.8 to 5.2 us where they are many, of 128
columns 12.6 and 12.9 us. Triton's on Hopper have a law of their own
(`attention_triton.py`).
"""

from __future__ import annotations

import heapq
import random
from functools import lru_cache
from math import ceil

import numpy as np

from flopcast.kernels.shapes import columns_of_products
from flopcast.microbench.records.machine import Device
from flopcast.roofline.gpu.laws import attention_triton
from flopcast.roofline.gpu.laws.attention_triton import FADE_FLOPS, OVERLAP, Sizes
from flopcast.roofline.gpu.laws.law import Law, Params
from flopcast.roofline.gpu.laws.smooth import Array, soft_max
from flopcast.roofline.stream.lowering.variants import AttentionVariant

# Rows of a block and of a step, blocks at once on an SM, whether other kernels follow (backward), whether few blocks
# are split along the keys (flash forward).
SCHEDULE = ("block", "advance", "resident", "follows", "splits")
# Absent from older profiles: `MASKED`, and whether the residual depends on rounds and on blocks that are part empty.
LATER = ("masked", "rounds")

# Two blocks on one SM each run at 1 / (1 + CROWDING) of a lone one's pace.
CROWDING = 0.5
# Extra time of a step whose scores are masked, in steps without a mask, in flash's forward: on an H200 blocks of short
# causal calls run as if each of their two or three masked steps were nearly two. With it, `LATER`'s inputs and the cold
# surface as base, 666 calls of flash, cross-validated, 90th percentile: forward cold 10.3 to 8.9%, hot 13.4 to 10.6%,
# backward 4.2 to 3.7 and 5.8 to 4.5%.
MASKED = 0.8
AHEAD = 0.2
# Blocks per place that are scheduled one by one; the rest of longer calls counts by its mean.
ROUNDS = 8
# Steps that a block's start is assumed to take while blocks are dealt out; the time is linear between and beyond.
_STARTS = (0.25, 1.5)
# Flash splits the keys where blocks of 64 rows fill less than this share of two blocks per SM.
_FULL, _GOOD, _MOST_SPLITS = 0.8, 0.85, 128
_SPLIT_ROWS = 64
FEW_ROUNDS = 0.25  # below it places are empty, however many
_DONE = 1e-9  # of a block's steps, what is no work left but a rounding; late in long calls clocks round by more
_ROUNDING = 1e-13


def schedule_of(
    backend: str, direction: str, head_dim: int, causal: bool = True, device: Device | None = None
) -> dict[str, float]:
    """The fixed parameters of a backend's kernels, `SCHEDULE`; of Triton's on a Hopper part (`device`, as machine.json
    has it) also their tiles. A backend not known gets blocks of 128 rows."""
    small = head_dim <= 64
    found = {"block": 128.0, "advance": 64.0, "resident": 1.0, "follows": 0.0, "splits": 0.0}
    if backend == "sdpa-cudnn":
        found |= {"advance": 128.0} if direction == "fwd" else {"follows": 1.0}
    elif backend == "sdpa-flash":
        found["advance"] = 128.0 if small else 64.0
        found |= {"resident": 2.0, "splits": 1.0, "masked": MASKED} if direction == "fwd" else {"follows": 1.0}
    elif backend == "sdpa-efficient":
        found |= {"block": 64.0, "advance": 64.0, "resident": 2.0} if small else {"block": 64.0, "advance": 128.0}
        found |= {"follows": 1.0} if direction == "bwd" else {}
    elif backend == "triton" and device and (capability := device.get("capability")):
        major, minor = capability
        name = str(device.get("name", ""))
        found |= attention_triton.parameters(name, (major, minor), direction, head_dim, causal)
    return found | {"rounds": 1.0}


def log_seconds(variant: AttentionVariant, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
    """The log of seconds. features: log2 of batch x heads, of query heads per key head, of the sequence length."""
    own, values = variant.head_dim, variant.value_dim or variant.head_dim
    heads, group, seq = _sizes(features)
    if attention_triton.has_tiles(params):
        return attention_triton.log_seconds(variant, params, Sizes(heads, seq, group), bytes_, flops)
    steps, starts, splits = _dealt(variant, params, heads, seq, group)
    block, advance = params["block"], params["advance"]
    columns = float(columns_of_products(variant.direction, own, values))
    step = 2.0 * block * advance * columns * params["sm_count"] / (params["peak"] * params["efficiency"])
    rows = seq * group if params.get("packs") else seq
    matrix = (steps * step + starts * params["prologue"]) * np.where(
        (rows % block != 0) & (splits == 1), np.exp(params["uneven"]), 1.0
    )
    matrix = matrix * (1.0 + params["fade"] * np.log2(1.0 + flops / FADE_FLOPS))
    seconds = params["floor"] + soft_max(matrix, bytes_ / params["bandwidth"], OVERLAP)
    if params["follows"]:
        seconds = seconds + _following(params, heads * seq * own, group)
    if params["splits"]:  # partial sums in fp32, of which rows are added up
        seconds = seconds + np.where(
            splits > 1, params["merge"] + params["merge_row"] * heads * seq * (5.0 + splits) / 7.0, 0.0
        )
    return np.asarray(np.log(seconds))


def inputs(variant: AttentionVariant, params: Params, features: Array) -> Array:
    """The residual's inputs: the features, how much longer the busiest place runs than the mean, and whether keys are
    split: [rows, sizes + 2].

    With "rounds" among the parameters (older profiles have none) also whether the last block of a head is partly
    empty, and log2 of the rounds of blocks: [rows, sizes + 4]."""
    heads, group, seq = _sizes(features)
    if attention_triton.has_tiles(params):
        return np.column_stack([features, *attention_triton.inputs(variant, params, Sizes(heads, seq, group))])
    steps, _, splits = _dealt(variant, params, heads, seq)
    lengths = [_lengths(variant, params, int(s)) for s in seq]
    places = params["sm_count"] * params["resident"]
    even = heads * np.array([sum(each) for each in lengths]) / places * _pace(int(params["resident"]))
    imbalance = np.log2(np.maximum(steps / np.maximum(even, 1e-9), 1.0)).clip(0.0, 3.0) * 2.0
    columns = [features, imbalance, np.where(splits > 1, 2.0, 0.0)]
    if params.get("rounds"):
        blocks = heads * np.ceil(seq / params["block"])
        columns += [np.where(seq % params["block"] != 0, 2.0, 0.0), np.log2((blocks / places).clip(FEW_ROUNDS))]
    return np.column_stack(columns)


def _following(params: Params, numel: Array, group: Array) -> Array:
    """Seconds of the backward's further kernels. They move 8 bytes per element for the dot products and the cleared
    fp32 sum and 6 for its rounding; each sum over a group reads its bf16 elements and writes one in `group`."""
    seconds = 2.0 * params["follow_floor"] + 14.0 * numel / params["follow_bandwidth"]
    sums = 2.0 * params["follow_floor"] + 4.0 * numel * (1.0 + 1.0 / group) / params["sum_bandwidth"]
    return np.asarray(seconds + np.where(group > 1.0, sums, 0.0))


def _sizes(features: Array) -> tuple[Array, Array, Array]:
    heads, group, seq = (np.asarray(np.exp2(features[:, i]), np.float64) for i in range(3))
    return np.round(heads).clip(1.0), group, np.round(seq).clip(1.0)


# --- the schedule -------------------------------------------------------------------------------------------


def _dealt(
    variant: AttentionVariant, params: Params, heads: Array, seq: Array, group: Array | None = None
) -> tuple[Array, Array, Array]:
    """(steps, blocks) that the place which is done last has run, one after the other, and splits of the keys.

    Forward kernels whose blocks take their rows from all query heads of a key head have "packs", as FlashAttention 3
    has before Hopper."""
    packs = group is not None and bool(params.get("packs"))
    sizes = (heads, seq, np.ones_like(heads) if group is None else group)
    found = np.empty((3, len(heads)))
    lengths: tuple[float, ...]
    sm_count, resident = int(params["sm_count"]), int(params["resident"])
    for row, (count, length, each) in enumerate(zip(*(np.round(x).astype(int).tolist() for x in sizes), strict=True)):
        splits = 1
        if packs:
            lengths = _packed_steps(variant.is_causal, int(params["block"]), int(params["advance"]), length, each)
            count = max(count // each, 1)
        else:
            if params["splits"]:
                splits = flash_splits(count, length, variant.head_dim, sm_count)
            lengths = _lengths(variant, params, length) if splits == 1 else _split(variant, length, splits)
        low, high = (dealt(lengths, count, sm_count, resident, start) for start in _STARTS)
        blocks = (high - low) / (_STARTS[1] - _STARTS[0])
        found[:, row] = low - _STARTS[0] * blocks, blocks, splits
    return found[0], found[1], found[2]


@lru_cache(maxsize=4096)
def _steps(direction: str, causal: bool, block: int, advance: int, seq: int) -> tuple[int, ...]:
    whole, blocks = ceil(seq / advance), range(ceil(seq / block))
    if not causal:
        return (whole,) * len(blocks)
    if direction == "fwd":
        return tuple(ceil(min((i + 1) * block, seq) / advance) for i in blocks)
    return tuple(whole - i * block // advance for i in blocks)


def _lengths(variant: AttentionVariant, params: Params, seq: int) -> tuple[float, ...]:
    """Steps of each block of one head, in launch order."""
    block, advance = int(params["block"]), int(params["advance"])
    steps = _steps(variant.direction, variant.is_causal, block, advance, seq)
    if not (variant.is_causal and params.get("masked")):
        return steps
    most = ceil(block / advance) + (seq % block != 0)  # flash_fwd_kernel.h, n_masking_steps
    return tuple(count + params["masked"] * min(most, count) for count in steps)


def dealt(lengths: tuple[float, ...], heads: int, sm_count: int, resident: int, start: float) -> float:
    """Steps until the last block of `heads` heads is done; blocks take their `lengths` and `start` each.

    Blocks go to SMs in launch order, `resident` (one or two) to each, the next to where one ends; the hardware's order
    of SMs is taken to be random from the second round on (by number, the longest of a head would never meet on an SM:
    20% less than measured for 256 causal blocks)."""
    most = max(1, ROUNDS * sm_count * resident // len(lengths))
    rest = max(heads - most, 0)
    beyond = rest * (sum(lengths) + start * len(lengths)) / (sm_count * resident) * _pace(resident)
    return beyond + _one_by_one(lengths, heads - rest, sm_count, resident, start)


@lru_cache(maxsize=65536)
def _one_by_one(lengths: tuple[float, ...], heads: int, sm_count: int, resident: int, start: float) -> float:
    """The same as `dealt` with every block scheduled. Calls of many heads all come with the same number of them, so
    that most answers are cached."""
    count = len(lengths) * heads
    if len(set(lengths)) == 1:  # all SMs do the same, the first has most to do
        lengths, heads, sm_count = lengths[:1], ceil(count / sm_count), 1
    blocks = [length + start for length in lengths] * heads
    if resident > 1:
        return _in_pairs(blocks, sm_count)
    ends = [0.0] * min(sm_count, len(blocks))
    for length in blocks:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def _pace(resident: int) -> float:
    """The factor by which a block takes longer when all places of its SM are taken."""
    return 1.0 + (resident - 1) * CROWDING


def _in_pairs(blocks: list[float], sm_count: int) -> float:
    """Steps until all `blocks` are done, two on an SM: they share it, the older one ahead. 0: no block is there.

    Two lists of numbers and no calls: a schedule has up to two thousand turns, and a table of shapes many schedules.
    """
    faster, slower = _paces(2)
    order = list(range(sm_count))
    random.Random(1).shuffle(order)
    older = [0.0] * sm_count
    older[: len(blocks)] = blocks[:sm_count]
    younger = [0.0] * sm_count
    for sm, block in zip(order, blocks[sm_count : 2 * sm_count], strict=False):
        younger[sm] = block
    queued = iter(blocks[2 * sm_count :])
    begun = [0.0] * sm_count
    events = [
        (min(old / faster, young / slower) if young else old, sm)
        for sm, (old, young) in enumerate(zip(older, younger, strict=True))
        if old
    ]
    heapq.heapify(events)
    now = 0.0
    while events:
        now, sm = events[0]
        passed, begun[sm] = now - begun[sm], now
        old, young = older[sm], younger[sm]
        old -= passed * faster if young else passed
        young -= passed * slower if young else 0.0
        done = _DONE if now * _ROUNDING < _DONE else now * _ROUNDING
        if old <= done:
            old, young = young, 0.0
        if old <= done:
            old = next(queued, 0.0)
        if young <= done:
            young = next(queued, 0.0) if old else 0.0
        older[sm], younger[sm] = old, young
        if young:
            ends, other = old / faster, young / slower
            heapq.heapreplace(events, (now + (ends if ends < other else other), sm))
        elif old:
            heapq.heapreplace(events, (now + old, sm))
        else:
            heapq.heappop(events)
    return now


@lru_cache(maxsize=16)
def _paces(count: int) -> tuple[float, ...]:
    """Paces of the blocks on an SM, oldest first, relative to a lone block's; their mean is 1 / `_pace`."""
    mean = 1.0 / _pace(count)
    shares = np.linspace(1.0 + AHEAD, 1.0 - AHEAD, count) if count > 1 else [1.0]
    return tuple(float(mean * part) for part in shares)


@lru_cache(maxsize=4096)
def _packed_steps(causal: bool, block: int, advance: int, seq: int, group: int) -> tuple[int, ...]:
    blocks = range(ceil(seq * group / block))
    if not causal:
        return (ceil(seq / advance),) * len(blocks)
    return tuple(ceil(min(ceil((i + 1) * block / group), seq) / advance) for i in blocks)


# --- flash's splits of the keys -----------------------------------------------------------------------------


def _split_columns(head_dim: int) -> int:
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64


@lru_cache(maxsize=65536)
def flash_splits(heads: int, seq: int, head_dim: int, sm_count: int) -> int:
    """Into how many parts flash's forward cuts the keys (`num_splits_heuristic`): the least number that fills the
    last wave nearly as well as the best does."""
    blocks, columns = heads * ceil(seq / _SPLIT_ROWS), ceil(seq / _split_columns(head_dim))
    places = 2 * sm_count
    if blocks >= _FULL * places:
        return 1
    share = {}
    for splits in range(1, min(_MOST_SPLITS, places, columns) + 1):
        if splits == 1 or ceil(columns / splits) != ceil(columns / (splits - 1)):
            waves = blocks * splits / places
            share[splits] = waves / ceil(waves)
    best = max(share.values())
    return min(splits for splits, reached in share.items() if reached >= _GOOD * best)


def _split(variant: AttentionVariant, seq: int, splits: int) -> tuple[int, ...]:
    """Steps of each block of one head whose keys are split, in those of 128 rows by 64 (d128) or 128 (d64): a step
    of 64 rows by twice as many keys is as much work."""
    columns = _split_columns(variant.head_dim)
    each = ceil(ceil(seq / columns) / splits)
    whole = _steps("fwd", variant.is_causal, _SPLIT_ROWS, columns, seq)
    parts = (min(steps - part * each, each) for part in range(splits) for steps in whole)
    return tuple(steps for steps in parts if steps > 0)  # the others end at once


LAW = Law(
    frozenset({"peak", "sm_count", "efficiency", "prologue", "floor", "bandwidth", "fade", "uneven", *SCHEDULE}),
    log_seconds,
    inputs,
)
