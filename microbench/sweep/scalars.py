"""Ceilings and costs of the machine itself: rows `scalar/<name>` with a `value` and a `unit`.

    launch, launch_inplace      host seconds to enqueue one tiny op, not waiting for it
    sync                        host seconds of one `.item()` on an idle device
    launch_queue                launches that the host can be ahead before it blocks (unit "launches")
    kernel_floor                seconds of one tiny kernel within a graph
    kernel_floor_cupti          the same kernel's duration as the profiler sees it
    kernel_gap                  seconds between two kernels of an eagerly filled queue, of a step's sizes
    kernel_gap_tiny             the same for kernels of one block
    matrix_burst/<dtype>        best short sample from cool, FLOP/s, at 8192^3
    matrix_sustained/<dtype>    mean over the last half of some seconds without a pause, FLOP/s
    hbm_copy, hbm_read, hbm_write   bytes/s at 1 GiB and more (copy counts what is read and what is written)
    l2_copy                     bytes/s of a copy that stays within the last-level cache
    copy/<bytes>                bytes/s of a copy over its working set (not in the quick suite)
    l2_read/<bytes>             bytes/s of reading a working set over and over within one kernel (CUDA, not quick):
                                the cache's own rate, where a copy of some MB is as long as its launch

On the CPU the same names hold for the processor: memory for HBM, its last-level cache for L2, a tiny op for a
tiny kernel; the queue, the gap and the synchronisation do not exist there. Host costs come first: CUDA's
profiler, once used, may leave launches dearer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

from flopcast.gc_pause import no_garbage_collection
from flopcast.kernels.references import BackendUnavailable
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS, KEPT_SAMPLES, ScalarRow, merged, rounded
from flopcast.microbench.sweep.ceilings import (
    MATRIX_DTYPES,
    Scalar,
    cache_read,
    copy_bandwidth,
    hbm_copy,
    hbm_read,
    hbm_write,
    l2_copy,
    matrix_burst,
    matrix_sustained,
)
from flopcast.microbench.sweep.work import Stopwatch, Summary, first_line, status_of, work_through
from flopcast.microbench.timing.timer import Timer, synchronise

TINY = 1024  # elements: one block's work, 4 KB
GAP_KERNELS = 800  # fits the queue of about 1,024 launches
MAX_QUEUE = 4096
# Bytes of a copy's two arrays together, 256 KiB to 1 GiB, and of what is read again and again: by octaves, by half
# octaves where last-level caches of today end (24 to 192 MiB).
_HALVES = tuple(3 << power for power in range(23, 27))
COPY_SETS = tuple(sorted([*(1 << power for power in range(18, 31)), *_HALVES]))
READ_SETS = tuple(sorted([*(1 << power for power in range(20, 30)), *_HALVES]))
Measure = Callable[[Timer], Scalar]


def run_scalars(
    *,
    recorder: Recorder,
    timer: Timer,
    suite: str,
    retry: Collection[str] = (),
    budget_seconds: float | None = None,
    only: Collection[str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Measure the scalars that the recorder's folder lacks; with `only`, of these keys. A failure is a row with a
    reason.

    Raises RunError on a full disk only.
    """
    watch = Stopwatch(budget_seconds, clock)
    measures = scalar_measures(timer, suite)
    wanted = {key: measure for key, measure in measures.items() if only is None or key in only}
    todo = [key for key in wanted if not recorder.is_done(key, retry=retry)]
    statuses = work_through(
        [(key, key) for key in todo], lambda key: _scalar_row(key, suite, wanted[key], timer),
        recorder=recorder, label="ceilings", watch=watch,
    )  # fmt: skip
    return Summary(statuses, len(wanted) - len(todo), len(todo) - statuses.total(), watch.seconds)


def _scalar_row(key: str, suite: str, measure: Measure, timer: Timer) -> ScalarRow:
    what = {"key": key, "backend": "torch", "cache": "cold", "shape": None, "suite": suite}
    rest = {"role": "fit", "value": None, "unit": None}
    stream = getattr(timer, "stream", None)
    try:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            scalar = measure(timer)
    except Exception as error:  # an op that this part lacks must not cost the other ceilings
        failed = {"status": status_of(error), "reason": first_line(error)}
        return merged(ScalarRow, what, EMPTY_FIELDS, rest, failed)
    finally:
        if timer.device.type == "cuda":
            torch.cuda.empty_cache()
    found = {"value": scalar.value, "unit": scalar.unit, "samples": rounded(scalar.samples[:KEPT_SAMPLES])}
    counted = {"n": len(scalar.samples), **scalar.reading.as_row(), **scalar.fields}
    return merged(ScalarRow, what, EMPTY_FIELDS, rest, found, counted)


