"""Runs real training steps in turn and writes one row per step: the measurements that `validate` compares with."""

from __future__ import annotations

import gc
import re
import statistics
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from operator import attrgetter

import torch

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.hosts.host import Kept, depth_of_row, host_fields, host_phases, run_host, steady_seconds
from flopcast.microbench.hosts.operators import operator_rows
from flopcast.microbench.recipe import training_step
from flopcast.microbench.recipe.compiling import forget, host_builders
from flopcast.microbench.recipe.inference import InferenceStep
from flopcast.microbench.recipe.patches import patched
from flopcast.microbench.recipe.plans import PHASES, HostPlan, StepPlan
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS, KERNEL, Fields, Row, merged, rounded
from flopcast.microbench.steps.ahead import ahead_of
from flopcast.microbench.steps.beside import NOTHING, Beside
from flopcast.microbench.steps.build import build_plan
from flopcast.microbench.steps.gpu_alone import gpu_alone
from flopcast.microbench.steps.measure import Kernel, StepKernels, StepTiming, profile_step, time_step
from flopcast.microbench.sweep.work import Stopwatch, Summary, first_line, oom_or_error, work_through
from flopcast.microbench.timing.allocator import settle_allocator
from flopcast.microbench.timing.telemetry import Reading, beside_others, telemetry

Measure = Callable[[training_step.TrainingStep | InferenceStep], Fields]
PlanMeasure = Callable[[StepPlan], Fields]
PlanKey = Callable[[StepPlan], str]
_TIMES, _KERNELS, _ESTIMATES = attrgetter("key"), attrgetter("kernels_key"), attrgetter("estimate_key")

_CALL = re.compile(r"\w+::\w+$")  # an operator, not a range of autograd's engine or of compiled code

COMPILED_ROUNDS = 3  # of compiled tiny models, before the steps
LONGEST_NAME = 100  # characters of it that are kept

TIMES_AND_KERNELS = ("times", "kernels")
PARTS = (*TIMES_AND_KERNELS, "estimates")  # what can be measured of a step, in this order


