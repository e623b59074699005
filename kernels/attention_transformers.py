"""The Triton attention in transformers' models, however they state that it is causal, has a window or is packed.

    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_with_transformers())

transformers states it in four ways. A module's `is_causal` without a mask is what it does for causal batches without
padding. A boolean mask [batch or 1, heads or 1, queries, keys] or an additive one is what it makes for packed
sequences and padding, for callers of their own, and always under torch.compile, where it cannot look whether a batch
is packed. Outside of torch.compile such a mask is looked at once (the host waits for the device) and, if it is the
causal one, in a layer with a sliding window that of the window, not used. Inside nothing can be looked at, so that
`patch.patch` tells the model beforehand, by `NO_MASK`, that a batch without a mask is causal, and by `DOCUMENTS`, made
of its positions, where the documents of packed sequences begin. Any other mask is right, and slower: it goes to
torch's SDPA, as do the few queries of a decoding step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flopcast.kernels.attention import attention

NAME = "flopcast_triton"
NO_MASK = (0, 0, 0, 0)  # the shape of a mask that says: none but that of causal attention and its window
DOCUMENTS = "flopcast_documents"  # the keyword of `documents.py`'s spans

# mask -> (its version and the window it was held against, whether it is causal)
_LOOKED_AT: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def is_causal_mask(mask: Tensor, queries: int, keys: int, window: int | None = None) -> bool:
    """Whether a mask says of every batch and head that each of `queries` attends to its own and all earlier keys, or
    with a window to its own and those `window` - 1 before.

    A boolean mask is true, and an additive one exactly 0, where a query attends; elsewhere an additive one is at most
    the least finite number of its dtype. Waits for the device, once per mask.
    """
    if queries != keys or mask.shape[-2:] != (queries, keys):
        return False
    now = mask._version, window
    then, answer = _LOOKED_AT.get(mask, (None, False))
    if then != now:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        if mask.dtype == torch.bool:
            as_causal = mask == seen
        else:
            as_causal = torch.where(seen, mask == 0, mask <= torch.finfo(mask.dtype).min)
        answer = bool(as_causal.all())
        _LOOKED_AT[mask] = (now, answer)
    return bool(answer)


def _said_causal(mask: Tensor, queries: int, keys: int, window: int | None) -> bool:
    return not torch.compiler.is_compiling() and is_causal_mask(mask, queries, keys, window)


def transformers_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers calls it: query [B, H, S, D], key, value [B, KV, S, D] -> ([B, S, H, D], None).

    Raises NotImplementedError for dropout, biases of positions, caps of scores, sinks and windows that are not causal.
    """
    queries, keys = query.shape[2], key.shape[2]
    window, documents = kwargs.get("sliding_window"), kwargs.pop(DOCUMENTS, None)
    if window is not None and window >= keys:
        window = None
    asked = [name for name in ("position_bias", "softcap", "s_aux") if kwargs.get(name) is not None]
    if dropout or asked:
        raise NotImplementedError(
            f"{NAME} has no {' and no '.join(asked or ['dropout'])}: it is causal, windowed or full attention; use "
            "attn_implementation 'sdpa'"
        )
    if attention_mask is not None and attention_mask.numel() == 0:
        attention_mask = None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and _said_causal(attention_mask, queries, keys, window):
        attention_mask, causal = None, True
    if attention_mask is None and window is not None and not (causal and queries == keys):
        raise NotImplementedError(
            f"{NAME} has windows of causal attention only, of as many queries as keys; use attn_implementation 'sdpa'"
        )
    if attention_mask is not None or queries != keys:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out, None
    out = attention(query, key, value, causal, scaling, window=window, documents=documents)
    return out.transpose(1, 2).contiguous(), None


def register_with_transformers() -> str:
    """Makes `attn_implementation="flopcast_triton"` available to transformers' models; returns that name.

    Masks are made as for sdpa, that is, none at all for causal batches without padding outside of torch.compile.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, transformers_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
