"""Runs real training steps one after the other and writes a row for each: the measured side of `validate`."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any

import torch

from flopcast.microbench import steps
from flopcast.microbench.cases import first_line, is_out_of_memory
from flopcast.microbench.measure_step import Kernel, StepMeasurement, measure_step
from flopcast.microbench.plans import StepPlan
from flopcast.microbench.progress import progress
from flopcast.microbench.records import EMPTY_FIELDS, Recorder
from flopcast.microbench.sweep import Summary


def run_steps(
    plans: Iterable[StepPlan],
    *,
    device: torch.device,
    recorder: Recorder,
    rounds: int = 5,
    steps_per_round: int = 5,
    suite: str = "validate",
    budget_seconds: float | None = None,
    retry: Collection[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Measures what the recorder's folder lacks, smallest model first as given.

    A step that does not fit is a row of status "oom", any other fault one of status "error"; the rest goes
    on.
    """
    start = clock()
    wanted = list(plans)
    todo = [plan for plan in wanted if not recorder.is_done(plan.key, retry=retry)]
    summary = Summary(skipped=len(wanted) - len(todo), remaining=0)
    done = 0
    with progress(len(todo), "real steps") as advance:
        for plan in todo:
            if budget_seconds is not None and clock() - start >= budget_seconds:
                break
            row = measure_plan(plan, device, rounds=rounds, steps_per_round=steps_per_round)
            recorder.append(
                {"key": plan.key, "backend": "torch", "cache": "cold", "shape": None, "suite": suite, **row}
            )
            summary.statuses[row["status"]] += 1
            done += 1
            advance(plan.name)
    return Summary(summary.statuses, summary.skipped, len(todo) - done, clock() - start)


def measure_plan(
    plan: StepPlan, device: torch.device, *, rounds: int, steps_per_round: int
) -> dict[str, Any]:
    """The fields of one plan's row, whatever happens."""
    empty = {**EMPTY_FIELDS, "role": "validation", "plan": asdict(plan), "unit": "seconds", "value": None}
    step = None
    try:
        step = steps.build(
            plan.config, device, batch=plan.batch, seq=plan.seq, precision=plan.precision,
            optimizer=plan.optimizer, attention=plan.attention,
        )  # fmt: skip
        measured = measure_step(step, rounds=rounds, steps_per_round=steps_per_round)
        return {**empty, **step_fields(measured), "n_params": sum(p.numel() for p in step.model.parameters())}
    except Exception as error:
        return {**empty, "status": "oom" if is_out_of_memory(error) else "error", "reason": first_line(error)}
    finally:
        del step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def step_fields(measured: StepMeasurement) -> dict[str, Any]:
    """A step's measurement as fields of a row. `ops`: device seconds and kernels by launching ATen call."""
    return {
        "value": statistics.median(measured.step_seconds),
        "seconds": statistics.median(measured.step_seconds),
        "samples": list(measured.step_seconds),
        "n": len(measured.step_seconds),
        "timer": "wall",
        "device_seconds": statistics.median(measured.device_seconds),
        "host_seconds": statistics.median(measured.host_seconds),
        "host_samples": list(measured.host_seconds),
        "phase_seconds": {
            "forward": statistics.median(measured.forward_seconds),
            "backward": statistics.median(measured.backward_seconds),
            "optimizer": statistics.median(measured.optimizer_seconds),
        },
        "n_kernels": len(measured.kernels),
        "ops": by_op(measured.kernels),
        "peak_bytes": measured.peak_bytes,
    }


def by_op(kernels: Iterable[Kernel]) -> dict[str, list[float]]:
    """{ATen call: [seconds, kernels]} of one step."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel in kernels:
        entry = totals[kernel.op]
        entry[0] += kernel.seconds
        entry[1] += 1
    return dict(totals)
