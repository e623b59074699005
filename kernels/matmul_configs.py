"""Configurations of the Triton matmul: what there is, what fits a part, and a cost model that ranks them.

Plain data and arithmetic, no torch. Which configuration a call gets is decided in `matmul_table`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from flopcast.kernels.shapes import DTYPE_BYTES, Gemm

# Shared memory that one block may use, bytes, by compute capability (CUDA programming guide, table of
# technical specifications: the limit per block, 1 KB below the one per multiprocessor).
SHARED_MEMORY = {
    (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376,
    (9, 0): 232448, (10, 0): 232448, (12, 0): 101376,
}  # fmt: skip
STREAM = 0  # as a `split`: stream-K
GLUON = ("gluon", "drift", "turns", "regs")


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes per block; 99 KB, the least of any part since sm_80, for those not listed."""
    return SHARED_MEMORY.get(capability, 101376)


@dataclass(frozen=True)
class MatmulConfig:
    """Tile sizes and launch options of one of the Triton kernels.

    kind: "pointer" (any part, strides and sizes), "tma" (sm_90, 16 bits, rows of whole 16 bytes) or, where it takes
    that, the kernel in Gluon: "gluon" (num_warps / 4 warpgroups share a tile), "drift" (they do, a step of k apart),
    "regs" (they do, with A in registers) or "turns" (two take tiles in turn).
    split: programs per tile, each for a part of k; 1: whole tiles; STREAM (0, tma only): stream-K.
    reduce: parts are summed by a second kernel, not by the program that finishes a tile last (tma only: the
    pointer kernel's always are). subtiles: pieces in which a tile of C is stored (tma). per_sm: programs that
    a multiprocessor runs at once (tma, whole tiles and stream-K).
    rate: what a multiprocessor reaches with this tile relative to the largest, an estimate that only ranks.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    rate: float = 1.0
    kind: str = "pointer"
    split: int = 1
    reduce: bool = False
    subtiles: int = 1
    per_sm: int = 1

    def shared_bytes(self, element_bytes: int) -> int:
        """Shared memory of the pipelined operand tiles and, where C leaves through it, of C's."""
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k * element_bytes
        if self.kind == "pointer":
            return operands
        barriers = 16 * self.num_stages + 64
        (m, more_m), (n, more_n) = blocks(self.block_m), blocks(self.block_n)
        if self.kind in GLUON:  # one buffer per warpgroup, through which one block after another leaves
            rows = self.block_m * (self.num_warps // 4 if self.kind == "turns" else 1)
            return operands + rows * n // self.subtiles * element_bytes + 2 * barriers
        stored = {(m, n // self.subtiles), (more_m, n) if more_m else (m, more_n)}  # blocks of one shape share
        return operands + sum(rows * columns for rows, columns in stored) * element_bytes + barriers

    @property
    def key(self) -> str:
        """Names the configuration in records, all but `rate`, e.g. tma/128x256x64/w8s4/g8/k1c2p1."""
        share = "stream" if self.split == STREAM else f"k{self.split}{'r' if self.reduce else ''}"
        return (
            f"{self.kind}/{self.block_m}x{self.block_n}x{self.block_k}/w{self.num_warps}s{self.num_stages}/"
            f"g{self.group_m}/{share}/c{self.subtiles}p{self.per_sm}"
        )


def _tma(
    m: int, n: int, k: int, warps: int, stages: int, rate: float, subtiles: int = 1, per_sm: int = 1
) -> MatmulConfig:
    return MatmulConfig(m, n, k, warps, stages, rate=rate, kind="tma", subtiles=subtiles, per_sm=per_sm)


# sm_90, 16 bits. 128x256 is the tile whose operand traffic the matrix units need: four stages of it fit when C is
# stored in halves. Two or more programs per multiprocessor hide one another's prologue and epilogue. Small tiles fill
# 132 multiprocessors when there are only 1024 rows.
TMA_SM90 = (
    _tma(128, 256, 64, 8, 4, 1.0, subtiles=2),
    _tma(128, 256, 64, 8, 3, 0.99),
    _tma(256, 128, 64, 8, 4, 0.98, subtiles=2),
    _tma(256, 128, 64, 8, 3, 0.91),
    _tma(128, 128, 64, 8, 6, 0.88),
    _tma(128, 128, 64, 4, 3, 0.94, subtiles=2, per_sm=2),
    _tma(128, 128, 128, 8, 3, 0.91),
    _tma(64, 256, 64, 4, 4, 0.95),
    _tma(64, 256, 64, 4, 2, 0.56, subtiles=2, per_sm=2),
    _tma(256, 64, 64, 8, 4, 0.72),
    _tma(128, 64, 64, 4, 4, 0.66, per_sm=2),
    _tma(128, 64, 128, 4, 4, 0.74),
    _tma(64, 128, 64, 4, 4, 0.76, per_sm=2),
    _tma(64, 128, 128, 4, 4, 0.8),
    _tma(64, 128, 256, 4, 2, 0.44),
    _tma(64, 64, 64, 4, 4, 0.57, per_sm=3),
    _tma(64, 64, 128, 4, 6, 0.66),
    _tma(64, 64, 128, 4, 3, 0.54, per_sm=2),
    _tma(64, 64, 256, 4, 3, 0.56),
    _tma(64, 32, 128, 4, 6, 0.33),
    _tma(64, 32, 256, 4, 4, 0.39),
    _tma(128, 32, 128, 4, 5, 0.48),
)


def _gluon(
    m: int, n: int, warps: int, stages: int, rate: float, subtiles: int = 1, kind: str = "gluon"
) -> MatmulConfig:
    return MatmulConfig(m, n, 64, warps, stages, rate=rate, kind=kind, subtiles=subtiles)


# Of the kernel in Gluon. Rates are those guessed before it was timed, with which the H200's table was made: that a
# matrix instruction takes n / 2 cycles for n columns and 16 to fetch its 64 rows from shared memory, which "regs" does
# ahead. The timings since fit 0.97 to 1.02 to tiles of 128 and of 192 (as 128 + 64) columns, 0.91 to 0.94 to 160, 144
# and 96, and 0.84 to 1.0 to "regs": a second block costs little beside a loading warp, registers for A save nothing.
GLUON_SM90 = (
    _gluon(128, 256, 8, 4, 1.0, 2),
    _gluon(128, 256, 8, 3, 0.99),
    _gluon(256, 128, 8, 4, 0.9, 2),
    _gluon(192, 128, 12, 4, 0.9),
    _gluon(128, 128, 8, 6, 0.88),
    _gluon(256, 192, 8, 3, 0.85, 2),
    _gluon(192, 192, 12, 3, 0.85),
    _gluon(128, 192, 8, 4, 0.84),
    _gluon(256, 160, 8, 3, 0.8),
    _gluon(128, 144, 8, 5, 0.77),
    _gluon(192, 96, 12, 5, 0.67),
    _gluon(128, 96, 8, 6, 0.67),
    _gluon(128, 256, 8, 4, 1.01, 2, "drift"),
    _gluon(256, 128, 8, 4, 0.91, 2, "drift"),
    _gluon(128, 192, 8, 5, 0.85, 2, "drift"),
    _gluon(128, 192, 8, 4, 0.82, 2, "turns"),
    _gluon(128, 128, 8, 6, 0.86, 2, "turns"),
    _gluon(64, 256, 8, 4, 0.88, 2, "turns"),
    _gluon(64, 192, 8, 6, 0.74, 1, "turns"),
    _gluon(128, 256, 8, 4, 1.05, 2, "regs"),
    _gluon(128, 256, 8, 3, 1.04, 1, "regs"),
    _gluon(192, 192, 12, 3, 1.05, 1, "regs"),
    _gluon(256, 160, 8, 3, 1.03, 1, "regs"),
    _gluon(192, 160, 12, 4, 1.02, 1, "regs"),
    _gluon(256, 144, 8, 3, 1.01, 1, "regs"),
    _gluon(192, 144, 12, 4, 1.0, 1, "regs"),
    _gluon(256, 128, 8, 4, 1.0, 2, "regs"),
    _gluon(128, 192, 8, 4, 1.01, 1, "regs"),
    _gluon(128, 192, 8, 5, 1.01, 2, "regs"),
    _gluon(192, 128, 12, 4, 0.96, 1, "regs"),
    _gluon(128, 160, 8, 5, 0.96, 1, "regs"),
    _gluon(128, 144, 8, 5, 0.94, 1, "regs"),
    _gluon(128, 128, 8, 6, 0.9, 1, "regs"),
    _gluon(256, 96, 8, 4, 0.87, 1, "regs"),
    _gluon(192, 96, 12, 5, 0.85, 1, "regs"),
    _gluon(128, 96, 8, 6, 0.8, 1, "regs"),
)
# Tiles of two blocks: 0.7 to 0.8 of the rate of 128x256 out of the flattened loop, in which ptxas runs their products
# one after another (500 TFLOP/s). The kernel in Gluon has them at full rate.
NEW_SM90 = (
    _tma(128, 192, 64, 8, 5, 0.95, subtiles=2),
    _tma(128, 192, 64, 8, 4, 0.95),
    _tma(192, 128, 64, 8, 4, 0.94),
    _tma(64, 192, 64, 4, 3, 0.92, subtiles=2, per_sm=2),
    _tma(192, 64, 64, 4, 3, 0.85, subtiles=2, per_sm=2),
    _tma(128, 96, 64, 4, 3, 0.85, per_sm=2),
)
SPLITS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)

SMALL_FLOPS = 1e10  # 15 to 25 us
# Pointers, 16-bit operands: what sm_90 takes where tensor-memory copies cannot (rows not of whole 16 bytes), and
# sm_8x always: mma.sync reads operands into registers, so a thinner k step; the two-stage rows are those that fit the
# 99 KB of sm_86 and sm_89.
_HALF_SM90 = (
    MatmulConfig(128, 256, 64, 8, 3, rate=1.0),
    MatmulConfig(256, 128, 64, 8, 3, rate=1.0),
    MatmulConfig(128, 128, 64, 8, 4, rate=0.85),
    MatmulConfig(64, 128, 64, 4, 4, rate=0.65),
    MatmulConfig(128, 64, 64, 4, 4, rate=0.65),
    MatmulConfig(64, 64, 64, 4, 5, rate=0.45),
)
_HALF_SM80 = (
    MatmulConfig(128, 256, 32, 8, 3, rate=1.0),
    MatmulConfig(256, 128, 32, 8, 3, rate=1.0),
    MatmulConfig(128, 128, 32, 4, 4, rate=0.95),
    MatmulConfig(64, 128, 32, 4, 4, rate=0.75),
    MatmulConfig(128, 64, 32, 4, 4, rate=0.75),
    MatmulConfig(64, 64, 32, 4, 5, rate=0.5),
)
_TF32 = (
    MatmulConfig(128, 128, 32, 8, 3, rate=1.0),
    MatmulConfig(64, 128, 32, 4, 3, rate=0.8),
    MatmulConfig(64, 64, 32, 4, 3, rate=0.6),
)
# Exact fp32 runs on the ordinary units, where the accumulator's registers set the tile.
_FP32 = (MatmulConfig(64, 64, 16, 8, 2, rate=1.0), MatmulConfig(32, 32, 32, 4, 2, rate=0.5))


def tiles_for(
    dtype: str, capability: tuple[int, int] = (9, 0), tma: bool = False, new: bool = False
) -> tuple[MatmulConfig, ...]:
    """Every tile for this dtype on this part, unsplit; `tma`: of the kernel with tensor-memory copies, none where the
    part or the dtype has none; `new`: those with it that no device has timed yet, for tuning."""
    table: tuple[MatmulConfig, ...]
    if tma:
        table = TMA_SM90 + (NEW_SM90 + GLUON_SM90) * new if capability[0] == 9 and dtype in ("bf16", "fp16") else ()
    elif dtype == "tf32":
        table = _TF32
    elif dtype == "fp32":
        table = _FP32
    else:
        table = _HALF_SM90 if capability[0] == 9 else _HALF_SM80
    limit = shared_memory_limit(capability)
    return tuple(config for config in table if config.shared_bytes(DTYPE_BYTES[dtype]) <= limit)


@lru_cache(maxsize=1)
def _rates() -> dict[tuple[object, ...], float]:
    every = (*TMA_SM90, *NEW_SM90, *GLUON_SM90, *_HALF_SM90)
    return {_tile(config): config.rate for config in every}


def _tile(config: MatmulConfig) -> tuple[object, ...]:
    return (
        config.kind, config.block_m, config.block_n, config.block_k, config.num_warps, config.num_stages,
        config.subtiles, config.per_sm,
    )  # fmt: skip


def rated(config: MatmulConfig) -> MatmulConfig:
    """The same configuration with its tile's rate, which a key does not hold."""
    return replace(config, rate=_rates().get(_tile(config), config.rate))


def blocks(size: int) -> tuple[int, int]:
    """A tile's side as two powers of 2, the second of them possibly 0: 192 is 128 and 64."""
    first = 1 << (size.bit_length() - 1)
    return first, size - first


def is_power_of_2(size: int) -> bool:
    return size & (size - 1) == 0


def tile_count(config: MatmulConfig, shape: Gemm) -> int:
    return math.ceil(shape.m / config.block_m) * math.ceil(shape.n / config.block_n)


def splits_of(config: MatmulConfig, shape: Gemm, sm_count: int) -> Iterator[MatmulConfig]:
    """The tile whole, and split where its tiles leave multiprocessors idle: up to three programs each."""
    yield config
    if config.kind in GLUON or not is_power_of_2(config.block_m * config.block_n):
        return
    tiles = tile_count(config, shape)
    k_tiles = math.ceil(shape.k / config.block_k)
    slots = sm_count * config.per_sm
    is_small = shape.bytes <= STREAM_BYTES
    if config.kind == "tma" and is_small and slots < 3 * tiles and tiles < 8 * slots and tiles % slots and k_tiles >= 4:
        yield replace(config, split=STREAM)
    for split in SPLITS:
        if tiles * split > 3 * sm_count or k_tiles < 2 * split:
            return
        yield replace(config, split=split)
        if split >= 3:
            yield replace(config, split=split, reduce=True)


# --- the cost model, in seconds: fitted to an H200's times of the kernels above (median error 5%)

SM_MACS_PER_SECOND = 800e12 / 2 / 132  # at a rate of 1
START_SECONDS = 2.5e-6  # a launch right after another, and its first loads
WAVE_SECONDS = 0.3e-6  # per tile of a program: draining, and
STORE_SECONDS = 2.4e-11  # per element of the tile: the epilogue
PART_SECONDS = 1.3e-13 * 4  # per element of a part, in the workspace
LAST_SECONDS = 0.5e-6  # finding out that a program is the last of its tile, and
LAST_PART_SECONDS = 0.8e-10  # per element of each part that it reads
KERNEL_SECONDS = 1.0e-6  # a second kernel
BYTES_PER_SECOND = 4.0e12
LONE_FACTOR = 1.5  # a program made to share its multiprocessor that is alone there
SPLIT_FACTOR = 1.25  # what parts cost beyond that, at the median of 840 timings
STREAM_FACTOR = 1.4  # what shares that begin anywhere in k cost, at the median of 1,170 timings:
STREAM_BYTES = 40e6  # neighbours read different parts of k, up to twice as slow where the operands outgrow the L2


def cost(config: MatmulConfig, shape: Gemm, sm_count: int) -> float:
    """Estimated seconds of a configuration, which only rank those of one shape.

    The busiest multiprocessor's k steps, its epilogues, and the sum of parts; never less than the memory traffic. A
    wave costs as much when it is not full, which sends 1024-token shapes to small, split or 192-wide tiles.
    """
    tiles = tile_count(config, shape)
    k_tiles = math.ceil(shape.k / config.block_k)
    tile = config.block_m * config.block_n
    step = tile * config.block_k / (SM_MACS_PER_SECOND * config.rate)
    if math.ceil(tiles * max(1, config.split) / sm_count) < config.per_sm:
        step *= LONE_FACTOR
    epilogue = WAVE_SECONDS + tile * STORE_SECONDS
    if config.split == STREAM:
        busy = tiles / sm_count * k_tiles * step + epilogue * max(1.0, tiles / sm_count)
        extra = LAST_SECONDS + min(tiles, 2 * sm_count) * tile * PART_SECONDS + 2 * tile * LAST_PART_SECONDS
    elif config.split > 1:
        rounds = math.ceil(tiles * config.split / sm_count)
        busy = rounds * (math.ceil(k_tiles / config.split) * step + epilogue)
        extra = tiles * config.split * tile * PART_SECONDS
        if config.reduce or config.kind == "pointer":
            extra += KERNEL_SECONDS
        else:
            extra += LAST_SECONDS + config.split * tile * LAST_PART_SECONDS
    else:
        waves = math.ceil(tiles / sm_count)
        hidden = 0.0 if config.kind == "turns" else 1.0 / min(waves, config.per_sm)
        busy = waves * k_tiles * step + epilogue * (1 + (waves - 1) * hidden)
        extra = 0.0
    factor = STREAM_FACTOR if config.split == STREAM else SPLIT_FACTOR if config.split > 1 else 1.0
    return factor * (START_SECONDS + max(busy, shape.bytes / BYTES_PER_SECOND) + extra)


def with_group(config: MatmulConfig, shape: Gemm, sm_count: int) -> MatmulConfig:
    """The same with as many rows of tiles per group as make a wave of tiles nearly square in elements."""
    wave = sm_count * config.per_sm
    ideal = math.sqrt(wave * config.block_n / config.block_m)
    group = 2 ** max(0, min(5, round(math.log2(ideal))))
    return replace(config, group_m=group)


def ranked(configs: Iterable[MatmulConfig], shape: Gemm, sm_count: int) -> list[MatmulConfig]:
    """The configurations by estimated time, best first; of equals the one with the larger tile."""
    return sorted(configs, key=lambda config: (cost(config, shape, sm_count), -config.block_m * config.block_n))


def proposals(
    shape: Gemm, sm_count: int, capability: tuple[int, int], count: int, per_tile: int = 3, new: bool = False
) -> list[MatmulConfig]:
    """The `count` most promising configurations of the tensor-memory kernel (of pointers, where there is none), at most
    `per_tile` per tile: what tuning tries. Where there are many waves, the best four tiles come with other groups;
    small products also with pointers, which fetch no descriptor before the first load. `new` as in `tiles_for`."""
    tiles = tiles_for(shape.dtype, capability, True, new) or tiles_for(shape.dtype, capability)
    options: list[MatmulConfig] = []
    for tile in tiles:
        best = ranked(splits_of(tile, shape, sm_count), shape, sm_count)[:per_tile]
        options += [with_group(config, shape, sm_count) for config in best]
    options = ranked(options, shape, sm_count)
    grouped = [
        replace(config, group_m=group)
        for config in options[: 4 if count > 8 else 0]
        if config.split == 1 and tile_count(config, shape) > 3 * sm_count
        for group in (config.group_m // 4, config.group_m // 2, config.group_m * 2)
        if group >= 1
    ]
    pointers = []
    if count > 8 and shape.flops < SMALL_FLOPS and options[0].kind == "tma":
        pointers = ranked(tiles_for(shape.dtype, capability), shape, sm_count)[:3]
    return [*options[: count - len(grouped) - len(pointers)], *grouped, *pointers]
