"""Products of fp8 (e4m3) operands, scaled per tensor or per row: torch._scaled_mm, and a Triton kernel for Hopper.

    a8, scale_a = quantised(a, per_row=True)          # a[m, k] -> e4m3 and fp32 [m, 1]; per tensor: [1, 1]
    b8, scale_b = quantised(b, per_row=True)          # b[n, k]: a weight as it is stored
    c = scaled_matmul(a8, b8, scale_a, scale_b)       # bf16 [m, n] = (a8 b8^T) scale_a scale_b^T
    error, tolerance = check(c, reference(a8, b8, scale_a, scale_b), a8.shape[1])

Forward only: no gradient. Hopper's units add fp8 products up in 14 bits; as in torch, `use_fast_accum` leaves it at
that, and without it every 128 products go to a sum in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flopcast.kernels.operators import operator
from flopcast.kernels.references import BackendUnavailable as BackendUnavailable
from flopcast.kernels.references import matmul_precision, require_known
from flopcast.kernels.rowwise import capability, multiprocessors

E4M3 = torch.float8_e4m3fn
BACKENDS = ("torch", "triton")
TOLERANCE = 2.0**-7  # of the largest: half an ulp of bf16, and what 14 bits lose within 128 products


@dataclass(frozen=True)
class Fp8Config:
    """Tile and launch options; `fast`: whether sums stay in the 14 bits of Hopper's units; else those of block_k do."""

    block_m: int
    block_n: int
    block_k: int = 128
    num_warps: int = 8
    num_stages: int = 3
    group_m: int = 8
    fast: bool = False

    @property
    def key(self) -> str:
        sizes = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{sizes}/w{self.num_warps}s{self.num_stages}g{self.group_m}" + "/fast" * self.fast


# What compiles for sm_90 without spills and fits (the first only if fast). On an H200 the first is the best of fast
# sums and the second of others, at five sizes of five (`studies.kernels.trial`).
TILES = (
    Fp8Config(128, 256), Fp8Config(256, 128), Fp8Config(128, 128, num_stages=5),
    Fp8Config(128, 128, num_warps=4, num_stages=4), Fp8Config(64, 128, num_warps=4, num_stages=5),
)  # fmt: skip


def config_for(m: int, n: int, sm_count: int, use_fast_accum: bool) -> Fp8Config:
    """The largest tile of which there are nine for ten multiprocessors: at 1024 x 4096 x 4096 128 of the largest have
    0.998 of torch's speed on an H200's 132, twice as many of half the size 0.944."""
    for tile in (TILES[0 if use_fast_accum else 1], TILES[2], TILES[4]):
        if 10 * -(-m // tile.block_m) * -(-n // tile.block_n) >= 9 * sm_count or tile is TILES[4]:
            break
    return replace(tile, fast=use_fast_accum)


def quantised(x: Tensor, per_row: bool = False) -> tuple[Tensor, Tensor]:
    """(e4m3 of x [rows, k], fp32 scales [rows, 1] or [1, 1]) with x ~ e4m3 * scale: the largest becomes 448."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True) if per_row else wide.abs().amax().reshape(1, 1)
    scale = largest.clamp(min=1e-12) / torch.finfo(E4M3).max
    return (wide / scale).to(E4M3), scale


def _check(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or not a.dtype == b.dtype == E4M3:
        raise ValueError(
            "a scaled product takes e4m3 a[m, k] and b[n, k], got "
            f"{a.dtype}{tuple(a.shape)} and {b.dtype}{tuple(b.shape)}"
        )
    sizes = {(scale_a.numel(), scale_b.numel()), (1, 1)}
    if sizes - {(1, 1), (a.shape[0], b.shape[0])} or not scale_a.dtype == scale_b.dtype == torch.float32:
        raise ValueError(
            f"scales are fp32, one per tensor or one per row: 1 and 1, or {a.shape[0]} and {b.shape[0]}, got "
            f"{scale_a.dtype} {scale_a.numel()} and {scale_b.dtype} {scale_b.numel()}"
        )


def forward(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, use_fast_accum: bool = False,
    *, config: Fp8Config | None = None,
) -> Tensor:  # fmt: skip
    """The Triton kernel: bf16 [m, n] (in the interpreter, which has no bf16, fp32). Operands are copied where k is not
    contiguous. Raises ValueError on operands that do not fit together, BackendUnavailable where it cannot run."""
    _check(a, b, scale_a, scale_b)
    try:
        from flopcast.kernels import triton_matmul_fp8 as module
    except ImportError as error:
        raise BackendUnavailable(f"backend triton: {error}") from error
    if not module.interpreted() and not (a.is_cuda and capability(a.device)[0] == 9):
        raise BackendUnavailable("backend triton multiplies fp8 on Hopper (sm_90) only")
    (m, k), n = a.shape, b.shape[0]
    if k % 16 or n % 16:
        raise BackendUnavailable(f"backend triton: k {k} and n {n} of an fp8 product must be multiples of 16")
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty((m, n), dtype=torch.bfloat16 if a.is_cuda else torch.float32, device=a.device)
    sms = multiprocessors(a.device)
    config = config or config_for(m, n, sms, use_fast_accum)
    if out.numel():
        module.launch(a, b, scale_a.contiguous(), scale_b.contiguous(), out, sms, config)
    return out


@operator("flopcast::scaled_matmul")
def scaled_matmul_op(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, use_fast_accum: bool) -> Tensor:
    return forward(a, b, scale_a, scale_b, use_fast_accum)


@scaled_matmul_op.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, use_fast_accum: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


@register_flop_formula(torch.ops.flopcast.scaled_matmul)
def _flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * a[0] * a[1] * b[0])


def scaled_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, use_fast_accum: bool = False) -> Tensor:
    """bf16 [m, n] = (a b^T) scale_a scale_b^T of e4m3 a[m, k] and b[n, k], by the Triton kernel. No gradient."""
    out: Tensor = scaled_matmul_op(a, b, scale_a, scale_b, use_fast_accum)
    return out


def prepare(
    backend: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, use_fast_accum: bool = False
) -> Callable[[], Tensor]:
    """A call that makes the product once. torch's takes sizes in multiples of 16, and row scales on Hopper."""
    require_known("fp8 backend", backend, BACKENDS)
    if backend == "triton":
        return lambda: forward(a, b, scale_a, scale_b, use_fast_accum)
    if scale_a.numel() == scale_b.numel() == 1:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    else:
        scale_a, scale_b = scale_a.reshape(-1, 1), scale_b.reshape(1, -1)
    return lambda: torch._scaled_mm(a, b.T, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum)


def reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The product of the quantised operands in fp32, which holds theirs exactly."""
    with matmul_precision(tf32=False):
        return (a.float() @ b.float().T) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)


def check(out: Tensor, ref: Tensor, k: int, fast: bool = False) -> tuple[float, float]:
    """(the largest difference over the largest number of the reference, what is admitted) of a product over k.

    A `fast` one is admitted 2^-14 more for each 32 products: Hopper's units add so many at a time to a sum of 14 bits
    and cut off what is below, always towards zero. On one H200 torch's and ours were 0.0052 off at k 4,096, 0.0079 at
    8,192 (torch 2.11, 2026-11-23).
    """
    scale = float(ref.abs().max()) or 1.0
    return float((out.float() - ref).abs().max()) / scale, TOLERANCE + (k / 32 * 2.0**-14 if fast else 0.0)
