"""Qwen3's per-head RMSNorm of queries and keys followed by rotary embedding: torch, torch.compile, one fused kernel.

q [B, S, H, D] and k [B, S, KV, D] are as the projections leave them: any strides are read in place if the last is 1.
cos and sin [B or 1, S, D] are as transformers' rotary modules make them, cat(frequencies, frequencies): the second
half repeats the first, and the kernel reads the first alone.

    operands_ = operands(shape, device)      # q, k, q_weight, k_weight, cos, sin and, for the backward, dq, dk
    out = prepare(shape, "triton", operands_)()      # (q, k), or (dq, dk, dq_weight, dk_weight)
    error, tolerance = check(out, reference(operands_, shape), operands_, shape)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flopcast.kernels.operators import operator
from flopcast.kernels.references import BackendUnavailable, require_known, standard_normal, worst
from flopcast.kernels.rowwise import (
    BACKENDS,
    Outputs,
    RowConfig,
    autocast_dtype,
    load_triton,
    one_direction,
    persistent_programs,
    widened,
)
from flopcast.kernels.shapes import RopeQkNorm

EPS = 1e-6
THETA = 1e6  # Qwen3's


@lru_cache
def config_for(head_dim: int, direction: str = "fwd") -> RowConfig:
    """The default configuration for heads of `head_dim` elements in one direction ("fwd", "bwd").

    Forward: tiles of 4096 elements by four warps, two 16-byte loads per thread of each half of a row. Backward: tiles
    of 2048 elements, four programs per multiprocessor, which 128 registers per thread fill; half of the registers hold
    the next tile's rows while they are loaded. On an H200 this reaches 0.94 of a copy's bandwidth; without loading the
    next tile early 0.90, with copying it to shared memory meanwhile 0.77, with more programs than fit at most 0.93.
    """
    rows = max(1, 2048 // (2 * (1 << max(0, head_dim // 2 - 1).bit_length())))
    return RowConfig(2 * rows, 4) if direction == "fwd" else RowConfig(rows, 4, 4, max_registers=128)


def candidates(direction: str, head_dim: int) -> list[RowConfig]:
    """The configurations worth timing on a new part."""
    one = config_for(head_dim, "bwd").rows
    if direction == "fwd":
        return [RowConfig(one * k, warps) for k, warps in ((1, 4), (2, 4), (2, 8), (4, 8), (4, 16))]
    return [
        RowConfig(one * k, warps, per_sm * 4 // warps, 1, registers)
        for k, warps in ((1, 4), (2, 4), (2, 8), (4, 8), (4, 16), (1, 8))
        for per_sm, registers in ((4, None), (6, 80), (8, 64))
        if per_sm * 4 >= warps
    ]


def _check(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    fits = (
        q.dim() == k.dim() == 4
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
        and q_weight.shape == k_weight.shape == q.shape[3:]
        and cos.shape == sin.shape
        and cos.shape[1:] == (q.shape[1], q.shape[3])
        and cos.shape[0] in (1, q.shape[0])
        and q.dtype == k.dtype
        and q_weight.dtype == k_weight.dtype
        and cos.stride() == sin.stride()
    )
    if not fits:
        raise ValueError(
            "rope_qk_norm takes q [B, S, H, D], k [B, S, KV, D] of one dtype, weights [D], cos and sin [B or 1, S, D]"
            f", got {[(str(x.dtype), tuple(x.shape)) for x in (q, k, q_weight, k_weight, cos, sin)]}"
        )
    if q.shape[3] % 2 or q.shape[3] > 1024:
        raise BackendUnavailable(f"backend triton: head_dim {q.shape[3]} is odd or above 1024")


def _in_place(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = EPS,
    out_dtype: torch.dtype | None = None, *, config: RowConfig | None = None,
) -> Outputs:  # fmt: skip
    """Triton forward: (q, k) normed and rotated, contiguous, in `out_dtype` (default: what torch would promote to).

    Raises ValueError on operands that do not fit together, BackendUnavailable where the kernel cannot run,
    NotImplementedError for bf16 in the interpreter.
    """
    _check(q, k, q_weight, k_weight, cos, sin)
    module = load_triton("rope", q, k, q_weight, k_weight, cos, sin)
    q_out, k_out = _outputs(q, k, q_weight, cos, out_dtype)
    if q.numel():
        module.launch_forward(
            *_in_place(q, k, q_weight, k_weight, cos, sin), eps, q_out, k_out, config or config_for(q.shape[3])
        )
    return q_out, k_out


def backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
    sin: Tensor, eps: float = EPS, *, config: RowConfig | None = None,
) -> Outputs:  # fmt: skip
    """Triton backward: (dq, dk, dweights [2, D]), from the forward's inputs alone and bit-identical from run to run.
    Errors as `forward`."""
    _check(q, k, q_weight, k_weight, cos, sin)
    module = load_triton("rope", dq_out, dk_out, q, k, q_weight, k_weight, cos, sin)
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    dweights = q_weight.new_empty((2, q.shape[3]))
    if not q.numel():
        dweights.zero_()
    else:
        config = config or config_for(q.shape[3], "bwd")
        tiles = -(-q[..., 0].numel() // config.rows)
        programs = persistent_programs(tiles, config, q.device)
        module.launch_backward(
            *_in_place(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin), eps, dq, dk, dweights, programs, config
        )
    return dq, dk, dweights


# --- Registration ---


def _outputs(q: Tensor, k: Tensor, weight: Tensor, cos: Tensor, out_dtype: torch.dtype | None) -> Outputs:
    if out_dtype is None:
        out_dtype = torch.promote_types(torch.promote_types(q.dtype, weight.dtype), cos.dtype)
    return q.new_empty(q.shape, dtype=out_dtype), k.new_empty(k.shape, dtype=out_dtype)


@operator("flopcast::rope_qk_norm")
def rope_qk_norm_op(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_out, k_out = forward(q, k, q_weight, k_weight, cos, sin, eps, out_dtype)
    return q_out, k_out


@operator("flopcast::rope_qk_norm_backward")
def rope_qk_norm_backward_op(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
    sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dweights = backward(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps)
    return dq, dk, dweights  # both weights' in one tensor: operators may not return views of one storage


@rope_qk_norm_op.register_fake
def _(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_out, k_out = _outputs(q, k, q_weight, cos, out_dtype)
    return q_out, k_out


@rope_qk_norm_backward_op.register_fake
def _(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
    sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), q_weight.new_empty((2, *q_weight.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dweights = rope_qk_norm_backward_op(dq_out, dk_out, *ctx.saved_tensors, ctx.eps)
    return dq, dk, dweights[0], dweights[1], None, None, None, None  # the tables are constants


rope_qk_norm_op.register_autograd(_gradients, setup_context=_save)


def rope_qk_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = EPS,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Differentiable Triton (q, k), contiguous [B, S, heads, D], of which attention takes the transpose(1, 2).

    Under autocast the results have its dtype, to which attention would cast. cos and sin get no gradient.
    """
    q_out, k_out = rope_qk_norm_op(q, k, q_weight, k_weight, cos, sin, eps, out_dtype or autocast_dtype(q))
    return q_out, k_out


