"""Attention with grouped key-value heads, causal or full, both directions: SDPA by backend, and Triton.

Tensors are [batch, heads, seq, head_dim] views of [batch, seq, heads, head_dim] storage, as a model's
projections leave them; any strides are read in place if the last is 1. Queries and keys number the same.

    operands_ = operands(shape, device, seed=0)             # q, k, v and, for the backward, do
    out = prepare(shape, "sdpa-flash", operands_)()         # o, or (dq, dk, dv)
    error, tolerance = check(out, reference(operands_, shape), operands_, shape)

The torch backends call the ATen operator that `scaled_dot_product_attention` and its autograd formula call in
a training step (log-sum-exp on, no dropout; enable_gqa: flash and cuDNN take fewer key-value heads as they
are), so that a timed call holds that operator alone. What SDPA's own checks refuse is refused here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import register_flop_formula

from flopcast.kernels.matmul import shared_memory_limit
from flopcast.kernels.references import (
    BackendUnavailable,
    attention_math,
    attention_math_backward,
    higher_precision,
    largest,
    max_difference,
    torch_dtype,
)
from flopcast.kernels.shapes import DTYPE_BYTES, Attention

Outputs = Tensor | tuple[Tensor, ...]
HEAD_DIMS = (16, 32, 64, 128)  # of the Triton kernel; 64 and 128 are tuned

BACKENDS = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math", "sdpa-cpu", "triton")


@dataclass(frozen=True)
class Tile:
    """block_m query rows by block_n key rows."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionConfig:
    """One tile per Triton kernel."""

    forward: Tile
    dkdv: Tile
    dq: Tile


def config_for(shape: Attention, capability: tuple[int, int] = (9, 0)) -> AttentionConfig:
    """Tiles by part, dtype and head_dim; checked for spills and shared memory by offline compilation."""
    if DTYPE_BYTES[shape.dtype] == 4:  # exact fp32, for tests: ordinary units, small tiles
        small = Tile(32, 32, 4, 1)
        return AttentionConfig(small, small, small)
    if capability[0] == 9:
        if shape.head_dim <= 64:
            return AttentionConfig(Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2))
        return AttentionConfig(Tile(128, 128, 8, 2), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2))
    roomy = shared_memory_limit(capability) > 128 * 1024
    if shape.head_dim <= 64:
        return AttentionConfig(Tile(128, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2))
    if roomy:
        return AttentionConfig(Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2))
    return AttentionConfig(Tile(64, 32, 4, 2), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1))


# --- Triton ---


