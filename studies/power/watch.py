"""Reads a GPU's clock and energy around kernels, and the kernels' durations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import pynvml
import torch
from torch.profiler import ProfilerActivity, profile

from flopcast.microbench.timing.mean_clock import ClockProbe

_NOT_KERNELS = ("read_clocks", "spin", "Context Sync", "Activity Buffer", "Memset")


class Read(NamedTuple):
    """Of kernels that ran in a row: by name the median of their seconds and how many there were; the mean clock of the
    multiprocessors meanwhile, in MHz."""

    kernels: dict[str, tuple[float, int]]
    mhz: float | None


@dataclass(frozen=True)
class InARow:
    """Of something that ran over and over: its seconds, the mean clock in MHz and the mean power in watts."""

    seconds: float
    mhz: float | None
    watts: float


class Watch:
    """Of the current GPU."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self._gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        self._probe = ClockProbe(torch.device("cuda", torch.cuda.current_device()))

    def profiled(self, run: Callable[[], Any]) -> Read:
        """Runs it once with the profiler on."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._probe.mark()
            run()
            self._probe.mark()
            torch.cuda.synchronize()
        results: Any = profiler.profiler
        by_name: dict[str, list[float]] = {}
        for event in results.kineto_results.events():
            is_kernel = str(event.device_type()).endswith("CUDA") and not any(n in event.name() for n in _NOT_KERNELS)
            if is_kernel and event.duration_ns() > 0:
                by_name.setdefault(event.name()[:90], []).append(event.duration_ns() * 1e-9)
        found = {name: (median(seconds), len(seconds)) for name, seconds in by_name.items()}
        return Read(found, self._probe.mean_mhz())

    def in_a_row(self, run: Callable[[], Any], seconds: float) -> InARow:
        """Runs it for about `seconds`, and again for as long, of which it tells."""
        number = max(2, round(seconds / seconds_of(run)))
        for _ in range(number):
            run()
        torch.cuda.synchronize()
        began, before = time.perf_counter(), self._joules()
        self._probe.mark()
        for _ in range(number):
            run()
        self._probe.mark()
        torch.cuda.synchronize()
        took, spent = time.perf_counter() - began, self._joules() - before
        return InARow(took / number, self._probe.mean_mhz(), spent / took)

    def _joules(self) -> float:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) * 1e-3


def seconds_of(run: Callable[[], Any]) -> float:
    """The seconds of one run of several."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    return max((time.perf_counter() - began) / 3, 1e-6)
