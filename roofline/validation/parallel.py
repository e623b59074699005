"""Runs real steps on several GPUs and compares them with their forecasts: the step, what it is made of, memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from flopcast.errors import UsageError
from flopcast.microbench.recipe.layout import Layout
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records import records
from flopcast.microbench.records.rows import ParallelKernelsRow, ParallelStepRow, select
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config, make_config
from flopcast.roofline.stream.model.run import Run, check_step
from flopcast.roofline.validation.step_comparison import Part

PARTS = ("step", "compute", "communication", "exposed", "host", "memory")
# Models whose steps are run: of each suite the config, sequences of a data-parallel rank, and their tokens.
_MODELS = {
    "quick": (("w1024-d4", 4, 512), ("qwen3-0.6b", 4, 512)),
    "standard": (
        ("w1024-d4", 4, 512), ("qwen3-0.6b", 4, 512), ("w2560-d3", 8, 512), ("qwen3-0.6b", 8, 1024),
        ("llama-3.2-1b", 2, 2048), ("qwen3-1.7b", 4, 1024),
    ),
}  # fmt: skip
_OWN = {"w1024-d4": (1024, 4), "w2560-d3": (2560, 3)}  # width and depth
MICRO_BATCHES = 2  # of a pipeline, per stage
SUITES = tuple(_MODELS)


def parallel_plans(layouts: Sequence[str], suite: str, mode: str = "eager") -> list[StepPlan]:
    """The steps that `validate --parallel` runs: all models of the suite in each layout and this mode. Raises
    UsageError for a layout that is none, or not modelled in this mode."""
    if suite not in _MODELS:
        raise UsageError(f"--suite {suite} with --parallel: valid are {', '.join(SUITES)}")
    found = []
    for text in layouts:
        layout = Layout.parse(text)
        layout.check_built()
        layout.check_not_own()
        if mode != Run.mode:
            Run(parallel=text, mode=mode).check()
        for name, batch, seq in _MODELS[suite]:
            config = make_config(width=_OWN[name][0], depth=_OWN[name][1]) if name in _OWN else load_config(name)
            if layout.ep > 1:
                config, name = load_config("qwen3-moe"), "qwen3-moe"
            micro = MICRO_BATCHES * layout.pp if layout.pp > 1 else 1
            found.append(StepPlan(
                name=name, config=config, batch=max(batch // 2, 1) if micro > 1 else batch, seq=seq,
                optimizer="adamw-fused", accumulate=micro, parallel=str(layout), mode=mode,
                group="parallel",
            ))  # fmt: skip
    return list({plan.key: plan for plan in found}.values())


def own_plans(own: StepPlan, layouts: Sequence[str]) -> list[StepPlan]:
    """The step of a user's model in each layout. Raises UsageError for a layout that is none, that is not modelled in
    the step's mode, or whose parts do not divide the model."""
    found = []
    for text in layouts:
        layout = Layout.parse(text)
        layout.check_built()
        plan = replace(own, parallel=str(layout), group="parallel")
        run = Run(**plan.settings).checked()
        check_step(plan.config, run.traced_on("cuda 9.0 132"))
        found.append(plan)
    return found


def run_parallel_steps(
    plans: Sequence[StepPlan], out: Path, device: str | None, *, retry: Sequence[str] = (), budget: float | None = None
) -> bool:
    """Runs what `out` lacks, in a process per GPU: those that torchrun started, else as many as the layouts have ranks.
    Returns whether this process is the one that speaks. Raises UsageError where there are not as many GPUs."""
    from flopcast.microbench.collectives import launch, session
    from flopcast.microbench.ranks import worker
    from flopcast.microbench.timing.device import all_gpus, pick_device

    if device not in (None, "cuda", "cpu"):
        raise UsageError(f"--device {device} with --parallel: valid are cuda, all GPUs that a layout needs, and cpu")
    on_gpus = device == "cuda" or (device is None and pick_device().type == "cuda")
    worlds = {Layout.parse(plan.parallel).world for plan in plans}
    if len(worlds) > 1:
        raise UsageError(f"--parallel: layouts over {', '.join(map(str, sorted(worlds)))} GPUs; give them one by one")
    (world,) = worlds
    task = worker.Task(
        str(out), "nccl" if on_gpus else "gloo", [asdict(plan) for plan in plans], budget=budget, retry=tuple(retry)
    )
    if session.is_member(os.environ):
        rank, started, _ = session.place(os.environ)
        if started != world:
            raise UsageError(f"--parallel: the layouts have {world} ranks, the launcher started {started} processes")
        worker.run(task)
        return rank == 0
    here = len(all_gpus()) if on_gpus else world
    if here < world:
        raise UsageError(
            f"--parallel: the layouts have {world} ranks and this host {here} GPUs; start `flopcast validate` by "
            "torchrun on several hosts, or name a layout that fits"
        )

    def text_of(fault: str) -> str:
        return worker.as_text(replace(task, fault=fault))

    launch.start(worker.WORKER, text_of, world, str(out))
    return True