def _triton_module(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The kernels' module, after checking that they can run here on these operands."""
    if q.dim() != 4 or k.shape != v.shape or k.shape[::3] != q.shape[::3] or k.shape[2] != q.shape[2]:
        raise ValueError(
            "attention takes q [B, H, S, D] and k, v [B, KV, S, D], "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not divisible by {k.shape[1]} key-value heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[3] not in HEAD_DIMS:
        raise BackendUnavailable(f"backend triton: head_dim {q.shape[3]} is not one of {HEAD_DIMS}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise BackendUnavailable(f"backend triton: {q.dtype} is not supported (bf16, fp16, fp32 are)")
    try:
        from flopcast.kernels import triton_attention
    except ImportError as error:
        raise BackendUnavailable(f"backend triton: {error}") from error
    if triton_attention.interpreted():
        if q.dtype == torch.bfloat16:
            raise NotImplementedError("bf16 is wrong in Triton's interpreter: use fp16 or fp32 there")
    elif not q.is_cuda:
        raise BackendUnavailable(
            "backend triton needs CUDA tensors (or TRITON_INTERPRET=1 set before triton is imported)"
        )
    return triton_attention


def _config_of(q: Tensor, config: AttentionConfig | None) -> AttentionConfig:
    if config is not None:
        return config
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    dtype = "fp32" if q.dtype == torch.float32 else "bf16"
    shape = Attention(batch=1, heads=1, kv_heads=1, seq=q.shape[2], head_dim=q.shape[3], dtype=dtype)
    return config_for(shape, capability)


def _rows_in_place(x: Tensor) -> Tensor:
    """The kernels need stride 1 on the last dimension: an expanded or transposed tensor is copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _output_like(q: Tensor) -> Tensor:
    """An uninitialised [B, H, S, D] view of [B, S, H, D] storage, which the next projection reads as is."""
    batch, heads, seq, dim = q.shape
    return torch.empty((batch, seq, heads, dim), dtype=q.dtype, device=q.device).transpose(1, 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    *,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Triton forward: (o like q, lse fp32 [batch, heads, seq], natural). scale: 1/sqrt(head_dim) by default.

    Raises ValueError on operands that do not fit together, BackendUnavailable where the kernel cannot run,
    NotImplementedError for bf16 in the interpreter.
    """
    module = _triton_module(q, k, v)
    o, lse = _output_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    module.launch_forward(*map(_rows_in_place, (q, k, v)), o, lse, causal, scale, _config_of(q, config))
    return o, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    causal: bool = True, scale: float | None = None, *, config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Triton backward: (dq, dk, dv), bit-identical from run to run. Errors as `forward`."""
    module = _triton_module(q, k, v)
    dq, dk, dv = _output_like(q), _output_like(k), _output_like(v)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    module.launch_backward(
        *map(_rows_in_place, (do, q, k, v, o)), lse, dq, dk, dv, causal, scale, _config_of(q, config)
    )
    return dq, dk, dv


# --- Registration: torch.compile, fake tensors, autograd and FLOP counting see two opaque operators ---


@torch.library.custom_op("flopcast::triton_attention_forward", mutates_args=())
def attention_forward_op(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return forward(q, k, v, causal, scale)


@torch.library.custom_op("flopcast::triton_attention_backward", mutates_args=())
def attention_backward_op(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return backward(do, q, k, v, o, lse, causal, scale)


@attention_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _output_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@attention_backward_op.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _output_like(q), _output_like(k), _output_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    """lse is not differentiated: `attention` hands out o alone."""
    del dlse
    return (*attention_backward_op(do, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None)


attention_forward_op.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.flopcast.triton_attention_forward)
def _forward_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """As torch counts SDPA: in full, causal or not. `shapes.Attention.flops` halves causal."""
    batch, heads, seq, dim = q
    return int(4 * batch * heads * seq * seq * dim)


@register_flop_formula(torch.ops.flopcast.triton_attention_backward)
def _backward_flops(do: Any, q: Any, *args: Any, **kwargs: Any) -> int:
    return _forward_flops(q, None, None) * 5 // 2


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """Differentiable Triton attention; under autocast the operands are cast as SDPA's are."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    o: Tensor = attention_forward_op(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)[0]
    return o


def _transformers_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers calls it: query [B, H, S, D], key, value [B, KV, S, D] -> ([B, S, H, D], None)."""
    if (
        attention_mask is not None
        or dropout
        or kwargs.get("sliding_window")
        or kwargs.get("position_bias") is not None
    ):
        raise NotImplementedError(
            "flopcast_triton is causal or full attention: no mask, dropout, sliding window or bias"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return attention(query, key, value, causal, scaling).transpose(1, 2).contiguous(), None


def register_with_transformers() -> str:
    """Makes `attn_implementation="flopcast_triton"` available to transformers' models; returns that name.

    Masks are made as for sdpa, that is, none at all for causal batches without padding.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("flopcast_triton", _transformers_attention)
    AttentionMaskInterface.register("flopcast_triton", sdpa_mask)
    return "flopcast_triton"


# --- Benchmark interface ---


def operands(shape: Attention, device: torch.device | str, seed: int = 0) -> tuple[Tensor, ...]:
    """Standard-normal (q, k, v), and do for the backward. ValueError on sizes that make no attention."""
    if min(shape.batch, shape.heads, shape.kv_heads, shape.seq, shape.head_dim) < 1:
        raise ValueError(f"{shape.key}: batch, heads, kv_heads, seq and head_dim must be at least 1")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"{shape.key}: heads must be divisible by kv_heads")
    if shape.direction not in ("fwd", "bwd"):
        raise ValueError(f"unknown direction {shape.direction!r}: known are fwd, bwd")
    generator = torch.Generator(device=device).manual_seed(seed)
    heads = (
        shape.heads,
        shape.kv_heads,
        shape.kv_heads,
        *((shape.heads,) if shape.direction == "bwd" else ()),
    )
    dtype = torch_dtype(shape.dtype)
    return tuple(
        torch.randn(
            (shape.batch, shape.seq, n, shape.head_dim), dtype=dtype, device=device, generator=generator
        ).transpose(1, 2)
        for n in heads
    )


def sdpa_choice(operands: Sequence[Tensor], shape: Attention) -> str:
    """The backend that torch's SDPA picks by itself for these operands in training."""
    q, k, v = (x.detach().requires_grad_() for x in operands[:3])
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, shape.causal, enable_gqa=True))
    names = {
        SDPBackend.FLASH_ATTENTION: "sdpa-flash" if q.is_cuda else "sdpa-cpu",
        SDPBackend.CUDNN_ATTENTION: "sdpa-cudnn",
        SDPBackend.EFFICIENT_ATTENTION: "sdpa-efficient",
    }
    return names.get(chosen, "sdpa-math")


