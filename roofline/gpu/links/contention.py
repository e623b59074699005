"""What a kernel and a collective lose to each other while both run on one GPU, on two CUDA streams.

A collective's kernel holds a multiprocessor per channel, `held` of them, until it is done; `left` are the others.

    a product          takes min(2 waves, blocks / left + `tail`) waves in place of ceil(blocks / multiprocessors)
    any other kernel   takes 1 + `lost` x held / left times as long
    the collective     takes 1 + `slowed` times as long, and begins later by `waited` x the seconds of the kernel that
                       runs when it is launched. Beside what memory bounds, at u of the memory's `bandwidth`, that is
                       `slowed` of products up to u = `calm`, and from there in proportion up to its own at u = 1

Products have a block per multiprocessor, and libraries choose tiles to fill the last wave: so one that took a wave
takes two. What is left is filled less evenly, which `tail` counts, in waves. A kernel that loses just the
multiprocessors has `lost` 1: attention and what memory bounds have less. The collective gets less of the memory and the
caches, and its blocks find no room until all of the running kernel's have begun, on every GPU.
`contention_fit.py` has the parameters from what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal, NamedTuple, get_args

from flopcast.bounds import Count, Deviation, NonNegative, Positive, Seconds, Size, Valid

Bound = Literal["matrix", "attention", "memory"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
# Seconds of a product's kernel that are not its waves: it starts, and its last results are written. Of kernels that
# take one wave, those of 6 µs take 1.68 times as long beside a collective, those of 44 µs 1.90 times (an H200).
NOT_WAVES = 2e-6


class Beside(NamedTuple):
    """A kernel beside a long collective on another stream, and each by itself: seconds of `work` and of the
    collective. `channels`: the blocks that NCCL's kernel held, 0 where it did not say."""

    work: str
    collective: str
    gpus: Size
    channels: Count
    alone_seconds: Seconds
    beside_seconds: Seconds
    collective_alone_seconds: Seconds
    collective_beside_seconds: Seconds


def _of_each_bound(found: Mapping[str, float]) -> bool:
    return set(found) == set(BOUNDS)


@dataclass(frozen=True)
class Contention:
    """The law's parameters, as the module says, of a GPU of so many multiprocessors and bytes/s of
    memory; `slowed`, and the deviations of
    log seconds of kernels and of collectives from the rows that they were fitted to, by what bounds the kernel."""

    multiprocessors: Annotated[int, Valid(lambda n: n > 1, "2 or more")]
    bandwidth: Positive
    calm: Annotated[float, Valid(lambda share: 0 <= share < 1, "a share below 1")]
    tail: NonNegative
    waited: NonNegative
    lost: Annotated[Mapping[str, NonNegative], Valid(lambda found: set(found) == {"attention", "memory"}, "of both")]
    slowed: Annotated[Mapping[str, NonNegative], Valid(_of_each_bound, "of each bound")]
    sigma: Annotated[Mapping[str, Deviation], Valid(_of_each_bound, "of each bound")]
    collective_sigma: Annotated[Mapping[str, Deviation], Valid(_of_each_bound, "of each bound")]


class Contended(NamedTuple):
    """Factors on the seconds of a kernel and of a collective while both run, the seconds by which a collective that is
    launched behind the kernel begins late, and the multiprocessors that the collective holds."""

    kernel: float
    collective: float
    delay: float
    held: int


def contended(
    known: Contention, bound: Bound, held: int, *, multiprocessors: int, seconds: float = 0.0, blocks: int = 0,
    memory_share: float = 1.0,
) -> Contended:  # fmt: skip
    """A kernel that takes so many seconds by itself (0: not known) beside a collective that holds `held`
    multiprocessors. `blocks`: a product's; where they are not known (0), those of one wave. `memory_share`: the part
    of the memory's bandwidth that a kernel reaches which memory bounds."""
    held = min(held, multiprocessors - 1)
    left = multiprocessors - held
    if bound == "matrix":
        part = max(0.0, 1 - NOT_WAVES / seconds) if seconds else 1.0
        kernel = 1 + part * (wave_factor(known.tail, blocks or multiprocessors, multiprocessors, left) - 1)
    else:
        kernel = 1 + known.lost[bound] * held / left
    slowed = known.slowed[bound]
    if bound == "memory":
        beyond = min(1.0, max(0.0, memory_share - known.calm) / (1 - known.calm))
        slowed = known.slowed["matrix"] + beyond * (slowed - known.slowed["matrix"])
    return Contended(kernel, 1 + slowed, known.waited * seconds, held)


def wave_factor(tail: float, blocks: int, multiprocessors: int, left: int) -> float:
    """How many times as many waves a product of so many blocks takes on the multiprocessors that are left."""
    if blocks <= left:
        return 1.0
    waves = ceil(blocks / multiprocessors)
    return max(1.0, min(2.0, (blocks / left + tail) / waves))


def bound_of(work: str) -> Bound:
    """What bounds a kernel of `bench --suite collectives`, by its name."""
    return {"product": "matrix", "attention": "attention"}.get(work.partition("-")[0], "memory")  # type: ignore[return-value]
