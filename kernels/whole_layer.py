"""A decoder layer of an eager training step as one node of autograd, and a linear layer whose gradient is made in fp32.

A layer by its modules has some twenty nodes, each of which costs the host, and its weights' gradients are rounded to 16
bits, written, read and written again in fp32. `run` computes the same by the same kernels in one node:
- its weights are cast in one launch, and queries, keys and values are one product;
- a weight's gradient leaves its product in fp32, as torch.mm's `out_dtype` gives it (more exact: nothing is rounded);
- gradients of one input by several products are added inside these (beta = 1);
- the addition after the MLP is in the norm that follows, of the next layer or of the model. The normed rows go to it as
  an attribute of the layer's output, so that whatever else reads or replaces that output is right, only slower.

It takes what training gives: fp32 weights under 16-bit autocast, gradients of all wanted, causal attention on our
kernels, no cache. `run` returns None for anything else (biases, adapters, hooks on a module inside, sharded weights,
checkpointing), and the layer then runs by its modules, as it does for torch.compile, which fuses by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flopcast.kernels.attention import attention_backward_op, attention_forward_op
from flopcast.kernels.launching import PLAIN
from flopcast.kernels.rmsnorm import add_rms_norm_backward_op, add_rms_norm_op, rms_norm_backward_op, rms_norm_op
from flopcast.kernels.rope import rope_qk_norm_backward_op, rope_qk_norm_op
from flopcast.kernels.rotary import rotary_backward_op, rotary_op
from flopcast.kernels.rowwise import autocast_dtype
from flopcast.kernels.swiglu import swiglu_backward_op, swiglu_op

NEXT = "_flopcast_next_norm"  # of a layer: the norm that reads its output
PARTS = "_flopcast_parts"  # of a layer: its `_Parts`
_NORMED = "_flopcast_normed"  # of a layer's output: (that norm, the rows it would return, their 1 / rms)


@dataclass(frozen=True)
class Sizes:
    """What of a layer is no tensor. `eps`: of the norm before attention, of queries and keys, before the MLP, of the
    next layer."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    eps: tuple[float, float, float, float]
    scale: float
    window: int
    qk_norm: bool
    has_next: bool


