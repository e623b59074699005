"""Measures the host cost of a training step: seconds to enqueue forward, backward, optimizer and zero_grad, by depth.

Host cost does not depend on width and is linear in depth (H200, Qwen3 eager: 12 layers take 57.8 ms at width 256,
57.2 at 1024), so models of tiny width at a few depths calibrate all sizes. Single runs spread by 10-40%: depths are
interleaved in rounds, and every sample is kept. Device work at tiny width is small but not zero: the
synchronisation inside transformers' Qwen3 forward waits for the few kernels that were enqueued before it.

Rows have the key host/<model>/depth<D>/<phase>; phases are forward, backward, optimizer, zero_grad, step (all of them),
and steady: a step in a row of steps between which the device is not drained.

On the CPU device an op runs when it is called, so the rows include the ops' own time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import torch

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.records.rows import EMPTY_FIELDS, Fields, HostRow, Row, merged, rounded
from flopcast.microbench.sweep.work import Stopwatch, Summary, first_line, oom_or_error
from flopcast.microbench.timing.allocator import settle_allocator
from flopcast.microbench.timing.timer import synchronise
from flopcast.progress import progress

PHASES = ("zero_grad", "forward", "backward", "optimizer")
IN_A_ROW = 3  # steps of a tiny model without synchronisation between them, per sample of the host


class Step(Protocol):
    """A training step whose phases can be run one by one (steps.TrainingStep)."""

    def run(self) -> Any: ...
    def zero_grad(self) -> None: ...
    def forward(self) -> Any: ...
    def backward(self, loss: Any) -> None: ...
    def optimizer_step(self) -> None: ...


class Rows(Protocol):
    """Where rows are kept, and which are there already (`records.recorder.Recorder`)."""

    def is_done(self, key: str, *, retry: Collection[str] = ()) -> bool: ...
    def append(self, row: Row) -> None: ...


class Kept:
    """Stands for a folder that holds nothing yet: keeps the rows for whoever made it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def is_done(self, key: str, *, retry: Collection[str] = ()) -> bool:
        return False

    def append(self, row: Row) -> None:
        self.rows.append(row)


def host_key(model: str, depth: int, phase: str) -> str:
    return f"host/{model}/depth{depth}/{phase}"


def depth_of_row(key: str) -> int:
    """The depth in a key of `host_key`."""
    return int(key.split("/")[2].removeprefix("depth"))


def host_fields(key: str, samples: Sequence[float], *, backend: str = "torch", suite: str | None = None) -> Fields:
    """The fields of a row of host seconds measured by wall clock; the value is None where there is no sample."""
    return {
        **EMPTY_FIELDS, "key": key, "backend": backend, "cache": "cold", "shape": None,
        **({} if suite is None else {"suite": suite}), "role": "fit",
        "value": statistics.median(samples) if samples else None, "unit": "seconds",
        "samples": rounded(samples), "n": len(samples), "timer": "wall",
    }  # fmt: skip


def run_host(
    builders: Mapping[int, Callable[[], Step]],
    *,
    model: str,
    recorder: Rows,
    device: torch.device,
    suite: str,
    rounds: int = 5,
    steps_per_round: int = 4,
    warm_up_steps: int = 2,
    retry: Collection[str] = (),
    counts: Mapping[int, Mapping[str, Mapping[str, float]]] = MappingProxyType({}),
    clock: Callable[[], float] = time.perf_counter,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Summary:
    """Measures and records the host seconds of each phase at each depth of `builders` (depth -> function that builds
    the step). `counts`: numbers of ops by kind, by depth and phase, where the rows shall have them, complete once the
    steps are built. `beside` is held while they are measured, not while they are built.

    `model` names the family and whatever else changes what is launched ("qwen3-adamw-fused"). The models of all depths
    are in memory at once, since each round runs all of them, so widths must be tiny. Depths are skipped only when all
    are done. A depth that does not fit or fails gets rows that say so.
    """
    settle_allocator(device)
    watch = Stopwatch(clock=clock)
    wanted = [host_key(model, depth, phase) for depth in builders for phase in (*PHASES, "step")]
    if all(recorder.is_done(key, retry=retry) for key in wanted):
        return Summary(skipped=len(wanted))
    statuses = Counter[str]()
    steps: dict[int, Step] = {}
    failed: dict[int, Fields] = {}
    samples: dict[int, list[dict[str, float]]] = {depth: [] for depth in builders}
    with progress(f"host cost, {model}", (rounds + 1) * len(builders), in_logs=True) as shown:
        for depth, build in builders.items():
            try:
                steps[depth] = build()
                for _ in range(warm_up_steps):
                    host_phases(steps[depth], device, clock)
            except Exception as error:
                steps.pop(depth, None)
                failed[depth] = {"status": oom_or_error(error), "reason": first_line(error)}
            shown.advance(f"building depth {depth}")
        for _ in range(rounds):
            for depth, step in steps.items():
                gc.collect()
                with no_garbage_collection(), beside():
                    found = [host_phases(step, device, clock) for _ in range(steps_per_round)]
                    steady = steady_seconds(step, device, clock)
                samples[depth] += [{**phases, "steady": steady} for phases in found]
                shown.advance(f"depth {depth}")
    for depth in builders:
        for phase in (*PHASES, "step", "steady"):
            fields = host_fields(
                host_key(model, depth, phase), [sample[phase] for sample in samples[depth]], suite=suite
            )
            # the first sample of each round follows a pause and is slower
            own = counts.get(depth, {}).get(phase)
            counted: Fields = {} if own is None else {"counts": dict(own)}
            row = merged(HostRow, fields, failed.get(depth, {}), {"rounds": rounds}, counted)
            recorder.append(row)
            statuses[row["status"]] += 1
    return Summary(statuses, seconds=watch.seconds)


def host_phases(step: Step, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Host seconds of each phase of one step on an idle device, without waiting for the device; "step" is the sum of
    the phases."""
    synchronise(device)
    stamps = [clock()]
    step.zero_grad()
    stamps.append(clock())
    loss = step.forward()
    stamps.append(clock())
    step.backward(loss)
    stamps.append(clock())
    step.optimizer_step()
    stamps.append(clock())
    synchronise(device)
    phases = {phase: stamps[i + 1] - stamps[i] for i, phase in enumerate(PHASES)}
    return {**phases, "step": stamps[-1] - stamps[0]}


def steady_seconds(step: Step, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds per step of IN_A_ROW steps, the device drained at both ends. They include what the phases leave out:
    freeing the graph, the loop itself, the effect of the queue on the host."""
    synchronise(device)
    start = clock()
    for _ in range(IN_A_ROW):
        step.run()
    synchronise(device)
    return (clock() - start) / IN_A_ROW
