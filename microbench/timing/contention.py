"""Whether other processes kept this machine's processor busy: what is timed on it, or launched by it, then waits.

Linux alone tells; elsewhere nothing is known. Time that a hypervisor takes counts as another process's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6, 7)  # of /proc/stat's first line: user, nice, system, irq, softirq, steal
LEAST_SECONDS = 0.05  # the kernel counts in steps of 10 ms on each core


class OthersShare:
    """Called, it returns the share of the machine's cores that other processes kept busy since it was called last; None
    where that is not known."""

    def __init__(
        self,
        machine: Callable[[], float | None] | None = None,
        own: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        cores: int | None = None,
    ) -> None:
        """`machine`, `own`: processor seconds so far of all processes, and of this one with its children."""
        self._machine, self._own, self._clock = machine or machine_seconds, own or own_seconds, clock
        self._cores = cores or os.cpu_count() or 1
        self._last: float | None = None
        self._mark = self._now()

    def __call__(self) -> float | None:
        now = self._now()
        elapsed = now[0] - self._mark[0]
        if elapsed < LEAST_SECONDS:
            return self._last
        if now[1] is None or self._mark[1] is None:
            return None
        others = (now[1] - self._mark[1]) - (now[2] - self._mark[2])
        self._mark, self._last = now, round(min(max(others / elapsed / self._cores, 0.0), 1.0), 3)
        return self._last

    def _now(self) -> tuple[float, float | None, float]:
        return self._clock(), self._machine(), self._own()


def machine_seconds() -> float | None:
    """Processor seconds that all processes have used since the machine started."""
    try:
        with Path("/proc/stat").open() as file:
            ticks = [int(field) for field in file.readline().split()[1:]]
        return sum(ticks[place] for place in _BUSY) / float(os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


def own_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
