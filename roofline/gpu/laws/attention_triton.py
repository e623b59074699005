"""Triton's attention on Hopper: which tiles a call takes, and how many each program runs. numpy only.

As many programs as the part has multiprocessors take tiles to and fro: a round in rising order, the next in falling
order (`rounds_of` and `tile_of` in kernels/triton_attention_hopper.py). Tiles are numbered longest first, of all heads
at once or section by section, so what a call takes is known: the steps of the program that has most to do. Sizes of
tiles come from the table that the kernels themselves go by (kernels/attention_config.py), and are kept with the
surface: a profile says what its kernels did.

    forward     128 query rows, or 64 of two heads of a group, over steps of keys: 2 products per step
    dK and dV   128 keys over steps of the queries of all heads of their group: 4 products
    dQ          128 query rows over steps of keys: 3 products

Long causal backwards take one pass (`attention_config.takes_one_pass`): the tiles of dK and dV make 5 products, dealt
out by work (kernels/attention_schedule.py), and what they add to dQ is cleared before and rounded after.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopcast.kernels.attention_config import ONE_PASS_TOKENS_ELSEWHERE
from flopcast.kernels.attention_schedule import deal_tiles, even_section
from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.laws.law import Params
from flopcast.roofline.gpu.laws.smooth import Array, soft_max
from flopcast.roofline.stream.lowering.variants import AttentionVariant

ROWS = 128  # of a tile: queries, keys of dK and dV
PRODUCTS = {"forward": 2.0, "dkdv": 4.0, "dq": 3.0}
OF_ONE_PASS = 5.0
CLEARED_AND_ROUNDED = 10.0  # bytes for each element of dQ: 4 cleared, 4 read and 2 written
LENGTHS = tuple(2**power for power in range(6, 16))
FIELDS = ("below", "step", "pack", "l2_mib")
ONE_PASS = ("onepass.tokens", "onepass.least", "onepass.step", "onepass.l2_mib")
NO_END = 1e9
_MIB = 1 << 20
FADE_FLOPS = 2.0**36  # 0.1 ms on a large part: above it the clock falls
OVERLAP = 1.5  # exponent of the smooth maximum of matrix and memory time: they overlap in part only


class Sizes(NamedTuple):
    """Sizes of calls: batches times query heads, tokens, and query heads per key head."""

    heads: Array
    seq: Array
    group: Array


class Load(NamedTuple):
    """Work (rows of a tile times rows of a step) and tiles of the program with most to do, and the mean work of all."""

    work: float
    tiles: float
    mean: float


def has_tiles(params: Params) -> bool:
    """Whether a surface's parameters describe these kernels' tiles."""
    return "forward.0.below" in params or "dkdv.0.below" in params


def kernels_of(direction: str) -> tuple[str, ...]:
    return ("forward",) if direction == "fwd" else ("dkdv", "dq")


def parameters(
    device: str, capability: tuple[int, int], direction: str, head_dim: int, causal: bool
) -> dict[str, float]:
    """The tiles as a surface keeps them: `FIELDS` per kernel and range of lengths; {} where other kernels run.

    `below`: end of the range of lengths, exclusive; `step`: keys or queries per step; `pack`: whether the forward
    takes 64 rows of two heads where a group has an even number; `l2_mib`: the sections' size. Where backwards can take
    one pass also ONE_PASS: from how many `tokens` per head of a group on, and from what length at `least`."""
    from flopcast.kernels import attention_config  # at fit time alone

    found: dict[str, float] = {}
    for kernel in kernels_of(direction):
        last: tuple[float, ...] = ()
        entries: list[tuple[float, tuple[float, ...]]] = []
        for seq in LENGTHS:
            shape = Attention(batch=1, heads=2, kv_heads=1, seq=seq, head_dim=head_dim, causal=causal)
            config = attention_config.config_for(
                shape, capability, tma=capability[0] == 9, device=device, deterministic=True
            )
            tile = getattr(config, kernel)
            if tile.kind != "hopper" or not tile.persistent:
                return {}
            step = tile.block_m if kernel == "dkdv" else tile.block_n
            entry: tuple[float, ...] = (float(step), float(tile.pack), float(tile.l2_mib))
            if entry != last:
                # the nearest length in log2 decides: halfway between two
                entries.append((seq / 2**0.5, entry))
                last = entry
        ends = [start for start, _ in entries[1:]] + [NO_END]
        for i, ((_, entry), end) in enumerate(zip(entries, ends, strict=True)):
            for name, value in zip(FIELDS, (end, *entry), strict=True):
                found[f"{kernel}.{i}.{name}"] = value
    if direction == "bwd" and causal and head_dim == 128:
        tile = attention_config.ONE_PASS
        tokens = attention_config.ONE_PASS_TOKENS.get(device, attention_config.ONE_PASS_TOKENS_ELSEWHERE)
        told = (tokens, attention_config.ONE_PASS_LEAST, tile.block_m, tile.l2_mib)
        found |= dict(zip(ONE_PASS, map(float, told), strict=True))
    return found


def one_pass_elsewhere(params: Params, capability: tuple[int, int]) -> dict[str, float]:
    """What is another parameter on a part without a table of tiles: from what length on it takes one pass. The kernels
    for parts before Hopper never do."""
    if "onepass.tokens" not in params:
        return {}
    return {"onepass.tokens": float(ONE_PASS_TOKENS_ELSEWHERE) if capability[0] == 9 else NO_END}


def log_seconds(variant: AttentionVariant, params: Params, sizes: Sizes, bytes_: Array, flops: Array) -> Array:
    """As `attention.log_seconds`. A tile takes a time besides its steps (its first loads, the mask of its diagonal,
    its results), and before dK and dV runs a kernel that only reads: the dot product of each row of the output with its
    gradient."""
    matrix = np.zeros(len(bytes_))
    one_pass = in_one_pass(params, sizes)
    for kernel in kernels_of(variant.direction):
        work, tiles, _ = loads(kernel, variant, params, sizes)
        own = "dq_" if kernel == "dq" else ""
        seconds = _of_tiles(params, own, PRODUCTS[kernel] * variant.head_dim, work, tiles)
        if one_pass.any():
            once = _of_tiles(params, "onepass_", OF_ONE_PASS * variant.head_dim, work, tiles)
            seconds = np.where(one_pass, 0.0 if kernel == "dq" else once, seconds)
        matrix = matrix + seconds
    matrix = matrix * np.where(sizes.seq % ROWS != 0, np.exp(params["uneven"]), 1.0)
    matrix = matrix * (1.0 + params["fade"] * np.log2(1.0 + flops / FADE_FLOPS))
    seconds = params["floor"] + soft_max(matrix, bytes_ / params["bandwidth"], OVERLAP)
    if "follow_bandwidth" in params:
        bytes_each = 4.0 + CLEARED_AND_ROUNDED * one_pass
        seconds = seconds + bytes_each * sizes.heads * sizes.seq * variant.head_dim / params["follow_bandwidth"]
    return np.asarray(np.log(seconds))


def _of_tiles(params: Params, own: str, columns: float, work: Array, tiles: Array) -> Array:
    """Seconds of the program with most to do: `columns` of products for each unit of work, and what a tile takes."""
    rate = params["peak"] / params["sm_count"] * params[f"{own}efficiency"]
    return 2.0 * columns * work / rate + tiles * params[f"{own}prologue"]


def in_one_pass(params: Params, sizes: Sizes) -> NDArray[np.bool_]:
    """Which calls are backwards in one pass: bool. Older profiles have none."""
    if "onepass.tokens" not in params:
        return np.zeros(len(sizes.seq), bool)
    return np.asarray(
        np.round(sizes.seq) >= np.maximum(params["onepass.tokens"] * np.round(sizes.group), params["onepass.least"])
    )


def inputs(variant: AttentionVariant, params: Params, sizes: Sizes) -> list[Array]:
    """Columns of the residual's inputs: per kernel, log2 of its busiest program's work over the mean; whether the last
    tile is partly empty; log2 of the rounds of tiles."""
    kernels = kernels_of(variant.direction)
    of_kernels = [loads(kernel, variant, params, sizes) for kernel in kernels]
    columns = [2.0 * np.log2(work / mean).clip(0.0, 3.0) for work, _, mean in of_kernels]
    columns[-1] = np.where(in_one_pass(params, sizes), 0.0, columns[-1])  # which has no kernel of dQ
    return [*columns, np.where(sizes.seq % ROWS != 0, 2.0, 0.0), np.log2(of_kernels[-1][1])]


def loads(kernel: str, variant: AttentionVariant, params: Params, sizes: Sizes) -> tuple[Array, Array, Array]:
    """(work, tiles, mean work) of each call, as `Load`."""
    table, causal, programs = _table(kernel, params), variant.is_causal, int(params["sm_count"])
    rows = zip(*(np.round(x).astype(int).tolist() for x in sizes), strict=True)
    found = [
        _of_one_pass(programs, variant.head_dim, int(params["onepass.step"]), int(params["onepass.l2_mib"]), *row)
        if is_one_pass and kernel == "dkdv"
        else _load(kernel, causal, table, variant.head_dim, programs, *row)
        for row, is_one_pass in zip(rows, in_one_pass(params, sizes), strict=True)
    ]
    work, tiles, mean = np.array(found, float).reshape(-1, 3).T
    return work, tiles, mean


def _table(kernel: str, params: Params) -> tuple[tuple[float, ...], ...]:
    table: list[tuple[float, ...]] = []
    while f"{kernel}.{len(table)}.below" in params:
        table.append(tuple(params[f"{kernel}.{len(table)}.{name}"] for name in FIELDS))
    return tuple(table)


@lru_cache(maxsize=65536)
def _load(
    kernel: str, causal: bool, table: tuple[tuple[float, ...], ...], head_dim: int, programs: int,
    heads: int, seq: int, group: int,
) -> Load:  # fmt: skip
    _, step, pack, l2_mib = next(entry for entry in table if seq < entry[0])
    if kernel == "forward" and pack and group % 2:  # such heads go by the rule (attention_config.config_for)
        step, pack, l2_mib = float(ROWS), 0.0, 0.0
    row_bytes = 4 * head_dim  # of what the tiles of a head share: two operands of 16 bits
    if kernel == "dkdv":
        pairs, shared, sharing = max(heads // group, 1), group * seq, 1
        blocks = np.arange(ceil(seq / ROWS))
        whole = ceil(seq / step)
        steps = group * (whole - (blocks * ROWS // step if causal else 0 * blocks))
    else:
        rows = ROWS // 2 if pack else ROWS
        pairs = max(heads // 2, 1) if pack else heads
        shared, sharing = seq, max(group // 2, 1) if pack else group
        ends = np.minimum((np.arange(ceil(seq / rows)) + 1) * rows, seq) if causal else np.full(ceil(seq / rows), seq)
        steps = np.ceil(ends[::-1] / step)  # the longest first
    section = min(pairs, sharing * max(1, int(l2_mib) * _MIB // (shared * row_bytes))) if l2_mib else pairs
    order = [np.repeat(steps, min(section, pairs - first)) for first in range(0, pairs, section)]
    work, tiles = _to_and_fro(np.concatenate(order).astype(float), programs)
    return Load(work * ROWS * step, tiles, float(steps.sum()) * pairs / programs * ROWS * step)


@lru_cache(maxsize=65536)
def _of_one_pass(programs: int, head_dim: int, step: int, l2_mib: int, heads: int, seq: int, group: int) -> Load:
    """As `_load`, of a causal backward in one pass."""
    pairs, blocks = max(heads // group, 1), ceil(seq / ROWS)
    steps = group * (ceil(seq / step) - np.arange(blocks) * ROWS // step).astype(float)
    programs = min(programs, pairs * blocks)
    taken = deal_tiles(pairs, blocks, True, even_section(pairs, seq, head_dim, l2_mib * _MIB), programs)
    work, tiles = max((float(steps[np.array(own) % blocks].sum()), float(len(own))) for own in taken)
    return Load(work * ROWS * step, tiles, float(steps.sum()) * pairs / programs * ROWS * step)


def _to_and_fro(lengths: Array, programs: int) -> tuple[float, float]:
    """(steps, tiles) of the program with most to do, of tiles in their order."""
    programs = min(programs, len(lengths))
    turns = ceil(len(lengths) / programs)
    padded = np.zeros(turns * programs)
    padded[: len(lengths)] = lengths
    rounds = padded.reshape(turns, programs)
    rounds[1::2] = rounds[1::2, ::-1]
    sums, counts = rounds.sum(axis=0), (rounds > 0).sum(axis=0)
    longest = int(np.argmax(sums + 0.5 * counts))
    return float(sums[longest]), float(counts[longest])
