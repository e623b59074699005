"""Provides what all measurements share: summary, time budget, the loop over items left to do, the status of a fault."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from flopcast.kernels.references import BackendUnavailable
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import Row, Status
from flopcast.progress import progress

Item = TypeVar("Item")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Summary:
    """What one run measured. `remaining`: the number of items left for the next run when the time budget was spent."""

    statuses: Counter[str] = field(default_factory=Counter)  # of the rows written
    skipped: int = 0  # done before
    remaining: int = 0
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def measured(self) -> int:
        return sum(self.statuses.values())

    def __str__(self) -> str:
        parts = [f"{count} {status}" for status, count in sorted(self.statuses.items())]
        text = f"{self.measured} measured in {self.seconds:.0f} s"
        text += f" ({', '.join(parts)})" if parts else ""
        text += f", {self.skipped} done before" if self.skipped else ""
        text += f", {self.remaining} left over (time budget spent: run again to continue)" if self.remaining else ""
        return text


class Stopwatch:
    """Measures the seconds since it was created, against a time budget where there is one."""

    def __init__(self, budget_seconds: float | None = None, clock: Clock = time.monotonic) -> None:
        self._budget, self._clock, self._start = budget_seconds, clock, clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    @property
    def left(self) -> float | None:
        return None if self._budget is None else self._budget - self.seconds

    def is_spent(self) -> bool:
        left = self.left
        return left is not None and left <= 0


def work_through(
    todo: Iterable[tuple[str, Item]],
    measure: Callable[[Item], Row],
    *,
    recorder: Recorder,
    label: str,
    watch: Stopwatch,
    planned: int | None = None,
) -> Counter[str]:
    """Measures the items of (name, item) pairs in turn and writes one row per item; begins none once the time is spent.
    `planned`: how many there are, of an iterator that waits for each. Returns the number of rows by status. Raises
    RunError on a full disk."""
    if planned is None:
        todo = list(todo)
        planned = len(todo)
    statuses = Counter[str]()
    with progress(label, planned, in_logs=True) as shown:
        for name, item in todo:
            if watch.is_spent():
                break
            row = measure(item)
            recorder.append(row)
            statuses[row["status"]] += 1
            shown.advance(name)
    return statuses


# --- faults


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, as reported by CUDA, by the processor's allocator or by cuBLAS."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def status_of(error: BaseException) -> Status:
    """The status of a case that raised: "oom", "unsupported" where the device or the installed Triton lacks what the
    case needs (a kernel in Gluon on a release without it is an ImportError), else "error"."""
    if is_out_of_memory(error):
        return "oom"
    is_lacking = isinstance(error, ImportError) and (error.name or "").split(".")[0] == "triton"
    is_unsupported = is_lacking or isinstance(error, BackendUnavailable | NotImplementedError)
    return "unsupported" if is_unsupported else "error"


def oom_or_error(error: BaseException) -> Status:
    """The status of a whole step that raised: as `status_of`, but a model that the device cannot run is an "error"."""
    return "oom" if is_out_of_memory(error) else "error"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 characters; the error's type where it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