def run_steps(
    plans: Iterable[StepPlan],
    *,
    device: torch.device,
    recorder: Recorder,
    rounds: int = 5,
    steps_per_round: int = 5,
    least_round_seconds: float = 0.0,
    suite: str = "validate",
    host: HostPlan | None = None,
    compiled: Sequence[HostPlan] = (),
    parts: Collection[str] = TIMES_AND_KERNELS,
    budget_seconds: float | None = None,
    retry: Collection[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Measures what the recorder's folder lacks of `parts` (of `PARTS`): first the times of all steps, then the kernels
    of those that ran, then the estimates of torch's own estimator, which runs none of them.

    With `host`, its tiny models are run between the steps, so that the host's speed at that time is known: it differs
    by 10 to 40% from one process to the next, and also drifts. Their rows are those of `run_host`; a step's row
    says in which run (`session`) and after how many of their samples (`host_samples_before`) it was timed, and what
    the middle one of them took between its rounds (`host_pace`). They are written before each step, with all samples
    so far: of one key the last row counts. The models of `compiled` are measured once, beside the same one.

    Compiled steps are compiled ahead, in processes of their own, which profile their kernels too (`ahead`): each step
    is timed as soon as its code is there, while they stand still.

    Two passes, because launches cost more in a process that has used CUDA's profiler (`profile_step`). A step that
    does not fit gets a row of status "oom", any other fault one of status "error", and the other steps continue. A run
    that stops at its budget is continued by the next, including the kernels of the steps that it timed.
    """
    settle_allocator(device)
    run = _Run(list(plans), device, recorder, suite, retry, Stopwatch(budget_seconds, clock))
    if "times" in parts:
        run.times(host, compiled, partial(
            time_step, rounds=rounds, steps_per_round=steps_per_round, least_round_seconds=least_round_seconds
        ))  # fmt: skip
    if "kernels" in parts:
        run.kernels()
    if "estimates" in parts:
        run.estimates()
    return Summary(run.statuses, run.skipped, run.remaining, run.watch.seconds)


class _Run:
    """One call of `run_steps`: what it was asked for, and what it has done so far."""

    def __init__(
        self, plans: Sequence[StepPlan], device: torch.device, recorder: Recorder, suite: str, retry: Collection[str],
        watch: Stopwatch,
    ) -> None:  # fmt: skip
        self.plans, self.device, self.recorder, self.suite, self.retry = plans, device, recorder, suite, retry
        self.watch = watch
        self.session = uuid.uuid4().hex[:12]
        self.statuses = Counter[str]()
        self.skipped = self.remaining = 0

    def times(self, host: HostPlan | None, compiled: Sequence[HostPlan], time_it: Callable[..., StepTiming]) -> None:
        todo = self._left_of(self.plans, _TIMES)
        calibration = HostCalibration(host, self.device) if host is not None and todo else None
        if calibration is not None and self.device.type == "cuda" and any(plan.has_triton for plan in todo):
            self._append(operator_rows(self.device), suite=self.suite)
        read = telemetry(self.device)
        if self.device.type == "cuda":  # a processor's telemetry tells it already
            read = beside_others(read)

        def times(plan: StepPlan, beside: Beside = NOTHING) -> Fields:
            def timed(step: training_step.TrainingStep | InferenceStep) -> Fields:
                timing = time_it(step, read=read, beside=beside, pace=None if calibration is None else calibration.pace)
                return timing_fields(timing, 0 if calibration is None else calibration.held_bytes())

            if calibration is None:
                return measure_plan(plan, self.device, timed)
            with beside.still():
                calibration.sample()
            self._append(calibration.rows(self.suite))  # at once: a run that is killed keeps what tells its host
            return {**measure_plan(plan, self.device, timed), "host_samples_before": calibration.n_samples}

        eager = [plan for plan in todo if plan.mode == "eager"]
        self._work_through(eager, "real steps, times", _TIMES, times, len(eager))
        if len(eager) < len(todo):
            pace = None if calibration is None else calibration.pace
            self._as_they_are_compiled([plan for plan in todo if plan.mode != "eager"], compiled, times, pace)
        if calibration is not None:
            if calibration.n_samples:
                calibration.sample()
            self._append(calibration.rows(self.suite))

    def _as_they_are_compiled(
        self, todo: Sequence[StepPlan], hosts: Sequence[HostPlan], times: Callable[[StepPlan, Beside], Fields],
        pace: Callable[[], float] | None,
    ) -> None:  # fmt: skip
        """Times compiled steps, each when its code is there, and keeps the rows of their kernels."""
        with ahead_of(todo, hosts, self.device) as ahead:

            def ready() -> Iterator[StepPlan]:
                for one in ahead.ready(self.watch.is_spent):
                    if isinstance(one.what, HostPlan):
                        self._compiled_host(one.what, ahead, pace)
                        continue
                    yield one.what
                    if one.kernels is not None and self.recorder.status(one.what.key) == "ok":
                        self._append([self._row(_KERNELS(one.what), one.kernels)])

            self._work_through(ready(), "compiled steps", _TIMES, lambda plan: times(plan, ahead), len(todo))

    def _compiled_host(self, plan: HostPlan, beside: Beside, pace: Callable[[], float] | None) -> None:
        """Measures the host cost of compiled tiny models; a failure gets rows that say so, and the steps are run."""
        builders, counts = host_builders(plan, self.device)
        kept, paces = Kept(), list[float]()

        @contextmanager
        def still() -> Iterator[None]:
            with beside.still():
                if pace is not None:
                    paces.append(pace())
                yield

        run_host(
            builders, model=plan.model, recorder=kept, device=self.device, suite=self.suite, counts=counts,
            rounds=COMPILED_ROUNDS, steps_per_round=plan.steps_per_round, beside=still,
        )  # fmt: skip
        forget(plan.mode)
        of_depth = {
            depth: rounded(paces[number :: len(builders)]) if len(paces) == COMPILED_ROUNDS * len(builders) else []
            for number, depth in enumerate(builders)
        }
        self._append({**row, "host_pace": of_depth[depth_of_row(row["key"])]} for row in kept.rows)

    def kernels(self) -> None:
        ran = [plan for plan in self.plans if self.recorder.status(plan.key) == "ok"]
        todo = self._left_of(ran, _KERNELS)
        profiled = partial(measure_plan, device=self.device, measure=lambda step: kernel_fields(profile_step(step)))
        self._work_through(todo, "real steps, kernels", _KERNELS, profiled, len(todo))

    def estimates(self) -> None:
        from flopcast.microbench.steps.torch_estimate import estimate_plans

        todo = self._left_of(self.plans, _ESTIMATES)
        with estimate_plans(todo, self.device, budget_seconds=self.watch.left) as estimated:
            self._work_through(todo, "torch's estimates", _ESTIMATES, estimated, len(todo))

    def _left_of(self, plans: Sequence[StepPlan], key: PlanKey) -> list[StepPlan]:
        todo = [plan for plan in plans if not self.recorder.is_done(key(plan), retry=self.retry)]
        self.skipped += len(plans) - len(todo)
        return todo

    def _work_through(
        self, todo: Iterable[StepPlan], label: str, key: PlanKey, measure: PlanMeasure, planned: int
    ) -> None:
        statuses = work_through(
            ((plan.name, plan) for plan in todo),
            lambda plan: self._row(key(plan), measure(plan)),
            recorder=self.recorder, label=label, watch=self.watch, planned=planned,
        )  # fmt: skip
        self.statuses.update(statuses)
        self.remaining += planned - statuses.total()

    def _row(self, key: str, fields: Fields) -> Row:
        what = {"key": key, "backend": "torch", "cache": "cold", "shape": None}
        return merged(Row, what, {"suite": self.suite, "session": self.session}, fields)

    def _append(self, rows: Iterable[Fields], **fields: str) -> None:
        for row in rows:
            self.recorder.append({**row, **fields, "session": self.session})


class HostCalibration:
    """The tiny models of a host plan, kept in memory and sampled between steps."""

    def __init__(self, plan: HostPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.steps = {depth: training_step.build(config, device, plan) for depth, config in plan.configs.items()}
        self.samples: dict[int, list[dict[str, float]]] = {depth: [] for depth in self.steps}
        for step in self.steps.values():
            step.run()

    @property
    def n_samples(self) -> int:
        """The number of samples per depth so far."""
        return min(len(samples) for samples in self.samples.values())

    def sample(self) -> None:
        """Runs one warm-up step, two steps measured by phase, and a few in a row ("steady"), at each depth."""
        for depth, step in self.steps.items():
            host_phases(step, self.device)
            with no_garbage_collection():
                found = [host_phases(step, self.device) for _ in range(2)]
                steady = steady_seconds(step, self.device)
            self.samples[depth] += [{**phases, "steady": steady} for phases in found]

    def pace(self) -> float:
        """Seconds of a step of the tiny model of middle depth, of a few in a row."""
        depths = sorted(self.steps)
        with no_garbage_collection():
            return steady_seconds(self.steps[depths[len(depths) // 2]], self.device)

    def held_bytes(self) -> int:
        """Bytes that the tiny models hold between samples, as the allocator counts them; not part of the measured
        step's memory."""
        tensors = [
            tensor
            for step in self.steps.values()
            for p in step.model.parameters()
            for tensor in (p, p.grad, *(t for optimizer in step.optimizers for t in optimizer.state[p].values()))
        ]
        on_device = (t for t in tensors if isinstance(t, torch.Tensor) and t.device.type == self.device.type)
        return sum(-(-t.untyped_storage().nbytes() // 512) * 512 for t in on_device)

    def rows(self, suite: str) -> list[Fields]:
        """The fields of one row per depth and phase, as `run_host` writes them."""
        return [
            host_fields(self.plan.row_key(depth, phase), values, suite=suite)
            for depth, samples in self.samples.items()
            for phase in ("zero_grad", *PHASES, "steady")
            if (values := [sample[phase] for sample in samples])
        ]


def measure_plan(plan: StepPlan, device: torch.device, measure: Measure) -> Fields:
    """Returns the fields of one plan's row, also where the measurement fails. A model that is compiled, which other
    processes do beside this one, is built with the GPU for itself."""
    empty = {**EMPTY_FIELDS, "role": "validation", "plan": asdict(plan), "unit": "seconds", "value": None}
    step = None
    try:
        with patched(plan.matmul, plan.attention, device.type):
            with nullcontext() if plan.mode == "eager" else gpu_alone(device.type):
                step = build_plan(plan, device)
            return {**empty, **measure(step), "n_params": parameters_of(step.model)}
    except Exception as error:
        return {**empty, "status": oom_or_error(error), "reason": first_line(error)}
    finally:
        del step
        forget(plan.mode)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def parameters_of(model: torch.nn.Module) -> int:
    """The number of a model's parameters; what packs several into one number counts as what it stands for."""
    return sum(int(getattr(p, "stands_for", p.numel())) for p in model.parameters())


def timing_fields(timing: StepTiming, held_bytes: int = 0) -> Fields:
    """A step's times as the fields of a row. `held_bytes`: the part of the peak memory that is not the step's."""
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
        "steps_per_round": timing.steps_per_round,
        "host_pace": rounded(timing.pace_seconds),
        "peak_bytes": timing.peak_bytes - held_bytes if timing.peak_bytes else timing.peak_bytes,
        "reserved_bytes": timing.reserved_bytes,
        **(timing.reading or Reading()).as_row(),
    }


def kernel_fields(found: StepKernels) -> Fields:
    """A step's kernels as the fields of a row. `ops`: device seconds and number of kernels per launching ATen call, or
    per kernel's name where a replayed CUDA graph or generated code launched it."""
    device_seconds = statistics.median(found.device_seconds)
    return {
        "value": device_seconds,
        "device_seconds": device_seconds,
        "samples": list(found.device_seconds),
        "n": len(found.device_seconds),
        "timer": "profiler",
        "n_kernels": len(found.kernels),
        "ops": by_op(found.kernels),
        "mean_clock_mhz": found.mean_clock_mhz and round(found.mean_clock_mhz, 1),
        **found.reading.as_row(),
    }


def by_op(kernels: Iterable[Kernel]) -> dict[str, list[float]]:
    """{ATen call, or KERNEL and the kernel's name: [seconds, number of kernels]} of one step."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel in kernels:
        is_called = _CALL.match(kernel.op) and not kernel.name.startswith("triton_")
        entry = totals[kernel.op if is_called else f"{KERNEL}{kernel.name[:LONGEST_NAME]}"]
        entry[0] += kernel.seconds
        entry[1] += 1
    return dict(totals)
