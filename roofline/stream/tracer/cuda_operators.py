"""Rules for operators that run differently on CUDA than on the CPU: other kernels, or results of another dtype.

Some operators are composed of others, and torch chooses of which by the device: `RULES` holds CUDA's choices, which
`cuda_semantics` registers for the CPU. Some kernels give results of another dtype or shape on CUDA: `RESULTS` makes
these, in place of the fake CPU kernels. Attention is traced as one operator of its own, `flopcast::attention`,
because the profile determines which kernel runs it (flash, cuDNN, memory-efficient).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flopcast.roofline.stream.tracer.lanes import wraps


@torch.library.custom_op("flopcast::attention", mutates_args=())
def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    raise NotImplementedError("flopcast::attention exists for tracing only")


@_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    # Flash attention and cuDNN lay the result out like the query, with its dimensions in the same order in memory.
    strides = query.stride()
    order = sorted(range(4), key=lambda d: -strides[d])
    shape = (*query.shape[:-1], value.shape[-1])
    out = query.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("flopcast::attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None, dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    raise NotImplementedError("flopcast::attention_backward exists for tracing only")


@_attention_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None, dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)  # else the unused log-sum-exp would get a gradient of zeros
    ctx.mark_non_differentiable(output[1])
    query, key, value, ctx.is_causal, ctx.mask, ctx.dropout = inputs
    ctx.save_for_backward(query, key, value, *output)


def _attention_gradient(ctx: Any, grad: torch.Tensor, _lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    extra = () if ctx.mask is None and not ctx.dropout else (ctx.mask, ctx.dropout)
    return *_attention_backward(grad, *ctx.saved_tensors, ctx.is_causal, *extra), None, None, None


torch.library.register_autograd("flopcast::attention", _attention_gradient, setup_context=_save)


def _scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Calls one operator where CUDA has a fused kernel, else the products and the softmax that it consists of
    (aten/src/ATen/native/transformers/sdp_utils_cpp.h: flash and cuDNN take only 16-bit dtypes, the memory-efficient
    kernel takes no grouped heads, and none takes fewer heads of keys than of queries unless `enable_gqa` is set:
    Falcon's multi-query attention multiplies in fp32)."""
    if wraps(
        [type(query)]
    ):  # of a sequence that ranks divide: torch puts ring attention in place of a GPU's own operator
        of_hopper: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, attn_mask, True, dropout_p, is_causal, False, scale=scale
        )[0]
        return of_hopper
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if query.ndim != 4 or (query.shape[1] != key.shape[1] and not (is_half and enable_gqa)):
        by_parts: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return by_parts
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # torch first converts it to an additive mask
        least = torch.ops.aten.scalar_tensor.default(-65504.0 if is_half else float("-inf"), dtype=query.dtype)
        attn_mask = torch.ops.aten.where.ScalarSelf(attn_mask, 0.0, least)
    extra = () if attn_mask is None and not dropout_p else (attn_mask, dropout_p)
    out: torch.Tensor = _attention(query, key, value, is_causal, *extra)[0]
    return out


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Calls one fused kernel, as CUDA does (aten/src/ATen/native/Dropout.cpp)."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    out: torch.Tensor = torch.ops.aten.native_dropout.default(input, p, train)[0]
    return out


def _batch_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    """Calls cuDNN's kernel for fp32 and fp16, torch's own for bf16 (aten/src/ATen/native/Normalization.cpp)."""
    parts = (input, weight, bias, running_mean, running_var)
    if (
        input.dtype in (torch.float32, torch.float16)
        and all(part is not None for part in parts)
        and input.ndim >= 3
        and training
        and input.shape[0] <= 880_801
        and cudnn_enabled
    ):
        arguments = (*parts, training, momentum, eps)
        return torch.ops.aten.cudnn_batch_norm.default(*arguments)[0]  # type: ignore[no-any-return]
    out: torch.Tensor = torch.ops.aten._batch_norm_impl_index.default(*parts, training, momentum, eps, cudnn_enabled)[0]
    return out


