"""How long a configuration of the tensor-memory kernels takes for a product: what the rule and the forecast go by.

A program's time is that of its k steps, each the slower of its products and its loads, and of the ends of its tiles.
A launch's is that of the busiest multiprocessor, or of the memory's traffic: the operands once, and again for each
wave as far as they do not stay in the L2. Parts of k add their way through a workspace. The constants and the rate of
each tile are fitted to timings on an H200 (`data/tiles_nvidia_h200.json`, by `python -m studies.kernels.tile_law`), and
what they leave over is that of trees (`matmul_trees`).

Arrays of configurations or of shapes, which broadcast. numpy, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopcast.bounds import Positive
from flopcast.decode import load
from flopcast.kernels.matmul_configs import (
    GLUON,
    STREAM,
    MatmulConfig,
    from_key,
    is_power_of_2,
    ranked_pointers,
    shared_memory_limit,
    tile_count,
    with_group,
)
from flopcast.kernels.matmul_trees import fitted as trees
from flopcast.kernels.shapes import DTYPE_BYTES, Gemm

Array = NDArray[np.float64]
FOLDER = Path(__file__).parent / "data"
MACS_PER_SECOND = 800e12 / 2 / 132  # of a multiprocessor, at a rate of 1
LINE = 64  # elements of 128 bytes
KINDS = ("tma", *GLUON, "pointer")
LAYOUTS = ("nt", "nn", "tn", "tt")
L2_FROM, L2_TO = 20e6, 80e6  # bytes of operands of which a wave finds all, and none, in the L2
ITEM_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Seconds, bytes per second, and factors."""

    start: Positive  # a launch right after another, and its first loads
    alone: Positive  # what a program adds to that if no other fits beside it: the next launch cannot begin ahead
    tile: Positive  # per tile of a program: draining, and
    store: Positive  # per element of the tile
    partial_write: Positive  # how much more the bytes of C cost whose rows begin within a sector of 32 bytes
    memory: Positive  # bytes per second of all, and of a multiprocessor's loads:
    loads: Positive
    partial_load: Positive  # how much more a row costs to load that begins within a line, and
    partial_sector: Positive  # within a sector of 32 bytes
    latency: Positive  # of a load: a step takes its share of it, by the stages in flight
    load_power: Positive  # powers by which the slower of two weighs: of products and loads,
    memory_power: Positive  # of programs and the memory
    lone: Positive  # a program made to share its multiprocessor that is alone there
    part: Positive  # per element of a part, in the workspace
    last: Positive  # finding out that a program is the last of its tile, and
    last_part: Positive  # per element of each part that it reads
    kernel: Positive  # a second kernel
    split: Positive  # what parts cost beyond that
    stream: Positive  # shares that begin anywhere in k


@dataclass(frozen=True, kw_only=True)
class Law:
    """The constants, and the rates of the tiles by `tile_key`: what a multiprocessor reaches relative to
    MACS_PER_SECOND. `candidates`: the tiles that a product may get, of which enough timings tell."""

    device: str
    triton: str
    constants: Constants
    rates: Mapping[str, Positive]
    candidates: tuple[str, ...]

    @cached_property
    def tiles(self) -> tuple[MatmulConfig, ...]:
        """A configuration of each candidate, whole."""
        return tuple(map(whole, self.candidates))


class Columns(NamedTuple):
    """Configurations as arrays of one shape."""

    block_m: Array
    block_n: Array
    block_k: Array
    stages: Array
    per_sm: Array
    split: Array
    group: Array
    reduces: NDArray[np.bool_]
    kind: Array  # its place among KINDS
    warps: Array
    rate: Array


class Sizes(NamedTuple):
    """m, n and k of products, whether rows of A, B and C begin within a line of 128 bytes or a sector of 32, and the
    layout's place among LAYOUTS."""

    m: Any
    n: Any
    k: Any
    lines: tuple[Any, Any, Any]
    sectors: tuple[Any, Any, Any]
    layout: int


@lru_cache(maxsize=1)
def fitted() -> Law:
    return load(
        Law,
        FOLDER / "tiles_nvidia_h200.json",
        "a law of matmul tiles",
        hint="`python -m studies.kernels.tile_law` makes it",
    )


