"""Configurations of the Triton matmul: what they are, and the tiles of the kernel that runs on any part.

Plain data and arithmetic, no torch. The tiles of the tensor-memory kernels, and which of them is the fastest, are
`matmul_law`'s; which configuration a call gets is decided in `matmul_table`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

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
    split: programs per tile, each for a part of k ("pointer", "tma" and "gluon"); 1: whole tiles; STREAM (0, tma only):
    stream-K. reduce: parts are summed by a second kernel, as those of "pointer" and "gluon" always are, not by the
    program that finishes a tile last. subtiles: pieces in which a tile of C is stored (tma). per_sm: programs that a
    multiprocessor runs at once (tma, whole tiles and stream-K).
    rate: of the pointers' tiles, what a multiprocessor reaches relative to the largest, an estimate that only ranks.
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


def pointer_tiles(dtype: str, capability: tuple[int, int] = (9, 0)) -> tuple[MatmulConfig, ...]:
    """The tiles of the kernel that any part runs, for this dtype."""
    table: tuple[MatmulConfig, ...]
    if dtype in ("tf32", "fp32"):
        table = _TF32 if dtype == "tf32" else _FP32
    else:
        table = _HALF_SM90 if capability[0] == 9 else _HALF_SM80
    limit = shared_memory_limit(capability)
    return tuple(config for config in table if config.shared_bytes(DTYPE_BYTES[dtype]) <= limit)


_KEY = re.compile(
    r"(pointer|tma|gluon|drift|regs|turns)/(\d+)x(\d+)x(\d+)/w(\d+)s(\d+)/g(\d+)/(?:(stream)|k(\d+)(r?))/c(\d+)p(\d+)"
)


def from_key(key: str) -> MatmulConfig:
    """The configuration that `MatmulConfig.key` names. Raises ValueError for what is not such a key."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"no matmul configuration: {key!r}; e.g. tma/128x256x64/w8s4/g8/k1/c2p1")
    kind, m, n, k, warps, stages, group, stream, split, reduce, subtiles, per_sm = match.groups()
    return MatmulConfig(
        int(m), int(n), int(k), int(warps), int(stages), int(group), kind=kind,
        split=0 if stream else int(split), reduce=reduce == "r", subtiles=int(subtiles), per_sm=int(per_sm),
    )  # fmt: skip


def blocks(size: int) -> tuple[int, int]:
    """A tile's side as two powers of 2, the second of them possibly 0: 192 is 128 and 64."""
    first = 1 << (size.bit_length() - 1)
    return first, size - first


def is_power_of_2(size: int) -> bool:
    return size & (size - 1) == 0


def tile_count(config: MatmulConfig, shape: Gemm) -> int:
    return math.ceil(shape.m / config.block_m) * math.ceil(shape.n / config.block_n)


# --- what ranks the pointers' tiles: an estimate in seconds, by a part of 132 multiprocessors and 800 TFLOP/s

SM_MACS_PER_SECOND = 800e12 / 2 / 132  # at a rate of 1
START_SECONDS = 2.5e-6  # a launch right after another, and its first loads
WAVE_SECONDS = 0.3e-6  # per tile of a program: draining, and
STORE_SECONDS = 2.4e-11  # per element of the tile: the epilogue
BYTES_PER_SECOND = 4.0e12


def pointer_seconds(config: MatmulConfig, shape: Gemm, sm_count: int) -> float:
    """The busiest multiprocessor's k steps and epilogues; never less than the memory traffic. A wave costs as much when
    it is not full."""
    tile = config.block_m * config.block_n
    step = tile * config.block_k / (SM_MACS_PER_SECOND * config.rate)
    waves = math.ceil(tile_count(config, shape) / sm_count)
    busy = waves * (math.ceil(shape.k / config.block_k) * step + WAVE_SECONDS + tile * STORE_SECONDS)
    return START_SECONDS + max(busy, shape.bytes / BYTES_PER_SECOND)


def ranked_pointers(shape: Gemm, sm_count: int, capability: tuple[int, int]) -> list[MatmulConfig]:
    """The pointers' tiles by estimated time, best first; of equals the larger one."""
    tiles = pointer_tiles(shape.dtype, capability)
    return sorted(
        tiles, key=lambda config: (pointer_seconds(config, shape, sm_count), -config.block_m * config.block_n)
    )


def with_group(config: MatmulConfig, sm_count: int) -> MatmulConfig:
    """The same with as many rows of tiles per group as make a wave of tiles nearly square in elements."""
    wave = sm_count * config.per_sm
    ideal = math.sqrt(wave * config.block_n / config.block_m)
    return replace(config, group_m=2 ** max(0, min(5, round(math.log2(ideal)))))