def _cudnn_rnn(mode: int, n_states: int) -> Callable[..., Any]:
    """Makes the rule of a recurrent network, which cuDNN runs as one call (aten/src/ATen/native/cudnn/RNN.cpp). `mode`
    is cuDNN's number of its kind; of `n_states` 2 the second is the cell's."""

    def rule(
        input: torch.Tensor, states: Any, weights: list[torch.Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        if torch.is_autocast_enabled("cpu"):  # CUDA's casts every operand anew in each forward (autocast_RNN.cpp)
            dtype = torch.get_autocast_dtype("cpu")
            states = [state.to(dtype) for state in states] if n_states == 2 else states.to(dtype)
            input, weights = input.to(dtype), [weight.to(dtype) for weight in weights]
        hidden, cell = states if n_states == 2 else (states, None)
        size, out = (hidden if cell is None else cell).shape[-1], hidden.shape[-1]
        projection = out if out != size else 0
        each = (4 if has_biases else 2) + (projection > 0)
        made: tuple[torch.Tensor, ...] = torch.ops.aten._cudnn_rnn.default(
            input, weights, each, None, hidden, cell, mode, size, projection, num_layers, batch_first, dropout, train,
            bidirectional, [], None,
        )  # fmt: skip
        return made[: 1 + n_states]

    return rule


# Composite operators whose parts depend on the device, composed as on CUDA.
RULES: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    "rnn_relu.input": _cudnn_rnn(0, 1),
    "rnn_tanh.input": _cudnn_rnn(1, 1),
    "lstm.input": _cudnn_rnn(2, 2),
    "gru.input": _cudnn_rnn(3, 1),
    "scaled_dot_product_attention": _scaled_dot_product_attention,
    "dropout": _dropout,
}


def _histc(tensor: torch.Tensor, bins: int = 100, *_: Any, **__: Any) -> torch.Tensor | None:
    """Allows integers, which CUDA counts and the CPU does not."""
    return None if tensor.is_floating_point() else tensor.new_empty(bins)


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor | None:
    """Allows other dtypes than bf16: torch's own shape rule refuses them, yet CUDA multiplies these group by group."""
    if a.dtype == torch.bfloat16 or offs is None:
        return None
    groups = () if a.ndim + b.ndim == 5 else (len(offs),)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _layer_norm(tensor: torch.Tensor, shape: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    """Makes the results of CUDA's layer norm, which keeps mean and reciprocal standard deviation in fp32."""
    rows = (*tensor.shape[: tensor.ndim - len(shape)], *[1] * len(shape))
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return out, tensor.new_empty(rows, dtype=torch.float32), tensor.new_empty(rows, dtype=torch.float32)


def _batch_norm_results(tensor: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Makes the results of CUDA's batch norm, which keeps each channel's mean and deviation in fp32."""
    channels = tensor.shape[1]
    statistics = (tensor.new_empty(channels, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(tensor), *statistics


def _cudnn_batch_norm(tensor: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return *_batch_norm_results(tensor, *rest), tensor.new_empty(0, dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    tensor: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(tensor), torch.empty_like(weight), torch.empty_like(weight)


# What cuDNN keeps of a recurrent layer for its backward, in hidden sizes per place of a sequence: its gates, state and
# result. By its modes; an estimate from what the formulas of the gradients need, since cuDNN does not say.
_KEPT_STATES = {0: 2, 1: 2, 2: 6, 3: 5}


def _cudnn_rnn_results(
    input: torch.Tensor, weights: list[torch.Tensor], each: int, buffer: Any, hidden: torch.Tensor,
    cell: torch.Tensor | None, mode: int, size: int, projection: int, num_layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, *_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    out = (projection or size) * (1 + bidirectional)
    kept = input[..., 0].numel() * num_layers * (1 + bidirectional) * size * _KEPT_STATES[mode] if train else 0
    return (
        input.new_empty((*input.shape[:-1], out)), torch.empty_like(hidden),
        input.new_empty(0) if cell is None else torch.empty_like(cell),
        input.new_empty(kept * input.element_size(), dtype=torch.uint8), input.new_empty(0),
    )  # fmt: skip


def _cudnn_rnn_backward(
    input: torch.Tensor, weights: list[torch.Tensor], each: int, buffer: Any, hidden: torch.Tensor,
    cell: torch.Tensor | None, *rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    wanted = rest[-1]
    made = [torch.empty_like(weight) for weight in weights] if wanted[3] else []
    return torch.empty_like(input), torch.empty_like(hidden), None if cell is None else torch.empty_like(cell), made


# Operators whose results on CUDA differ from those of fake CPU tensors. Where the function returns None, they do not.
RESULTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.histc.default: _histc,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten.native_layer_norm.default: _layer_norm,
    torch.ops.aten._cudnn_rnn.default: _cudnn_rnn_results,
    torch.ops.aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
    torch.ops.aten.native_batch_norm.default: _batch_norm_results,
    torch.ops.aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    torch.ops.aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}
