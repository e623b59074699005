"""Times calls on the processor: wall clock around as many calls as make a stretch that the clock resolves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.timing.operands import Call, Operands, Prepare, cold_warnings, rotate, storage_bytes
from flopcast.microbench.timing.policy import TimingPolicy, should_stop, warm_up_until_settled
from flopcast.microbench.timing.processor import last_level_cache_bytes
from flopcast.microbench.timing.telemetry import telemetry
from flopcast.microbench.timing.timer import Timing

REFERENCE_SHARE = 0.03  # of a sweep's time


class CpuTimer:
    """Times calls by wall clock. Denormals are flushed to zero while timing, because the values of in-place ops that
    are repeated often decay into them."""

    def __init__(self, policy: TimingPolicy, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.device = torch.device("cpu")
        self.policy = policy
        self.read = telemetry(self.device)
        self._clock_ns = clock_ns
        self.cache_bytes = last_level_cache_bytes()
        self._flush_buffer: Tensor | None = None
        self._reference_due = 0.0
        self._reference = torch.randn(512, 512)

    def warm_up(self) -> bool:
        """Starts the thread pool and brings the cores to their working clock."""
        return warm_up_until_settled(self._reference_product, self.policy)

    def reference_seconds(self) -> float | None:
        """Times a product that is always the same: its times over a sweep show how much the machine itself varies. None
        where it would take more than REFERENCE_SHARE of the time."""
        now = self._clock_ns() * 1e-9
        if now < self._reference_due:
            return None
        seconds = self._stretch([self._reference_product])
        self._reference_due = now + seconds / REFERENCE_SHARE
        return seconds

    def _reference_product(self) -> None:
        for _ in range(4):  # about 10 ms on two cores
            self._reference @ self._reference

    def time(self, prepare: Prepare, operands: Operands, cache: str) -> Timing:
        torch.set_flush_denormal(True)
        try:
            with no_garbage_collection():
                return self._time(prepare, operands, cache)
        finally:
            torch.set_flush_denormal(False)

    def _time(self, prepare: Prepare, operands: Operands, cache: str) -> Timing:
        policy = self.policy
        call = prepare(operands)
        once = self._stretch([call])
        calls, flush = [call], False
        footprint = storage_bytes(operands)
        if cache == "cold":
            rotated = rotate(prepare, operands, footprint, self.cache_bytes, self.device, policy)
            flush = rotated is None
            calls += rotated or []
        for warm in calls[: policy.warm_up_calls]:
            once = min(once, self._stretch([warm]))
        per_sample = 1 if flush else max(1, math.ceil(policy.cpu_sample_seconds / max(once, 1e-9)))
        samples: list[float] = []
        position, elapsed = 0, 0.0
        while not should_stop(samples, elapsed, policy):
            stretch = [calls[(position + i) % len(calls)] for i in range(per_sample)]
            position += per_sample
            if flush:
                self._flush()
            seconds = self._stretch(stretch)
            elapsed += seconds
            samples.append(seconds / per_sample)
        return Timing(
            tuple(samples), "wall", self.read(), sets=len(calls), calls_per_sample=per_sample,
            warnings=() if flush else cold_warnings(cache, len(calls), footprint, self.cache_bytes),
        )  # fmt: skip

    def _flush(self) -> None:
        """Fills the last-level cache with other data."""
        if self._flush_buffer is None:
            self._flush_buffer = torch.zeros(2 * self.cache_bytes, dtype=torch.uint8)
        self._flush_buffer.add_(1)

    def _stretch(self, calls: Iterable[Call]) -> float:
        start = self._clock_ns()
        for call in calls:
            call()
        return (self._clock_ns() - start) * 1e-9
