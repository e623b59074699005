"""Compiles steps in processes of their own while this one measures those whose code is there.

Compiling a step takes tens of seconds of one core, measuring it three seconds. Each process compiles one step, which
leaves its code in torch's cache, and profiles its kernels, whose times do not depend on what the host does beside; the
process that measures loads the code from the cache. Compilation takes all cores, which lengthens host times, so that
it stands still (SIGSTOP) while steps are timed. Whatever runs on the GPU takes turns on it (`gpu_alone`).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from flopcast import child
from flopcast.microbench.recipe.inference import InferenceStep
from flopcast.microbench.recipe.plans import HostPlan, StepPlan
from flopcast.microbench.recipe.settings import EXPERTS
from flopcast.microbench.recipe.training_step import TrainingStep
from flopcast.microbench.records.rows import Fields
from flopcast.microbench.steps.gpu_alone import first_steps, gpu_alone

WORKER = "flopcast.microbench.steps.compile_one"
# Each process compiles its kernels itself: it stands still whole, and there are as many processes as cores.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
HELD_GIGABYTES = 4  # of the GPU, by a process with nothing in it but what CUDA and a tiny model take
USED = 0.9  # of the GPU's memory
LOOK_SECONDS = 0.5

What = TypeVar("What")


@dataclass(frozen=True)
class Job(Generic[What]):
    """Something to compile: what it is, as a worker is asked for it, and the gigabytes of the GPU that it takes."""

    what: What
    request: Mapping[str, Any]
    gigabytes: int


@dataclass(frozen=True)
class Ready(Generic[What]):
    """Something whose code is there, or whose compilation failed, and what its process answered, if it did."""

    what: What
    kernels: Fields | None


class Ahead(Generic[What]):
    """Compiles the jobs, in their order, in as many processes as `workers`; a context in which they are measured.

    None of the processes outlives it. Of `gigabytes` they take what their jobs need, and so does what is measured.
    """

    def __init__(
        self, jobs: Sequence[Job[What]], device: str, *, workers: int, gigabytes: int, worker: str = WORKER
    ) -> None:
        self._jobs, self._device, self._worker = jobs, device, worker
        self._pool = ThreadPoolExecutor(
            workers
        )  # a process ends with the thread that started it: these live until the end
        self._memory = _Memory(gigabytes)
        self._starting = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        self._done: queue.SimpleQueue[tuple[Job[What], Fields | None]] = queue.SimpleQueue()

    def __enter__(self) -> Ahead[What]:
        for job in self._jobs:
            self._pool.submit(self._compile, job)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._starting:
            self._ended = True
            self._signal(signal.SIGKILL)
        self._memory.open()
        self._pool.shutdown(cancel_futures=True)

    def ready(self, is_spent: Callable[[], bool] = lambda: False) -> Iterator[Ready[What]]:
        """Yields each job when its code is there, with the GPU's memory for it taken, until all are or `is_spent`."""
        for _ in self._jobs:
            while True:
                if is_spent():
                    return
                with suppress(queue.Empty):
                    job, kernels = self._done.get(timeout=LOOK_SECONDS)
                    break
            with self._memory.taken(job.gigabytes, first=True):
                yield Ready(job.what, kernels)

    def first(self, step: TrainingStep | InferenceStep) -> None:
        """Runs a step once, which loads what was compiled."""
        first_steps(step, 1)

    @contextmanager
    def still(self) -> Iterator[None]:
        """While this is held no process compiles, and this one has the GPU for itself."""
        with gpu_alone(self._device), self._starting:
            self._signal(signal.SIGSTOP)
            try:
                yield
            finally:
                self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)  # with the assembler that it may have started

    def _compile(self, job: Job[What]) -> None:
        with self._memory.taken(job.gigabytes):
            with self._starting:
                if self._ended:
                    return
                process = child.start(self._worker, ENVIRONMENT, subprocess.DEVNULL, own_group=True)
                self._running.add(process)
            answer, _ = process.communicate(json.dumps(job.request))
            with self._starting:
                self._running.discard(process)
        self._done.put((job, json.loads(answer) if process.returncode == 0 else None))


class _Memory:
    """Gigabytes that are taken and given back; who comes `first` is served before all others."""

    def __init__(self, gigabytes: int) -> None:
        self._whole = self._free = gigabytes
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._is_open = False

    @contextmanager
    def taken(self, gigabytes: int, *, first: bool = False) -> Iterator[None]:
        wanted, turn = min(gigabytes, self._whole), object()
        with self._changed:
            (self._waiting.appendleft if first else self._waiting.append)(turn)
            self._changed.wait_for(lambda: self._is_open or (self._waiting[0] is turn and self._free >= wanted))
            self._waiting.remove(turn)
            self._free -= wanted
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()

    def open(self) -> None:
        """Lets everyone through: it has ended."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


def ahead_of(plans: Sequence[StepPlan], hosts: Sequence[HostPlan], device: torch.device) -> Ahead[StepPlan | HostPlan]:
    """Compiles the models of `hosts` and the plans for this machine's device; times alone are left to be measured."""
    jobs: list[Job[StepPlan | HostPlan]] = [
        Job(host, {"host": host.model, "plan": asdict(host), "device": device.type}, HELD_GIGABYTES) for host in hosts
    ]
    jobs += [Job(plan, {"plan": asdict(plan), "device": device.type}, gigabytes_of(plan)) for plan in plans]
    is_cuda = device.type == "cuda"
    whole = int(USED * torch.cuda.get_device_properties(device).total_memory / 1e9) if is_cuda else 10**6
    return Ahead(jobs, device.type, workers=cores(), gigabytes=whole - HELD_GIGABYTES)


def cores() -> int:
    """How many cores this process may use, as far as the system tells."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, allowed or 1)


def gigabytes_of(plan: StepPlan) -> int:
    """More than the step takes on the GPU: parameters with gradients and states at 16 bytes, activations and logits."""
    config = plan.config
    if plan.module:
        return 16
    width = int(config.get("hidden_size", config.get("n_embd", 0)))
    layers = int(config.get("num_hidden_layers", config.get("n_layer", 0)))
    vocabulary, tokens = int(config.get("vocab_size") or 0), plan.batch * plan.seq
    experts = int(next((config[name] for name in EXPERTS if config.get(name)), 1))
    inner = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * width)
    parameters = 2 * vocabulary * width + layers * width * (4 * width + 3 * inner * experts)
    return 3 + (16 * parameters + tokens * (12 * vocabulary + 60 * layers * width)) // 10**9