def gradient_in_fp32(dy: Tensor, x: Tensor) -> Tensor:
    """A weight's gradient [out, in] in fp32 of dy [rows, out] and x [rows, in] of 16 bits."""
    if x.device.type == "cpu" and type(x) in PLAIN:  # torch has this product on GPUs alone
        return torch.mm(dy.t().float(), x.float())
    return torch.mm(dy.t(), x, out_dtype=torch.float32)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sizes: Sizes, x: Tensor, normed: Tensor | None, rstd: Tensor | None, cos: Tensor, sin: Tensor,
        documents: Tensor | None, *weights: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """x [batch, seq, width] fp32 -> (the layer's output, normed for the next layer, 1 / rms of its rows)."""
        w_in, w_q, w_k, w_v, w_o, w_post, w_gate, w_up, w_down, *more = weights
        dtype, heads, kv_heads, dim = sizes.dtype, sizes.heads, sizes.kv_heads, sizes.head_dim
        batch, seq, width = x.shape
        n_q, n_kv = heads * dim, kv_heads * dim

        qkv_by = torch.empty((n_q + 2 * n_kv, width), dtype=dtype, device=x.device)
        o_by, gate_by, up_by, down_by = (torch.empty_like(w, dtype=dtype) for w in (w_o, w_gate, w_up, w_down))
        parts = (qkv_by[:n_q], qkv_by[n_q : n_q + n_kv], qkv_by[n_q + n_kv :])
        torch._foreach_copy_([*parts, o_by, gate_by, up_by, down_by], [w_q, w_k, w_v, w_o, w_gate, w_up, w_down])

        is_first = normed is None
        if normed is None:
            normed, rstd = rms_norm_op(x, w_in, sizes.eps[0], dtype)
        rows = normed.view(-1, width)
        qkv = torch.mm(rows, qkv_by.t()).view(batch, seq, heads + 2 * kv_heads, dim)
        q, k, v = qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads], qkv[:, :, heads + kv_heads :].transpose(1, 2)
        if sizes.qk_norm:
            q_out, k_out = rope_qk_norm_op(q, k, more[0], more[1], cos, sin, sizes.eps[1], dtype)
        else:
            q_out, k_out = rotary_op(q, k, cos, sin, dtype)
        q_out, k_out = q_out.transpose(1, 2), k_out.transpose(1, 2)
        o, lse = attention_forward_op(q_out, k_out, v, True, sizes.scale, sizes.window, documents)
        attended = torch.mm(o.transpose(1, 2).reshape(-1, n_q), o_by.t()).view(x.shape)
        normed_2, total, rstd_2 = add_rms_norm_op(attended, x, w_post, sizes.eps[2], dtype)
        rows_2 = normed_2.view(-1, width)
        gate, up = torch.mm(rows_2, gate_by.t()), torch.mm(rows_2, up_by.t())
        inner = swiglu_op(gate, up)
        down = torch.mm(inner, down_by.t()).view(x.shape)
        normed_next, rstd_next = None, None
        if sizes.has_next:
            normed_next, out, rstd_next = add_rms_norm_op(down, total, more[-1], sizes.eps[3], dtype)
            ctx.mark_non_differentiable(rstd_next)
        else:
            out = total + down

        ctx.sizes, ctx.is_first, ctx.shape = sizes, is_first, x.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *((x, rstd, w_in) if is_first else (None, None, None)),
            *((q, k, more[0], more[1]) if sizes.qk_norm else (None, None, None, None)),
            *((out, rstd_next, more[-1]) if sizes.has_next else (None, None, None)),
            normed, v, cos, sin, q_out, k_out, o, lse, documents, total, rstd_2, w_post, normed_2, gate, up, inner,
            qkv_by, o_by, gate_by, up_by, down_by,
        )  # fmt: skip
        return out, normed_next, rstd_next

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_next: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        (
            x, rstd, w_in, q, k, w_qn, w_kn, out, rstd_next, w_next, normed, v, cos, sin, q_out, k_out, o, lse,
            documents, total, rstd_2, w_post, normed_2, gate, up, inner, qkv_by, o_by, gate_by, up_by, down_by,
        ) = ctx.saved_tensors  # fmt: skip
        sizes: Sizes = ctx.sizes
        dtype, shape, width = sizes.dtype, ctx.shape, ctx.shape[-1]
        n_q, n_kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim

        dw_next: Tensor | None = None
        if d_next is None:
            assert d_out is not None
            d_total, d_down = d_out, d_out.to(dtype)
        elif d_out is None:
            d_total, dw_next = rms_norm_backward_op(d_next, out, w_next, rstd_next)
            d_down = d_total.to(dtype)
        else:
            d_total, d_down, dw_next = add_rms_norm_backward_op(d_next, d_out, out, w_next, rstd_next, dtype)
        d_down = d_down.reshape(-1, width)
        d_gate, d_up = swiglu_backward_op(torch.mm(d_down, down_by), gate, up)
        rows_2 = normed_2.view(-1, width)
        of_down, of_gate, of_up = (
            gradient_in_fp32(dy, rows) for dy, rows in ((d_down, inner), (d_gate, rows_2), (d_up, rows_2))
        )
        d_rows = torch.mm(d_gate, gate_by).addmm_(d_up, up_by)
        d_x, d_attended, dw_post = add_rms_norm_backward_op(d_rows.view(shape), d_total, total, w_post, rstd_2, dtype)
        d_attended = d_attended.view(-1, width)
        d_o = torch.mm(d_attended, o_by).view(*shape[:2], -1, sizes.head_dim).transpose(1, 2)
        of_o = gradient_in_fp32(d_attended, o.transpose(1, 2).reshape(-1, n_q))
        dq_out, dk_out, dv = attention_backward_op(
            d_o, q_out, k_out, v, o, lse, True, sizes.scale, sizes.window, documents,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        dq_out, dk_out, dv = (one.transpose(1, 2) for one in (dq_out, dk_out, dv))
        of_qk_norms: tuple[Tensor, ...] = ()
        if sizes.qk_norm:
            dq, dk, dws = rope_qk_norm_backward_op(dq_out, dk_out, q, k, w_qn, w_kn, cos, sin, sizes.eps[1])
            of_qk_norms = (dws[0], dws[1])
        else:
            dq, dk = rotary_backward_op(dq_out, dk_out, cos, sin, dtype)
        dq, dk, dv = (one.reshape(-1, columns) for one, columns in ((dq, n_q), (dk, n_kv), (dv, n_kv)))
        rows = normed.view(-1, width)
        of_q, of_k, of_v = (gradient_in_fp32(one, rows) for one in (dq, dk, dv))
        d_rows = torch.mm(dq, qkv_by[:n_q]).addmm_(dk, qkv_by[n_q : n_q + n_kv]).addmm_(dv, qkv_by[n_q + n_kv :])
        d_normed: Tensor | None = d_rows.view(shape)
        dw_in: Tensor | None = None
        if ctx.is_first:
            d_x, _, dw_in = add_rms_norm_backward_op(d_normed, d_x, x, w_in, rstd, None)
            d_normed = None
        return (
            None, d_x, d_normed, None, None, None, None,
            dw_in, of_q, of_k, of_v, of_o, dw_post, of_gate, of_up, of_down,
            *of_qk_norms, *((dw_next,) if sizes.has_next else ()),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a layer's modules are, looked up once, since torch takes half a microsecond for each."""

    children: list[nn.Module]  # of the layer, its attention and its MLP
    hooks: list[Mapping[Any, Any]]  # of all of them: empty where a call does nothing else than is known
    norms: list[dict[str, Any]]  # parameters: before attention, before the MLP, of queries and keys
    linears: list[dict[str, Any]]
    sizes: Sizes | None  # of fp16 without window and next; None where a layer has something else


def _hooks_of(module: nn.Module) -> list[Mapping[Any, Any]]:
    return [
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    ]  # fmt: skip


def _trained(parameters: Mapping[str, Any]) -> bool:
    """Whether a module's weight is in fp32, whole and wants a gradient."""
    weight = parameters["weight"]
    return bool(weight.requires_grad and weight.dtype == torch.float32 and type(weight).__name__ != "DTensor")


def _is_product(module: Any) -> bool:
    return type(module) is nn.Linear and module.bias is None and "_flopcast_products" not in module.__dict__


def _parts_of(layer: Any) -> _Parts:
    attention, mlp = layer._modules["self_attn"], layer._modules["mlp"]
    children = [*layer._modules.values(), *attention._modules.values(), *mlp._modules.values()]
    known: _Parts | None = layer.__dict__.get(PARTS)
    if known is not None and known.children == children:
        return known
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    qk_norm = hasattr(attention, "q_norm")
    if qk_norm:
        norms += [attention.q_norm, attention.k_norm]
    sizes = None
    if all(map(_is_product, linears)):
        dim = attention.head_dim
        eps = norms[0].variance_epsilon, norms[-1].variance_epsilon, norms[1].variance_epsilon, 0.0
        heads, kv_heads = linears[0].out_features // dim, linears[1].out_features // dim
        sizes = Sizes(torch.float16, heads, kv_heads, dim, eps, attention.scaling, 0, qk_norm, False)
    hooks = [one for module in (layer, *children) for one in _hooks_of(module)]
    parts = _Parts(children, hooks, [x._parameters for x in norms], [x._parameters for x in linears], sizes)
    layer.__dict__[PARTS] = parts
    return parts


@lru_cache(maxsize=4096)
def _sizes(sizes: Sizes, dtype: torch.dtype, window: int, following_eps: float | None) -> Sizes:
    eps = (*sizes.eps[:3], following_eps or 0.0)
    return replace(sizes, dtype=dtype, window=window, eps=eps, has_next=following_eps is not None)


def run(
    layer: Any, x: Tensor, tables: tuple[Tensor, Tensor] | None, window: int | None, documents: Tensor | None
) -> Tensor | None:
    """The output of a decoder layer of transformers, [batch, seq, width] fp32 as x, for causal attention; None where
    the layer has to run by its modules."""
    dtype = autocast_dtype(x)
    if dtype not in (torch.bfloat16, torch.float16) or x.dtype != torch.float32 or not torch.is_grad_enabled():
        return None
    if tables is None or x.dim() != 3 or getattr(layer, "gradient_checkpointing", False):
        return None
    parts = _parts_of(layer)
    if parts.sizes is None or any(parts.hooks) or not all(map(_trained, (*parts.norms, *parts.linears))):
        return None
    following = layer.__dict__.get(NEXT)
    if following is not None and (any(_hooks_of(following)) or not _trained(following._parameters)):
        following = None
    known = getattr(x, _NORMED, None)
    normed, rstd = known[1:] if known is not None and known[0] is layer.input_layernorm else (None, None)
    if normed is not None and normed.dtype != dtype:
        normed, rstd = None, None
    sizes = _sizes(parts.sizes, dtype, window or 0, None if following is None else following.variance_epsilon)
    w_in, w_post, *of_qk = [one["weight"] for one in parts.norms]
    w_q, w_k, w_v, w_o, *of_mlp = [one["weight"] for one in parts.linears]
    of_next = () if following is None else (following.weight,)
    out, normed, rstd = _Layer.apply(  # type: ignore[no-untyped-call]
        sizes, x, normed, rstd, *tables, documents, w_in, w_q, w_k, w_v, w_o, w_post, *of_mlp, *of_qk, *of_next
    )
    if following is not None:
        setattr(out, _NORMED, (following, normed, rstd))
    found: Tensor = out
    return found


def normed_before(norm: Any, x: Tensor) -> Tensor | None:
    """What the layer that made x left for this norm to return."""
    known = getattr(x, _NORMED, None)
    if known is None or known[0] is not norm:
        return None
    normed: Tensor = known[1]
    return normed


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        return torch.mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        dx = torch.mm(dy, weight).view(x.shape)
        return dx, gradient_in_fp32(dy, x.reshape(-1, x.shape[-1])), None


def linear(module: Any, x: Tensor) -> Tensor | None:
    """A linear layer's output, whose weight's gradient is made in fp32, of x in autocast's dtype; None where the layer
    has to run as it is."""
    dtype = autocast_dtype(x)
    if dtype not in (torch.bfloat16, torch.float16) or x.dtype != dtype or not torch.is_grad_enabled():
        return None
    if not _is_product(module) or any(_hooks_of(module)) or not _trained(module._parameters):
        return None
    out: Tensor = _Linear.apply(x, module.weight, dtype)  # type: ignore[no-untyped-call]
    return out
