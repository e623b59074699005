"""What a configuration of the Triton matmul costs: seconds of one launch, by waves, k steps, copies and parts.

Plain arithmetic without torch. The constants and the rates of the tiles are fitted to timings on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from flopcast.kernels.matmul_configs import STREAM, MatmulConfig, tile_count
from flopcast.kernels.shapes import Gemm

SM_MACS_PER_SECOND = 800e12 / 2 / 132  # of a multiprocessor, at a rate of 1
START = 2.2e-6  # a launch right after another, and its first loads
TILE = 0.2e-6  # per tile of a program: draining, and
STORE = 1.86e-11  # per element of the tile: the epilogue
MEMORY = 3.1e12  # bytes per second
LOADS = 1.2e11  # bytes per second into a multiprocessor's shared memory
PARTIAL_LINE = 0.25  # how much more a row costs to load that starts within a line of 128 bytes
PART = 1.66e-12  # per element of a part, in the workspace
LAST = 2.9e-6  # finding out that a program is the last of its tile
KERNEL = 2.0e-6  # a second kernel
LONE = 1.37  # a program made to share its multiprocessor that is alone there
STREAMED = 1.2  # shares that begin anywhere in k
LINE = 64  # elements of 128 bytes

RATES: Mapping[str, float] = MappingProxyType(
    {
        "drift/128x192x64/w8s5/c2p1": 1.037,
        "drift/128x256x64/w8s4/c2p1": 0.993,
        "drift/256x128x64/w8s4/c2p1": 0.976,
        "gluon/128x128x64/w8s6/c1p1": 1.026,
        "gluon/128x144x64/w8s5/c1p1": 0.881,
        "gluon/128x160x64/w8s5/c1p1": 0.93,
        "gluon/128x192x64/w8s4/c1p1": 1.026,
        "gluon/128x256x64/w8s3/c1p1": 0.994,
        "gluon/128x256x64/w8s4/c2p1": 0.989,
        "gluon/128x320x64/w8s3/c2p1": 1.0,
        "gluon/128x32x64/w8s8/c1p1": 0.5,
        "gluon/128x384x64/w8s3/c2p1": 1.0,
        "gluon/128x64x64/w8s8/c1p1": 0.85,
        "gluon/128x96x64/w8s6/c1p1": 0.944,
        "gluon/192x128x64/w12s4/c1p1": 0.979,
        "gluon/192x160x64/w12s4/c1p1": 0.95,
        "gluon/192x192x64/w12s3/c1p1": 0.977,
        "gluon/192x64x64/w12s6/c1p1": 0.8,
        "gluon/192x96x64/w12s5/c1p1": 0.899,
        "gluon/256x128x64/w8s4/c2p1": 0.981,
        "gluon/256x160x64/w8s3/c1p1": 0.937,
        "gluon/256x192x64/w8s3/c2p1": 1.046,
        "gluon/256x64x64/w8s4/c1p1": 0.85,
        "gluon/256x96x64/w8s4/c1p1": 0.9,
        "regs/128x256x64/w8s3/c1p1": 1.003,
        "regs/192x128x64/w12s4/c1p1": 0.975,
        "regs/192x144x64/w12s4/c1p1": 0.928,
        "regs/192x160x64/w12s4/c1p1": 0.952,
        "regs/192x192x64/w12s3/c1p1": 0.992,
        "tma/128x128x128/w8s3/c1p1": 0.936,
        "tma/128x128x64/w4s3/c2p2": 0.95,
        "tma/128x128x64/w8s6/c1p1": 0.881,
        "tma/128x256x64/w8s3/c1p1": 1.001,
        "tma/128x256x64/w8s4/c2p1": 1.006,
        "tma/128x32x128/w4s5/c1p1": 0.592,
        "tma/128x64x128/w4s4/c1p1": 0.82,
        "tma/128x64x64/w4s4/c1p2": 0.79,
        "tma/256x128x64/w8s3/c1p1": 0.911,
        "tma/256x128x64/w8s4/c2p1": 0.976,
        "tma/256x64x64/w8s4/c1p1": 0.724,
        "tma/64x128x128/w4s4/c1p1": 0.886,
        "tma/64x128x64/w4s4/c1p2": 0.991,
        "tma/64x192x64/w4s3/c2p2": 0.817,
        "tma/64x256x64/w4s2/c2p2": 0.702,
        "tma/64x256x64/w4s4/c1p1": 1.098,
        "tma/64x32x128/w4s6/c1p1": 0.334,
        "tma/64x32x256/w4s4/c1p1": 0.426,
        "tma/64x64x128/w4s3/c1p2": 0.843,
        "tma/64x64x128/w4s6/c1p1": 0.663,
        "tma/64x64x256/w4s3/c1p1": 0.665,
        "tma/64x64x64/w4s4/c1p3": 0.721,
        "turns/128x128x64/w8s6/c2p1": 1.004,
        "turns/128x192x64/w8s4/c2p1": 1.016,
        "turns/64x128x64/w8s6/c1p1": 1.0,
        "turns/64x192x64/w8s6/c1p1": 1.1,
        "turns/64x256x64/w8s4/c2p1": 1.055,
    }
)


def tile_key(config: MatmulConfig) -> str:
    """The key of a configuration without its group and its split: what has a rate."""
    parts = config.key.split("/")
    return "/".join((*parts[:3], parts[-1]))


def partial_rows(shape: Gemm) -> tuple[bool, bool, bool]:
    """Whether rows of A, B and C, as they are stored, begin within a line of 128 bytes."""
    of_a = shape.k if shape.layout[0] == "n" else shape.m
    of_b = shape.n if shape.layout[1] == "n" else shape.k
    return of_a % LINE != 0, of_b % LINE != 0, shape.n % LINE != 0


def seconds(config: MatmulConfig, shape: Gemm, sm_count: int) -> float:
    """Seconds of a configuration: the busiest multiprocessor's k steps, each the slower of its products and its loads,
    its tiles' ends, and the sum of parts; never less than the memory's traffic."""
    a, b, _ = partial_rows(shape)
    tile = config.block_m * config.block_n
    tiles = tile_count(config, shape)
    k_tiles = math.ceil(shape.k / config.block_k)
    products = tile * config.block_k / (SM_MACS_PER_SECOND * RATES[tile_key(config)])
    rows = config.block_m * (1 + PARTIAL_LINE * a) + config.block_n * (1 + PARTIAL_LINE * b)
    step = _norm(products, rows * config.block_k * 2 / LOADS, 6)
    parts = max(1, config.split)
    if math.ceil(tiles * parts / sm_count) < config.per_sm:
        step *= LONE
    end = TILE + tile * STORE
    extra = 0.0
    if config.split == STREAM:
        waves = tiles / sm_count
        busy = waves * k_tiles * step + end * max(1.0, waves)
        extra = LAST + min(tiles, 2 * sm_count) * tile * PART
    elif config.split > 1:
        busy = math.ceil(tiles * parts / sm_count) * (math.ceil(k_tiles / parts) * step + end)
        extra = tiles * parts * tile * PART + (KERNEL if config.reduce or config.kind == "pointer" else LAST)
    else:
        waves = math.ceil(tiles / sm_count)
        hidden = 0.0 if config.kind == "turns" else 1 / min(waves, config.per_sm)
        busy = waves * k_tiles * step + end * (1 + (waves - 1) * hidden)
    return (STREAMED if config.split == STREAM else 1.0) * (START + _norm(busy, shape.bytes / MEMORY, 3) + extra)


def _norm(one: float, other: float, power: int) -> float:
    """The larger of two, and a little more where they are close."""
    return math.exp(math.log(one**power + other**power) / power)