@dataclass(frozen=True, kw_only=True)
class ParallelComparison:
    """A real step on several GPUs beside its forecast. Seconds and bytes of `parts`, by PARTS: the median step; its
    kernels; its collectives; those that no kernel hides, without waiting for other ranks; the host until a step is
    enqueued; the fullest rank's peak. `reason`: why there is no measurement or nothing to compare it with."""

    plan: StepPlan
    parts: Mapping[str, Part]
    bound: str = ""
    used_bytes: int | None = None
    reason: str | None = None

    @property
    def num_gpus(self) -> int:
        return Layout.parse(self.plan.parallel).world

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        record: dict[str, Any] = {
            "name": plan.name, "parallel": plan.parallel, "num_gpus": self.num_gpus, "batch": plan.batch,
            "seq": plan.seq, "accumulate": plan.accumulate, "optimizer": plan.optimizer, "precision": plan.precision,
            "mode": plan.mode, "bound": self.bound or None,
        }  # fmt: skip
        for name in PARTS:
            part = self.parts.get(name, Part())
            unit = "bytes" if name == "memory" else "seconds"
            record |= {
                f"{name}_{unit}": part.measured, f"{name}_{unit}_forecast": part.forecast, f"{name}_error": part.error,
            }  # fmt: skip
        step = self.parts.get("step", Part())
        return record | {
            "step_seconds_low": step.low, "step_seconds_high": step.high, "step_within": step.is_within,
            "used_bytes": self.used_bytes, "reason": self.reason,
        }  # fmt: skip


def holds_parallel(folder: Path) -> bool:
    """Whether real steps on several GPUs were run into a folder."""
    path = records.file_in(folder)
    return path.is_file() and bool(select(records.read(path).rows, ParallelStepRow))


def compare_parallel(
    folder: Path,
    profile: Profile,
    host: HostCosts | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ParallelComparison]:
    """Compares the steps of a folder with their forecasts, those that were run last of each."""
    rows = records.read(records.file_in(folder)).rows
    times = {row["key"]: row for row in select(rows, ParallelStepRow)}
    kernels = {row["key"]: row for row in select(rows, ParallelKernelsRow) if row["status"] == "ok"}
    found = []
    for row in times.values():
        plan = StepPlan(**row["plan"])
        found.append(_compared(plan, row, kernels.get(plan.parallel_kernels_key), profile, host))
        progress(len(found), len(times))
    return found


def _compared(
    plan: StepPlan, row: ParallelStepRow, kernels: ParallelKernelsRow | None, profile: Profile, host: HostCosts | None
) -> ParallelComparison:
    if row["status"] != "ok":
        return ParallelComparison(plan=plan, parts={}, reason=row.get("reason") or row["status"])
    run = Run(**plan.settings, nodes=row.get("nodes", 1))
    spent: Mapping[str, Any] = kernels or {}
    measured = {
        "step": row["value"], "host": row["host_seconds"], "memory": max(row["peak_bytes"]),
        "compute": _mean(spent.get("compute_seconds")), "communication": _mean(spent.get("communication_seconds")),
        "exposed": _exposed(spent),
    }  # fmt: skip
    used = max(row.get("used_bytes") or [0]) or None
    try:
        run.check()
        step = PricedStep(get_stream(plan.config, traced_of(run, profile)), run, profile, host)
        shares, timeline = step.timeline.shares, step.timeline
        forecast = {
            "step": step.interval.value, "host": timeline.enqueue_seconds, "memory": step.peak_bytes,
            "compute": timeline.device_seconds + shares.contention,
            "communication": sum(op.seconds for op in step.ops if op.collective is not None),
            "exposed": shares.exposed,
        }  # fmt: skip
    except UsageError as fault:
        parts = {name: Part(value) for name, value in measured.items()}
        return ParallelComparison(plan=plan, parts=parts, used_bytes=used, reason=str(fault))
    ends = {"step": (step.interval.low, step.interval.high)}
    parts = {name: Part(measured[name], forecast[name], *ends.get(name, (None, None))) for name in PARTS}
    return ParallelComparison(plan=plan, parts=parts, bound=step.bound, used_bytes=used)


def _mean(values: Iterable[float] | None) -> float | None:
    return None if values is None else mean(values)


def _exposed(spent: Mapping[str, Any]) -> float | None:
    """The least of the ranks': what is left of it in the others is waiting."""
    if "exposed_seconds" not in spent:
        return None
    pairs = zip(spent["exposed_seconds"], spent["waiting_seconds"], strict=True)
    return float(min(max(exposed - waiting, 0.0) for exposed, waiting in pairs))
