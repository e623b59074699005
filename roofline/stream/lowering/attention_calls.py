"""Where the arguments of attention calls lie, and what attention a shape is."""

from __future__ import annotations

import json
from math import isqrt
from typing import Any, NamedTuple

from flopcast.kernels.shapes import Attention, Call, Shape
from flopcast.roofline.stream.ops.op_stream import packet, tensor_places

TILE = 128  # rows and columns of a tile of scores, as cuDNN's kernels visit them


class Places(NamedTuple):
    """An attention call: its backend, and the places of its flag "causal", mask, dropout, window and documents among
    the arguments, None for what it does not take.

    Eager models of transformers leave out a mask that is causal, where compiled ones hand it over; both hand over that
    of a sliding window or of padding, all pairs of which torch's kernels then compute. The Triton attention takes the
    window's size."""

    backend: str
    causal: int
    mask: int | None = None
    dropout: int | None = None
    window: int | None = None
    documents: int | None = None


def is_given(arguments: list[Any], place: int | None) -> bool:
    """Whether a call's arguments have something other than none, zero or false at a place."""
    return place is not None and place < len(arguments) and bool(arguments[place])


ATTENTION = {
    "flopcast.attention": Places("sdpa", 3, mask=4, dropout=5),
    "flopcast.attention_backward": Places("sdpa", 6, mask=7, dropout=8),
    "aten._scaled_dot_product_flash_attention": Places("sdpa-flash", 4, dropout=3),
    "aten._scaled_dot_product_flash_attention_backward": Places("sdpa-flash", 11, dropout=10),
    "aten._scaled_dot_product_cudnn_attention": Places("sdpa-cudnn", 6, mask=3, dropout=5),
    "aten._scaled_dot_product_cudnn_attention_backward": Places("sdpa-cudnn", 14, mask=8, dropout=13),
    "aten._scaled_dot_product_efficient_attention": Places("sdpa-efficient", 6, mask=3, dropout=5),
    "aten._scaled_dot_product_efficient_attention_backward": Places("sdpa-efficient", 11, mask=4, dropout=9),
    "aten._scaled_dot_product_flash_attention_for_cpu": Places("sdpa-cpu", 4),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": Places("sdpa-cpu", 7),
    "flopcast.triton_attention_forward": Places("triton", 3, window=5, documents=6),
    "flopcast.triton_attention_backward": Places("triton", 6, window=8, documents=9),
}


def attention_of(shape: Shape) -> Attention | None:
    """Returns the attention that a shape is, as the law of masks and the choice of a backend take it: of a call in
    which keys and queries differ in number, as over a static cache, the square one of as many pairs. None for anything
    else, and for attention of one token, which other kernels run."""
    if isinstance(shape, Attention):
        return shape
    if not isinstance(shape, Call) or (name := packet(shape.op)) not in ATTENTION:
        return None
    is_backward, places = name.endswith("_backward"), ATTENTION[name]
    arguments, tensors = json.loads(shape.args), tensor_places(shape.args)
    query, key = (shape.inputs[place] for i in (is_backward, 1 + is_backward) if (place := tensors[i]) is not None)
    *_, heads, queries, head_dim = query.shape
    if queries == 1 or len(query.shape) != 4:
        return None
    return Attention(
        batch=query.shape[0], heads=heads, kv_heads=key.shape[1], seq=isqrt(queries * key.shape[2]), head_dim=head_dim,
        causal=False, direction="bwd" if is_backward else "fwd", dtype=query.dtype,
        mask=is_given(arguments, places.mask), dropout=is_given(arguments, places.dropout),
    )  # fmt: skip