def tile_key(config: MatmulConfig) -> str:
    """The key of a configuration without its group and its split: what has a rate, e.g. tma/128x256x64/w8s4/c2p1."""
    parts = config.key.split("/")
    return "/".join((*parts[:3], parts[-1]))


def whole(tile: str) -> MatmulConfig:
    """The configuration of a `tile_key` that splits nothing."""
    *sizes, last = tile.split("/")
    return from_key("/".join((*sizes, "g8/k1", last)))


def columns(configs: Sequence[MatmulConfig], rates: Iterable[float]) -> Columns:
    def of(name: str) -> Array:
        return np.array([getattr(config, name) for config in configs], np.float64)

    kinds = np.array([config.kind for config in configs])
    reduces = np.array([config.reduce for config in configs], bool) | (kinds == "pointer")
    return Columns(
        of("block_m"), of("block_n"), of("block_k"), of("num_stages"), of("per_sm"), of("split"), of("group_m"),
        reduces, np.array([KINDS.index(kind) for kind in kinds], np.float64), of("num_warps"),
        np.fromiter(rates, np.float64),
    )  # fmt: skip


def sizes_of(layout: str, m: Any, n: Any, k: Any) -> Sizes:
    """`m`, `n`, `k`: numbers, or arrays of products of this layout."""
    rows = (m if layout[0] == "t" else k, k if layout[1] == "t" else n, n)
    return Sizes(
        m, n, k,
        (rows[0] % LINE != 0, rows[1] % LINE != 0, rows[2] % LINE != 0),
        (rows[0] % (LINE // 4) != 0, rows[1] % (LINE // 4) != 0, rows[2] % (LINE // 4) != 0),
        LAYOUTS.index(layout),
    )  # fmt: skip


def seconds(law: Constants, configs: Columns, sizes: Sizes, sm_count: int) -> Array:
    """Seconds of each configuration for each product."""
    m, n, k = sizes.m, sizes.n, sizes.k
    tile = configs.block_m * configs.block_n
    along_m, along_n = np.ceil(m / configs.block_m), np.ceil(n / configs.block_n)
    tiles, steps = along_m * along_n, np.ceil(k / configs.block_k)
    waves, parts = np.ceil(tiles / sm_count), np.maximum(configs.split, 1.0)
    of_stream, is_split = configs.split == 0, configs.split > 1

    # a step of k
    products = tile * configs.block_k / (MACS_PER_SECOND * configs.rate)
    slower = [1 + law.partial_load * line + law.partial_sector * sector
              for line, sector in zip(sizes.lines, sizes.sectors, strict=True)]  # fmt: skip
    rows = configs.block_m * slower[0] + configs.block_n * slower[1]
    in_flight = configs.stages * np.clip(tiles * parts / sm_count, 1.0, configs.per_sm)
    step = _norm(products, rows * configs.block_k * ITEM_BYTES / law.loads, law.load_power)
    step = _norm(step, law.latency / in_flight, law.load_power)
    step = np.where(np.ceil(tiles * parts / sm_count) < configs.per_sm, step * law.lone, step)

    # the busiest multiprocessor
    end = law.tile + tile * law.store
    hidden = np.where(configs.kind == KINDS.index("turns"), 0.0, 1 / np.minimum(waves, configs.per_sm))
    busy = waves * steps * step + end * (1 + (waves - 1) * hidden)
    even = tiles / sm_count
    busy = np.where(of_stream, even * steps * step + end * np.maximum(1.0, even), busy)
    busy = np.where(is_split, np.ceil(tiles * parts / sm_count) * (np.ceil(steps / parts) * step + end), busy)

    # the memory
    slots = np.minimum(sm_count * configs.per_sm, tiles)
    group = np.minimum(configs.group, along_m)
    across = np.clip(slots / group, 1.0, along_n)
    down = np.clip(slots / across, group, along_m)
    operands = (m + n) * k * ITEM_BYTES
    of_waves = tiles / slots * k * ITEM_BYTES * (
        np.minimum(down * configs.block_m, m) + np.minimum(across * configs.block_n, n)
    )  # fmt: skip
    lost = np.clip((operands - L2_FROM) / (L2_TO - L2_FROM), 0.0, 1.0)
    traffic = operands + np.maximum(of_waves - operands, 0.0) * lost
    traffic = traffic + m * n * ITEM_BYTES * (1 + law.partial_write * sizes.sectors[2])

    # the parts
    summed = np.where(configs.reduces, law.kernel, law.last + parts * tile * law.last_part)
    extra = np.where(is_split, tiles * parts * tile * law.part + summed, 0.0)
    of_shares = law.last + np.minimum(tiles, 2 * sm_count) * tile * law.part + 2 * tile * law.last_part
    extra = np.where(of_stream, of_shares, extra)
    start = law.start + np.where(configs.per_sm > 1, 0.0, law.alone)
    factor = np.where(of_stream, law.stream, np.where(is_split, law.split, 1.0))
    return np.asarray(factor * (start + _norm(busy, traffic / law.memory, law.memory_power) + extra))


def _norm(one: Any, other: Any, power: float) -> Any:
    """The larger of two, and a little more where they are close."""
    return (one**power + other**power) ** (1 / power)


def inputs(configs: Columns, sizes: Sizes, sm_count: int) -> Array:
    """What the trees ask of each configuration for each product: along the last axis a number for each question."""
    m, n, k = sizes.m, sizes.n, sizes.k
    along_m, along_n = np.ceil(m / configs.block_m), np.ceil(n / configs.block_n)
    parts = np.maximum(configs.split, 1.0)
    work = along_m * along_n * parts / sm_count
    found = {
        "m": np.log2(m), "n": np.log2(n), "k": np.log2(k), "layout": sizes.layout,
        "a within lines": sizes.lines[0], "b within lines": sizes.lines[1], "c within lines": sizes.lines[2],
        "a within sectors": sizes.sectors[0], "b within sectors": sizes.sectors[1],
        "block_m": configs.block_m, "block_n": configs.block_n, "block_k": configs.block_k, "stages": configs.stages,
        "per_sm": configs.per_sm, "warps": configs.warps, "group": configs.group, "kind": configs.kind,
        "split": configs.split, "reduces": configs.reduces,
        "work": work, "waves": np.ceil(work), "full": work / np.ceil(work), "along m": along_m, "along n": along_n,
        "full along m": m / (along_m * configs.block_m), "full along n": n / (along_n * configs.block_n),
        "steps of a part": np.ceil(k / configs.block_k) / parts,
        "a": np.log2(m * k), "b": np.log2(n * k), "c": np.log2(m * n), "operands": np.log2((m + n) * k),
        "products": np.log2(m * n * k),
    }  # fmt: skip
    return np.stack(np.broadcast_arrays(*(np.asarray(value, np.float64) for value in found.values())), axis=-1)


def corrected(cost: Array, configs: Columns, sizes: Sizes, sm_count: int) -> Array:
    """Seconds by the law, [configurations], with what it leaves over."""
    return np.asarray(cost * np.exp(trees().grown(inputs(configs, sizes, sm_count))))


def seconds_of(config: MatmulConfig, shape: Gemm, sm_count: int) -> float:
    """Seconds of one configuration for one product; a tile without a rate has its own estimate."""
    law = fitted()
    one = columns([config], [law.rates.get(tile_key(config), config.rate)])
    sizes = sizes_of(shape.layout, shape.m, shape.n, shape.k)
    return float(corrected(seconds(law.constants, one, sizes, sm_count), one, sizes, sm_count)[0])


# --- which is the fastest

SPLITS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
NEAR = 1.6  # times the fastest by the law: beyond, what it leaves over is not asked for
STREAM_BYTES = 40e6  # neighbours read different parts of k, up to twice as slow where the operands outgrow the L2


def stores_ragged(config: MatmulConfig) -> bool:
    """Whether a tile of the tensor-memory kernel may store C through pointers: 128 accumulators per thread and the
    addresses beside them spill, and blocks stored in pieces need more shared memory than there is."""
    small = config.block_m * config.block_n <= 64 * 32 * config.num_warps
    return config.kind == "tma" and small and config.subtiles == 1


@lru_cache(maxsize=8)
def _candidates(sm_count: int, limit: int) -> tuple[list[MatmulConfig], Columns, NDArray[np.bool_]]:
    """The tiles that fit in `limit` bytes of shared memory, whole and split; as arrays; which may store C ragged."""
    law = fitted()
    found = []
    for tile in law.tiles:
        if tile.kind == "pointer" or tile.shared_bytes(ITEM_BYTES) > limit:
            continue
        found.append(with_group(tile, sm_count))
        if tile.kind == "tma" and is_power_of_2(tile.block_m * tile.block_n):
            split = [replace(found[-1], split=parts) for parts in (STREAM, *SPLITS)]
            found += [*split, *(replace(one, reduce=True) for one in split if one.split >= 3)]
        elif tile.kind == "gluon" and tile.block_n <= 320:  # 128x384 spills where it stores parts
            found += [replace(found[-1], split=parts, reduce=True) for parts in SPLITS]
    rates = [law.rates[tile_key(config)] for config in found]
    return found, columns(found, rates), np.array([stores_ragged(config) for config in found])


def _suits(configs: Columns, shape: Gemm, sm_count: int) -> NDArray[np.bool_]:
    """Where a tile may be split: its parts leave idle multiprocessors work, up to three programs each, and are two
    steps of k at least; shares of stream-K where waves are ragged and few, and operands stay in the L2."""
    tiles = np.ceil(shape.m / configs.block_m) * np.ceil(shape.n / configs.block_n)
    steps = np.ceil(shape.k / configs.block_k)
    slots = sm_count * configs.per_sm
    for_parts = (tiles * configs.split <= 3 * sm_count) & (steps >= 2 * configs.split)
    few = (slots < 3 * tiles) & (tiles < 8 * slots) & (tiles % slots > 0) & (steps >= 4)
    return np.where(configs.split == STREAM, few & (shape.bytes <= STREAM_BYTES), (configs.split == 1) | for_parts)


def estimates(shape: Gemm, sm_count: int, limit: int) -> list[tuple[float, MatmulConfig]]:
    """The configurations of the tensor-memory kernels for a product by their seconds, fastest first; those that may
    store rows of C that are not whole 16 bytes, where it has such."""
    configs, cost = _estimated(shape, sm_count, limit)
    return [(float(cost[i]), configs[i]) for i in np.argsort(cost, kind="stable").tolist() if np.isfinite(cost[i])]


def fastest(shape: Gemm, sm_count: int, limit: int) -> MatmulConfig:
    configs, cost = _estimated(shape, sm_count, limit)
    return configs[int(np.argmin(cost))]


def _estimated(shape: Gemm, sm_count: int, limit: int) -> tuple[list[MatmulConfig], Array]:
    """The candidates and their seconds, infinite for those that do not suit."""
    configs, arrays, ragged = _candidates(sm_count, limit)
    suits = _suits(arrays, shape, sm_count) & (ragged if shape.n % 8 else True)
    sizes = sizes_of(shape.layout, shape.m, shape.n, shape.k)
    cost = np.where(suits, seconds(fitted().constants, arrays, sizes, sm_count), np.inf)
    near = np.flatnonzero(cost < NEAR * cost.min())
    some = Columns._make(column[near] for column in arrays)
    cost[near] = corrected(cost[near], some, sizes, sm_count)
    return configs, cost


SMALL_FLOPS = 1e10  # 15 to 25 us


def proposals(
    shape: Gemm, sm_count: int, capability: tuple[int, int], count: int, per_tile: int = 3
) -> list[MatmulConfig]:
    """The `count` most promising configurations of the tensor-memory kernels (of pointers, where there are none), at
    most `per_tile` per tile: what tuning tries. Where there are many waves, the best four tiles come with other groups;
    small products also with pointers, which fetch no descriptor before the first load."""
    if capability[0] != 9 or DTYPE_BYTES[shape.dtype] != ITEM_BYTES:
        return ranked_pointers(shape, sm_count, capability)[:count]
    of_tile = Counter[str]()
    options: list[MatmulConfig] = []
    for _, config in estimates(shape, sm_count, shared_memory_limit(capability)):
        of_tile[tile_key(config)] += 1
        if of_tile[tile_key(config)] <= per_tile:
            options.append(config)
    grouped = [
        replace(config, group_m=group)
        for config in options[: 4 if count > 8 else 0]
        if config.split == 1 and tile_count(config, shape) > 3 * sm_count
        for group in (config.group_m // 4, config.group_m // 2, config.group_m * 2)
        if group >= 1
    ]
    is_small = count > 8 and shape.flops < SMALL_FLOPS
    pointers = ranked_pointers(shape, sm_count, capability)[:3] if is_small else []
    return [*options[: count - len(grouped) - len(pointers)], *grouped, *pointers]
