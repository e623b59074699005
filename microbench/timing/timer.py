"""How one call is timed: the policy, the stopping rule, rotation of operands, and the processor's timer.

`seconds` is the median time of ONE execution, the cost of launching it excluded:
- CUDA (cuda_timer.py): below 200 us a CUDA graph of many calls is replayed and divided (singly by events,
  1024^3 on an H200 reads 9.7 us, in a graph 5.7); longer calls lie between two events each.
- CPU: wall clock around enough calls to fill 200 us.
`cold` means that a call finds none of its operands in the last-level cache: calls rotate over operand sets
which together are some times its size, or the cache is flushed in between. `hot` repeats one set.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.timing.device import Reading, last_level_cache_bytes, telemetry

Operands = Sequence[Tensor]
Call = Callable[[], Any]
Prepare = Callable[[Operands], Call]  # binds operands to a call without arguments


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
    rotation_seconds: float = 0.3  # for preparing the sets; dearer calls are flushed for instead
    profile_repeats: int = 5
    profile_batch: int = 32  # cases per profiler session, which takes about 0.3 s to open and close
    sustained_seconds: float = 2.0
    scalar_repeats: int = 5


QUICK = TimingPolicy(timeout_seconds=0.05, max_samples=30)
# 6% of an H200's rows are noisier than the rule asks and end by the time-out: 0.25 s of it made 11 s of `standard`.
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
    until it settles: `warm_up_seconds` at least, WARM_UP_CAP times that at most. Whether it did.

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


@dataclass(frozen=True)
class Timing:
    """The samples of one case, seconds per execution. `warnings`: what did not go by the book."""

    samples: tuple[float, ...]
    timer: str  # "graph", "events" or "wall"
    reading: Reading = field(default_factory=Reading)
    sets: int = 1  # operand sets rotated over
    calls_per_sample: int = 1
    warnings: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)


class Timer(Protocol):
    """Times calls on one device."""

    device: torch.device
    policy: TimingPolicy
    cache_bytes: int  # of the last-level cache
    read: Callable[[], Reading]

    def warm_up(self) -> bool:
        """Bring the device to its working clocks; once per process. False where they never held still."""

    def time(self, prepare: Prepare, operands: Operands, cache: str) -> Timing: ...


# --- operand sets


def storage_bytes(values: Any) -> int:
    """Bytes of the distinct storages behind the tensors of a nested list, tuple or dictionary."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(values)}.values())


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def clone_operands(operands: Operands) -> tuple[Tensor, ...]:
    """Copies that lie in memory as the originals: sizes, strides (0 too), offsets, storages shared or not."""
    storages: dict[int, Any] = {}
    clones = []
    for tensor in operands:
        storage: Any = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()
        clone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        clone.set_(storages[storage.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride())
        clones.append(clone.requires_grad_(tensor.requires_grad))
    return tuple(clones)


def rotation_sets(footprint_bytes: int, cache_bytes: int, free_bytes: int, policy: TimingPolicy) -> int:
    """How many operand sets to rotate over: together `rotation_factor` times the cache, at least 2, within
    the memory allowed (1 when not even two fit)."""
    footprint = max(1, footprint_bytes)
    wanted = max(2, math.ceil(policy.rotation_factor * cache_bytes / footprint))
    allowed = min(policy.max_rotation_bytes, free_bytes // 2) // footprint
    return max(1, min(wanted, policy.max_sets, allowed))


def rotate(prepare: Prepare, operands: Operands, sets: int, policy: TimingPolicy) -> list[Call] | None:
    """Calls on `sets` - 1 more copies of the operands, each run once (a first call may compile or allocate).

    None when that takes over `rotation_seconds` (a traced backward: 0.1 s each) or too much memory.
    """
    calls: list[Call] = []
    start = time.perf_counter()
    for _ in range(sets - 1):
        try:
            calls.append(prepare(clone_operands(operands)))
            calls[-1]()
        except torch.OutOfMemoryError:
            return None
        if time.perf_counter() - start > policy.rotation_seconds and len(calls) < sets - 1:
            return None
    return calls


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the processor


class CpuTimer:
    """Wall clock. Denormals are flushed while timing: in-place ops often repeated decay into them."""

    def __init__(self, policy: TimingPolicy, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.device = torch.device("cpu")
        self.policy = policy
        self.read = telemetry(self.device)
        self._clock_ns = clock_ns
        self.cache_bytes = last_level_cache_bytes()
        self._flush_buffer: Tensor | None = None

    def warm_up(self) -> bool:
        """Start the thread pool and bring the cores to speed."""
        a = torch.randn(512, 512)

        def reference() -> None:
            for _ in range(4):  # about 10 ms on two cores
                a @ a

        return warm_up_until_settled(reference, self.policy)

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
            sets = rotation_sets(footprint, self.cache_bytes, free_bytes(self.device), policy)
            rotated = rotate(prepare, operands, sets, policy)
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
        """Fill the last-level cache with something else."""
        if self._flush_buffer is None:
            self._flush_buffer = torch.zeros(2 * self.cache_bytes, dtype=torch.uint8)
        self._flush_buffer.add_(1)

    def _stretch(self, calls: Iterable[Call]) -> float:
        start = self._clock_ns()
        for call in calls:
            call()
        return (self._clock_ns() - start) * 1e-9


def cold_warnings(cache: str, sets: int, footprint: int, cache_bytes: int) -> tuple[str, ...]:
    """Says so where rotation could not outgrow the cache (many tiny sets): the row is then partly warm."""
    if cache == "cold" and sets * footprint < cache_bytes:
        return (f"partly warm: {sets} operand sets of {footprint} bytes stay within the {cache_bytes}-byte cache",)
    return ()


def free_bytes(device: torch.device) -> int:
    """Memory that torch could still take on the device, its own cached blocks included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2 << 30
