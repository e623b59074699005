"""Processes that share a GPU take turns on it: while one holds it, no other runs kernels there."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from flopcast.microbench.recipe.compiling import FIRST_STEPS
from flopcast.microbench.recipe.inference import InferenceStep
from flopcast.microbench.recipe.training_step import TrainingStep

_held = threading.Event()  # this process has the GPU for itself
_kept_free: set[int] = set()  # the core of whoever has it, where `leave_a_core` has been called
FEW_CORES = 4  # of fewer, one less would lengthen compiling by half or more


def leave_a_core(least: int = FEW_CORES) -> None:
    """Takes this process, which compiles beside others, off the last of its cores, `least` or more, except while it has
    the GPU.

    Inductor times each kernel in two or three configurations and keeps the quickest, with the launch in what it times.
    Where as many processes compile as there are cores, launches wait for one: kernels of 2 to 20 us came out at 14 to
    240 in its log on an H200, and of a decode one ran in 3.4 us that runs in 1.7 where a core is left."""
    if hasattr(os, "sched_setaffinity") and len(cores := os.sched_getaffinity(0)) >= least:
        _kept_free.add(max(cores))
        _run_on(cores - _kept_free)


@contextmanager
def _on_kept_core() -> Iterator[None]:
    """Meanwhile this process, if it has left a core, runs there."""
    if not _kept_free:
        yield
        return
    others = os.sched_getaffinity(0)
    _run_on(_kept_free)
    try:
        yield
    finally:
        _run_on(others)


def _run_on(cores: set[int]) -> None:
    """Moves all threads of this process to these cores: backwards run in threads of autograd's."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


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
            with _on_kept_core():
                yield
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # what is free is free for the others
        finally:
            _held.clear()


@contextmanager
def graphs_alone(device: str) -> Iterator[None]:
    """Compiled graphs that run meanwhile, and products that inductor times as they are and padded before it compiles
    them, have the GPU for themselves.

    Two models 1,023 wide whose products were timed beside each other were left partly unpadded: a step of four layers
    took 22.6 ms in place of 15 on an H200, where inductor alone finds all of them 1.2 to 6 times faster padded."""
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.output_code import CompiledFxGraph

    run_graph = CompiledFxGraph.__call__
    should_pad: Any = pad_mm._should_pad

    def run_graph_alone(self: Any, inputs: Any) -> Any:
        with gpu_alone(device):
            return run_graph(self, inputs)

    def should_pad_alone(*given: Any, **named: Any) -> Any:
        with gpu_alone(device):
            return should_pad(*given, **named)

    CompiledFxGraph.__call__ = run_graph_alone  # type: ignore[method-assign]
    pad_mm._should_pad = should_pad_alone
    try:
        yield
    finally:
        CompiledFxGraph.__call__ = run_graph  # type: ignore[method-assign]
        pad_mm._should_pad = should_pad


def first_steps(step: TrainingStep | InferenceStep, number: int = FIRST_STEPS) -> None:
    """Runs the first steps of a compiled model, in which it is compiled and captured. Whatever of them runs on the GPU
    has it for itself, so that choices that torch makes by timing are those of an idle one."""
    with graphs_alone(step.device_type):
        for _ in range(number):
            if isinstance(step, InferenceStep):
                step.run()
                continue
            step.zero_grad()
            for _ in range(step.accumulate):
                step.backward(step.forward())
            with gpu_alone(step.device_type):
                step.optimizer_step()
