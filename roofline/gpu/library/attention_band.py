"""How long the Triton attention takes on a GPU where windows or documents hide keys: the plain kernels' blocks.

Such a call runs on the plain kernels (`kernels.triton_attention`), of which a block's time is known from
causal calls on an H200 (`python -m studies.shipped.attention_bands`); Hopper's own kernels, which the profile's surface
times, have neither. A tile takes a start and as long for every block that it visits (`kernels.attention_blocks`);
tiles go to the SMs in launch order, the next to where one ends. Before the backward's two kernels one reads the output
and its gradient.

Of 92 calls with windows, documents or both that were timed afterwards, to which nothing was fitted, the forecast is
6.4% off at the median and 21.8% at worst; the deviation is theirs.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import hypot
from typing import NamedTuple

from flopcast.bounds import Deviation, NonNegative, Positive
from flopcast.decode import load
from flopcast.kernels.attention_blocks import PRODUCTS, band_of, flops_visited, is_banded, visits
from flopcast.kernels.attention_config import Tile, rule
from flopcast.kernels.shapes import DTYPE_BYTES, Attention
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.library.generated import projected_sigma
from flopcast.roofline.gpu.profile.passes import DEFAULT_BANDWIDTH, DEFAULT_SM_COUNT
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.stream.lowering.describe import Work

FILE = DATA / "attention_bands.json"
STUDY = "studies.shipped.attention_bands"
_DEALT = 4096  # tiles that are dealt one by one, the last ones; those before fill the SMs evenly


class Pace(NamedTuple):
    """Of a kernel: the share of the datasheet's matrix rate that its blocks reach, and a tile's other seconds."""

    share: Positive
    start: NonNegative


class Reading(NamedTuple):
    """Of the kernel before the backward's others: its least seconds, and the share of the copy bandwidth it reaches."""

    floor: NonNegative
    share: Positive


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The paces by kernel, the GPU that they were fitted on, and the deviation of log seconds."""

    gpu: str
    paces: Mapping[str, Pace]
    reading: Reading
    sigma: Deviation
    source: str


class Part(NamedTuple):
    """A GPU: matrix FLOP/s of a dtype by the datasheet, bytes per second of a copy, multiprocessors, capability."""

    peak: float
    bandwidth: float
    sm_count: int
    capability: tuple[int, int]


@cache
def fitted() -> Fitted:
    return load(Fitted, FILE, "paces of the plain attention", hint=f"`python -m {STUDY}` makes it")


def with_band(work: Work, found: Estimate, profile: Profile) -> Estimate:
    """`found`: the estimate of the work without its window and documents (`attention_dropout.plain`), returned where it
    has none."""
    shape = work.shape
    part = part_of(profile, shape.dtype) if isinstance(shape, Attention) and is_banded(shape) else None
    if not isinstance(shape, Attention) or part is None:
        return found
    known = fitted()
    taken = seconds(shape, part, known)
    sigma = known.sigma
    if profile.gpu != known.gpu:
        sigma = hypot(sigma, projected_sigma(known.gpu, profile, "attention"))
    return Estimate(taken, sigma, "extrapolated", "blocks of a window")


def visited_flops(shape: Attention, profile: Profile) -> int:
    """FLOPs of the blocks that the plain kernels visit, with those of what they compute anew."""
    major, minor = profile.device.get("capability") or (9, 0)
    return flops_visited(shape, rule(shape, (major, minor)))


def part_of(profile: Profile, dtype: str) -> Part | None:
    """None of processors, and of a part whose matrix rate is not known."""
    device = profile.device
    peak = profile.peaks.get(dtype)
    if device["type"] != "cuda" or peak is None:
        return None
    major, minor = device.get("capability") or (9, 0)
    sm_count = int(device.get("sm_count") or DEFAULT_SM_COUNT)
    return Part(peak.value, profile.ceiling("hbm_copy", DEFAULT_BANDWIDTH), sm_count, (major, minor))


def seconds(shape: Attention, part: Part, known: Fitted) -> float:
    """The time of a call."""
    if shape.direction == "fwd":
        return kernel_seconds("forward", shape, part, known.paces["forward"])
    each = (kernel_seconds(kernel, shape, part, known.paces[kernel]) for kernel in ("dkdv", "dq"))
    return reading_seconds(shape, part, known.reading) + sum(each)


def kernel_seconds(kernel: str, shape: Attention, part: Part, pace: Pace) -> float:
    tile: Tile = getattr(rule(shape, part.capability), kernel)
    pairs = 2.0 * PRODUCTS[kernel] * tile.block_m * tile.block_n * shape.head_dim
    block = pairs * part.sm_count / (part.peak * pace.share)
    group = shape.heads // shape.kv_heads if kernel == "dkdv" else 1
    lengths = [group * one.blocks + pace.start / block for one in visits(kernel, band_of(shape), tile)]
    if kernel != "dkdv" and shape.causal:  # the last queries, which see the most keys, go first
        lengths.reverse()
    return block * dealt(tuple(lengths), shape.batch * shape.heads // group, part.sm_count)


def reading_seconds(shape: Attention, part: Part, reading: Reading) -> float:
    queries = shape.batch * shape.heads * shape.seq * shape.head_dim * DTYPE_BYTES[shape.dtype]
    return reading.floor + 2.0 * queries / (reading.share * part.bandwidth)


@lru_cache(maxsize=4096)
def dealt(lengths: Sequence[float], heads: int, places: int) -> float:
    """When the last tile ends, of tiles with these lengths in each head: those of all heads go first of each length."""
    last = min(len(lengths), max(1, _DEALT // heads))
    first, rest = lengths[: len(lengths) - last], lengths[len(lengths) - last :]
    each = min(heads, _DEALT)
    evenly = (sum(first) * heads + sum(rest) * (heads - each)) / places
    ends = [evenly] * min(places, len(lengths) * heads)
    for length in rest:
        for _ in range(each):
            heapq.heapreplace(ends, ends[0] + length)
    return max(ends)
