"""Attention with grouped key-value heads, causal or full, both directions: SDPA by backend, and Triton.

    o = attention(q, k, v)                                       # differentiable, causal
    o = attention(q, k, v, window=4096)                          # transformers' sliding_window: itself and 4,095 before
    o = attention(q, k, v, cu_seqlens=cu_seqlens)                # packed documents, in flash-attention's terms
    o = attention(q, k, v, documents=documents.from_positions(position_ids))     # made once for all layers

Tensors are [batch, heads, seq, head_dim] views of [batch, seq, heads, head_dim] storage, as a model's
projections leave them; any strides are read in place if the last is 1. Queries and keys number the same. The kernels
do not visit blocks of keys that a window or the documents hide.

The benchmarks' interface:

    operands_ = operands(shape, device, seed=0)             # q, k, v and, for the backward, do
    out = prepare(shape, "sdpa-flash", operands_)()         # o, or (dq, dk, dv)
    error, tolerance = check(out, reference(operands_, shape), operands_, shape)

On Hopper, in bf16, the Triton backend is kernels in Gluon (`triton_attention_hopper*`), elsewhere and for
other operands, windows and documents plain Triton (`triton_attention`); `attention_config` says with which tiles. Long
causal backwards at head_dim 128 add dQ up in an order that differs from run to run, unless
`torch.use_deterministic_algorithms(True)`.

The torch backends call the ATen operator that `scaled_dot_product_attention` and its autograd formula call in
a training step (log-sum-exp on, no dropout; enable_gqa: flash and cuDNN take fewer key-value heads as they
are), so that a timed call holds that operator alone. What SDPA's own checks refuse is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flopcast.kernels import documents as packed
from flopcast.kernels.attention_config import HEAD_DIMS as HEAD_DIMS
from flopcast.kernels.attention_config import AttentionConfig as AttentionConfig
from flopcast.kernels.attention_config import Tile as Tile
from flopcast.kernels.attention_config import config_for as config_for
from flopcast.kernels.attention_sdpa import SDPA_BACKENDS, Outputs, prepare_sdpa
from flopcast.kernels.attention_sdpa import sdpa_choice as sdpa_choice
from flopcast.kernels.operators import operator
from flopcast.kernels.references import (
    BackendUnavailable,
    attention_math,
    attention_math_backward,
    higher_precision,
    largest,
    require_known,
    standard_normal,
    worst,
)
from flopcast.kernels.rowwise import autocast_dtype
from flopcast.kernels.shapes import Attention

BACKENDS = (*SDPA_BACKENDS, "triton")


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


@lru_cache
def _hopper() -> str:
    """Triton's version if its Gluon has what the Hopper kernels use (3.6 and 3.7 have), else an empty string."""
    try:
        from flopcast.kernels import triton_attention_launch
    except (ImportError, AttributeError):
        return ""
    version = triton_attention_launch.VERSION
    return version if tuple(map(int, version.split(".")[:2])) >= (3, 6) else ""


@lru_cache(maxsize=1024)
def _chosen(
    device: torch.device, dtype: torch.dtype, q: tuple[int, ...], kv_heads: int, causal: bool, by_hopper: bool,
    deterministic: bool,
) -> AttentionConfig:  # fmt: skip
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else (9, 0)
    name = "fp32" if dtype == torch.float32 else "bf16"
    shape = Attention(batch=q[0], heads=q[1], kv_heads=kv_heads, seq=q[2], head_dim=q[3], causal=causal, dtype=name)
    # In fp16 the Hopper kernels have not been run on a GPU yet.
    suited = on_gpu and by_hopper and capability == (9, 0) and dtype == torch.bfloat16
    triton = _hopper() if suited else ""
    device_name = torch.cuda.get_device_name(device) if on_gpu else ""
    return config_for(
        shape, capability, tma=bool(triton), device=device_name, triton=triton, deterministic=deterministic
    )


def _config_of(
    q: Tensor, k: Tensor, causal: bool, scale: float, banded: bool, config: AttentionConfig | None,
    deterministic: bool = False,
) -> AttentionConfig:  # fmt: skip
    """The Hopper kernels take the maximum of unscaled scores, right for a positive scale only, and have no bands."""
    by_hopper = scale > 0 and not banded
    return config or _chosen(q.device, q.dtype, tuple(q.shape), k.shape[1], causal, by_hopper, deterministic)