# --- torch twin and the benchmark interface ---


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]


def rope_qk_norm_torch(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = EPS
) -> Outputs:
    """(q, k), as transformers' Qwen3Attention computes them (there after a transpose), in torch's promoted dtype."""
    return _rotate(_norm(q, q_weight, eps), cos, sin), _rotate(_norm(k, k_weight, eps), cos, sin)


def tables(seq: int, head_dim: int, device: torch.device | str, theta: float = THETA) -> tuple[Tensor, Tensor]:
    """The tables (cos, sin), fp32 [1, seq, head_dim], as transformers' default rotary module makes them."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = torch.arange(seq, device=device)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)[None].float()
    return angle.cos(), angle.sin()


def operands(shape: RopeQkNorm, device: torch.device | str, seed: int = 0) -> tuple[Tensor, ...]:
    """Standard-normal q, k, q_weight, k_weight; cos, sin; for the backward standard-normal dq, dk. Raises ValueError on
    sizes below 1, an odd head_dim and an unknown direction."""
    if min(shape.batch, shape.seq, shape.heads, shape.kv_heads) < 1 or shape.head_dim < 2 or shape.head_dim % 2:
        raise ValueError(f"{shape.key}: sizes must be at least 1 and head_dim even")
    require_known("direction", shape.direction, ("fwd", "bwd"))
    heads = [(shape.batch, shape.seq, n, shape.head_dim) for n in (shape.heads, shape.kv_heads)]
    sizes = [*heads, *[(shape.head_dim,)] * 2, *(heads if shape.direction == "bwd" else ())]
    normal = standard_normal(sizes, shape.dtype, device, seed)
    return (*normal[:4], *tables(shape.seq, shape.head_dim, device), *normal[4:])


def prepare(shape: RopeQkNorm, backend: str, operands: Sequence[Tensor]) -> Callable[[], Outputs]:
    """A call that runs one direction once: (q, k) or (dq, dk, dq_weight, dk_weight), in the dtype of q.

    Errors as `rmsnorm.prepare`.
    """
    require_known("rope backend", backend, BACKENDS)
    if backend == "triton":
        return triton_call(shape, operands, None)
    cos, sin = operands[4:6]

    def function(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> Outputs:
        return tuple(x.to(q.dtype) for x in rope_qk_norm_torch(q, k, q_weight, k_weight, cos, sin))

    gradients = operands[6:] if shape.direction == "bwd" else None
    return one_direction(function, operands[:4], gradients, backend == "compile")


def triton_call(shape: RopeQkNorm, operands: Sequence[Tensor], config: RowConfig | None) -> Callable[[], Outputs]:
    """As `prepare` for backend triton, with the given configuration (None: the default one)."""
    q, k, q_weight, k_weight, cos, sin = operands[:6]
    if shape.direction == "fwd":
        return lambda: forward(q, k, q_weight, k_weight, cos, sin, EPS, q.dtype, config=config)
    dq_out, dk_out = operands[6:8]

    def run_backward() -> Outputs:
        dq, dk, dweights = backward(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, EPS, config=config)
        return dq, dk, dweights[0], dweights[1]

    return run_backward


def reference(operands: Sequence[Tensor], shape: RopeQkNorm) -> Outputs:
    """What `prepare`'s call returns, computed by torch in fp64 for fp32 operands, in fp32 for 16-bit ones."""
    return prepare(shape, "torch", widened(operands))()


def check(out: Outputs, ref: Outputs, operands: Sequence[Tensor], shape: RopeQkNorm) -> tuple[float, float]:
    """(relative error, tolerance) of the worst output, by `references.worst`."""
    return worst(out, ref, prepare(shape, "torch", operands)())
