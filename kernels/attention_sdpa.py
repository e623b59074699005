"""torch's attention backends, each as the ATen operator that SDPA and its autograd formula call in training.

`attention` offers them; what SDPA's own checks refuse is refused here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopcast.kernels.references import BackendUnavailable
from flopcast.kernels.shapes import Attention

Outputs = Tensor | tuple[Tensor, ...]
SDPA_BACKENDS = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math", "sdpa-cpu")
MASKED_BACKENDS = ("sdpa-cudnn", "sdpa-efficient", "sdpa-cpu")  # that are measured with masks


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


def _require(backend: str, shape: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raises BackendUnavailable, with torch's reasons, unless SDPA itself would take this backend."""
    if backend == "sdpa-cpu":
        if q.device.type != "cpu":
            raise BackendUnavailable("backend sdpa-cpu needs CPU tensors")
        if sdpa_choice((q, k, v), shape) != "sdpa-cpu":
            raise BackendUnavailable(f"torch has no fused CPU attention for {shape.key}: use sdpa-math")
        return
    if not q.is_cuda:
        raise BackendUnavailable(f"backend {backend} needs CUDA tensors: use sdpa-cpu or sdpa-math on the CPU")
    usable = {
        "sdpa-flash": torch.backends.cuda.can_use_flash_attention,
        "sdpa-cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "sdpa-efficient": torch.backends.cuda.can_use_efficient_attention,
    }[backend]
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    params = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, shape.causal, shape.heads != shape.kv_heads)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        if not usable(params, True):
            why = " ".join(str(reason.message).split(" (Triggered")[0] for reason in reasons)
            raise BackendUnavailable(f"backend {backend} cannot run {shape.key}: {why or 'torch gives no reason'}")


def mask_of(shape: Attention, q: Tensor) -> Tensor | None:
    """What a masked shape adds to its scores, as compiled models of transformers hand over that they are causal: in
    the dtype of `q`, [batch, 1, seq, seq], minus infinity above the diagonal. None for a shape without a mask."""
    if not shape.mask:
        return None
    size = (shape.batch, 1, shape.seq, shape.seq)
    return torch.full(size, float("-inf"), dtype=q.dtype, device=q.device).triu_(1)


def _fused_calls(
    backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, attn_mask: Tensor | None
) -> tuple[Callable[[], tuple[Any, ...]], Callable[[Tensor, tuple[Any, ...]], tuple[Tensor, ...]]]:
    """(forward, backward): forward() returns the operator's outputs, o first; backward(do, outputs) the gradients.

    The saved values and their order are those of torch's derivatives.yaml.
    """
    aten, scale = torch.ops.aten, q.shape[-1] ** -0.5
    if backend == "sdpa-flash":

        def flash_backward(do: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor, ...]:
            o, lse, cum_q, cum_k, max_q, max_k, rng_state, unused, _ = saved
            return tuple(
                aten._scaled_dot_product_flash_attention_backward.default(
                    do, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, rng_state, unused, scale=scale
                )
            )

        op = aten._scaled_dot_product_flash_attention.default
        return lambda: op(q, k, v, 0.0, causal, False, scale=scale), flash_backward
    if backend == "sdpa-cudnn":

        def cudnn_backward(do: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor, ...]:
            o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
            return tuple(
                aten._scaled_dot_product_cudnn_attention_backward.default(
                    do, q, k, v, o, lse, seed, offset, attn_mask, cum_q, cum_k, max_q, max_k, 0.0, causal, scale=scale
                )
            )

        op = aten._scaled_dot_product_cudnn_attention.default
        return lambda: op(q, k, v, attn_mask, True, 0.0, causal, False, scale=scale), cudnn_backward
    if backend == "sdpa-efficient":
        bias = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])

        def efficient_backward(do: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor, ...]:
            o, lse, seed, offset = saved
            wanted = [True, True, True, False]
            return tuple(
                aten._scaled_dot_product_efficient_attention_backward.default(
                    do, q, k, v, bias, o, lse, seed, offset, 0.0, wanted, causal, scale=scale
                )
            )[:3]

        op = aten._scaled_dot_product_efficient_attention.default
        return lambda: op(q, k, v, bias, True, 0.0, causal, scale=scale), efficient_backward

    def cpu_backward(do: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                do, q, k, v, *saved, 0.0, causal, attn_mask=attn_mask, scale=scale
            )
        )

    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    return lambda: op(q, k, v, 0.0, causal, attn_mask=attn_mask, scale=scale), cpu_backward


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


def prepare_sdpa(shape: Attention, backend: str, operands: Sequence[Tensor]) -> Callable[[], Outputs]:
    """As `attention.prepare`, for the torch backends."""
    q, k, v = operands[:3]
    causal = shape.causal
    if shape.mask and backend not in MASKED_BACKENDS:
        raise BackendUnavailable(f"backend {backend} takes no mask, got {shape.key}: {', '.join(MASKED_BACKENDS)} do")
    if backend == "sdpa-math":
        if shape.direction == "fwd":
            return lambda: _math_forward(q, k, v, causal)
        return _math_backward(q, k, v, operands[3], causal)
    mask = mask_of(shape, q)
    _require(backend, shape, q, k, v, mask)
    run_forward, run_backward = _fused_calls(backend, q, k, v, causal, mask)
    if shape.direction == "fwd":
        return lambda: run_forward()[0]
    saved = run_forward()
    return lambda: run_backward(operands[3], saved)
