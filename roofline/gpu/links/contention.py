"""What a kernel and a collective lose to each other while both run on one GPU, on two streams.

A collective's kernel holds `blocks` of the GPU's multiprocessors, one per channel, until it is done. So

    kernel's factor     = 1 + `lost` x blocks / (multiprocessors - blocks)
    collective's factor = 1 + `slowed`
    collective's delay  = `waited` x seconds of the kernel that runs when it is launched

A kernel that loses just the multiprocessors has `lost` 1. Products have more, by what their waves do not fill of what
is left; a product of few blocks is counted by its waves where their number is known. Attention and what memory bounds
have less. A collective slows down by what memory and caches deliver less, and begins late: its blocks find no room
until all blocks of the kernel that runs have begun, on every GPU. `contention_fit.py` has the parameters from what was
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal, NamedTuple

from flopcast.bounds import Count, NonNegative, Seconds, Size, Valid

Bound = Literal["matrix", "memory"]


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


@dataclass(frozen=True)
class Share:
    """The parameters of one class of kernels, as the module says, and the deviations of log seconds from the rows that
    they were fitted to, of kernels and of collectives."""

    lost: NonNegative
    slowed: NonNegative
    sigma: NonNegative
    collective_sigma: NonNegative


@dataclass(frozen=True)
class Contention:
    """The parameters of a GPU of so many multiprocessors, beside collectives that held `blocks` of them."""

    multiprocessors: Annotated[int, Valid(lambda n: n > 1, "2 or more")]
    blocks: Size
    waited: NonNegative
    matrix: Share
    memory: Share

    def of(self, bound: Bound) -> Share:
        return self.matrix if bound == "matrix" else self.memory


class Contended(NamedTuple):
    """Factors on the seconds of a kernel and of a collective while both run, the seconds by which a collective that is
    launched behind the kernel begins late, and the multiprocessors that the collective holds."""

    kernel: float
    collective: float
    delay: float
    blocks: int


def contended(
    known: Contention, bound: Bound, held: int, *, multiprocessors: int, kernel_seconds: float, kernel_blocks: int = 0
) -> Contended:
    """A kernel of `kernel_seconds` by itself beside a collective that holds `held` multiprocessors. `kernel_blocks`: of
    a product whose blocks have a multiprocessor each, their number; 0 where it is not known."""
    share = known.of(bound)
    held = min(held, multiprocessors - 1)
    left = multiprocessors - held
    lost = 1 + share.lost * held / left
    if kernel_blocks and bound == "matrix":
        lost = max(1.0, ceil(kernel_blocks / left) / ceil(kernel_blocks / multiprocessors))
    return Contended(lost, 1 + share.slowed, known.waited * kernel_seconds, held)


def bound_of(work: str) -> Bound:
    """What bounds a kernel of `bench --suite collectives`, by its name."""
    return "matrix" if work.startswith(("product", "attention")) else "memory"
