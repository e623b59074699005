"""What the kernel modules share off the GPU: dtypes, errors, random operands, error measures, reference attention.

The reference attention works on blocks of query rows, so that it needs heads x block x seq elements of memory in place
of heads x seq^2: seq 16384 fits beside its operands on a GPU, seq 4096 on a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,  # fp32 tensors, multiplied in tf32
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class BackendUnavailable(RuntimeError):
    """This backend cannot run this shape here; the message says why. A sweep records it as `unsupported`."""


def require_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raises ValueError, which lists the known names, where `name` is none of them; `kind` says what is named."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}: known are {', '.join(known)}")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of tensors in which a shape's dtype is stored. Raises ValueError on an unknown name."""
    require_known("dtype", name, TORCH_DTYPES)
    return TORCH_DTYPES[name]


def standard_normal(
    sizes: Iterable[Sequence[int]], dtype: str, device: torch.device | str, seed: int
) -> tuple[Tensor, ...]:
    """One tensor per size, drawn one after another. Raises ValueError on an unknown dtype."""
    generator = torch.Generator(device=device).manual_seed(seed)
    kind = torch_dtype(dtype)
    return tuple(torch.randn(tuple(size), dtype=kind, device=device, generator=generator) for size in sizes)


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Inside the block fp32 matrices are multiplied in tf32 or exactly in fp32; the process's setting returns after."""
    wanted = "high" if tf32 else "highest"
    before = torch.get_float32_matmul_precision()
    if before == wanted:
        yield
        return
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def higher_precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a reference: fp64 for fp32 and fp64; fp32 for 16 bits, at least 2^13 finer and fast everywhere."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def max_difference(out: Tensor, ref: Tensor) -> float:
    """max|out - ref|; infinity when `out` has a NaN, an infinity or the wrong shape.

    Computed in chunks of the first dimension, because an output of 16384 x 151936 must not be copied to fp32 whole.
    """
    if out.shape != ref.shape:
        return math.inf
    out, ref = torch.atleast_1d(out), torch.atleast_1d(ref)
    found = 0.0
    rows = max(1, (1 << 26) // max(1, ref[0].numel()))
    for start in range(0, ref.shape[0], rows):
        want = ref[start : start + rows]
        difference = (out[start : start + rows].to(want.dtype) - want).abs().max().item()
        if not math.isfinite(difference):
            return math.inf
        found = max(found, difference)
    return found


def max_relative(out: Tensor, ref: Tensor) -> float:
    """`max_difference` divided by max|ref|, or by 1 where ref is all zero."""
    return max_difference(out, ref) / (largest(ref) or 1.0)


def largest(x: Tensor) -> float:
    """max|x|, without a copy of x."""
    low, high = torch.aminmax(x)
    return float(max(-low.item(), high.item()))


def worst(
    outs: Sequence[Tensor], refs: Sequence[Tensor], rounded: Sequence[Tensor], floor: float = 0.0
) -> tuple[float, float]:
    """(relative error, tolerance) of the worst output, by FlashAttention's criterion.

    max|out - ref| <= 2 max|rounded - ref| + one ulp of the output's dtype (8 ulp in fp32, where only the order of sums
    and approximate exponentials differ). `rounded` is what torch computes in the operands' dtype. Each side is divided
    by max|ref| of that output, or by `floor` where that is larger (a gradient that vanishes leaves only noise). A NaN,
    an infinity, a wrong shape or a wrong number of outputs is an infinite error.
    """
    if len(outs) != len(refs):
        return math.inf, 1.0
    pairs = []
    for out, ref, same in zip(outs, refs, rounded, strict=True):
        scale = max(largest(ref), floor) or 1.0
        ulp = torch.finfo(out.dtype).eps * (8 if out.dtype == torch.float32 else 1)
        pairs.append((max_difference(out, ref) / scale, 2 * max_difference(same, ref) / scale + ulp))
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def _row_blocks(heads: int, seq: int, budget_elements: int = 1 << 27) -> Iterator[slice]:
    """Slices of query rows, each with at most 2^27 scores (heads x rows x seq; 0.5 GB in fp32)."""
    rows = min(seq, max(1, budget_elements // (heads * seq)))
    for start in range(0, seq, rows):
        yield slice(start, min(start + rows, seq))


def _probabilities(
    q_GRD: Tensor, k_SD: Tensor, start: int, causal: bool, scale: float, window: int, spans_2S: Tensor | None
) -> Tensor:
    """softmax(scale Q K^T) [group, rows, seq] for the query rows from `start`, in the operands' dtype."""
    scores = (q_GRD * scale) @ k_SD.T
    rows = torch.arange(start, start + q_GRD.shape[1], device=q_GRD.device)[:, None]
    columns = torch.arange(k_SD.shape[0], device=q_GRD.device)[None, :]
    if causal:
        scores = scores.masked_fill(columns > rows, -math.inf)
    if window:
        scores = scores.masked_fill(columns <= rows - window, -math.inf)
    if spans_2S is not None:
        first, past = (edge[rows] for edge in spans_2S)
        scores = scores.masked_fill((columns < first) | (columns >= past), -math.inf)
    return torch.softmax(scores, dim=-1)


def attention_math(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dtype: torch.dtype,
    window: int = 0, documents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """o [B, H, S, V] of attention by its definition, each step rounded to `dtype`; q [B, H, S, D], k [B, KV, S, D],
    v [B, KV, S, V].

    window: how many keys a query sees, itself the last, 0 for all. documents: [B, 2, S], see `documents.py`.
    """
    batch, heads, seq, _ = q.shape
    group = heads // k.shape[1]
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=dtype, device=q.device)
    with torch.no_grad(), matmul_precision(tf32=False):
        for b in range(batch):
            spans = None if documents is None else documents[b]
            for h in range(k.shape[1]):
                of_group = slice(h * group, (h + 1) * group)
                k_SD, v_SV = k[b, h].to(dtype), v[b, h].to(dtype)
                for rows in _row_blocks(group, seq):
                    q_GRD = q[b, of_group, rows].to(dtype)
                    out[b, of_group, rows] = (
                        _probabilities(q_GRD, k_SD, rows.start, causal, scale, window, spans) @ v_SV
                    )
    return out


def attention_math_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float, dtype: torch.dtype,
    window: int = 0, documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients (dq, dk, dv) of `attention_math`, each step rounded to `dtype`.

    dv = P^T do; ds = P (do v^T - rowsum(P do v^T)) scale; dq = ds k; dk = ds^T q. dk and dv are summed over
    the blocks of rows and the heads of a group in at least fp32, as in the fused kernels.
    """
    batch, heads, seq, _ = q.shape
    group = heads // k.shape[1]
    accumulate = torch.promote_types(dtype, torch.float32)
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=accumulate, device=q.device)
    dv = torch.zeros(v.shape, dtype=accumulate, device=q.device)
    with torch.no_grad(), matmul_precision(tf32=False):
        for b in range(batch):
            spans = None if documents is None else documents[b]
            for h in range(k.shape[1]):
                of_group = slice(h * group, (h + 1) * group)
                k_SD, v_SV = k[b, h].to(dtype), v[b, h].to(dtype)
                for rows in _row_blocks(group, seq):
                    q_GRD, do_GRV = q[b, of_group, rows].to(dtype), do[b, of_group, rows].to(dtype)
                    p = _probabilities(q_GRD, k_SD, rows.start, causal, scale, window, spans)
                    dp = do_GRV @ v_SV.T
                    ds = (p * (dp - (dp * p).sum(-1, keepdim=True))) * scale
                    dq[b, of_group, rows] = ds @ k_SD
                    dk[b, h] += (ds.mT @ q_GRD).to(accumulate).sum(0)
                    dv[b, h] += (p.mT @ do_GRV).to(accumulate).sum(0)
    return dq, dk.to(dtype), dv.to(dtype)
