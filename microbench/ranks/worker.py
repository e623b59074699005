"""One of the processes that run real steps together, as torch's launcher starts it:

    python -m torch.distributed.run ... -m flopcast.microbench.ranks.worker TASK

TASK is a `Task` as JSON. All steps are timed first, then profiled. The first process writes a row per step and stage as
each ends; what goes wrong there it also writes to `task.fault`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from flopcast.child import run_as_worker
from flopcast.errors import FlopcastError
from flopcast.microbench.recipe.layout import Layout
from flopcast.microbench.recipe.plans import StepPlan

WORKER = "flopcast.microbench.ranks.worker"


@dataclass(frozen=True)
class Task:
    """Which steps to run into which folder; JSON has the same fields. `plans`: the fields of `StepPlan`."""

    out: str
    backend: str
    plans: Sequence[Mapping[str, Any]]
    budget: float | None = None
    retry: Sequence[str] = ()
    fault: str = ""


def run(task: Task) -> None:
    """Joins the others and runs what the folder lacks. Raises UsageError where the folder cannot be used."""
    import torch.distributed as dist

    from flopcast.microbench.collectives import session as sessions
    from flopcast.microbench.collectives.worker import hosts_of
    from flopcast.microbench.records.recorder import Recorder
    from flopcast.microbench.sweep.work import Stopwatch
    from flopcast.microbench.timing.device import describe

    rank, world, local = sessions.place(os.environ)
    device, control = sessions.start(rank, world, local, task.backend)
    try:
        made = sessions.settings(os.environ)
        facts = {
            "backend": task.backend, "cache": "hot", "suite": "parallel", "role": "validation",
            "nccl": sessions.nccl_version() if task.backend == "nccl" else "",
            "nvls": made.get("NCCL_NVLS_ENABLE") != "0", "settings": made,
        }  # fmt: skip
        session = sessions.Session(rank, world, hosts_of(world, control), device, task.backend, control, facts,
                                   retry=tuple(task.retry), watch=Stopwatch(task.budget))  # fmt: skip
        if rank == 0:
            with Recorder(task.out, describe(device)) as recorder:
                sessions.check_settings(recorder.rows, facts)
                session.recorder = recorder
                _run_all(session, task)
        else:
            _run_all(session, task)
    finally:
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _run_all(session: Any, task: Task) -> None:
    from flopcast.microbench.collectives.cases import Members
    from flopcast.microbench.records.rows import ParallelKernelsRow, ParallelStepRow

    plans = [StepPlan(**dict(plan)) for plan in task.plans]
    members = Members(session.world // session.hosts, session.hosts)
    stages: list[tuple[str, Any, Any]] = [("times", ParallelStepRow, _times)]
    if task.backend == "nccl":
        stages.append(("kernels", ParallelKernelsRow, _kernels))
    for stage, kind, measure in stages:
        keys = [plan.parallel_key if stage == "times" else plan.parallel_kernels_key for plan in plans]
        for index in session.each(f"steps: {stage}", keys):
            fields = _attempt(session, plans[index], measure)
            session.record(kind, keys[index], members, {"plan": asdict(plans[index]), **fields})
    session.wait()


def _attempt(session: Any, plan: StepPlan, measure: Any) -> dict[str, Any]:
    """The fields of a step's row. All ranks must come to the same end: what failed in one is told to all."""
    from flopcast.microbench.sweep.work import first_line, oom_or_error

    found: Any = None
    fault: dict[str, Any] | None = None
    try:
        found = measure(session, plan)
    except (FlopcastError, RuntimeError, ValueError, NotImplementedError) as error:
        fault = {"status": oom_or_error(error), "reason": first_line(error)}
    _clean(session.device.type)
    faults = session.gathered(fault)
    ranks = session.gathered(found)
    failed = next((one for one in faults if one is not None), None)
    if failed is not None:
        return dict(failed)
    fields: dict[str, Any] = _of_times(ranks) if measure is _times else _of_kernels(ranks)
    return fields


def _clean(device: str) -> None:
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _built(session: Any, plan: StepPlan) -> Any:
    import torch

    from flopcast.microbench.recipe.compiling import forget
    from flopcast.microbench.recipe.optimizers import hold_learning_rate
    from flopcast.microbench.recipe.parallel_step import build_parallel, mesh_of

    layout, device = Layout.parse(plan.parallel), session.device.type
    forget(plan.mode)
    torch.manual_seed(session.rank if layout.tp == 1 else 0)
    step = build_parallel(plan.config, layout, mesh_of(layout, device), device, plan)
    hold_learning_rate(step.optimizers)
    step.warm_up()
    return step


def _times(session: Any, plan: StepPlan) -> Any:
    from flopcast.microbench.ranks.measure import time_rank

    return time_rank(_built(session, plan))


def _kernels(session: Any, plan: StepPlan) -> Any:
    from flopcast.microbench.ranks.measure import profile_rank

    return profile_rank(_built(session, plan))


def _of_times(ranks: Sequence[Any]) -> dict[str, Any]:
    """A row's fields of what `time_rank` found in each rank."""
    from flopcast.microbench.records.rows import rounded

    samples = [median(same) for same in zip(*(rank.step_seconds for rank in ranks), strict=True)]
    hosts = [median(rank.host_seconds) for rank in ranks]
    value = median(samples)
    return {
        "value": value, "seconds": value, "unit": "seconds", "samples": rounded(samples), "n": len(samples),
        "timer": "wall", "host_seconds": sum(hosts) / len(hosts), "rank_host_seconds": rounded(hosts),
        "peak_bytes": [rank.peak_bytes for rank in ranks],
        "reserved_bytes": [rank.reserved_bytes for rank in ranks], "used_bytes": [rank.used_bytes for rank in ranks],
    }  # fmt: skip


def _of_kernels(ranks: Sequence[Any]) -> dict[str, Any]:
    """A row's fields of the last steps that `profile_rank` saw in each rank."""
    from flopcast.microbench.ranks.measure import spent

    kernels = [steps[-1] for steps in ranks]
    found = [asdict(one) for one in spent(kernels)]
    parts = {f"{name}_seconds": [round(one[name], 9) for one in found] for name in found[0]}
    return {**parts, "n_kernels": [len(own) for own in kernels], "timer": "profiler", "n": len(ranks[0])}


def main(text: str) -> None:
    task = Task(**json.loads(text))
    run_as_worker(lambda: run(task), task.fault)


def as_text(task: Task) -> str:
    return json.dumps(asdict(task))


if __name__ == "__main__":
    main(sys.argv[1])
