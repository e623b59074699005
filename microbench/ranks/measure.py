"""Measures the step of one of several ranks, and says how it was spent: computing, communicating, both, neither."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flopcast.gc_pause import no_garbage_collection

ROUNDS, STEPS_PER_ROUND = 4, 4
PROFILED_STEPS = 2
Interval = tuple[float, float]


@dataclass(frozen=True)
class RankTimes:
    """`step_seconds`: wall time per step, of each round; `host_seconds`: the time to enqueue a step on idle GPUs;
    `peak_bytes` and `reserved_bytes` as torch's allocator counts them, `used_bytes` what the driver says is in use,
    with NCCL's own and every context's; 0 on processors."""

    step_seconds: list[float]
    host_seconds: list[float]
    peak_bytes: int = 0
    reserved_bytes: int = 0
    used_bytes: int = 0


@dataclass(frozen=True)
class Kernel:
    """A kernel as the profiler saw it; times in seconds, `start` from the first one's of its step."""

    name: str
    stream: int
    start: float
    seconds: float

    @property
    def is_sent(self) -> bool:
        return "nccl" in self.name.lower()

    @property
    def interval(self) -> Interval:
        return self.start, self.start + self.seconds


def time_rank(step: Any, *, rounds: int = ROUNDS, steps_per_round: int = STEPS_PER_ROUND) -> RankTimes:
    """Times a step that was warmed up; all ranks at once."""
    is_cuda = step.device_type == "cuda"
    meet(is_cuda)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()  # of a steady step: tensor parallel builds the whole model first
    step.run()
    _finish(is_cuda)
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()) if is_cuda else (0, 0)
    gc.collect()
    walls, hosts = [], []
    with no_garbage_collection():
        for _ in range(rounds):
            meet(is_cuda)
            start = time.perf_counter()
            for _ in range(steps_per_round):
                step.run()
            _finish(is_cuda)
            walls.append((time.perf_counter() - start) / steps_per_round)
            meet(is_cuda)
            start = time.perf_counter()
            step.run()
            hosts.append(time.perf_counter() - start)
    used = 0
    if is_cuda:
        free, whole = torch.cuda.mem_get_info()
        used = whole - free
    return RankTimes(walls, hosts, peak, reserved, used)


def profile_rank(step: Any, steps: int = PROFILED_STEPS) -> list[list[Kernel]]:
    """The kernels of some steps. A process that has used the profiler launches slower ever after: time first."""
    from torch.profiler import ProfilerActivity, profile

    found = []
    for _ in range(steps):
        meet(is_cuda=True)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step.run()
            torch.cuda.synchronize()
        results: Any = profiler.profiler.kineto_results
        events = [e for e in results.events() if str(e.device_type()).endswith("CUDA") and e.duration_ns() > 0]
        events.sort(key=lambda e: e.start_ns())
        first = events[0].start_ns()
        found.append([
            Kernel(e.name(), e.device_resource_id(), (e.start_ns() - first) * 1e-9, e.duration_ns() * 1e-9)
            for e in events
        ])  # fmt: skip
    return found


def meet(is_cuda: bool) -> None:
    """All ranks go on together, their GPUs idle."""
    _finish(is_cuda)
    dist.barrier()
    _finish(is_cuda)


def _finish(is_cuda: bool) -> None:
    if is_cuda:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Spent:
    """Seconds of one rank's profiled step. Communication counts from when the last rank has come, `waiting` is what
    this one waited before that; `exposed` is when NCCL's kernels run alone, waiting included."""

    span: float
    compute: float
    communication: float
    waiting: float
    overlapped: float
    exposed: float
    idle: float


def spent(ranks: Sequence[Sequence[Kernel]]) -> list[Spent]:
    """What each rank did in a step; the n-th collective of one is that of the others, where they have as many."""
    sent = [[kernel for kernel in kernels if kernel.is_sent] for kernels in ranks]
    are_alike = len({len(own) for own in sent}) == 1
    together = sum(min(kernel.seconds for kernel in same) for same in zip(*sent, strict=are_alike))
    found = []
    for kernels, own in zip(ranks, sent, strict=True):
        busy = [kernel.interval for kernel in kernels if not kernel.is_sent]
        sending = [kernel.interval for kernel in own]
        whole, compute, communicate = (length(some) for some in ([*busy, *sending], busy, sending))
        span = max((end for _, end in [*busy, *sending]), default=0.0)
        communication = together if are_alike else sum(kernel.seconds for kernel in own)
        found.append(Spent(
            span, compute, communication, sum(kernel.seconds for kernel in own) - communication,
            compute + communicate - whole, whole - compute, span - whole,
        ))  # fmt: skip
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of what they cover together."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
