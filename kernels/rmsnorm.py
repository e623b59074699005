"""RMSNorm as in Qwen3, with or without a residual added first: torch, torch.compile and one fused Triton kernel.

    y = x rsqrt(mean(x^2) + eps) weight          over the last dimension, in fp32, rounded once
    y, total = norm(x + residual), x + residual  where there is a residual

A model calls `rms_norm` and `add_rms_norm`, which are differentiable and registered as operators. Under autocast they
return the dtype to which the next linear layer would cast (transformers returns fp32 there, which that layer then
rounds to the same values).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flopcast.kernels.matmul import shared_memory_limit
from flopcast.kernels.operators import operator
from flopcast.kernels.references import BackendUnavailable, require_known, standard_normal, worst
from flopcast.kernels.row_tiles import blocks_of
from flopcast.kernels.rowwise import (
    BACKENDS,
    LONGEST_ROW,
    Outputs,
    RowConfig,
    autocast_dtype,
    capability,
    load_triton,
    one_direction,
    persistent_programs,
    rows_in_place,
    widened,
)
from flopcast.kernels.shapes import RmsNorm

EPS = 1e-6  # Qwen3's


@lru_cache
def config_for(
    n: int, direction: str = "fwd", operand_bytes: tuple[int, ...] = (2, 2, 2), part: tuple[int, int] = (9, 0),
    *, residual: bool = False,
) -> RowConfig:  # fmt: skip
    """The default configuration for rows of n elements in one direction ("fwd", "bwd") on a part.

    Forward: 8 to 16 elements per thread, of the rest of a row too, so that loads are of 16 bytes (rows of 5,120 on an
    H200: 0.95 of a copy's bandwidth instead of 0.89); several rows per program where they are short, and as many
    programs as fit. Rows of 1,024 go two to a program, or one with a residual: 131,072 such rows without a residual,
    launched ahead, take 158 us at one row per program and 129 us at two.

    Enough loads must be in flight: at 4.2 TB/s and a latency of 0.8 us a multiprocessor needs 25 KB on the way, and
    2048 threads with 16 elements of bf16 bring 64 KB. The backward holds the operands, the weight and its gradient in
    some 110 registers per thread, so that 16 warps fill a multiprocessor; in flight there are the rows of the next two
    steps, copied asynchronously to shared memory (fewer steps where that is too small).

    operand_bytes: bytes per element of each row operand of the backward. part: compute capability. residual: whether
    the forward adds one.
    """
    block, rest = blocks_of(n)
    rows = max(1, 2048 // block)
    if direction == "fwd":
        rows = 1 if block == 1024 and residual else rows
        warps = min(32, max(4, rows * block // 512))
        return RowConfig(rows, min(warps, max(4, rest // 256)) if rest else warps)
    warps = min(32, max(4, rows * block // 512))
    step_bytes = rows * (block + rest) * sum(operand_bytes)
    # 2 KB are set aside for the reductions across warps and for barriers.
    steps = min(2, (shared_memory_limit(part) - 2048) // step_bytes)
    return RowConfig(rows, warps, max(1, 16 // warps), 1 + steps, max_registers=min(128, 65536 // (32 * warps)))


def candidates(direction: str, n: int) -> list[RowConfig]:
    """The configurations worth timing on a new part: the neighbourhood of what the rule `config_for` chooses."""
    block, _ = blocks_of(n)
    tiles = [tile for tile in (1024, 2048, 4096, 8192) if tile >= block] or [block]
    found = []
    for tile in tiles:
        for per_thread in (4, 8, 16, 32) if direction == "fwd" else (8, 16, 32):
            warps = min(32, max(1, tile // (32 * per_thread)))
            if direction == "fwd":
                found.append(RowConfig(tile // block, warps))
            else:
                for threads in (512, 1024):
                    if threads >= 32 * warps:
                        found += [
                            RowConfig(tile // block, warps, threads // (32 * warps), stages, 65536 // threads)
                            for stages in (1, 3)
                        ]
    return list(dict.fromkeys(found))


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if weight.dim() != 1 or x.shape[-1:] != weight.shape or (residual is not None and residual.shape != x.shape):
        raise ValueError(
            "RMSNorm takes x [..., n], weight [n] and a residual like x, got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {None if residual is None else tuple(residual.shape)}"
        )
    if x.shape[-1] > LONGEST_ROW:
        raise BackendUnavailable(f"backend triton: rows of {x.shape[-1]} are longer than {LONGEST_ROW}")


def forward(
    x: Tensor,
    weight: Tensor,
    eps: float = EPS,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    config: RowConfig | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Triton forward of x [..., n]: (y like x, x + residual or None, rstd fp32 [rows]).

    y has `out_dtype`, by default the dtype that torch gives weight * x; x + residual has the one that torch gives the
    sum. Raises ValueError on operands that do not fit together, BackendUnavailable where the kernel cannot run,
    NotImplementedError for bf16 in the interpreter.
    """
    _check(x, weight, residual)
    module = load_triton("rmsnorm", x, weight, *(() if residual is None else (residual,)))
    y, total, rstd = _outputs(x, weight, residual, out_dtype)
    if x.numel():
        module.launch_forward(
            rows_in_place(x), None if residual is None else rows_in_place(residual), weight.contiguous(), eps,
            y, total, rstd, blocks_of(x.shape[-1]),
            config or config_for(x.shape[-1], residual=residual is not None),
        )  # fmt: skip
    return y, total, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dtotal: Tensor | None = None,
    second_dtype: torch.dtype | None = None,
    *,
    config: RowConfig | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Triton backward: (dx in x's dtype, the same in `second_dtype` or None, dweight), bit-identical from run to run.

    x is what was normalised: with a residual the sum, whose gradient from elsewhere is `dtotal`. Errors as `forward`.
    """
    _check(x, weight, dtotal)
    module = load_triton("rmsnorm", dy, x, weight)
    n = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dx2 = None if second_dtype in (None, x.dtype) else torch.empty_like(dx, dtype=second_dtype)
    dweight = torch.empty_like(weight)
    if not x.numel():
        return dx, dx2, dweight.zero_()
    rows = rows_in_place(x)
    if config is None:
        row_operands = (dy, x) if dtotal is None else (dy, x, dtotal)
        config = config_for(n, "bwd", tuple(y.element_size() for y in row_operands), capability(x.device))
    programs = persistent_programs(-(-rows.shape[0] // config.rows), config, x.device)
    module.launch_backward(
        rows_in_place(dy), None if dtotal is None else rows_in_place(dtotal), rows, weight.contiguous(), rstd,
        dx, dx2, dweight, programs, blocks_of(n), config,
    )  # fmt: skip
    return dx, dx2, dweight


# --- Registration ---


def _outputs(
    x: Tensor, weight: Tensor, residual: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Uninitialised (y, total, rstd), contiguous."""
    sum_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out_dtype = out_dtype or torch.promote_types(sum_dtype, weight.dtype)
    y = x.new_empty(x.shape, dtype=out_dtype)
    total = None if residual is None else x.new_empty(x.shape, dtype=sum_dtype)
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return y, total, x.new_empty((rows,), dtype=torch.float32)


@operator("flopcast::rms_norm")
def rms_norm_op(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    y, _, rstd = forward(x, weight, eps, None, out_dtype)
    return y, rstd


@operator("flopcast::rms_norm_backward")
def rms_norm_backward_op(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dx, _, dweight = backward(dy, x, weight, rstd)
    return dx, dweight


@operator("flopcast::add_rms_norm")
def add_rms_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, rstd = forward(x, weight, eps, residual, out_dtype)
    assert total is not None
    return y, total, rstd


@operator("flopcast::add_rms_norm_backward")
def add_rms_norm_backward_op(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, rstd: Tensor, second_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(the gradient in total's dtype; the same in `second_dtype`, empty where that is None or total's; dweight)."""
    dx, dx2, dweight = backward(dy, total, weight, rstd, dtotal, second_dtype)
    return dx, dx.new_empty(0) if dx2 is None else dx2, dweight


@rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    y, _, rstd = _outputs(x, weight, None, out_dtype)
    return y, rstd


@rms_norm_backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


@add_rms_norm_op.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, rstd = _outputs(x, weight, residual, out_dtype)
    assert total is not None
    return y, total, rstd


@add_rms_norm_backward_op.register_fake
def _(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, rstd: Tensor, second_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    same = second_dtype in (None, total.dtype)
    dx2 = total.new_empty(0) if same else total.new_empty(total.shape, dtype=second_dtype)
    return total.new_empty(total.shape), dx2, torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, _ = inputs
    ctx.set_materialize_grads(False)  # else rstd's gradient is filled with zeros: one launch per norm
    ctx.save_for_backward(x, weight, output[1])


def _gradients(ctx: Any, dy: Tensor | None, drstd: Tensor | None) -> tuple[Tensor | None, ...]:
    del drstd  # not differentiated: `rms_norm` hands out y alone
    if dy is None:
        return None, None, None, None
    return (*rms_norm_backward_op(dy, *ctx.saved_tensors), None, None)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _, _ = inputs
    _, total, rstd = output
    ctx.dtypes = x.dtype, residual.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, weight, rstd)


def _sum_gradients(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, drstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    del drstd
    total, weight, rstd = ctx.saved_tensors
    if dy is None:  # the norm is not used: the sum's gradient is both terms'
        return (*(None if dtotal is None else dtotal.to(x) for x in ctx.dtypes), None, None, None)
    if dtotal is None:
        dtotal = torch.zeros_like(total)
    other = next((dtype for dtype in ctx.dtypes if dtype != total.dtype), None)
    dx, dx2, dweight = add_rms_norm_backward_op(dy, dtotal, total, weight, rstd, other)
    of_x, of_residual = (dx if dtype == total.dtype else dx2 for dtype in ctx.dtypes)
    return of_x, of_residual, dweight, None, None


rms_norm_op.register_autograd(_gradients, setup_context=_save)
add_rms_norm_op.register_autograd(_sum_gradients, setup_context=_save_sum)


def rms_norm(x: Tensor, weight: Tensor, eps: float = EPS, out_dtype: torch.dtype | None = None) -> Tensor:
    """Differentiable Triton RMSNorm of x [..., n]; under autocast in autocast's dtype unless `out_dtype` is given."""
    y: Tensor = rms_norm_op(x, weight, eps, out_dtype or autocast_dtype(x))[0]
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = EPS, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Differentiable Triton (norm(x + residual), x + residual); dtypes as in `rms_norm`."""
    y, total, _ = add_rms_norm_op(x, residual, weight, eps, out_dtype or autocast_dtype(x))
    return y, total


# --- torch twins and the benchmark interface ---


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float = EPS) -> Outputs:
    """(y,), as transformers' Qwen3RMSNorm computes it (at least fp32 inside, one rounding before the weight)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(x.dtype),)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float = EPS) -> Outputs:
    """(y, total), as transformers' decoder layer computes it."""
    total = residual + x
    return (*rms_norm_torch(total, weight, eps), total)


def operands(shape: RmsNorm, device: torch.device | str, seed: int = 0) -> tuple[Tensor, ...]:
    """Standard-normal x, [residual,] weight, and for the backward dy[, dtotal]. Raises ValueError on sizes below 1 and
    on an unknown direction."""
    if min(shape.rows, shape.n) < 1:
        raise ValueError(f"{shape.key}: rows and n must be at least 1")
    require_known("direction", shape.direction, ("fwd", "bwd"))
    whole = [(shape.rows, shape.n)] * (2 if shape.residual else 1)
    sizes = [*whole, (shape.n,), *(whole if shape.direction == "bwd" else ())]
    return standard_normal(sizes, shape.dtype, device, seed)


def _split(operands: Sequence[Tensor], shape: RmsNorm) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    inputs = 3 if shape.residual else 2
    return tuple(operands[:inputs]), tuple(operands[inputs:]) if shape.direction == "bwd" else None


def prepare(shape: RmsNorm, backend: str, operands: Sequence[Tensor]) -> Callable[[], Outputs]:
    """A call that runs one direction once: (y[, total]) or (dx[, dresidual], dweight).

    Raises ValueError on an unknown backend, NotImplementedError or BackendUnavailable where it cannot run.
    """
    require_known("RMSNorm backend", backend, BACKENDS)
    if backend == "triton":
        return triton_call(shape, operands, None)
    function = add_rms_norm_torch if shape.residual else rms_norm_torch
    return one_direction(function, *_split(operands, shape), backend == "compile")


def triton_call(shape: RmsNorm, operands: Sequence[Tensor], config: RowConfig | None) -> Callable[[], Outputs]:
    """As `prepare` for backend triton, with the given configuration (None: the default one)."""
    inputs, gradients = _split(operands, shape)
    x, residual, weight = (inputs[0], inputs[1], inputs[2]) if shape.residual else (inputs[0], None, inputs[1])
    if gradients is None:

        def run_forward() -> Outputs:
            y, total, _ = forward(x, weight, EPS, residual, config=config)
            return (y,) if total is None else (y, total)

        return run_forward
    _, total, rstd = forward(x, weight, EPS, residual)
    normalised = x if total is None else total
    dtotal = gradients[1] if shape.residual else None

    def run_backward() -> Outputs:
        dx, _, dweight = backward(gradients[0], normalised, weight, rstd, dtotal, config=config)
        return (dx, dx, dweight) if shape.residual else (dx, dweight)

    return run_backward


def reference(operands: Sequence[Tensor], shape: RmsNorm) -> Outputs:
    """What `prepare`'s call returns, computed by torch in fp64 for fp32 operands, in fp32 for 16-bit ones."""
    return prepare(shape, "torch", widened(operands))()


def check(out: Outputs, ref: Outputs, operands: Sequence[Tensor], shape: RmsNorm) -> tuple[float, float]:
    """(relative error, tolerance) of the worst output, by `references.worst`."""
    return worst(out, ref, prepare(shape, "torch", operands)())
