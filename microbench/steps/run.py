"""Runs real training steps one after the other and writes a row for each: the measured side of `validate`."""

from __future__ import annotations

import gc
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any

import torch

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.hosts.host import host_phases
from flopcast.microbench.hosts.operators import operator_rows
from flopcast.microbench.recipe import training_step
from flopcast.microbench.recipe.patches import patched
from flopcast.microbench.recipe.plans import PHASES, HostPlan, StepPlan
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS
from flopcast.microbench.steps.build import build_plan
from flopcast.microbench.steps.measure import Kernel, StepKernels, StepTiming, profile_step, time_step
from flopcast.microbench.sweep.cases import first_line, is_out_of_memory
from flopcast.microbench.sweep.sweep import Summary
from flopcast.microbench.timing.device import Reading, telemetry
from flopcast.microbench.timing.timer import synchronise
from flopcast.progress import progress

Measure = Callable[[training_step.TrainingStep], dict[str, Any]]
PlanMeasure = Callable[[StepPlan], dict[str, Any]]

TIMES_AND_KERNELS = ("times", "kernels")
PARTS = (*TIMES_AND_KERNELS, "estimates")  # what can be made of a step, in this order

IN_A_ROW = 3  # steps of a tiny model without a stop between them, at each sample of the host


def run_steps(
    plans: Iterable[StepPlan],
    *,
    device: torch.device,
    recorder: Recorder,
    rounds: int = 5,
    steps_per_round: int = 5,
    suite: str = "validate",
    host: HostPlan | None = None,
    parts: Collection[str] = TIMES_AND_KERNELS,
    budget_seconds: float | None = None,
    retry: Collection[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Measures what the recorder's folder lacks of `parts` (of `PARTS`): first the times of all steps, then the kernels
    of those that ran, then what torch's own estimator says of all, which runs none of them.

    With `host`, its tiny models are run between the steps, so that the host's speed is known as it was then: one
    process differs from the next by 10 to 40%, and drifts besides. Their rows are those of `run_host`; a step's row
    says in which run (`session`) and after how many samples of them (`host_samples_before`) it was timed.

    Two passes, because CUDA's profiler makes every later launch of the process dearer (`profile_step`). A step that
    does not fit is a row of status "oom", any other fault one of status "error"; the rest goes on. A run that stops
    by its budget is continued by the next, kernels of what it timed included.
    """
    start = clock()
    wanted = list(plans)
    summary = Summary()
    remaining = 0
    session = uuid.uuid4().hex[:12]
    calibration: HostCalibration | None = None

    def pending(key: str) -> bool:
        return not recorder.is_done(key, retry=retry)

    def work_through(todo: list[StepPlan], label: str, key_of: Callable[[StepPlan], str], measure: PlanMeasure) -> int:
        done = 0
        with progress(label, len(todo), in_logs=True) as shown:
            for plan in todo:
                if budget_seconds is not None and clock() - start >= budget_seconds:
                    break
                row = measure(plan)
                shared = {
                    "key": key_of(plan),
                    "backend": "torch",
                    "cache": "cold",
                    "shape": None,
                    "suite": suite,
                    "session": session,
                }
                recorder.append({**shared, **row})
                summary.statuses[row["status"]] += 1
                done += 1
                shown.advance(plan.name)
        return len(todo) - done

    read = telemetry(device)

    def timing(plan: StepPlan) -> dict[str, Any]:
        if calibration is not None:
            calibration.sample()
        row = measure_plan(
            plan,
            device,
            lambda step: timing_fields(time_step(step, rounds=rounds, steps_per_round=steps_per_round, read=read)),
        )
        if calibration is not None:
            row["host_samples_before"] = calibration.n_samples
            if row.get("peak_bytes"):
                row["peak_bytes"] -= calibration.held_bytes()
        return row

    def kernels(plan: StepPlan) -> dict[str, Any]:
        return measure_plan(plan, device, lambda step: kernel_fields(profile_step(step)))

    timed = wanted if "times" in parts else []
    todo = [plan for plan in timed if pending(plan.key)]
    if host is not None and todo:
        calibration = HostCalibration(host, device)
        if device.type == "cuda" and any(plan.has_triton for plan in todo):
            for row in operator_rows(device):
                recorder.append({**row, "suite": suite, "session": session})
    remaining += work_through(todo, "real steps, times", lambda plan: plan.key, timing)
    if calibration is not None:
        if calibration.n_samples:
            calibration.sample()
        for row in calibration.rows(suite):
            recorder.append({**row, "session": session})
        calibration = None  # its memory goes back
    ran = [plan for plan in wanted if "kernels" in parts and recorder.status(plan.key) == "ok"]
    todo_kernels = [plan for plan in ran if pending(plan.kernels_key)]
    remaining += work_through(todo_kernels, "real steps, kernels", lambda plan: plan.kernels_key, kernels)
    skipped = len(timed) - len(todo) + len(ran) - len(todo_kernels)
    if "estimates" in parts:
        from flopcast.microbench.steps.torch_estimate import estimate_plans

        todo_estimates = [plan for plan in wanted if pending(plan.estimate_key)]
        left = None if budget_seconds is None else budget_seconds - (clock() - start)
        with estimate_plans(todo_estimates, device, budget_seconds=left) as rows:
            remaining += work_through(todo_estimates, "torch's estimates", lambda p: p.estimate_key, rows)
        skipped += len(wanted) - len(todo_estimates)
    return Summary(summary.statuses, skipped, remaining, clock() - start)


class HostCalibration:
    """The tiny models of a host plan, kept alive and sampled now and then."""

    def __init__(self, plan: HostPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.steps = {
            depth: training_step.build(config, device, batch=plan.batch, seq=plan.seq, optimizer=plan.optimizer)
            for depth, config in plan.configs.items()
        }
        self.samples: dict[int, list[dict[str, float]]] = {depth: [] for depth in self.steps}
        for step in self.steps.values():
            step.run()

    @property
    def n_samples(self) -> int:
        """How many samples each depth has by now."""
        return min(len(samples) for samples in self.samples.values())

    def sample(self) -> None:
        """One warm step, two measured by phase, and a few in a row at each depth.

        "steady" is the time of a step among others, the device not drained between them: what the phases leave out
        (freeing the graph, the loop itself, what the queue does to the host) is in it.
        """
        for depth, step in self.steps.items():
            host_phases(step, self.device)
            with no_garbage_collection():
                found = [host_phases(step, self.device) for _ in range(2)]
                synchronise(self.device)
                start = time.perf_counter()
                for _ in range(IN_A_ROW):
                    step.run()
                synchronise(self.device)
                steady = (time.perf_counter() - start) / IN_A_ROW
            self.samples[depth] += [{**phases, "steady": steady} for phases in found]

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
             "samples": [float(f"{value:.6g}") for value in values], "n": len(values), "timer": "wall"}
            for depth, samples in self.samples.items()
            for phase in ("zero_grad", *PHASES, "steady")
            if (values := [sample[phase] for sample in samples])
        ]  # fmt: skip


def measure_plan(plan: StepPlan, device: torch.device, measure: Measure) -> dict[str, Any]:
    """The fields of one plan's row, whatever happens."""
    empty = {**EMPTY_FIELDS, "role": "validation", "plan": asdict(plan), "unit": "seconds", "value": None}
    step = None
    try:
        with patched(plan.matmul, plan.attention, device.type):
            step = build_plan(plan, device)
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
        **(timing.reading or Reading()).as_row(),
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