def _require(backend: str, shape: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises BackendUnavailable, with torch's reasons, unless SDPA itself would take this backend."""
    if backend == "sdpa-cpu":
        if q.device.type != "cpu":
            raise BackendUnavailable("backend sdpa-cpu needs CPU tensors")
        if sdpa_choice((q, k, v), shape) != "sdpa-cpu":
            raise BackendUnavailable(f"torch has no fused CPU attention for {shape.key}: use sdpa-math")
        return
    if not q.is_cuda:
        raise BackendUnavailable(
            f"backend {backend} needs CUDA tensors: use sdpa-cpu or sdpa-math on the CPU"
        )
    usable = {
        "sdpa-flash": torch.backends.cuda.can_use_flash_attention,
        "sdpa-cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "sdpa-efficient": torch.backends.cuda.can_use_efficient_attention,
    }[backend]
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, shape.causal, shape.heads != shape.kv_heads)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        if not usable(params, True):
            why = " ".join(str(reason.message).split(" (Triggered")[0] for reason in reasons)
            raise BackendUnavailable(
                f"backend {backend} cannot run {shape.key}: {why or 'torch gives no reason'}"
            )


def _fused_calls(
    backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Callable[[], tuple[Any, ...]], Callable[[Tensor, tuple[Any, ...]], tuple[Tensor, ...]]]:
    """(forward, backward): forward() -> what the operator returns, o first; backward(do, that) -> gradients.

    The saved values and their order are those of torch's derivatives.yaml.
    """
    aten, scale = torch.ops.aten, q.shape[-1] ** -0.5
    if backend == "sdpa-flash":

        def flash_backward(do: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor, ...]:
            o, lse, cum_q, cum_k, max_q, max_k, rng_state, unused, _ = saved
            return tuple(
                aten._scaled_dot_product_flash_attention_backward.default(
                    do,
                    q,
                    k,
                    v,
                    o,
                    lse,
                    cum_q,
                    cum_k,
                    max_q,
                    max_k,
                    0.0,
                    causal,
                    rng_state,
                    unused,
                    scale=scale,
                )
            )

        op = aten._scaled_dot_product_flash_attention.default
        return lambda: op(q, k, v, 0.0, causal, False, scale=scale), flash_backward
    if backend == "sdpa-cudnn":

        def cudnn_backward(do: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor, ...]:
            o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
            return tuple(
                aten._scaled_dot_product_cudnn_attention_backward.default(
                    do,
                    q,
                    k,
                    v,
                    o,
                    lse,
                    seed,
                    offset,
                    None,
                    cum_q,
                    cum_k,
                    max_q,
                    max_k,
                    0.0,
                    causal,
                    scale=scale,
                )
            )

        op = aten._scaled_dot_product_cudnn_attention.default
        return lambda: op(q, k, v, None, True, 0.0, causal, False, scale=scale), cudnn_backward
    if backend == "sdpa-efficient":

        def efficient_backward(do: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor, ...]:
            o, lse, seed, offset = saved
            mask = [True, True, True, False]
            return tuple(
                aten._scaled_dot_product_efficient_attention_backward.default(
                    do, q, k, v, None, o, lse, seed, offset, 0.0, mask, causal, scale=scale
                )
            )[:3]

        op = aten._scaled_dot_product_efficient_attention.default
        return lambda: op(q, k, v, None, True, 0.0, causal, scale=scale), efficient_backward

    def cpu_backward(do: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                do, q, k, v, *saved, 0.0, causal, attn_mask=None, scale=scale
            )
        )

    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    return lambda: op(q, k, v, 0.0, causal, attn_mask=None, scale=scale), cpu_backward


