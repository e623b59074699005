"""Rotary embedding of queries and keys without norms, as in Llama: one kernel, which is its own backward.

q [B, S, H, D] and k [B, S, KV, D] are as the projections leave them, the tables as for `rope`. The gradient of a
rotation is the rotation by the negative angle, so that the backward needs nothing of the forward but the tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopcast.kernels.operators import operator
from flopcast.kernels.references import BackendUnavailable
from flopcast.kernels.rope import config_for
from flopcast.kernels.rowwise import Outputs, RowConfig, autocast_dtype, load_triton


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    fits = (
        q.dim() == k.dim() == 4
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
        and cos.shape == sin.shape
        and cos.shape[1:] == (q.shape[1], q.shape[3])
        and cos.shape[0] in (1, q.shape[0])
        and q.dtype == k.dtype
        and cos.stride() == sin.stride()
    )
    if not fits:
        raise ValueError(
            "rotary takes q [B, S, H, D] and k [B, S, KV, D] of one dtype, cos and sin [B or 1, S, D], got "
            f"{[(str(x.dtype), tuple(x.shape)) for x in (q, k, cos, sin)]}"
        )
    if q.shape[3] % 2 or q.shape[3] > 1024:
        raise BackendUnavailable(f"backend triton: head_dim {q.shape[3]} is odd or above 1024")


def _outputs(q: Tensor, k: Tensor, cos: Tensor, out_dtype: torch.dtype | None) -> Outputs:
    if out_dtype is None:
        out_dtype = torch.promote_types(q.dtype, cos.dtype)
    return q.new_empty(q.shape, dtype=out_dtype), k.new_empty(k.shape, dtype=out_dtype)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backwards: bool, out_dtype: torch.dtype | None,
    *, config: RowConfig | None = None,
) -> Outputs:  # fmt: skip
    """Triton: (q, k) rotated by the tables' angles, or `backwards`, contiguous, in `out_dtype` (default: what torch
    would promote to).

    Raises ValueError on operands that do not fit together, BackendUnavailable where the kernel cannot run,
    NotImplementedError for bf16 in the interpreter.
    """
    _check(q, k, cos, sin)
    module = load_triton("rotary", q, k, cos, sin)
    q_out, k_out = _outputs(q, k, cos, out_dtype)
    if q.numel():
        q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
        module.launch_rotation(q, k, cos, sin, backwards, q_out, k_out, config or config_for(q.shape[3]))
    return q_out, k_out


@operator("flopcast::rotary")
def rotary_op(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    q_out, k_out = rotate(q, k, cos, sin, False, out_dtype)
    return q_out, k_out


@operator("flopcast::rotary_backward")
def rotary_backward_op(
    dq_out: Tensor, dk_out: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    dq, dk = rotate(dq_out, dk_out, cos, sin, True, dtype)
    return dq, dk


@rotary_op.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    q_out, k_out = _outputs(q, k, cos, out_dtype)
    return q_out, k_out


@rotary_backward_op.register_fake
def _(dq_out: Tensor, dk_out: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    dq, dk = _outputs(dq_out, dk_out, cos, dtype)
    return dq, dk


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, _, cos, sin, _ = inputs
    ctx.dtype = q.dtype
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
    return (*rotary_backward_op(dq_out, dk_out, *ctx.saved_tensors, ctx.dtype), None, None, None)


rotary_op.register_autograd(_gradients, setup_context=_save)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Differentiable Triton (q, k) rotated, contiguous [B, S, heads, D], of which attention takes the transpose(1, 2).

    Under autocast the results have its dtype, to which attention would cast. cos and sin get no gradient.
    """
    q_out, k_out = rotary_op(q, k, cos, sin, out_dtype or autocast_dtype(q))
    return q_out, k_out