def _band(q: Tensor, causal: bool, window: int, documents: Tensor | None) -> tuple[int, Tensor | None]:
    """The window, 0 where it hides nothing, and the documents, after checking both."""
    batch, _, seq, _ = q.shape
    if window and (window < 0 or not causal):
        raise ValueError(f"a window of {window} with causal={causal}: it is 1 key or more, of causal attention")
    if documents is not None and (documents.shape != (batch, 2, seq) or documents.dtype != torch.int32):
        raise ValueError(
            f"documents are int32 [batch, 2, seq] = {(batch, 2, seq)}, by flopcast.kernels.documents, "
            f"got {documents.dtype} {tuple(documents.shape)}"
        )
    return (window if window < seq else 0), (None if documents is None else documents.contiguous())


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
    window: int = 0,
    documents: Tensor | None = None,
    *,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Triton forward: (o like q, natural log-sum-exp fp32 [batch, heads, seq]); scale is 1/sqrt(head_dim) by default.

    `window`: how many keys a query sees, itself the last, 0 for all; `documents`: see `documents.py`.

    Raises ValueError on operands that do not fit together, BackendUnavailable where the kernel cannot run,
    NotImplementedError for bf16 in the interpreter.
    """
    module = _triton_module(q, k, v)
    o, lse = _output_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    window, documents = _band(q, causal, window, documents)
    banded = window > 0 or documents is not None
    config = _config_of(q, k, causal, scale, banded, config)
    q, k, v = map(_rows_in_place, (q, k, v))
    if config.forward.kind == "hopper":
        from flopcast.kernels import triton_attention_launch

        triton_attention_launch.launch_forward(q, k, v, o, lse, causal, scale, config.forward)
    else:
        module.launch_forward(q, k, v, o, lse, causal, scale, config, window, documents)
    return o, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    causal: bool = True, scale: float | None = None, window: int = 0, documents: Tensor | None = None,
    deterministic: bool = False, *, config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Triton backward: (dq, dk, dv). `deterministic`: bit-identical from run to run; otherwise the last bits of dq may
    differ, as of torch's own backends. Errors as `forward`."""
    module = _triton_module(q, k, v)
    dq, dk, dv = _output_like(q), _output_like(k), _output_like(v)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    window, documents = _band(q, causal, window, documents)
    banded = window > 0 or documents is not None
    config = _config_of(q, k, causal, scale, banded, config, deterministic)
    do, q, k, v, o = map(_rows_in_place, (do, q, k, v, o))
    if config.dkdv.kind == "hopper":
        from flopcast.kernels import triton_attention_launch

        triton_attention_launch.launch_backward(do, q, k, v, o, lse, dq, dk, dv, causal, scale, config)
    else:
        module.launch_backward(do, q, k, v, o, lse, dq, dk, dv, causal, scale, config, window, documents)
    return dq, dk, dv


# --- Registration: torch.compile, fake tensors, autograd and FLOP counting see two opaque operators ---


