"""Processes that share a GPU take turns on it: while one holds it, no other runs kernels there."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flopcast.microbench.recipe.compiling import FIRST_STEPS
from flopcast.microbench.recipe.training_step import TrainingStep

_held = threading.Event()  # this process has the GPU for itself


@contextmanager
def gpu_alone(device: str) -> Iterator[None]:
    """While this is held no other process that asks for the same runs anything on the GPU."""
    if _held.is_set():
        yield
        return
    of_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with open(Path(tempfile.gettempdir()) / f"flopcast-{os.getuid()}-gpu{of_gpu}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        _held.set()
        try:
            yield
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # what is free is free for the others
        finally:
            _held.clear()


@contextmanager
def graphs_alone(device: str) -> Iterator[None]:
    """Compiled graphs that run meanwhile have the GPU for themselves."""
    from torch._inductor.output_code import CompiledFxGraph

    run_graph = CompiledFxGraph.__call__

    def run_graph_alone(self: Any, inputs: Any) -> Any:
        with gpu_alone(device):
            return run_graph(self, inputs)

    CompiledFxGraph.__call__ = run_graph_alone  # type: ignore[method-assign]
    try:
        yield
    finally:
        CompiledFxGraph.__call__ = run_graph  # type: ignore[method-assign]


def first_steps(step: TrainingStep, number: int = FIRST_STEPS) -> None:
    """Runs the first steps of a compiled model, in which it is compiled and captured. Whatever of them runs on the GPU
    has it for itself, so that Triton's choices among configurations are those of an idle one."""
    with graphs_alone(step.device_type):
        for _ in range(number):
            step.zero_grad()
            for _ in range(step.accumulate):
                step.backward(step.forward())
            with gpu_alone(step.device_type):
                step.optimizer_step()