def _math_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _math_backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> Callable[[], Outputs]:
    """The ATen calls of the math backend's autograd, traced once: calling autograd itself would launch on the
    stream of the forward, outside a graph under capture."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = _math_forward(q, k, v, causal)
    traced = make_fx(lambda g: torch.autograd.grad(o, (q, k, v), g, retain_graph=True))(do)

    def run() -> Outputs:
        with torch.no_grad():
            return tuple(traced(do))

    return run


def prepare(shape: Attention, backend: str, operands: Sequence[Tensor]) -> Callable[[], Outputs]:
    """A call without arguments that runs exactly the forward (-> o) or exactly the backward (-> dq, dk, dv).

    For the backward the forward runs here, once. Capturable in a CUDA graph once warm. Raises ValueError on
    an unknown backend, BackendUnavailable or NotImplementedError where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}: known are {', '.join(BACKENDS)}")
    if shape.dtype == "tf32":
        raise BackendUnavailable("attention in tf32 is not offered: use bf16, fp16 or fp32")
    q, k, v = operands[:3]
    causal = shape.causal
    if backend == "triton":
        o, lse = forward(q, k, v, causal)
        if shape.direction == "fwd":
            return lambda: forward(q, k, v, causal)[0]
        return lambda: backward(operands[3], q, k, v, o, lse, causal)
    if backend == "sdpa-math":
        if shape.direction == "fwd":
            return lambda: _math_forward(q, k, v, causal)
        return _math_backward(q, k, v, operands[3], causal)
    _require(backend, shape, q, k, v)
    run_forward, run_backward = _fused_calls(backend, q, k, v, causal)
    if shape.direction == "fwd":
        return lambda: run_forward()[0]
    saved = run_forward()
    return lambda: run_backward(operands[3], saved)


def _by_definition(operands: Sequence[Tensor], shape: Attention, dtype: torch.dtype) -> Outputs:
    q, k, v = operands[:3]
    scale = shape.head_dim**-0.5
    if shape.direction == "fwd":
        return attention_math(q, k, v, shape.causal, scale, dtype)
    return attention_math_backward(q, k, v, operands[3], shape.causal, scale, dtype)


def reference(operands: Sequence[Tensor], shape: Attention) -> Outputs:
    """o, or (dq, dk, dv), by the definition in fp32 (16-bit operands) or fp64 (fp32 operands)."""
    return _by_definition(operands, shape, higher_precision(operands[0].dtype))


def check(out: Outputs, ref: Outputs, operands: Sequence[Tensor], shape: Attention) -> tuple[float, float]:
    """(relative error, tolerance); correct when error <= tolerance. Of the backward, its worst gradient.

    FlashAttention's criterion over the largest of the references: max|out - ref| <= 2 max|math in the
    operands' dtype - ref| + one ulp. Eight ulp in fp32, where both differ from the reference by the order of
    their sums alone. A NaN, an infinity or a wrong shape gives an infinite error.
    """
    outs, refs, rounded = (
        x if isinstance(x, tuple) else (x,)
        for x in (out, ref, _by_definition(operands, shape, operands[0].dtype))
    )
    # One scale for all gradients: dq and dk are differences that can vanish (seq 1) and leave only noise.
    scale = max(largest(x) for x in refs) or 1.0
    ulp = torch.finfo(operands[0].dtype).eps * (8 if operands[0].dtype == torch.float32 else 1)
    pairs = [
        (max_difference(got, want) / scale, 2 * max_difference(same, want) / scale + ulp)
        for got, want, same in zip(outs, refs, rounded, strict=True)
    ]
    return max(pairs, key=lambda pair: pair[0] / pair[1])
