"""Runs a sweep: cases in shuffled order, each checked for correctness, profiled, timed, and written as one row.

No failure of a case ends the sweep: running out of memory, an unsupported backend, a wrong result or any exception
becomes a row with a status and a reason. Only a lost CUDA context (an illegal memory access) stops it,
because everything after it would fail: that case gets its row, and a re-run continues after it.
"""

from __future__ import annotations

import random
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flopcast.errors import RunError
from flopcast.kernels.shapes import Shape, shape_to_json
from flopcast.microbench.records.kernel_sources import BACKEND, OPERANDS, kernels_of
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import Fields, Status, is_busy
from flopcast.microbench.sweep.cases import Case, KernelModule, case_row, finite_or_none, kernel_module, timing_fields
from flopcast.microbench.sweep.scalars import reference_row
from flopcast.microbench.sweep.work import Stopwatch, Summary, first_line, is_out_of_memory, status_of
from flopcast.microbench.timing.allocator import settle_allocator
from flopcast.microbench.timing.cpu_timer import CpuTimer
from flopcast.microbench.timing.cuda_timer import CudaTimer
from flopcast.microbench.timing.cupti import KernelTimes, profile_calls
from flopcast.microbench.timing.operands import Call, free_bytes, storage_bytes
from flopcast.microbench.timing.timer import Timer, on_stream
from flopcast.progress import Progress, progress

# Share of the memory that a batch may take: it holds one operand set per case between profiling and timing.
BATCH_MEMORY_SHARE = 1 / 16
FEWEST_REFERENCES = 10  # fewer times of one product, those of a few seconds, say little of a machine's spread
BUSY = "other processes kept {share:.0%} of the cores busy: the times are those of a busy machine"
UNSETTLED = "the clock or the time of a reference still moved by more than the tolerance when warm-up was cut off"


@dataclass
class _Ready:
    """A case whose result was checked, ready to be timed."""

    case: Case
    module: KernelModule
    operands: Sequence[Tensor]
    call: Call
    checked: Fields  # the result's error and the tolerance
    note: str | None


class _Failed(Exception):
    """Ends a case, with this status and reason and further fields of its row."""

    def __init__(self, status: Status, reason: str, **fields: float | None) -> None:
        super().__init__(reason)
        self.row: Fields = {"status": status, "reason": reason, **fields}


