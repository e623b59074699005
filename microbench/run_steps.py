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
from flopcast.microbench.host import host_phases
from flopcast.microbench.measure_step import Kernel, StepKernels, StepTiming, profile_step, time_step
from flopcast.microbench.plans import PHASES, HostPlan, StepPlan
from flopcast.microbench.progress import progress
from flopcast.microbench.records import EMPTY_FIELDS, Recorder
from flopcast.microbench.sweep import Summary
from flopcast.microbench.timer import no_garbage_collection

Measure = Callable[[steps.TrainingStep], dict[str, Any]]


def run_steps(
    plans: Iterable[StepPlan],
    *,
    device: torch.device,
    recorder: Recorder,
    rounds: int = 5,
    steps_per_round: int = 5,
    suite: str = "validate",
    host: HostPlan | None = None,
    budget_seconds: float | None = None,
    retry: Collection[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Measures what the recorder's folder lacks: first the times of all steps, then the kernels of all.

    With `host`, its tiny models are run between the steps, so that the host's speed is known as it was then: one
    process differs from the next by 10 to 40%, and drifts besides. Their rows are those of `run_host`.

    Two passes, because CUDA's profiler makes every later launch of the process dearer (`profile_step`). A step that
    does not fit is a row of status "oom", any other fault one of status "error"; the rest goes on.
    """
    start = clock()
    wanted = list(plans)
    summary = Summary()
    remaining = 0
    calibration: HostCalibration | None = None

    def pending(key: str) -> bool:
        return not recorder.is_done(key, retry=retry)

    def work_through(
        todo: list[StepPlan], label: str, measure: Measure, key_of: Callable[[StepPlan], str]
    ) -> int:
        done = 0
        with progress(len(todo), label) as advance:
            for plan in todo:
                if budget_seconds is not None and clock() - start >= budget_seconds:
                    break
                if calibration is not None and measure is timing:
                    calibration.sample()
                row = measure_plan(plan, device, measure)
                if calibration is not None and row.get("peak_bytes"):
                    row["peak_bytes"] -= calibration.held_bytes()
                shared = {
                    "key": key_of(plan),
                    "backend": "torch",
                    "cache": "cold",
                    "shape": None,
                    "suite": suite,
                }
                recorder.append({**shared, **row})
                summary.statuses[row["status"]] += 1
                done += 1
                advance(plan.name)
        return len(todo) - done

    def timing(step: steps.TrainingStep) -> dict[str, Any]:
        return timing_fields(time_step(step, rounds=rounds, steps_per_round=steps_per_round))

    def kernels(step: steps.TrainingStep) -> dict[str, Any]:
        return kernel_fields(profile_step(step))

    todo = [plan for plan in wanted if pending(plan.key)]
    if host is not None and todo:
        calibration = HostCalibration(host, device)
    remaining += work_through(todo, "real steps, times", timing, lambda plan: plan.key)
    if calibration is not None:
        calibration.sample()
        for row in calibration.rows(suite):
            recorder.append(row)
        calibration = None  # its memory goes back
    ran = [plan for plan in wanted if recorder.status(plan.key) == "ok"]
    todo_kernels = [plan for plan in ran if pending(plan.kernels_key)]
    remaining += work_through(todo_kernels, "real steps, kernels", kernels, lambda plan: plan.kernels_key)
    skipped = len(wanted) - len(todo) + len(ran) - len(todo_kernels)
    return Summary(summary.statuses, skipped, remaining, clock() - start)


class HostCalibration:
    """The tiny models of a host plan, kept alive and sampled now and then."""

    def __init__(self, plan: HostPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.steps = {
            depth: steps.build(config, device, batch=plan.batch, seq=plan.seq, optimizer=plan.optimizer)
            for depth, config in plan.configs.items()
        }
        self.samples: dict[int, list[dict[str, float]]] = {depth: [] for depth in self.steps}
        for step in self.steps.values():
            step.run()

    def sample(self) -> None:
        """One warm step and two measured ones at each depth."""
        for depth, step in self.steps.items():
            host_phases(step, self.device)
            with no_garbage_collection():
                self.samples[depth] += [host_phases(step, self.device) for _ in range(2)]

    def held_bytes(self) -> int:
        """What the tiny models hold between samples, as the allocator counts it: not the measured step's."""
        tensors = [
            tensor
            for step in self.steps.values()
            for p in step.model.parameters()
            for tensor in (p, p.grad, *step.optimizer.state[p].values())
        ]
        on_device = (t for t in tensors if isinstance(t, torch.Tensor) and t.device.type == self.device.type)
        return sum(-(-t.untyped_storage().nbytes() // 512) * 512 for t in on_device)

    def rows(self, suite: str) -> list[dict[str, Any]]:
        """A row for each depth and phase, as `run_host` writes them."""
        return [
            {**EMPTY_FIELDS, "key": self.plan.row_key(depth, phase), "backend": "torch", "cache": "cold",
             "shape": None, "suite": suite, "role": "fit", "value": statistics.median(values), "unit": "seconds",
             "samples": [float(f"{value:.6g}") for value in values[:100]], "n": len(values), "timer": "wall"}
            for depth, samples in self.samples.items()
            for phase in ("zero_grad", *PHASES)
            if (values := [sample[phase] for sample in samples])
        ]  # fmt: skip


def measure_plan(plan: StepPlan, device: torch.device, measure: Measure) -> dict[str, Any]:
    """The fields of one plan's row, whatever happens."""
    empty = {**EMPTY_FIELDS, "role": "validation", "plan": asdict(plan), "unit": "seconds", "value": None}
    step = None
    try:
        step = steps.build(
            plan.config, device, batch=plan.batch, seq=plan.seq, precision=plan.precision,
            optimizer=plan.optimizer, attention=plan.attention,
        )  # fmt: skip
        return {**empty, **measure(step), "n_params": sum(p.numel() for p in step.model.parameters())}
    except Exception as error:
        return {**empty, "status": "oom" if is_out_of_memory(error) else "error", "reason": first_line(error)}
    finally:
        del step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def timing_fields(timing: StepTiming) -> dict[str, Any]:
    """A step's times as the fields of a row."""
    return {
        "value": statistics.median(timing.step_seconds),
        "seconds": statistics.median(timing.step_seconds),
        "samples": list(timing.step_seconds),
        "n": len(timing.step_seconds),
        "timer": "wall",
        "host_seconds": statistics.median(timing.host_seconds),
        "host_samples": list(timing.host_seconds),
        "phase_seconds": {
            "forward": statistics.median(timing.forward_seconds),
            "backward": statistics.median(timing.backward_seconds),
            "optimizer": statistics.median(timing.optimizer_seconds),
        },
        "peak_bytes": timing.peak_bytes,
    }


def kernel_fields(found: StepKernels) -> dict[str, Any]:
    """A step's kernels as the fields of a row. `ops`: device seconds and kernels by launching ATen call."""
    device_seconds = statistics.median(found.device_seconds)
    return {
        "value": device_seconds,
        "device_seconds": device_seconds,
        "samples": list(found.device_seconds),
        "n": len(found.device_seconds),
        "timer": "profiler",
        "n_kernels": len(found.kernels),
        "ops": by_op(found.kernels),
    }


def by_op(kernels: Iterable[Kernel]) -> dict[str, list[float]]:
    """{ATen call: [seconds, kernels]} of one step."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel in kernels:
        entry = totals[kernel.op]
        entry[0] += kernel.seconds
        entry[1] += 1
    return dict(totals)
