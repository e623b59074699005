"""Measures on a GPU what fine-tuning and inference launch, and runs real steps of them, part by part.

    python -m studies.beside_training OUT hosts   what Python their steps run, by tiny models
    python -m studies.beside_training OUT kernels SUITE   a suite's cases, without the ceilings
    python -m studies.beside_training OUT steps SUITE [--from N] [--to M] [--rounds R] [--budget S] [--mode M]

SUITE is inference, fine-tune, images or precisions, of steps also bitsandbytes. Each appends to OUT, which `flopcast
fit` and `flopcast validate --steps-from` read, and goes on where it was stopped.
"""

from __future__ import annotations

from pathlib import Path

import torch

from flopcast.microbench.hosts.host import run_host
from flopcast.microbench.recipe.compiling import host_builders
from flopcast.microbench.recipe.settings import MODES
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.steps.run import run_steps
from flopcast.microbench.sweep.cases import Case
from flopcast.microbench.sweep.sweep import run_sweep
from flopcast.microbench.timing.device import describe, pick_device
from flopcast.microbench.timing.make_timer import make_timer
from flopcast.microbench.timing.policy import POLICIES
from flopcast.roofline.gpu import suites
from flopcast.roofline.gpu.fit.host_calibration import fine_tune_host_plans, host_plan
from flopcast.roofline.validation.step_plans import (
    BITSANDBYTES,
    FINE_TUNE,
    IMAGES,
    INFERENCE,
    PRECISIONS,
    validation_plans,
)
from studies.command import parser_of

SUITES = (FINE_TUNE, INFERENCE, IMAGES, PRECISIONS)
STEPS = (*SUITES, BITSANDBYTES)  # those of which steps are run


def main() -> None:
    """Measures one part."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("part", choices=("hosts", "kernels", "steps"))
    parser.add_argument("suite", nargs="?", choices=STEPS)
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first step, from 0")
    parser.add_argument("--to", type=int, help="number of the step to end before")
    parser.add_argument("--budget", type=float, help="seconds after which nothing is begun")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which steps are timed")
    parser.add_argument("--mode", choices=MODES, default="eager", help="how steps run; others than eager: of inference")
    asked = parser.parse_args()
    if asked.part != "hosts" and asked.suite is None:
        parser.error(f"{asked.part} of which suite: {', '.join(SUITES)}")
    if asked.part == "kernels" and asked.suite not in SUITES:
        parser.error(f"no suite of kernels is called {asked.suite}: valid are {', '.join(SUITES)}")
    device = pick_device(None)
    with Recorder(asked.out, describe(device)) as recorder:
        if asked.part == "hosts":
            hosts(recorder, device)
        elif asked.part == "kernels":
            kernels(recorder, device, asked.suite, asked.budget)
        else:
            plans = validation_plans(device.type, asked.suite, asked.mode)[asked.first : asked.to]
            host = host_plan(device.type)
            print(run_steps(
                plans, device=device, recorder=recorder, host=host, budget_seconds=asked.budget, rounds=asked.rounds
            ))  # fmt: skip


def hosts(recorder: Recorder, device: torch.device) -> None:
    """Measures the tiny models of the usual step, then those of other optimizers, adapters and checkpointing."""
    usual = host_plan(device.type)
    for plan in (usual, *fine_tune_host_plans()):
        builders, _ = host_builders(plan, device)
        print(plan.model, run_host(
            builders, model=plan.model, recorder=recorder, device=device, suite=FINE_TUNE, rounds=plan.rounds,
            steps_per_round=plan.steps_per_round,
        ))  # fmt: skip


def kernels(recorder: Recorder, device: torch.device, suite: str, budget: float | None) -> None:
    """Measures the cases of a suite."""
    cases = [Case(shape=c.shape, backend=c.backend, cache=c.cache, role=c.role) for c in suites.load(suite)]
    measure(cases, recorder, device, suite, budget)


def measure(
    cases: list[Case], recorder: Recorder, device: torch.device, suite: str, budget: float | None = None
) -> None:
    """Measures cases after a training step, as `flopcast bench` does."""
    builders, _ = host_builders(host_plan(device.type), device)
    builders[min(builders)]().run()
    timer = make_timer(device, POLICIES[device.type]["standard"])
    print(run_sweep(cases, recorder=recorder, timer=timer, suite=suite, budget_seconds=budget))


if __name__ == "__main__":
    main()
