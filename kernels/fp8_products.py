"""Products of fp8 as the benchmarks call them: a `shapes.Gemm` of dtype "fp8", by torch._scaled_mm or Triton.

    operands_ = operands(shape, device, seed=0)              # e4m3 a[m, k] and b[n, k], and their scales
    out = prepare(shape, "triton", operands_)()              # bf16 [m, n]
    error, tolerance = check(out, reference(operands_, shape), operands_, shape)

Sums stay in the 14 bits of Hopper's units (`use_fast_accum`), as fp8 training has its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flopcast.kernels import fp8_matmul
from flopcast.kernels.references import BackendUnavailable, require_known, standard_normal
from flopcast.kernels.shapes import Gemm


def operands(shape: Gemm, device: torch.device | str, seed: int = 0) -> tuple[Tensor, ...]:
    """(a, b, scale_a, scale_b) of standard-normal matrices. ValueError on sizes that make no product."""
    if min(shape.m, shape.n, shape.k) < 1:
        raise ValueError(f"{shape.key}: m, n and k must be at least 1")
    require_known("layout of an fp8 product", shape.layout, ("nt",))
    a, b = standard_normal(((shape.m, shape.k), (shape.n, shape.k)), "bf16", device, seed)
    (a8, scale_a), (b8, scale_b) = (fp8_matmul.quantised(x, shape.row_scales) for x in (a, b))
    return a8, b8, scale_a, scale_b


def prepare(shape: Gemm, backend: str, operands: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A call that makes the product once. Raises BackendUnavailable where it cannot run."""
    a, b, scale_a, scale_b = operands
    on_gpu = a.is_cuda
    if backend == "torch" and on_gpu and torch.cuda.get_device_capability(a.device) < (8, 9):
        raise BackendUnavailable("fp8 products need compute capability 8.9 or later")
    return fp8_matmul.prepare(backend, a, b, scale_a, scale_b, use_fast_accum=on_gpu)


def reference(operands: Sequence[Tensor], shape: Gemm) -> Tensor:
    """The product of the quantised operands in fp32."""
    a, b, scale_a, scale_b = operands
    return fp8_matmul.reference(a, b, scale_a, scale_b)


def check(out: Tensor, ref: Tensor, operands: Sequence[Tensor], shape: Gemm) -> tuple[float, float]:
    """(relative error, tolerance); correct when error <= tolerance."""
    return fp8_matmul.check(out, ref, shape.k, fast=out.is_cuda)
