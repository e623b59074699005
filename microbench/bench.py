"""Runs one bench of one device into a folder that can be resumed: host cost, ceilings, a suite's cases."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from flopcast.microbench.hosts.host import run_host
from flopcast.microbench.hosts.operators import run_operators
from flopcast.microbench.hosts.processes import count_for, run_processes
from flopcast.microbench.recipe.compiling import Builders, host_builders
from flopcast.microbench.recipe.plans import HostPlan
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import HOST_SCALARS
from flopcast.microbench.sweep.cases import Case
from flopcast.microbench.sweep.scalars import run_scalars
from flopcast.microbench.sweep.sweep import run_sweep
from flopcast.microbench.sweep.work import Summary
from flopcast.microbench.timing.device import describe
from flopcast.microbench.timing.make_timer import make_timer
from flopcast.microbench.timing.policy import POLICIES


def run_bench(
    device: torch.device,
    folder: Path,
    *,
    suite: str,
    policy: str,
    cases: Iterable[Case],
    hosts: Iterable[HostPlan],
    budget_seconds: float | None = None,
    retry: Collection[str] = (),
    host_only: bool = False,
    calibrate: bool = True,
    operators: bool = False,
) -> dict[str, Summary]:
    """Measures what `folder` lacks and returns a summary of each part.

    With `host_only`, only the host cost and the host's scalars are measured, on a GPU in several fresh processes, as
    processes differ. Without `calibrate` the host cost is not
    measured, and one training step is run instead: in a process that has trained, consecutive kernels start 0.1 to
    0.2 us later (a tiny kernel in a graph takes 1.13 us instead of 0.93 on an H200), and the steps that are forecast
    run in such processes. With `operators`, the host cost of calling Triton's operators is measured as well.

    Raises UsageError when the folder cannot be used, and RunError on a full disk or a lost device; finished rows are
    kept in both cases.
    """
    timer = make_timer(device, POLICIES[device.type][policy])
    summaries: dict[str, Summary] = {}
    with Recorder(folder, describe(device)) as recorder:
        for plan in hosts:  # first, because launches may cost more once CUDA's profiler was used
            builders, counts = host_builders(plan, device)

            def train_once(plan: HostPlan = plan, builders: Builders = builders) -> None:
                if device.type == "cuda" and plan.mode == "eager":
                    builders[min(builders)]().run()

            if not calibrate:
                train_once()
                continue
            if host_only and device.type == "cuda":
                summaries[f"host {plan.model}"] = run_processes(
                    plan, recorder=recorder, device=str(device), suite=suite, retry=retry, count=count_for(plan)
                )
                continue
            host = summaries[f"host {plan.model}"] = run_host(
                builders,
                model=plan.model,
                recorder=recorder,
                device=device,
                suite=suite,
                rounds=plan.rounds,
                steps_per_round=plan.steps_per_round,
                retry=retry,
                counts=counts,
            )
            if not host.measured:  # done before, by another process
                train_once()
        if operators and device.type == "cuda":
            summaries["host operators"] = run_operators(recorder=recorder, device=device, suite=suite, retry=retry)
        if host_only:
            summaries["launches"] = run_scalars(
                recorder=recorder, timer=timer, suite=suite, retry=retry, only=HOST_SCALARS
            )
        else:
            summaries["ceilings"] = run_scalars(recorder=recorder, timer=timer, suite=suite, retry=retry)
            summaries["kernels"] = run_sweep(
                cases, recorder=recorder, timer=timer, suite=suite, budget_seconds=budget_seconds, retry=retry
            )
        next(iter(summaries.values())).warnings.extend(recorder.warnings)  # a torn line, found when opening
    return summaries