def run_sweep(
    cases: Iterable[Case],
    *,
    recorder: Recorder,
    timer: Timer,
    suite: str,
    seed: int = 0,
    budget_seconds: float | None = None,
    retry: Collection[str] = (),
    module_for: Callable[[Shape], KernelModule] = kernel_module,
    label: str = "measuring",
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Measures the cases that the recorder's folder lacks.

    They are shuffled by `seed`, so that drift (heat, neighbours) is spread over all shapes. No case is begun after
    `budget_seconds`. Cases whose status is in `retry` ("oom", "error") are measured again.
    Raises RunError when the CUDA context is lost or the disk is full; all finished rows are in the file.
    """
    settle_allocator(timer.device)
    watch = Stopwatch(budget_seconds, clock)
    wanted = list(dict.fromkeys(cases))
    todo = [c for c in wanted if not _is_done(c, recorder, retry)]
    random.Random(seed).shuffle(todo)
    sweep = _Sweep(recorder, timer, suite, seed, module_for)
    if todo and not watch.is_spent() and not timer.warm_up():
        sweep.warn(UNSETTLED)
    rows_before = len(recorder.rows)
    with progress(label, len(todo), in_logs=True) as shown, on_stream(timer):
        pending = list(reversed(todo))
        while pending and not watch.is_spent():
            sweep.run_batch(pending, watch, shown)
    shares = [share for row in recorder.rows[rows_before:] if (share := row.get("others_share")) is not None]
    if shares and is_busy(statistics.median(shares), timer.device.type):
        sweep.warn(BUSY.format(share=statistics.median(shares)))
    if len(sweep.references) >= FEWEST_REFERENCES:
        recorder.append(reference_row(sweep.references, suite))
    return Summary(
        statuses=sweep.statuses,
        skipped=len(wanted) - len(todo),
        remaining=len(todo) - sum(sweep.statuses.values()),
        seconds=watch.seconds,
        warnings=sweep.warnings,
    )


def _is_done(case: Case, recorder: Recorder, retry: Collection[str]) -> bool:
    is_told = case.backend == BACKEND or not OPERANDS.keys().isdisjoint(case.shape.key.split("/")[1].split("."))
    kernels = kernels_of(shape_to_json(case.shape), case.backend) if is_told else None
    return recorder.is_done(case.shape.key, case.backend, case.cache, retry=retry, kernels=kernels)


class _Sweep:
    def __init__(
        self, recorder: Recorder, timer: Timer, suite: str, seed: int, module_for: Callable[[Shape], KernelModule]
    ) -> None:
        self.recorder = recorder
        self.timer = timer
        self.suite = suite
        self.seed = seed
        self.module_for = module_for
        self.statuses: Counter[str] = Counter()
        self.warnings: list[str] = []
        self.references: list[float] = []  # seconds of one product, on a processor before each case
        self._checked: dict[tuple[str, str], tuple[float | None, float | None]] = {}

    @property
    def on_cuda(self) -> bool:
        return self.timer.device.type == "cuda"

    def run_batch(self, pending: list[Case], watch: Stopwatch, shown: Progress) -> None:
        """Takes a batch of cases off the end of `pending`, sets them up, profiles them together, times them one by one.

        Profiling comes before timing, so that each row is whole when its case has been timed, and is written at once.
        """
        ready: list[_Ready] = []
        held = 0
        limit = free_bytes(self.timer.device) * BATCH_MEMORY_SHARE
        size = self.timer.policy.profile_batch if self.on_cuda else 1  # no profiler, so no reason to batch
        while pending and len(ready) < size and held < limit and not watch.is_spent():
            case = pending.pop()
            if isinstance(self.timer, CpuTimer) and (seconds := self.timer.reference_seconds()) is not None:
                self.references.append(seconds)
            try:
                one = self._set_up(case)
            except _Failed as failed:
                if failed.row["status"] == "oom" and ready:  # the batch may be what fills the memory: try it alone
                    pending.append(case)
                    self._release()
                    break
                self._write(case, failed.row, shown)
            else:
                held += storage_bytes(list(one.operands))
                ready.append(one)
            self._release_if_large()
        profiles = self._profile(ready)
        for i in range(len(ready)):
            if i and watch.is_spent():  # not before the first, so that any budget makes progress
                break
            one, ready[i] = ready[i], None  # type: ignore[call-overload]
            self._write(one.case, self._time(one, profiles[i]), shown)
            del one
            self._release_if_large()

    # --- the steps of one case

    def _set_up(self, case: Case) -> _Ready:
        """Makes a case's operands and its call, and checks the result. Raises _Failed."""
        with self._guard(case):
            module = self.module_for(case.shape)
            operands = module.operands(case.shape, self.timer.device, zlib.crc32(case.shape.key.encode()) + self.seed)
            call = module.prepare(case.shape, case.backend, operands)
            error, tolerance, note = self._check(case, module, operands, call)
            checked = {"relative_error": finite_or_none(error), "tolerance": tolerance}
        return _Ready(case, module, operands, call, checked, note)

    def _check(
        self, case: Case, module: KernelModule, operands: Sequence[Tensor], call: Call
    ) -> tuple[float | None, float | None, str | None]:
        known = (case.shape.key, case.backend)  # cold and hot run the same kernel: checked once
        if known in self._checked:
            return (*self._checked[known], None)
        try:
            reference = module.reference(operands, case.shape)  # first: the call may write its operands
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._release()
            call()
            return None, None, "not checked: the reference does not fit in memory"
        error_, tolerance = module.check(call(), reference, operands, case.shape)
        error_, tolerance = float(error_), float(tolerance)
        if not error_ <= tolerance:
            reason = f"relative error {error_:.3g} is above the tolerance {tolerance:.3g}"
            raise _Failed("incorrect", reason, relative_error=finite_or_none(error_), tolerance=tolerance)
        self._checked[known] = (error_, tolerance)
        return error_, tolerance, None

    def _profile(self, ready: Sequence[_Ready]) -> Sequence[KernelTimes | None]:
        if not self.on_cuda or not ready:
            return [None] * len(ready)
        assert isinstance(self.timer, CudaTimer)
        current = ready[0].case

        def tracked(one: _Ready) -> Call:
            def call() -> Any:
                nonlocal current
                current = one.case
                return one.call()

            return call

        try:
            profiles = profile_calls(
                [(tracked(one), one.case.cache == "cold") for one in ready],
                flush=self.timer.flush,
                device=self.timer.device,
                stream=self.timer.stream,
                repeats=self.timer.policy.profile_repeats,
            )
        except RuntimeError as error:  # no permission, another tool holds CUPTI: kernel times stay empty
            self._raise_if_lost(error, current)
            self.warn(f"no kernel times from CUDA's profiler: {first_line(error)}")
            return [None] * len(ready)
        if any(times is None for times in profiles):
            missing = sum(times is None for times in profiles)
            self.warn(f"{missing} of {len(ready)} cases of a batch got no kernel times from CUDA's profiler")
        return profiles

    def _time(self, one: _Ready, profile: KernelTimes | None) -> Fields:
        """Returns the fields of one case's row, also where the case fails."""

        def prepare(operands: Sequence[Tensor]) -> Call:
            if operands is one.operands:
                return one.call
            return one.module.prepare(one.case.shape, one.case.backend, operands)

        try:
            with self._guard(one.case):
                timing = self.timer.time(prepare, one.operands, one.case.cache)
        except _Failed as failed:
            return {**one.checked, "note": one.note, **failed.row}
        notes = [*([one.note] if one.note else []), *timing.warnings]
        fields = {**one.checked, "note": "; ".join(notes) or None, **timing_fields(timing)}
        if profile is not None:
            fields |= {"kernel_seconds": profile.seconds, "kernels": [list(kernel) for kernel in profile.kernels]}
        elif not self.on_cuda:
            fields |= {"kernel_seconds": timing.seconds}
        return fields

    @contextmanager
    def _guard(self, case: Case) -> Iterator[None]:
        """Turns whatever a case raises into _Failed, or RunError when the device is lost."""
        try:
            yield
        except _Failed:
            raise
        except Exception as error:
            status = status_of(error)
            if status == "oom":
                self._release()
            else:
                self._raise_if_lost(error, case)
            name = f"{type(error).__name__}: " if status == "error" else ""
            raise _Failed(status, f"{name}{first_line(error)}") from None

    def _write(self, case: Case, fields: Fields, shown: Progress) -> None:
        row = case_row(case, self.suite, fields)
        self.recorder.append(row)
        self.statuses[row["status"]] += 1
        shown.advance(case.name)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    # --- memory and lost devices

    def _release(self) -> None:
        if self.on_cuda:
            torch.cuda.empty_cache()

    def _release_if_large(self) -> None:
        """Frees the private memory pools that graphs leave behind, once they take a quarter of the memory."""
        if not self.on_cuda:
            return
        device = self.timer.device
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if cached > torch.cuda.get_device_properties(device).total_memory // 4:
            torch.cuda.empty_cache()

    def _raise_if_lost(self, error: BaseException, case: Case) -> None:
        """Where every CUDA call fails, as after an illegal access, writes the row of `case` and raises RunError."""
        if not self.on_cuda:
            return
        try:
            torch.cuda.synchronize(self.timer.device)
        except RuntimeError as sticky:
            reason = f"lost the CUDA context: {first_line(sticky)}"
            self.recorder.append(case_row(case, self.suite, {"status": "error", "reason": reason}))
            raise RunError(
                f"{case.name}: {reason}. All finished rows are in {self.recorder.path};"
                " run the same command again, it continues behind this case"
            ) from error
