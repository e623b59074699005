"""Determines how long a case is timed: the policies of the suites, the stopping rule, the warm-up."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TimingPolicy:
    """How long to measure. All seconds are per case except `warm_up_seconds` (per process).

    A sample is one replay of a graph, one call between events, or one stretch of calls on the processor.
    """

    min_samples: int = 10
    max_samples: int = 100  # also how many raw samples a row keeps
    relative_noise: float = 0.005  # stop once sd/mean is below
    timeout_seconds: float = 0.25
    timeout_samples: int = 3  # even a time-out waits for these
    warm_up_seconds: float = 1.0  # at least; three times that at most
    settle_tolerance: float = 0.02  # of the clock and of a reference's time, over the last SETTLE_WINDOW readings
    warm_up_calls: int = 3
    graph_seconds: float = 1e-3  # device time of one graph: the event pair's own few us stay under 0.5%
    max_graph_calls: int = 512
    event_threshold_seconds: float = 200e-6  # longer calls are timed singly by events
    cpu_sample_seconds: float = 200e-6
    rotation_factor: float = 3.0  # cold operand sets together take this many times the cache
    max_sets: int = 256
    max_rotation_bytes: int = 4 << 30
    rotation_seconds: float = 0.3  # for preparing the sets; for slower calls the cache is flushed instead
    profile_repeats: int = 5
    profile_batch: int = 32  # cases per profiler session, which takes about 0.3 s to open and close
    sustained_seconds: float = 2.0
    scalar_repeats: int = 5


QUICK = TimingPolicy(timeout_seconds=0.05, max_samples=30)
# 6% of an H200's rows are noisier than the rule requires and end by the time-out; 0.25 s took 11 s of `standard`.
STANDARD = TimingPolicy(timeout_seconds=0.1, warm_up_seconds=3.0, sustained_seconds=4.0)
FULL = TimingPolicy(timeout_seconds=1.0, warm_up_seconds=3.0, min_samples=20, sustained_seconds=10.0, scalar_repeats=9)
# 2 cores reach 1e11 FLOP/s: a case is a thousand times longer there than on a GPU, so fewer samples
CPU_QUICK = TimingPolicy(
    min_samples=5, max_samples=20, relative_noise=0.02, timeout_seconds=0.1, timeout_samples=2,
    warm_up_seconds=0.3, settle_tolerance=0.1, warm_up_calls=1, rotation_factor=2.0, max_rotation_bytes=1 << 29,
    sustained_seconds=1.0,
)  # fmt: skip
CPU_STANDARD = TimingPolicy(
    max_samples=50, relative_noise=0.01, timeout_seconds=0.5, settle_tolerance=0.1, rotation_factor=2.0,
    max_rotation_bytes=1 << 29,
)  # fmt: skip
SETTLE_WINDOW = 5  # readings
WARM_UP_CAP = 3  # times `warm_up_seconds`: under a power cap a clock may never hold still
POLICIES = {
    "cuda": {"quick": QUICK, "standard": STANDARD, "full": FULL},
    "cpu": {"quick": CPU_QUICK, "standard": CPU_STANDARD, "full": CPU_STANDARD},
}


def should_stop(samples: Sequence[float], elapsed_seconds: float, policy: TimingPolicy) -> bool:
    """The stopping rule: enough samples of little noise, or the time-out, or as many samples as a row keeps.

    A rule on noise alone once ran 30 hours; the time-out applies from `timeout_samples` on.
    """
    n = len(samples)
    if n >= policy.max_samples:
        return True
    if n >= policy.timeout_samples and elapsed_seconds >= policy.timeout_seconds:
        return True
    return n >= max(2, policy.min_samples) and relative_noise(samples) < policy.relative_noise


def is_settled(seconds: Sequence[float], clocks: Sequence[float | None], tolerance: float) -> bool:
    """Whether the last SETTLE_WINDOW runs of a reference agree: in their time and, where it is known, in the clock."""
    if len(seconds) < SETTLE_WINDOW:
        return False
    known = [clock for clock in clocks[-SETTLE_WINDOW:] if clock]
    return all(
        max(values) - min(values) <= tolerance * max(values) for values in (seconds[-SETTLE_WINDOW:], known) if values
    )


def warm_up_until_settled(
    reference: Callable[[], float | None], policy: TimingPolicy, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Runs `reference`, which keeps the device busy for some 10 ms and returns its clock (MHz, None where unknown),
    until it settles: `warm_up_seconds` at least, WARM_UP_CAP times that at most. Returns whether it settled.

    A warm-up of 25 ms was found to misread by 30% (triton #2306).
    """
    start = before = clock()
    seconds: list[float] = []
    clocks: list[float | None] = []
    while before - start < WARM_UP_CAP * policy.warm_up_seconds:
        clocks.append(reference())
        now = clock()
        seconds.append(now - before)
        before = now
        if now - start >= policy.warm_up_seconds and is_settled(seconds, clocks, policy.settle_tolerance):
            return True
    return policy.warm_up_seconds <= 0


def relative_noise(samples: Sequence[float]) -> float:
    """sd / mean; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    mean = statistics.fmean(samples)
    return statistics.stdev(samples) / mean if mean > 0 else math.inf
