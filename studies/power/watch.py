"""Reads a GPU's clock and energy around kernels, and the kernels' durations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from flopcast.microbench.recipe.training_step import FunctionStep
from flopcast.microbench.steps.measure import profile_kernels
from flopcast.microbench.timing.mean_clock import ClockProbe
from flopcast.microbench.timing.telemetry import Nvml


class Profiled(NamedTuple):
    """Of kernels that ran in a row: by name the median of their seconds and how many there were; the mean clock of the
    multiprocessors meanwhile, in MHz."""

    kernels: dict[str, tuple[float, int]]
    mhz: float | None


@dataclass(frozen=True)
class InARow:
    """Of something that ran over and over: its seconds, the mean clock in MHz and the mean power in watts; the last two
    None where the GPU does not tell."""

    seconds: float
    mhz: float | None
    watts: float | None


class Watch:
    """Of the current GPU."""

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._nvml, self._probe = Nvml(device), ClockProbe(device)

    def profiled(self, run: Callable[[], Any]) -> Profiled:
        """Runs it once with the profiler on."""
        by_name: dict[str, list[float]] = {}
        for kernel in profile_kernels(FunctionStep(run, "cuda"), probe=self._probe):
            by_name.setdefault(kernel.name, []).append(kernel.seconds)
        found = {name: (median(seconds), len(seconds)) for name, seconds in by_name.items()}
        return Profiled(found, self._probe.mean_mhz())

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
        took, after = time.perf_counter() - began, self._joules()
        watts = None if before is None or after is None else (after - before) / took
        return InARow(took / number, self._probe.mean_mhz(), watts)

    def _joules(self) -> float | None:
        return self._nvml.scaled("nvmlDeviceGetTotalEnergyConsumption", 1e-3)


def seconds_of(run: Callable[[], Any]) -> float:
    """The seconds of one run of several."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    return max((time.perf_counter() - began) / 3, 1e-6)
