"""Where the documents of packed sequences begin and end, as the attention kernels take it.

    spans = from_positions(position_ids)        # made once per step, for all layers
    o = attention(q, k, v, documents=spans)

Spans are int32 [batch, 2, seq]: of each token's document, the first token and the one past the last. A row of a batch
holds documents one after the other; a token attends to its own only. Three ways to say where they are: positions that
begin anew, as transformers' DataCollatorWithFlattening packs; numbers of documents; flash-attention's cumulative
lengths. None waits for the device, and torch.compile traces them all.
"""

from __future__ import annotations

import torch
from torch import Tensor


def from_ids(ids: Tensor) -> Tensor:
    """Of the documents' numbers [batch, seq], which never fall within a row."""
    if ids.dim() != 2:
        raise ValueError(f"documents are numbered per token, [batch, seq], got {tuple(ids.shape)}")
    ids = ids.contiguous()
    first = torch.searchsorted(ids, ids, out_int32=True)
    return torch.stack((first, torch.searchsorted(ids, ids, right=True, out_int32=True)), 1)


def from_positions(position_ids: Tensor) -> Tensor:
    """Of the positions [batch, seq] of tokens in their documents: one begins wherever they do not rise by 1, as
    transformers has it."""
    if position_ids.dim() != 2:
        raise ValueError(f"positions are of tokens, [batch, seq], got {tuple(position_ids.shape)}")
    rises = torch.diff(position_ids, prepend=position_ids[:, :1] - 1)
    return from_ids((rises != 1).cumsum(-1))


def from_cu_seqlens(cu_seqlens: Tensor, seq: int) -> Tensor:
    """Of cumulative lengths (0, l0, l0 + l1, ...), as flash-attention takes them, of one row of `seq` tokens. What lies
    behind the last is a document of its own."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens are int32 [documents + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    tokens = torch.arange(seq, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return from_ids(torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)[None])
