"""Compiles a training step's model as users do, by `torch.compile(model)` or with `mode="reduce-overhead"`, and counts
what its graphs launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from flopcast.microbench.recipe.inference import InferenceStep
from flopcast.microbench.recipe.plans import HostPlan
from flopcast.microbench.recipe.settings import TORCH_MODES
from flopcast.microbench.recipe.training_step import TrainingStep, build

Builders = Mapping[int, Callable[[], TrainingStep]]
PhaseCounts = dict[str, dict[str, float]]
Counts = dict[int, PhaseCounts]

FIRST_STEPS = 3  # compile, record the CUDA graph, replay it once
_LABEL = re.compile(r"^# AOT ID: \['\d+_(\w+)'\]", re.MULTILINE)
_LAUNCH = re.compile(
    r"^ +(?:\w+ = )?(?:\w+\.run\(|extern_kernels\.|torch\.ops\.|aten\.|\w+\[.*\]\.view\(.*\.sum\()", re.MULTILINE
)


def compile_model(step: TrainingStep | InferenceStep, mode: str) -> None:
    """Compiles the step's model, but for mode "eager"."""
    if mode != "eager":
        compiled: Any = torch.compile(step.model, mode=TORCH_MODES[mode])
        step.model = compiled


def forget(mode: str) -> None:
    """Forgets what was compiled in this process: a code object has eight compiled forms at most, and CUDA graphs hold
    their memory."""
    if mode != "eager":
        torch._dynamo.reset()


def host_builders(plan: HostPlan, device: torch.device | str) -> tuple[Builders, Counts]:
    """Functions that build the plan's models, by depth, and what the graphs of compiled ones launch, by depth and phase
    {"launch", "graph"}, once they are built."""
    counts: Counts = {}

    def build_one(depth: int) -> TrainingStep:
        step = build(plan.configs[depth], device, plan)
        if plan.mode != "eager":
            compile_model(step, plan.mode)
            with graphs_run() as codes:
                step.run()
            counts[depth] = phase_counts(codes)
            for _ in range(FIRST_STEPS - 1):
                step.run()
        return step

    return {depth: partial(build_one, depth) for depth in plan.configs}, counts


@contextmanager
def graphs_run() -> Iterator[list[str]]:
    """Yields a list that takes the generated code of the graphs that run meanwhile, once for each call of a graph."""
    from torch._inductor.output_code import CompiledFxGraph

    found: list[str] = []
    run = CompiledFxGraph.__call__

    def noted(self: Any, inputs: Any) -> Any:
        found.append(self.source_code)  # which a graph from inductor's cache has too
        return run(self, inputs)

    CompiledFxGraph.__call__ = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CompiledFxGraph.__call__ = run  # type: ignore[method-assign]


def counts_of(code: str) -> tuple[str, int]:
    """(phase, launches) of a graph's generated code: kernels that it runs and calls of libraries."""
    label = _LABEL.search(code)
    return ("backward" if label and label[1] == "backward" else "forward"), len(_LAUNCH.findall(body_of(code)))


def body_of(code: str) -> str:
    """The function of a graph's generated code that launches everything."""
    body = code[code.index("def call(") :]
    return body[: body.find("\ndef ", 1)] if "\ndef " in body[1:] else body


def phase_counts(codes: Iterable[str]) -> PhaseCounts:
    """By phase {"launch", "graph"}: what the graphs of these calls launch, and the number of calls."""
    found: PhaseCounts = {}
    for code in codes:
        phase, launches = counts_of(code)
        own = found.setdefault(phase, {"launch": 0.0, "graph": 0.0})
        own["launch"] += launches
        own["graph"] += 1
    return found
