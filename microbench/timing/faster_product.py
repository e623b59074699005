"""Times a product by cuBLAS and by the Triton kernels in turn, and says which is faster on this very GPU.

    choose = measured_choice(otherwise)          # as `kernels.matmul_chosen` asks for it: of a shape, once

A law that ships picks the faster one of most products, but cuBLAS runs some shapes at half the pace of their
neighbours, and not the same ones on every GPU. Timing both takes 25 ms, and where a kernel of that tile was never
compiled the seconds of the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from flopcast.kernels import matmul
from flopcast.kernels.matmul_chosen import Choice
from flopcast.kernels.matmul_configs import MatmulConfig
from flopcast.kernels.references import BackendUnavailable, torch_dtype
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.timing.cuda_timer import CudaTimer
from flopcast.microbench.timing.interleave import Contender, calls_in_graph, interleaved, operand_sets
from flopcast.microbench.timing.operands import Call
from flopcast.microbench.timing.policy import QUICK

ROUNDS = 5  # readings of each
# A product's rough time, by which its calls in a graph are counted.
FLOPS_PER_SECOND, BYTES_PER_SECOND, LEAST_SECONDS = 5e14, 4e12, 4e-6


def ways(shape: Gemm, config: MatmulConfig | None = None) -> Mapping[str, Callable[[Sequence[Tensor]], Call]]:
    """By backend, what makes a call of operands as stored and the result's memory, (a, b, out); `config`: of ours."""

    def library(x: Sequence[Tensor]) -> Call:
        a = x[0] if shape.layout[0] == "n" else x[0].mT
        b = x[1] if shape.layout[1] == "n" else x[1].mT
        return lambda: torch.mm(a, b, out=x[2])

    def ours(x: Sequence[Tensor]) -> Call:
        return lambda: matmul.matmul_triton(x[0], x[1], shape.layout, config=config, out=x[2])

    return {"torch": library, "triton": ours}


def errors(shape: Gemm, operands: Sequence[Tensor], config: MatmulConfig | None = None) -> dict[str, float]:
    """By backend, the largest error of the result, as `matmul.check` has it. Each runs once, and so is compiled."""
    reference = matmul.reference(operands[:2], shape)
    found = {}
    for name, way in ways(shape, config).items():
        operands[2].fill_(math.nan)
        found[name], _ = matmul.check(way(operands)(), reference, operands, shape)
    return found


def operands_of(shape: Gemm, device: torch.device) -> tuple[Tensor, ...]:
    """(a, b, out): standard-normal operands as stored, and the result's memory."""
    out = torch.empty((shape.m, shape.n), dtype=torch_dtype(shape.dtype), device=device)
    return *matmul.operands(shape, device), out


def timed(
    timer: CudaTimer, shape: Gemm, operands: Sequence[Tensor], rounds: int = ROUNDS, config: MatmulConfig | None = None
) -> dict[str, Contender]:
    """By backend, the readings of both in turn, over operands that together are three times the L2."""
    count = calls_in_graph(max(shape.flops / FLOPS_PER_SECOND, shape.bytes / BYTES_PER_SECOND, LEAST_SECONDS))
    sets = operand_sets(operands, timer.cache_bytes, count)
    return interleaved(timer, ways(shape, config), sets, count, rounds)


@cache
def _timer(device: int) -> CudaTimer:
    return CudaTimer(torch.device("cuda", device), QUICK)


def faster(shape: Gemm) -> str:
    """The backend that took less time on the current device, "torch" or "triton"; "torch" where ours is wrong.

    Raises torch.OutOfMemoryError, and BackendUnavailable or NotImplementedError where ours cannot run.
    """
    timer = _timer(torch.cuda.current_device())
    torch.cuda.synchronize(timer.device)  # what runs beside would be timed, too
    with torch.cuda.stream(timer.stream), torch.no_grad(), torch.autocast("cuda", enabled=False):
        operands = operands_of(shape, timer.device)
        if errors(shape, operands)["triton"] > matmul.tolerance(shape):
            return "torch"
        found = timed(timer, shape, operands)
    return min(found, key=lambda backend: found[backend].seconds)


def measured_choice(otherwise: Choice) -> Choice:
    """The faster backend by timing. `otherwise` is asked where nothing can be timed: without a GPU, while a CUDA graph
    is captured, where memory is short, and for products that the Triton kernels do not have."""

    def choose(shape: Gemm) -> str:
        can_be_timed = shape.batch == 1 and shape.dtype in ("bf16", "fp16") and torch.cuda.is_available()
        if not can_be_timed or torch.cuda.is_current_stream_capturing():
            return otherwise(shape)
        try:
            return faster(shape)
        except (torch.OutOfMemoryError, BackendUnavailable, NotImplementedError):
            return otherwise(shape)

    return choose
