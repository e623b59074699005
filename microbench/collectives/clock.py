"""Times what all members of a group call together: on GPUs by graph replay or events, else by wall clock.

Every sample begins with an untimed collective of four bytes, behind which the members stand level; on a GPU the host
enqueues it and all that is timed while the device spins. Each member times itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.collectives.operations import Group
from flopcast.microbench.timing.cuda_timer import CudaTimer, between_events, seconds_between
from flopcast.microbench.timing.policy import QUICK
from flopcast.microbench.timing.telemetry import Reading

SAMPLE_SECONDS = 0.5e-3  # of calls in a row
MOST_CALLS = 16  # in place sums of 8 members grow by 2^48, which bf16 holds
CASE_SECONDS = 0.1
MOST_SAMPLES, LEAST_SAMPLES = 20, 5
GRAPH_BELOW = 200e-6  # seconds of a call: launched from Python a shorter one is the host's time
LEAD_SECONDS = 300e-6
HOST_CALL_SECONDS = 100e-6  # to enqueue one; an eager collective takes 20 to 50 µs

Call = Callable[[], Any]


@dataclass(frozen=True)
class Samples:
    """Seconds per call, and how they were taken."""

    seconds: tuple[float, ...]
    timer: str
    calls: int
    reading: Reading = field(default_factory=Reading)

    @property
    def median(self) -> float:
        return median(self.seconds)


def counts(estimate: float) -> tuple[int, int]:
    """(calls of a sample, samples) for calls that take so long."""
    calls = max(1, min(MOST_CALLS, ceil(SAMPLE_SECONDS / max(estimate, 1e-7))))
    seconds = calls * estimate + LEAD_SECONDS
    return calls, max(LEAST_SAMPLES, min(MOST_SAMPLES, int(CASE_SECONDS / seconds)))


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timer = CudaTimer(device, QUICK) if device.type == "cuda" else None
        self._small = torch.ones(1, device=device)

    def level(self, group: Group) -> None:
        """The untimed collective."""
        dist.all_reduce(self._small.fill_(1.0), group=group.handle)

    def time(self, call: Call, group: Group, again: Call | None = None) -> Samples:
        """Samples of a call that all members make; `again` restores its operands before each sample."""
        with no_garbage_collection():
            if self.timer is None:
                return self._by_wall(call, group, again or _nothing)
            with torch.cuda.stream(self.timer.stream):
                return self._on_gpu(self.timer, call, group, again or _nothing)

    def _by_wall(self, call: Call, group: Group, again: Call) -> Samples:
        def stretch(count: int) -> float:
            again()
            self.level(group)
            begin = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - begin) / count

        stretch(1)
        calls, samples = counts(group.longest(stretch(2)))
        return Samples(tuple(stretch(calls) for _ in range(samples)), "wall", calls)

    def _on_gpu(self, timer: CudaTimer, call: Call, group: Group, again: Call) -> Samples:
        def stretch(run: Call, launches: int) -> float:
            again()
            timer.spin(LEAD_SECONDS + launches * HOST_CALL_SECONDS)
            self.level(group)
            pair = between_events(run)
            torch.cuda.synchronize(self.device)
            return seconds_between(pair)

        for _ in range(2):
            call()
        torch.cuda.synchronize(self.device)
        again()
        estimate = group.longest(stretch(lambda: [call() for _ in range(3)], 3) / 3)
        calls, samples = counts(estimate)

        def in_a_row() -> None:
            for _ in range(calls):
                call()

        run: Call = in_a_row
        launches, kind = calls, "events"
        if estimate < GRAPH_BELOW:
            graph = timer.capture([call], calls)
            # one that cannot capture keeps the others from it
            if group.longest(float(isinstance(graph, str))) == 0.0 and not isinstance(graph, str):
                graph.replay()  # the first replay uploads it
                run, launches, kind = graph.replay, 1, "graph"
        found = [stretch(run, launches) / calls for _ in range(samples)]
        return Samples(tuple(found), kind, calls, timer.read())


def _nothing() -> None:
    """No operands to restore."""
