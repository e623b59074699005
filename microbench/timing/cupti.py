"""Records which kernels a call launches and how long each runs, by CUDA's profiler (CUPTI).

A profiler session takes some 100 ms to open and close, so that one session serves many calls. Only device activity is
recorded: marker kernels on the same stream, of a name that nothing else has (torch.cuda._sleep's), delimit each
call, and what lies outside of a pair of markers (flushes, the making of operands) is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MARKER = "spin_kernel"  # at::cuda::<anonymous>::spin_kernel(long)
NAME_LENGTH = 200  # CUTLASS names run to thousands of characters; cuBLAS's tile stands within the first 100

# Not work: what CUPTI also reports on the device's side.
_NOT_KERNELS = ("Context Sync", "Stream Sync", "Stream Wait", "Event Sync", "ProfilerStep", "Optimizer.", "## ")


@dataclass(frozen=True)
class DeviceEvent:
    """One kernel, copy or fill on the device."""

    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True)
class KernelTimes:
    """One call's kernels in launch order, with the median duration of each, seconds."""

    kernels: tuple[tuple[str, float], ...]
    seconds: float  # median over calls of the summed durations


def split_at_markers(events: Iterable[DeviceEvent], calls: int, marker: str = MARKER) -> list[list[DeviceEvent]] | None:
    """The events of each call, given that each lies between a pair of markers.

    None when there are not two markers per call: CUPTI dropped records, and kernels cannot be assigned to calls.
    """
    ordered = sorted(events, key=lambda event: event.start_ns)
    groups: list[list[DeviceEvent]] = []
    markers = 0
    for event in ordered:
        if marker in event.name:
            markers += 1
            if markers % 2:
                groups.append([])
        elif markers % 2:
            groups[-1].append(event)
    return groups if markers == 2 * calls else None


def summarise(calls: Sequence[Sequence[DeviceEvent]]) -> KernelTimes:
    """Medians over repeated calls; where these launched different kernels, over the commonest sequence."""
    sequences = [tuple(event.name for event in call) for call in calls]
    common = max(dict.fromkeys(sequences), key=sequences.count)
    same = [call for call, names in zip(calls, sequences, strict=True) if names == common]
    kernels = tuple(
        (name[:NAME_LENGTH], statistics.median(call[i].duration_ns for call in same) * 1e-9)
        for i, name in enumerate(common)
    )
    return KernelTimes(kernels, statistics.median(sum(e.duration_ns for e in call) for call in same) * 1e-9)


def record(run: Callable[[], Any], device: torch.device) -> list[DeviceEvent]:
    """Everything that runs on the device during `run`, to the nanosecond.

    Raises RuntimeError where the profiler cannot be opened (another tool holds CUPTI, no permission).
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    results: Any = profiler.profiler.kineto_results
    return [
        DeviceEvent(event.name(), event.start_ns(), event.duration_ns())
        for event in results.events()
        if str(event.device_type()).endswith("CUDA") and not event.name().startswith(_NOT_KERNELS)
    ]


def profile_calls(
    calls: Sequence[tuple[Callable[[], Any], bool]],
    *,
    flush: Callable[[], Any],
    device: torch.device,
    stream: torch.cuda.Stream,
    repeats: int = 5,
) -> list[KernelTimes | None]:
    """The kernels of each (call, cold), profiled in one session; None where nothing was launched or records were lost.

    Each call runs once unmarked, then `repeats` times between markers, after a flush of the cache where cold. That
    costs little beyond the kernels: about 30 us per flush, 10 us per marker. The result of a call that raises is None.
    """
    recorded: list[int] = []
    mark: Any = torch.cuda._sleep

    def run() -> None:
        with torch.cuda.stream(stream):
            for index, (call, cold) in enumerate(calls):
                try:
                    call()
                except Exception:  # the timing that follows meets and reports it
                    torch.cuda.synchronize(device)
                    continue
                recorded.append(index)
                for _ in range(repeats):
                    if cold:
                        flush()
                    mark(1)
                    call()
                    mark(1)
                torch.cuda.synchronize(device)  # so that a lost device is met at the case that lost it

    events = record(run, device)
    groups = split_at_markers(events, len(recorded) * repeats)
    times: list[KernelTimes | None] = [None] * len(calls)
    if groups is None:
        return times
    for position, index in enumerate(recorded):
        of_call = groups[position * repeats : (position + 1) * repeats]
        if any(of_call):
            times[index] = summarise(of_call)
    return times
