"""Says when one GPU of several does what in a step: kernels by phase, and collectives, beside kernels or alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.timeline import Shares

HIDDEN, EXPOSED = "beside kernels", "alone"
NEAR = 1e-3  # of the step: what lies nearer to each other is shown as one


class Busy(NamedTuple):
    """From when to when, in seconds from the step's begin, and what: a phase, or of collectives HIDDEN or EXPOSED. In
    between it runs for `seconds`."""

    start: float
    end: float
    what: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """A steady step of one GPU. `kernels` and `sent` are in order and do not overlap."""

    parallel: str
    step_seconds: float
    device_seconds: float
    shares: Shares
    kernels: Sequence[Busy]
    sent: Sequence[Busy]

    @property
    def idle_seconds(self) -> float:
        """In which neither a kernel nor a collective runs: gaps, and waiting for the host or for other GPUs."""
        busy = sum(one.seconds for one in self.kernels)
        return max(self.step_seconds - busy - self.shares.exposed, 0.0)


def lanes_of(step: PricedStep) -> Lanes:
    """Returns what a step's GPU does when; of a pipeline that of the last stage."""
    timeline, phases = step.timeline, [op.phase for op in step.stream.ops]
    spans = timeline.spans
    whole = timeline.step_seconds()
    first = min((span.start for span in spans), default=0.0)
    kernels = [
        _busy(span.start - first, span.end - first, phases[span.op]) for span in spans if not timeline.is_sent(span)
    ]
    sent = [_busy(span.start - first, span.end - first, "") for span in spans if timeline.is_sent(span)]
    return Lanes(
        parallel=str(step.run.layout), step_seconds=whole, device_seconds=timeline.device_seconds,
        shares=timeline.shares, kernels=tuple(joined(kernels, NEAR * whole)),
        sent=tuple(joined(_told_apart(sent, kernels), NEAR * whole)),
    )  # fmt: skip


def _busy(start: float, end: float, what: str) -> Busy:
    return Busy(start, end, what, end - start)


def joined(found: Iterable[Busy], near: float) -> list[Busy]:
    """Returns neighbours that do the same, with at most `near` seconds between them, as one."""
    whole: list[Busy] = []
    for one in sorted(found):
        if whole and one.what == whole[-1].what and one.start <= whole[-1].end + near:
            last = whole[-1]
            more = max(one.end - max(one.start, last.end), 0.0)  # of several CUDA streams at once, what one adds
            whole[-1] = last._replace(end=max(last.end, one.end), seconds=last.seconds + min(more, one.seconds))
        else:
            whole.append(one)
    return whole


def _told_apart(sent: Sequence[Busy], kernels: Sequence[Busy]) -> list[Busy]:
    """What is sent, in parts in which a kernel runs and in which none does."""
    busy = joined((one._replace(what="") for one in kernels), 0.0)
    found = []
    for one in joined(sent, 0.0):
        at = one.start
        for other in busy:
            if other.end <= at or other.start >= one.end:
                continue
            if other.start > at:
                found.append(_busy(at, other.start, EXPOSED))
            at = max(at, min(other.end, one.end))
            found.append(_busy(max(other.start, one.start), at, HIDDEN))
        if at < one.end:
            found.append(_busy(at, one.end, EXPOSED))
    return found
