"""Which fused kernel scaled_dot_product_attention calls on a GPU, for a compiler: the choice is made while it traces.

As aten/src/ATen/native/transformers/cuda/sdp_utils.cpp chooses; cuDNN's version is told, since this machine has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

# cuDNN comes first from torch 2.10 with cuDNN above 9.15 on these (`check_prefer_cudnn_attention`).
_PREFERS_CUDNN = ((9, 0), (10, 0))
_MIN_CUDNN = 91500
_MOST_OF_CUDNN, _MOST_OF_FLASH = 128, 256  # of a head, in a step that trains
_MOST_OF_CUDNN_ON_HOPPER = 256  # as compiled steps of Pythia and Gemma-3 on an H100 do, with cuDNN 9.19


def kernel_for(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    capability: tuple[int, int],
    cudnn: int,
    enable_gqa: bool = False,
) -> str:
    """Returns "cudnn", "flash", "efficient" or "math". Head sizes and numbers are the last and second dimension."""
    width = max(query.shape[-1], value.shape[-1])
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    is_grouped = query.shape[1] != key.shape[1]
    most_of_cudnn = _MOST_OF_CUDNN_ON_HOPPER if capability == (9, 0) else _MOST_OF_CUDNN
    prefers_cudnn = capability in _PREFERS_CUDNN and cudnn > _MIN_CUDNN and _torch() >= (2, 10)
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    # elements of a row side by side, of a mask too: ViT's, expanded from one element a row, is taken by none
    if query.ndim != 4 or any(operand.stride(-1) != 1 for operand in operands):
        return "math"
    if is_grouped and not enable_gqa:  # left to broadcasting, which no fused kernel does
        return "math"
    if prefers_cudnn and is_half and width % 8 == 0 and width <= most_of_cudnn:
        return "cudnn"
    is_for_flash = query.shape[-1] == value.shape[-1] <= _MOST_OF_FLASH and capability >= (8, 0)
    if is_half and mask is None and is_for_flash:
        return "flash"
    return "math" if is_grouped else "efficient"


def rule_for(capability: tuple[int, int], cudnn: int) -> Callable[..., torch.Tensor]:
    """Makes CUDA's `scaled_dot_product_attention`."""

    def rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        aten = torch.ops.aten
        trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        mask, (width, length) = attn_mask, (query.shape[-1], key.shape[-2])
        kernel = kernel_for(query, key, value, mask, capability, cudnn, enable_gqa)
        if mask is not None and mask.dtype == torch.bool:  # an additive one in its place
            least = aten.scalar_tensor.default(float("-inf"), dtype=query.dtype, device=query.device)
            mask = aten.where.ScalarSelf(mask, 0.0, least)
        results: Sequence[torch.Tensor]
        if kernel == "math":
            results = aten._scaled_dot_product_attention_math.default(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
        elif kernel == "cudnn":
            results = aten._scaled_dot_product_cudnn_attention.default(
                query, key, value, mask, trains, dropout_p, is_causal, False, scale=scale
            )
        elif kernel == "flash":  # takes heads of a multiple of 8
            if more := -width % 8:
                query, key, value = (pad(tensor, (0, more)) for tensor in (query, key, value))
                scale = width**-0.5 if scale is None else scale
            results = aten._scaled_dot_product_flash_attention.default(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )
        else:
            if mask is not None:  # expanded to all heads, its rows a multiple of 16 elements apart
                mask = pad(mask, (0, more))[..., :length] if (more := -length % 16) else mask
                mask = mask.expand(*query.shape[:3], length)
            results = aten._scaled_dot_product_efficient_attention.default(
                query, key, value, mask, trains, dropout_p, is_causal, scale=scale
            )
        out = results[0]
        return out[..., :width] if kernel == "flash" and width % 8 else out

    return rule


def _torch() -> tuple[int, int]:
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)