def scalar_measures(timer: Timer, suite: str) -> dict[str, Measure]:
    """What to measure on this device, by row key, in the order to do it."""
    measures: dict[str, Measure] = {"launch": launch, "launch_inplace": launch_inplace}
    if timer.device.type == "cuda":
        measures |= {"sync": sync, "launch_queue": launch_queue}
    for dtype in MATRIX_DTYPES[timer.device.type]:
        measures[f"matrix_burst/{dtype}"] = _of_dtype(matrix_burst, dtype)
        measures[f"matrix_sustained/{dtype}"] = _of_dtype(matrix_sustained, dtype)
    measures |= {"hbm_copy": hbm_copy, "hbm_read": hbm_read, "hbm_write": hbm_write, "l2_copy": l2_copy}
    if suite != "quick":
        for size in COPY_SETS:
            measures[f"copy/{size}"] = _copy_at(size)
        if timer.device.type == "cuda":
            for size in READ_SETS:
                measures[f"l2_read/{size}"] = _read_at(size)
    measures["kernel_floor"] = kernel_floor
    if timer.device.type == "cuda":
        measures |= {
            "kernel_floor_cupti": kernel_floor_cupti,
            "kernel_gap": kernel_gap,
            "kernel_gap_tiny": kernel_gap_tiny,
        }
    return {f"scalar/{name}": measure for name, measure in measures.items()}


def _of_dtype(measure: Callable[[Timer, str], Scalar], dtype: str) -> Measure:
    return lambda timer: measure(timer, dtype)


def _read_at(working_set: int) -> Measure:
    return lambda timer: cache_read(timer, working_set)


