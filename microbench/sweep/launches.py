"""Measures the host cost of launches, the duration of tiny kernels, and the gap between kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from flopcast.gc_pause import no_garbage_collection
from flopcast.kernels.references import BackendUnavailable
from flopcast.microbench.sweep.ceilings import Scalar
from flopcast.microbench.timing.cuda_timer import CudaTimer, between_events, seconds_between
from flopcast.microbench.timing.cupti import record
from flopcast.microbench.timing.timer import Timer, synchronise

TINY = 1024  # elements: one block's work, 4 KB
GAP_KERNELS = 800  # fits the queue of about 1,024 launches
MAX_QUEUE = 4096


# --- the host


def _host_seconds(timer: Timer, call: Callable[[], Any], calls: int) -> tuple[float, ...]:
    """Host seconds per call when `calls` calls are enqueued on an idle device without waiting, one sample per
    repeat."""
    for _ in range(calls):
        call()
    samples = []
    with no_garbage_collection():
        for _ in range(4 * timer.policy.scalar_repeats):
            synchronise(timer.device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples.append((time.perf_counter() - start) / calls)
    synchronise(timer.device)
    return tuple(samples)


def _median(timer: Timer, samples: tuple[float, ...], unit: str = "seconds") -> Scalar:
    return Scalar(statistics.median(samples), unit, samples, timer.read())


def launch(timer: Timer) -> Scalar:
    """Host seconds per torch.add out of place, which also allocates; 500 in a row, fewer than the queue's 1,024."""
    a, b = (torch.randn(TINY, device=timer.device) for _ in range(2))
    return _median(timer, _host_seconds(timer, lambda: torch.add(a, b), 500))


def launch_inplace(timer: Timer) -> Scalar:
    """Host seconds per a.add_(b)."""
    a, b = (torch.randn(TINY, device=timer.device) for _ in range(2))
    return _median(timer, _host_seconds(timer, lambda: a.add_(b, alpha=1e-6), 500))


def sync(timer: Timer) -> Scalar:
    """Host seconds per `.item()` of a ready value: a copy to the host and the wait for it, with nothing else queued."""
    a = torch.randn((), device=timer.device)
    return _median(timer, _host_seconds(timer, a.item, 100))


def launch_queue(timer: Timer) -> Scalar:
    """The number of tiny launches that can be enqueued behind a long kernel before one blocks.

    The kernel spins for 0.2 s; the first launch that takes over 5 ms, 500 times a normal one, met a full queue.
    """
    cuda = _cuda(timer)
    a = torch.randn(TINY, device=timer.device)
    for _ in range(100):
        a.add_(1e-6)
    torch.cuda.synchronize(timer.device)
    depths = []
    for _ in range(3):
        stamps = [0.0] * (MAX_QUEUE + 1)
        with no_garbage_collection():
            cuda.spin(0.2)
            stamps[0] = time.perf_counter()
            for i in range(MAX_QUEUE):
                a.add_(1e-6)
                stamps[i + 1] = time.perf_counter()
                if stamps[i + 1] - stamps[i] > 5e-3:
                    break
        torch.cuda.synchronize(timer.device)
        depths.append(first_stall(stamps[: i + 2], 5e-3))
    found = tuple(float(depth) for depth in depths if depth is not None)
    if not found:
        raise NotImplementedError(
            f"no launch blocked within {MAX_QUEUE}: the queue is deeper, or launches wait otherwise"
        )
    return _median(timer, found, "launches")


def first_stall(stamps: list[float], threshold_seconds: float) -> int | None:
    """Index of the first launch that took longer than the threshold, i.e. the number of launches before it; None when
    no launch did."""
    for i, (before, after) in enumerate(pairwise(stamps)):
        if after - before > threshold_seconds:
            return i
    return None


# --- tiny kernels


def kernel_floor(timer: Timer) -> Scalar:
    """Seconds per a.add_(1): one block, one vector load and store. Timed in a graph on CUDA, by wall clock on the
    CPU."""
    a = torch.randn(TINY, device=timer.device)
    timing = timer.time(lambda operands: lambda: operands[0].add_(1e-6), (a,), "hot")
    return Scalar(timing.seconds, "seconds", timing.samples, timing.reading, {"timer": timing.timer})


def kernel_floor_cupti(timer: Timer) -> Scalar:
    """The duration of `kernel_floor`'s kernel by CUPTI, from the start of its first instruction to the end of its
    last."""
    count = 50
    a = torch.randn(TINY, device=timer.device)

    def run() -> None:
        for _ in range(count):
            a.add_(1e-6)

    run()
    events = record(run, timer.device)
    if len(events) < count // 2:
        raise BackendUnavailable("CUDA's profiler recorded no kernels")
    return replace(_median(timer, tuple(event.duration_ns * 1e-9 for event in events)), fields={"timer": "cupti"})


def kernel_gap_tiny(timer: Timer) -> Scalar:
    """Idle seconds between kernels of a full queue, 800 of one block each: the least possible."""
    a = torch.randn(TINY, device=timer.device)
    return _gap(timer, [lambda: a.add_(1e-6)] * GAP_KERNELS)


def kernel_gap(timer: Timer) -> Scalar:
    """Idle seconds between kernels of a full queue, 800 like those of a step: products, casts and sums of 5 to 15 us.

    A wide kernel has to drain before the next one may start; a tiny one drains at once.
    """
    x, w = (torch.randn(1024, 1024, device=timer.device) for _ in range(2))
    xb, wb = x.bfloat16(), w.bfloat16()
    wide = torch.randn(4, 1024, 1024, device=timer.device)
    calls = [lambda: xb @ wb, lambda: wide * 0.5, lambda: wide.to(torch.bfloat16), lambda: wide.sum(-1)]
    return _gap(timer, calls * (GAP_KERNELS // len(calls)))


def _gap(timer: Timer, calls: list[Callable[[], Any]]) -> Scalar:
    """Seconds per kernel of the device time of `calls` behind a long kernel, less the kernels' own durations.

    The durations come from a profiled run of the same calls, the device time from runs that are not profiled.
    """
    cuda = _cuda(timer)

    def run() -> None:
        for call in calls:
            call()

    run()
    events = record(run, timer.device)
    duration = sum(event.duration_ns for event in events) * 1e-9
    samples: list[float] = []
    spin_seconds = 20e-3
    for _ in range(20):
        with no_garbage_collection():
            cuda.spin(spin_seconds)
            pair = between_events(run)
            ahead = not pair[0].query()
        torch.cuda.synchronize(timer.device)
        if ahead:
            samples.append((seconds_between(pair) - duration) / len(events))
        else:  # a slow host: the device began before all calls were enqueued
            spin_seconds *= 2
        if len(samples) >= timer.policy.scalar_repeats:
            break
    if not samples:
        raise NotImplementedError(f"the host was never {len(calls)} launches ahead of the device")
    value = max(0.0, statistics.median(samples))
    return Scalar(value, "seconds", tuple(samples), timer.read(), {"kernel_seconds": duration / len(events)})


def _cuda(timer: Timer) -> CudaTimer:
    """The timer as a CudaTimer, for measurements that exist on CUDA only."""
    assert isinstance(timer, CudaTimer)
    return timer
