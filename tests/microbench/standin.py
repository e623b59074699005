"""A stand-in for a module of `kernels`, whose backends misbehave on purpose; as a script, a slow sweep.

python standin.py OUT N: measures N shapes into OUT on the CPU, at least 20 ms each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopcast.kernels.references import BackendUnavailable
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.sweep import cases as sweep_cases
from flopcast.microbench.sweep import sweep
from flopcast.microbench.sweep.work import Summary
from flopcast.microbench.timing import device
from flopcast.microbench.timing.cpu_timer import CpuTimer
from flopcast.microbench.timing.policy import TimingPolicy

POLICY = TimingPolicy(
    min_samples=3, max_samples=5, timeout_seconds=0.02, timeout_samples=2, warm_up_seconds=0.0,
    warm_up_calls=1, max_rotation_bytes=1 << 22,
    max_sets=8, cpu_sample_seconds=1e-5,
)  # fmt: skip


class StandIn:
    """Matrix products by torch; backend says what goes wrong. Counts what is asked of it."""

    def __init__(self, slow_seconds: float = 0.0) -> None:
        self.slow_seconds = slow_seconds
        self.prepared: list[str] = []
        self.checked: list[str] = []

    def operands(self, shape: Gemm, device: Any, seed: int = 0) -> Sequence[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(shape.m, shape.k, generator=generator), torch.randn(shape.k, shape.n, generator=generator))

    def prepare(self, shape: Gemm, backend: str, operands: Sequence[Tensor]) -> Callable[[], Tensor]:
        self.prepared.append(backend)
        a, b = operands
        if backend == "unsupported":
            raise BackendUnavailable("needs a part that is not here")
        if backend == "no-gluon":
            raise ImportError("cannot import name 'gluon'", name="triton.experimental")
        if backend == "no-module":
            raise ImportError("cannot import name 'blocks'", name="flopcast.kernels.matmul_configs")
        if backend == "broken":
            raise KeyError("what a bug\nsays over two lines")
        if backend == "oom-prepare":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB\nand more")
        if backend == "oom-call":
            return lambda: torch.empty(1 << 60)
        if backend == "wrong":
            return lambda: a @ b + 1
        if backend == "nan":
            return lambda: a @ b * float("nan")
        return lambda: a @ b

    def reference(self, operands: Sequence[Tensor], shape: Gemm) -> Tensor:
        if self.slow_seconds:
            time.sleep(self.slow_seconds)
        a, b = operands
        return a.double() @ b.double()

    def check(self, out: Tensor, ref: Tensor, operands: Any, shape: Gemm) -> tuple[float, float]:
        self.checked.append(shape.key)
        return float((out - ref).abs().max() / ref.abs().max()), 1e-4


def cases(count: int, backend: str = "torch") -> list[sweep_cases.Case]:
    return [sweep_cases.Case(shape=Gemm(m=8, n=8, k=8 + i, dtype="fp32"), backend=backend) for i in range(count)]


def run(out: Path, wanted: Sequence[sweep_cases.Case], module: StandIn | None = None, **options: Any) -> Summary:
    stand_in = module or StandIn()
    with Recorder(out, device.describe(torch.device("cpu"))) as recorder:
        return sweep.run_sweep(
            wanted,
            recorder=recorder,
            timer=CpuTimer(POLICY),
            suite="quick",
            module_for=lambda shape: stand_in,
            **options,
        )


if __name__ == "__main__":
    run(Path(sys.argv[1]), cases(int(sys.argv[2])), StandIn(slow_seconds=0.02))