def _copy_at(working_set: int) -> Measure:
    return lambda timer: copy_bandwidth(timer, working_set // 2)


# --- the host


def _host_seconds(timer: Timer, call: Callable[[], Any], calls: int, repeats: int) -> tuple[float, ...]:
    """Host seconds per call when `calls` are enqueued on an idle device without waiting, once per repeat."""
    for _ in range(calls):
        call()
    samples = []
    with no_garbage_collection():
        for _ in range(repeats):
            synchronise(timer.device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples.append((time.perf_counter() - start) / calls)
    synchronise(timer.device)
    return tuple(samples)


def launch(timer: Timer) -> Scalar:
    """torch.add out of place, which also allocates; 500 in a row, under the queue's 1,024."""
    a, b = (torch.randn(TINY, device=timer.device) for _ in range(2))
    samples = _host_seconds(timer, lambda: torch.add(a, b), 500, 4 * timer.policy.scalar_repeats)
    return Scalar(statistics.median(samples), "seconds", samples, timer.read())


def launch_inplace(timer: Timer) -> Scalar:
    """a.add_(b)."""
    a, b = (torch.randn(TINY, device=timer.device) for _ in range(2))
    samples = _host_seconds(timer, lambda: a.add_(b, alpha=1e-6), 500, 4 * timer.policy.scalar_repeats)
    return Scalar(statistics.median(samples), "seconds", samples, timer.read())


def sync(timer: Timer) -> Scalar:
    """`.item()` of a ready value: a copy to the host and the wait for it, nothing else queued."""
    a = torch.randn((), device=timer.device)
    samples = _host_seconds(timer, a.item, 100, 4 * timer.policy.scalar_repeats)
    return Scalar(statistics.median(samples), "seconds", samples, timer.read())


def launch_queue(timer: Timer) -> Scalar:
    """How many tiny launches go ahead behind a long kernel before one blocks.

    The kernel spins 0.2 s; the first launch that takes over 5 ms, 500 times a normal one, met a full queue.
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
    found = [float(depth) for depth in depths if depth is not None]
    if not found:
        raise NotImplementedError(
            f"no launch blocked within {MAX_QUEUE}: the queue is deeper, or launches wait otherwise"
        )
    return Scalar(statistics.median(found), "launches", tuple(found), timer.read())


def first_stall(stamps: list[float], threshold_seconds: float) -> int | None:
    """Index of the first launch that took longer, i.e. how many went ahead before it; None when none did."""
    for i, (before, after) in enumerate(pairwise(stamps)):
        if after - before > threshold_seconds:
            return i
    return None


# --- tiny kernels


def kernel_floor(timer: Timer) -> Scalar:
    """a.add_(1): one block, one vector load and store. In a graph on CUDA, wall clock on the CPU."""
    a = torch.randn(TINY, device=timer.device)
    timing = timer.time(lambda operands: lambda: operands[0].add_(1e-6), (a,), "hot")
    return Scalar(timing.seconds, "seconds", timing.samples, timing.reading, {"timer": timing.timer})


def kernel_floor_cupti(timer: Timer) -> Scalar:
    """Its duration by CUPTI, start of the first instruction to end of the last."""
    samples = _tiny_durations(timer, 50)
    return Scalar(statistics.median(samples), "seconds", samples, timer.read(), {"timer": "cupti"})


def _tiny_durations(timer: Timer, count: int) -> tuple[float, ...]:
    from flopcast.microbench.timing.cupti import record

    a = torch.randn(TINY, device=timer.device)

    def run() -> None:
        for _ in range(count):
            a.add_(1e-6)

    run()
    events = record(run, timer.device)
    if len(events) < count // 2:
        raise BackendUnavailable("CUDA's profiler recorded no kernels")
    return tuple(event.duration_ns * 1e-9 for event in events)


def kernel_gap_tiny(timer: Timer) -> Scalar:
    """Time between kernels of a full queue, 800 of one block each: the least that a launch leaves idle."""
    a = torch.randn(TINY, device=timer.device)
    return _gap(timer, [lambda: a.add_(1e-6)] * GAP_KERNELS)


def kernel_gap(timer: Timer) -> Scalar:
    """Time between kernels of a full queue, 800 such as a step has: products, casts and sums of 5 to 15 us.

    Wide kernels have to drain before the next may start, which a tiny one does at once.
    """
    x, w = (torch.randn(1024, 1024, device=timer.device) for _ in range(2))
    xb, wb = x.bfloat16(), w.bfloat16()
    wide = torch.randn(4, 1024, 1024, device=timer.device)
    calls = [lambda: xb @ wb, lambda: wide * 0.5, lambda: wide.to(torch.bfloat16), lambda: wide.sum(-1)]
    return _gap(timer, calls * (GAP_KERNELS // len(calls)))


def _gap(timer: Timer, calls: list[Callable[[], Any]]) -> Scalar:
    """Device time of `calls` behind a long kernel less their own durations, per kernel.

    The durations come from a profiled run of the same calls, the time from runs that are not profiled.
    """
    from flopcast.microbench.timing.cupti import record

    cuda = _cuda(timer)

    def run() -> None:
        for call in calls:
            call()

    run()
    events = record(run, timer.device)
    duration = sum(event.duration_ns for event in events) * 1e-9
    samples: list[float] = []
    spin_seconds = 20e-3
    make_event: Any = torch.cuda.Event
    for _ in range(20):
        start, end = make_event(enable_timing=True), make_event(enable_timing=True)
        with no_garbage_collection():
            cuda.spin(spin_seconds)
            start.record()
            run()
            end.record()
            ahead = not start.query()
        torch.cuda.synchronize(timer.device)
        if ahead:
            samples.append((float(start.elapsed_time(end)) * 1e-3 - duration) / len(events))
        else:  # a slow host: the device had begun before the queue was full
            spin_seconds *= 2
        if len(samples) >= timer.policy.scalar_repeats:
            break
    if not samples:
        raise NotImplementedError(f"the host was never {len(calls)} launches ahead of the device")
    value = max(0.0, statistics.median(samples))
    return Scalar(value, "seconds", tuple(samples), timer.read(), {"kernel_seconds": duration / len(events)})


def _cuda(timer: Timer) -> Any:
    """The CudaTimer that a measure for CUDA alone is given."""
    from flopcast.microbench.timing.cuda_timer import CudaTimer

    assert isinstance(timer, CudaTimer)
    return timer
