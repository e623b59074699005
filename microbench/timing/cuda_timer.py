"""Times calls on a CUDA device: graph replay over rotating operands for short calls, event pairs for long ones.

Everything runs on one side stream, including autograd and the making of operands: a backward pass runs on the stream
of its forward, and a graph can be captured on a side stream only.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.timing.operands import Call, Operands, Prepare, cold_warnings, rotate, storage_bytes
from flopcast.microbench.timing.policy import TimingPolicy, should_stop, warm_up_until_settled
from flopcast.microbench.timing.telemetry import Reading, telemetry, typical_reading
from flopcast.microbench.timing.timer import Timing

EventPair = tuple[torch.cuda.Event, torch.cuda.Event]

# Device time put before a batch of samples, so that the host is ahead when the first one starts.
LEAD_SECONDS = 300e-6
READING_SECONDS = 50e-3  # NVML updates its clocks and reasons about that often
BATCH = 5  # samples enqueued before the host waits, fewer where they would outlast the time-out


class CudaTimer:
    """Times calls on one CUDA device. `stream` is where everything has to run (see `on_stream`)."""

    def __init__(self, device: torch.device, policy: TimingPolicy) -> None:
        self.device = device
        self.policy = policy
        self.read = telemetry(device)
        torch.cuda.set_device(device)
        make_stream: Any = torch.cuda.Stream
        self.stream: torch.cuda.Stream = make_stream(device)
        facts = torch.cuda.get_device_properties(device)
        self.cache_bytes = int(facts.L2_cache_size)
        self.cycles_per_second = float(getattr(facts, "clock_rate", None) or 2_000_000) * 1e3
        with warnings.catch_warnings():  # the first use of the mode warns that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")

    @cached_property
    def _flush_buffer(self) -> torch.Tensor:
        return torch.empty(max(2 * self.cache_bytes, 1 << 20), dtype=torch.uint8, device=self.device)

    def flush(self) -> None:
        """Fills the L2 with other data: one write of twice its size (about 30 us on an H200)."""
        self._flush_buffer.zero_()

    def spin(self, seconds: float) -> None:
        """Keeps the device busy for about `seconds` (exact at the maximum clock, longer below it)."""
        sleep: Any = torch.cuda._sleep
        sleep(max(1, int(seconds * self.cycles_per_second)))

    def warm_up(self) -> bool:
        """Runs matrix products until their time and the SM clock are stable; False where they never were."""
        with torch.cuda.stream(self.stream):
            a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=self.device)

            def reference() -> float | None:
                for _ in range(200):  # about 40 ms on an H200
                    torch.mm(a, a)
                clock = self.read().clock_mhz  # while it is busy
                torch.cuda.synchronize(self.device)
                return clock

            return warm_up_until_settled(reference, self.policy)

    def time(self, prepare: Prepare, operands: Operands, cache: str) -> Timing:
        """Seconds per execution of the call that `prepare` makes. `operands` must lie on `stream`.

        Raises whatever the call raises; torch.OutOfMemoryError where not even one set's outputs fit.
        """
        with torch.cuda.stream(self.stream), no_garbage_collection():
            call = prepare(operands)
            out = call()
            footprint = storage_bytes([*operands, out])
            del out
            estimate = self.estimate(call)
            if estimate > self.policy.event_threshold_seconds:
                return self._by_events(call, cache, estimate)
            return self._by_graph(prepare, operands, call, cache, footprint, estimate)

    def estimate(self, call: Call) -> float:
        """Device seconds of one call, from a few in a row enqueued ahead of the device."""
        for _ in range(self.policy.warm_up_calls):
            call()
        torch.cuda.synchronize(self.device)
        host_start = time.perf_counter()
        call()
        host_seconds = time.perf_counter() - host_start
        torch.cuda.synchronize(self.device)
        start, end = event(), event()
        self.spin(3 * 1.5 * host_seconds + LEAD_SECONDS)
        start.record()
        for _ in range(3):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return seconds_between((start, end)) / 3

    # --- long calls

    def _by_events(self, call: Call, cache: str, estimate: float, notes: tuple[str, ...] = ()) -> Timing:
        if cache == "cold":
            self.flush()  # which takes its memory
        host_start = time.perf_counter()
        call()
        host_seconds = time.perf_counter() - host_start

        def sample() -> EventPair:
            if cache == "cold":
                self.flush()
            return between_events(call)

        # 20 ms at most: a call that waits for the device itself would ask for its whole duration
        lead = LEAD_SECONDS + min(20e-3, 1.5 * BATCH * host_seconds)
        samples, reading = self._sample(sample, estimate, lead)
        return Timing(samples, "events", reading, warnings=notes)

    def _sample(
        self, sample: Callable[[], EventPair], sample_seconds: float, lead_seconds: float
    ) -> tuple[tuple[float, ...], Reading]:
        """Takes batches of samples until the stopping rule holds. The clocks are read while a batch runs: in the first
        two batches and every READING_SECONDS from then on, so that throttling during a long case is noticed."""
        batch = max(1, min(BATCH, int(self.policy.timeout_seconds / max(sample_seconds, 1e-6))))
        samples: list[float] = []
        readings: list[Reading] = []
        start = last = time.perf_counter()
        while not should_stop(samples, time.perf_counter() - start, self.policy):
            self.spin(lead_seconds)
            pairs = [sample() for _ in range(batch)]
            now = time.perf_counter()
            if len(readings) < 2 or now - last > READING_SECONDS:
                readings.append(self.read())
                last = now
            torch.cuda.synchronize(self.device)
            samples += map(seconds_between, pairs)
        return tuple(samples[: self.policy.max_samples]), typical_reading(readings)

    # --- short calls

    def _by_graph(
        self, prepare: Prepare, operands: Operands, call: Call, cache: str, footprint: int, estimate: float
    ) -> Timing:
        if self._synchronises(call):
            return self._by_events(call, cache, estimate, ("timed by events: it waits for the device itself",))
        calls = [call]
        if cache == "cold":
            rotated = rotate(prepare, operands, footprint, self.cache_bytes, self.device, self.policy)
            if rotated is None:
                return self._by_events(call, cache, estimate, ("timed by events: too dear to rotate its operands",))
            calls += rotated
        count = graph_calls(len(calls), estimate, self.policy)
        captured = self.capture(calls, count, keep=len(calls) if cache == "cold" else 0)
        if isinstance(captured, str):
            return self._by_events(call, cache, estimate, (f"timed by events: {captured}",))
        graph = captured
        graph.replay()  # the first replay uploads the graph

        samples, reading = self._sample(lambda: between_events(graph.replay), count * estimate, LEAD_SECONDS)
        notes = cold_warnings(cache, len(calls), footprint, self.cache_bytes)
        return Timing(
            tuple(s / count for s in samples), "graph", reading, len(calls), calls_per_sample=count, warnings=notes
        )

    def _synchronises(self, call: Call) -> bool:
        """Whether the call synchronises the host: a capture would fail and leave the allocator in an undefined
        state."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            if "synchronizing" in str(error):
                return True
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    def capture(self, calls: Sequence[Call], count: int, keep: int = 0) -> torch.cuda.CUDAGraph | str:
        """A graph of `count` calls, taken round-robin; the reason, where none can be captured.

        The outputs of the last `keep` calls are kept while capturing, so that they too have distinct addresses.
        torch.cuda.graph would collect garbage and empty the allocator's cache for each graph (about 100 ms).
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        kept: deque[Any] = deque(maxlen=keep)
        failure: Exception | None = None
        with torch.cuda.stream(self.stream), no_garbage_collection():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(count):
                    kept.append(calls[i % len(calls)]())
            except Exception as error:  # whatever it is, the capture has to be ended before anything else runs
                failure = error
            kept.clear()
            try:
                graph.capture_end()
            except RuntimeError as error:
                failure = failure or error
        if failure is None:
            return graph
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure
        torch.cuda.synchronize(self.device)  # raises where the device itself is lost
        reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        return f"no graph could be captured ({reason})"


def graph_calls(sets: int, estimate_seconds: float, policy: TimingPolicy) -> int:
    """Calls in one graph: whole rounds over the sets, `graph_seconds` long if `max_graph_calls` allow."""
    wanted = math.ceil(policy.graph_seconds / max(estimate_seconds, 1e-7))
    rounds = max(1, min(math.ceil(wanted / sets), policy.max_graph_calls // sets))
    return rounds * sets


def event() -> torch.cuda.Event:
    make: Any = torch.cuda.Event
    event: torch.cuda.Event = make(enable_timing=True)
    return event


def between_events(run: Callable[[], Any]) -> EventPair:
    """Enqueues `run` between two events on the current stream."""
    start, end = event(), event()
    start.record()
    run()
    end.record()
    return start, end


def seconds_between(pair: EventPair) -> float:
    """Device seconds from one event to the other, once both have passed."""
    return float(pair[0].elapsed_time(pair[1])) * 1e-3
