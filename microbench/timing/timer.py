"""The interface of a timer, and its result: samples of one call, and the device's state while they were taken.

`seconds` is the median time of ONE execution, the cost of launching it excluded:
- CUDA (cuda_timer.py): below 200 us a CUDA graph of many calls is replayed and divided (singly by events,
  1024^3 on an H200 reads 9.7 us, in a graph 5.7); longer calls lie between two events each.
- CPU (cpu_timer.py): wall clock around enough calls to fill 200 us.
`cold` means that a call finds none of its operands in the last-level cache: calls rotate over operand sets
which together are some times its size, or the cache is flushed in between. `hot` repeats one set.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from flopcast.microbench.timing.operands import Operands, Prepare
from flopcast.microbench.timing.policy import TimingPolicy
from flopcast.microbench.timing.telemetry import Reading


@dataclass(frozen=True)
class Timing:
    """The samples of one case, seconds per execution. `warnings`: what was irregular."""

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
        """Brings the device to its working clocks, once per process. False where they never settled."""

    def time(self, prepare: Prepare, operands: Operands, cache: str) -> Timing: ...


def synchronise(device: torch.device) -> None:
    """Waits until the device has done all that was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_stream(timer: Timer) -> AbstractContextManager[Any]:
    """A context in which everything runs on the timer's stream, if it has one: on CUDA everything timed has to."""
    stream = getattr(timer, "stream", None)
    return nullcontext() if stream is None else torch.cuda.stream(stream)
