"""The torch twins of the fused operators, for recorded calls; importing this module registers the operators.

A step of a model on the fused kernels (`patch_layers`) is a stream of calls such as `flopcast.rms_norm`. `aten` replays
them as any other call and compares their results with these twins, which compute in the dtype of the operands, because
the operators' own kernels take no float64. As in the kernels, only the first half of a rotary table is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# imported for their registrations
from flopcast.kernels import adamw, cross_entropy, gradient_norm, rmsnorm, rope, rotary, swiglu

__all__ = [
    "TWINS", "adamw", "cross_entropy", "gradient_norm", "held_call", "rmsnorm", "rope", "rotary", "swiglu", "twin_of",
]  # fmt: skip


def twin_of(op: str) -> Callable[..., Any]:
    """The twin of `flopcast.<name>.default`. Raises NotImplementedError where there is none."""
    name = op.split(".")[1]
    if name not in TWINS:
        raise NotImplementedError(f"{op} has no reference: known are {', '.join(TWINS)}")
    return TWINS[name]


def held_call(op: str) -> Callable[..., Callable[[], Any]] | None:
    """For operators whose tables of tensors are kept only while few others are asked for: a function of their arguments
    that gives a call with a table of its own, which benches repeat and capture in CUDA graphs. None for others."""
    return _HELD.get(op.split(".")[1])


def _rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.pow(2).mean(-1) + eps)
    return x * rstd[..., None] * weight, rstd.reshape(-1)


def _rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    scale = rstd.reshape(x.shape[:-1])[..., None]
    normed = x * scale
    scaled = dy * weight
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * scale
    return dx, (dy * normed).reshape(-1, x.shape[-1]).sum(0)


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    y, rstd = _rms_norm(total, weight, eps, out_dtype)
    return y, total, rstd


def _add_rms_norm_backward(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, rstd: Tensor, second_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight = _rms_norm_backward(dy, total, weight, rstd)
    dx = dx + dtotal
    return dx, dx if second_dtype is not None else dx.new_empty(0), dweight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - sign * second * sin, second * cos + sign * first * sin), -1)


def _halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The first halves of the tables, each [B or 1, S, 1, D / 2]."""
    return tuple(x.chunk(2, -1)[0][:, :, None] for x in (cos, sin))  # type: ignore[return-value]


def _rope_qk_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    tables = _halves(cos, sin)
    return tuple(
        _rotate(_rms_norm(x, weight, eps, None)[0], *tables, 1.0) for x, weight in ((q, q_weight), (k, k_weight))
    )


def _rope_qk_norm_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
    sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tables = _halves(cos, sin)
    found = []
    for dout, x, weight in ((dq_out, q, q_weight), (dk_out, k, k_weight)):
        rstd = torch.rsqrt(x.pow(2).mean(-1) + eps).reshape(-1)
        found.append(_rms_norm_backward(_rotate(dout, *tables, -1.0), x, weight, rstd))
    (dq, dq_weight), (dk, dk_weight) = found
    return dq, dk, torch.stack((dq_weight, dk_weight))


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    return tuple(_rotate(x, *_halves(cos, sin), 1.0) for x in (q, k))


def _rotary_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(_rotate(x, *_halves(cos, sin), -1.0) for x in (dq, dk))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    return dout * up * sigmoid * (1 + gate * (1 - sigmoid)), dout * gate * sigmoid


def _cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    kept = target != ignore_index
    count = kept.sum().to(logits.dtype) if reduction == "mean" else logits.new_ones(())
    lse = torch.logsumexp(logits, -1) * kept
    at = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    return ((lse - at) * kept).sum() / count, lse, count.reshape(1)


def _cross_entropy_backward(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, ignore_index: int
) -> Tensor:
    gradient = (logits - lse[:, None]).exp_()
    ones = torch.ones_like(target, dtype=logits.dtype)
    gradient.scatter_add_(1, target.clamp(min=0)[:, None], -ones[:, None])
    return gradient.mul_(((target != ignore_index) * (dloss / count))[:, None])


def _cross_entropy_with_gradient(
    logits: Tensor, target: Tensor, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor]:
    loss, lse, count = _cross_entropy(logits, target, ignore_index, reduction)
    return loss, _cross_entropy_backward(torch.ones_like(loss), logits, target, lse, count, ignore_index)


def _scale(x: Tensor, factor: Tensor) -> None:
    x.mul_(factor)


def _adamw(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    norm: Tensor | None = None, max_norm: float = 0.0,
) -> None:  # fmt: skip
    """Tensor by tensor: in fp64 a model's lists leave no room for results of their size."""
    scale = 1.0 if norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param, grad, first, second in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        scaled = grad * scale
        first.lerp_(scaled, 1 - beta1)
        second.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        denominator = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
        param.mul_(1 - lr * weight_decay).addcdiv_(first, denominator, value=-lr / (1 - beta1**step))


def _gradient_norm(gradients: list[Tensor]) -> Tensor:
    each = torch.stack([torch.linalg.vector_norm(x) for x in gradients])
    norm: Tensor = torch.linalg.vector_norm(each, keepdim=True)
    return norm


_HELD: dict[str, Callable[..., Callable[[], Any]]] = {
    "adamw_": adamw.call_of, "adamw_clipped_": adamw.call_of, "gradient_norm": gradient_norm.call_of,
}  # fmt: skip
TWINS: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "add_rms_norm": _add_rms_norm,
    "add_rms_norm_backward": _add_rms_norm_backward,
    "rope_qk_norm": _rope_qk_norm,
    "rope_qk_norm_backward": _rope_qk_norm_backward,
    "rotary": _rotary,
    "rotary_backward": _rotary_backward,
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "cross_entropy_with_gradient": _cross_entropy_with_gradient,
    "scale_": _scale,
    "adamw_": _adamw,
    "adamw_clipped_": _adamw,
    "gradient_norm": _gradient_norm,
}
