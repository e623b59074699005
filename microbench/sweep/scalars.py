"""Measures ceilings and costs of the machine itself into rows `scalar/<name>` with a `value` and a `unit`.

    launch, launch_inplace      host seconds to enqueue one tiny op, without waiting for it
    sync                        host seconds of one `.item()` on an idle device
    launch_queue                launches that the host can be ahead before it blocks (unit "launches")
    kernel_floor                seconds of one tiny kernel within a graph
    kernel_floor_cupti          the same kernel's duration as the profiler sees it
    kernel_gap                  seconds between two kernels of an eagerly filled queue, of a step's sizes
    kernel_gap_tiny             the same for kernels of one block
    matrix_burst/<dtype>        best short sample after idle time, FLOP/s, at 8192^3
    matrix_sustained/<dtype>    mean over the last half of some seconds without a pause, FLOP/s
    hbm_copy, hbm_read, hbm_write   bytes/s at 1 GiB and more (copy counts what is read and what is written)
    l2_copy                     bytes/s of a copy that stays within the last-level cache
    reference                   seconds of one product, timed before each case of a sweep (processors alone): its
                                spread is that of the machine
    copy/<bytes>                bytes/s of a copy over its working set (not in the quick suite)
    l2_read/<bytes>             bytes/s of reading a working set repeatedly within one kernel (CUDA, not quick): the
                                cache's own rate, whereas a copy of some MB takes no longer than its launch

On the CPU the same names hold for the processor: memory for HBM, its last-level cache for L2, a tiny op for a
tiny kernel; the queue, the gap and the synchronisation do not exist there. Host costs come first, because launches may
cost more once CUDA's profiler has been used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

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
from flopcast.microbench.sweep.launches import (
    kernel_floor,
    kernel_floor_cupti,
    kernel_gap,
    kernel_gap_tiny,
    launch,
    launch_inplace,
    launch_queue,
    sync,
)
from flopcast.microbench.sweep.work import Stopwatch, Summary, first_line, status_of, work_through
from flopcast.microbench.timing.timer import Timer, on_stream

# Bytes of a copy's two arrays together, 256 KiB to 1 GiB, and of the working sets that are read repeatedly: powers of
# two, with steps of half an octave at the sizes of today's last-level caches (24 to 192 MiB).
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
    """Measures the scalars that the recorder's folder lacks; if `only` is given, those of its keys. A scalar that
    fails gets a row with a reason.

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
    try:
        with on_stream(timer):
            scalar = measure(timer)
    except Exception as error:  # an op that this device lacks must not stop the other ceilings
        failed = {"status": status_of(error), "reason": first_line(error)}
        return merged(ScalarRow, what, EMPTY_FIELDS, rest, failed)
    finally:
        if timer.device.type == "cuda":
            torch.cuda.empty_cache()
    found = {"value": scalar.value, "unit": scalar.unit, "samples": rounded(scalar.samples[:KEPT_SAMPLES])}
    counted = {"n": len(scalar.samples), **scalar.reading.as_row(), **scalar.fields}
    return merged(ScalarRow, what, EMPTY_FIELDS, rest, found, counted)


def reference_row(samples: Sequence[float], suite: str) -> ScalarRow:
    """The row of a product that was timed before each case of a sweep on a processor: how much the machine varies."""
    what = {"key": "scalar/reference", "backend": "torch", "cache": "hot", "shape": None, "suite": suite, "role": "fit"}
    step = -(-len(samples) // KEPT_SAMPLES)
    value = {"unit": "seconds", "value": statistics.median(samples), "timer": "wall", "n": len(samples)}
    return merged(ScalarRow, EMPTY_FIELDS, what, value, {"samples": rounded(samples[::step])})


def scalar_measures(timer: Timer, suite: str) -> dict[str, Measure]:
    """The measurements for this device, by row key, in the order in which they are made."""
    measures: dict[str, Measure] = {"launch": launch, "launch_inplace": launch_inplace}
    if timer.device.type == "cuda":
        measures |= {"sync": sync, "launch_queue": launch_queue}
    for dtype in MATRIX_DTYPES[timer.device.type]:
        measures[f"matrix_burst/{dtype}"] = partial(matrix_burst, dtype=dtype)
        measures[f"matrix_sustained/{dtype}"] = partial(matrix_sustained, dtype=dtype)
    measures |= {"hbm_copy": hbm_copy, "hbm_read": hbm_read, "hbm_write": hbm_write, "l2_copy": l2_copy}
    if suite != "quick":
        measures |= {f"copy/{size}": partial(copy_bandwidth, size=size // 2) for size in COPY_SETS}
        if timer.device.type == "cuda":
            measures |= {f"l2_read/{size}": partial(cache_read, working_set=size) for size in READ_SETS}
    measures["kernel_floor"] = kernel_floor
    if timer.device.type == "cuda":
        measures |= {
            "kernel_floor_cupti": kernel_floor_cupti,
            "kernel_gap": kernel_gap,
            "kernel_gap_tiny": kernel_gap_tiny,
        }
    return {f"scalar/{name}": measure for name, measure in measures.items()}