@operator("flopcast::triton_attention_forward")
def attention_forward_op(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    return forward(q, k, v, causal, scale, window, documents)


@operator("flopcast::triton_attention_backward")
def attention_backward_op(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float,
    window: int, documents: Tensor | None, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return backward(do, q, k, v, o, lse, causal, scale, window, documents, deterministic)


@attention_forward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _output_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@attention_backward_op.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float,
    window: int, documents: Tensor | None, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _output_like(q), _output_like(k), _output_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # else each backward fills a gradient of lse with zeros, which nobody reads
    q, k, v, ctx.causal, ctx.scale, ctx.window, documents = inputs
    ctx.save_for_backward(q, k, v, *output, documents)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """lse is not differentiated: `attention` hands out o alone."""
    del dlse
    if do is None:
        return (None,) * 7
    *saved, documents = ctx.saved_tensors
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = attention_backward_op(do, *saved, ctx.causal, ctx.scale, ctx.window, documents, deterministic)
    return (*gradients, None, None, None, None)


attention_forward_op.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.flopcast.triton_attention_forward)
def _forward_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """As torch counts SDPA: in full. `shapes.Attention.flops` counts what a triangle or band of the pairs holds."""
    batch, heads, seq, dim = q
    return int(4 * batch * heads * seq * seq * dim)


@register_flop_formula(torch.ops.flopcast.triton_attention_backward)
def _backward_flops(do: Any, q: Any, *args: Any, **kwargs: Any) -> int:
    return _forward_flops(q, None, None) * 5 // 2


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None, *,
    window: int | None = None, documents: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Differentiable Triton attention; under autocast the operands are cast as SDPA's are.

    `window`: how many keys a query sees, itself the last (transformers' sliding_window; flash-attention's window_size
    is (window - 1, 0)). Packed documents: `documents`, as `documents.py` makes them once for all layers, or
    `cu_seqlens` int32 [documents + 1] of a batch of one row. Raises ValueError on a window of full attention and
    documents that do not fit.
    """
    dtype = autocast_dtype(q)
    if dtype is not None and not q.dtype == k.dtype == v.dtype == dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if window is not None and window < 1:
        raise ValueError(f"a window of {window}: it is 1 key or more, or None")
    if cu_seqlens is not None:
        if documents is not None or q.shape[0] != 1:
            raise ValueError("cu_seqlens are of a batch of one row, and instead of documents")
        documents = packed.from_cu_seqlens(cu_seqlens, q.shape[2])
    o: Tensor = attention_forward_op(q, k, v, causal, scale, window or 0, documents)[0]
    return o


# --- Benchmark interface ---


def operands(shape: Attention, device: torch.device | str, seed: int = 0) -> tuple[Tensor, ...]:
    """Standard-normal q, k, v and, for the backward, do: [batch, heads, seq, head_dim], v and do of value_dim columns.
    Of a masked shape k and v lie head by head, as repeating them for the heads of a group leaves them. ValueError on
    sizes that make no attention."""
    if min(shape.batch, shape.heads, shape.kv_heads, shape.seq, shape.head_dim) < 1:
        raise ValueError(f"{shape.key}: batch, heads, kv_heads, seq and head_dim must be at least 1")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"{shape.key}: heads must be divisible by kv_heads")
    require_known("direction", shape.direction, ("fwd", "bwd"))
    if shape.window and not shape.causal:
        raise ValueError(f"{shape.key}: a window is of causal attention")
    if shape.documents > shape.seq:
        raise ValueError(f"{shape.key}: a document has a token at least")
    own, values = shape.columns
    kinds = ((shape.heads, own), (shape.kv_heads, own), (shape.kv_heads, values), (shape.heads, values))
    sizes = ((shape.batch, shape.seq, *kind) for kind in kinds[: 4 if shape.direction == "bwd" else 3])
    found = tuple(x.transpose(1, 2) for x in standard_normal(sizes, shape.dtype, device, seed))
    return (found[0], *(x.contiguous() for x in found[1:3]), *found[3:]) if shape.mask else found


def prepare(shape: Attention, backend: str, operands: Sequence[Tensor]) -> Callable[[], Outputs]:
    """A call without arguments that runs exactly the forward (-> o) or exactly the backward (-> dq, dk, dv).

    For the backward the forward runs here, once. Capturable in a CUDA graph once warm. Raises ValueError on
    an unknown backend, BackendUnavailable or NotImplementedError where it cannot run.
    """
    require_known("attention backend", backend, BACKENDS)
    if shape.dtype == "tf32":
        raise BackendUnavailable("attention in tf32 is not offered: use bf16, fp16 or fp32")
    q, k, v = operands[:3]
    if backend in ("triton", "sdpa-flash") and shape.value_dim:
        raise BackendUnavailable(
            f"backend {backend} takes values as wide as queries, got {shape.key}: use sdpa-cudnn or sdpa-efficient"
        )
    if backend == "triton":
        how = (shape.causal, None, shape.window, _spans(shape, q.device))
        o, lse = forward(q, k, v, *how)
        if shape.direction == "fwd":
            return lambda: forward(q, k, v, *how)[0]
        return lambda: backward(operands[3], q, k, v, o, lse, *how)
    if shape.dropout:
        raise BackendUnavailable(f"dropout is not measured alone, got {shape.key}: leave it out")
    if shape.window or shape.documents:
        raise BackendUnavailable(
            f"backend {backend} has no windows but by a mask of all pairs, nor packed documents: triton has"
        )
    return prepare_sdpa(shape, backend, operands)


def _spans(shape: Attention, device: torch.device) -> Tensor | None:
    """The documents of the shape's rows, as the kernels take them."""
    if not shape.documents:
        return None
    ids = torch.arange(max(shape.documents, 1)).repeat_interleave(torch.tensor(shape.document_lengths))
    return packed.from_ids(ids.to(device).expand(shape.batch, -1))


def _by_definition(
    operands: Sequence[Tensor], shape: Attention, documents: Tensor | None, dtype: torch.dtype
) -> Outputs:
    q, k, v = operands[:3]
    documents = _spans(shape, q.device) if documents is None else documents
    is_causal = shape.causal or shape.mask  # as `attention_sdpa.mask_of` says
    how = (is_causal, shape.head_dim**-0.5, dtype, shape.window, documents)
    if shape.direction == "fwd":
        return attention_math(q, k, v, *how)
    return attention_math_backward(q, k, v, operands[3], *how)


def reference(operands: Sequence[Tensor], shape: Attention, documents: Tensor | None = None) -> Outputs:
    """o, or (dq, dk, dv), by the definition in fp32 (16-bit operands) or fp64 (fp32 operands)."""
    return _by_definition(operands, shape, documents, higher_precision(operands[0].dtype))


def check(
    out: Outputs, ref: Outputs, operands: Sequence[Tensor], shape: Attention, documents: Tensor | None = None
) -> tuple[float, float]:
    """(relative error, tolerance) by `references.worst`; correct when error <= tolerance. Of the backward it is the
    worst gradient's."""
    same = _by_definition(operands, shape, documents, operands[0].dtype)
    outs, refs, rounded = (x if isinstance(x, tuple) else (x,) for x in (out, ref, same))
    # One scale for all gradients: dq and dk are differences that can vanish (seq 1) and leave only noise.
    return worst(outs, refs, rounded, floor=max(map(largest, refs)))
