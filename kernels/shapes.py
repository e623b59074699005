"""Shapes: frozen descriptions of the operations that a training step launches.

Pure data, no torch: the performance model imports this file and nothing else of `kernels`.
Every shape has `.flops` (2 per multiply-add), `.bytes` (each operand read or written once) and `.key`,
the string that names it in measurement files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from random import Random
from typing import Annotated, Any, Literal

DTYPE_BYTES = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8,
}  # fmt: skip

Layout = Literal["nt", "nn", "tn", "tt"]
Direction = Literal["fwd", "bwd"]
# what a file may hold (`flopcast.bounds`)
Size = Annotated[int, range(1, 1 << 48)]
Count = Annotated[int, range(1 << 48)]
Dtype = Annotated[str, tuple(DTYPE_BYTES)]


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """Matrix product C[m, n] = A[m, k] B[k, n], summed over k, `batch` times.

    `layout` says how A and B lie in memory ("n": row-major as written, "t": stored transposed):
    nt: x[m, k] W[n, k]^T (forward), nn: g[m, k] W[k, n] (dgrad), tn: g[k, m]^T x[k, n] (wgrad).
    dtype "tf32" is fp32 data multiplied in tf32; "fp8" is e4m3 scaled by a factor per tensor or, with `row_scales`, per
    row of both operands, and its result is bf16.
    """

    m: Size
    n: Size
    k: Size
    dtype: Dtype = "bf16"
    layout: Annotated[str, Layout] = "nt"
    batch: Size = 1
    row_scales: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        of_result = DTYPE_BYTES["bf16"] if self.dtype == "fp8" else size
        return self.batch * ((self.m * self.k + self.k * self.n) * size + self.m * self.n * of_result)

    @property
    def key(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        scales = "+rows" if self.row_scales else ""
        return f"gemm/{self.layout}/{self.dtype}{scales}/{batch}{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Scaled dot-product attention with grouped key-value heads, `seq` queries over `seq` keys.

    FLOPs: 4 batch heads seq^2 head_dim forward, halved when causal; backward counts 2.5 times that
    (5 matmuls for 2). Bytes: Q, K, V, O (and for the backward also their gradients) once, plus the
    fp32 log-sum-exp row.

    `value_dim`: the columns of values and results where they are others than `head_dim`, those of queries and keys
    (DeepSeek's 128 for 192), else 0: of the forward's two matmuls one is of them, of the backward's five two.

    `window`: a query sees this many keys, itself the last (0: all), of causal attention; the pairs of the triangle that
    lie beyond do not count.
    `documents`: each row of the batch packs this many (0 or 1: one), of lengths that `document_lengths` draws; a query
    sees keys of its own.
    `mask`: a tensor, added to the scores, says which keys a query sees, so that all pairs count, and of it one row
    per query is read. `dropout`: weights are dropped at random.
    """

    batch: Size
    heads: Size
    kv_heads: Size
    seq: Size
    head_dim: Size
    causal: bool = True
    direction: str = "fwd"
    dtype: Dtype = "bf16"
    mask: bool = False
    dropout: bool = False
    window: Count = 0
    documents: Count = 0
    value_dim: Count = 0

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of queries and keys, and of values and results."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Lengths of the documents of a row, of cuts that are drawn evenly; the same in each row and for each shape of
        as many tokens and documents."""
        if self.documents < 2:
            return (self.seq,)
        cuts = Random(f"{self.documents} of {self.seq}").sample(range(1, self.seq), self.documents - 1)
        return tuple(end - start for start, end in pairwise((0, *sorted(cuts), self.seq)))

    @property
    def flops(self) -> int:
        pairs = 0
        for length in self.document_lengths:
            beyond = max(0, length - self.window) if self.window else 0
            pairs += length * length - beyond * beyond
        flops = 2 * self.batch * self.heads * pairs * columns_of_products(self.direction, *self.columns)
        return flops // 2 if self.causal else flops

    @property
    def bytes(self) -> int:
        # a query and its result are as wide as a key and its value
        width = sum(self.columns) * DTYPE_BYTES[self.dtype]
        q_and_o = self.batch * self.heads * self.seq * width
        k_and_v = self.batch * self.kv_heads * self.seq * width
        lse = 4 * self.batch * self.heads * self.seq
        # forward reads q, k, v and writes o; backward reads q, k, v, o, do and writes dq, dk, dv
        mask = self.batch * self.seq * self.seq * DTYPE_BYTES[self.dtype] if self.mask else 0
        return mask + (1 if self.direction == "fwd" else 2) * (q_and_o + k_and_v) + lse

    @property
    def key(self) -> str:
        mask = ("causal" if self.causal else "masked" if self.mask else "full") + self.dropout * "+dropout"
        mask += (f"+window{self.window}" if self.window else "") + (
            f"+documents{self.documents}" if self.documents else ""
        )
        return (
            f"attention/{self.direction}/{mask}/{self.dtype}/"
            f"b{self.batch}h{self.heads}k{self.kv_heads}s{self.seq}d{self.head_dim}"
            + (f"v{self.value_dim}" if self.value_dim else "")
        )


def columns_of_products(direction: str, own: int, values: int) -> int:
    """Multiply-adds per pair of a query and a key, over all matmuls of an attention: of the forward q k and p v, of the
    backward these two's gradients and q k again. `own`: columns of queries and keys, `values`: of values."""
    return own + values if direction == "fwd" else 3 * own + 2 * values


@dataclass(frozen=True)
class Operand:
    """One tensor as an operation sees it: sizes and strides in elements."""

    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    dtype: Dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def bytes(self) -> int:
        """Bytes touched: a dimension of stride 0 (a broadcast) is read once."""
        touched = prod(size for size, step in zip(self.shape, self.stride, strict=True) if step != 0 or size == 0)
        return touched * DTYPE_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    @property
    def key(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return (
            f"{self.dtype}[{sizes}]"
            if self.is_contiguous
            else f"{self.dtype}[{sizes}:{','.join(map(str, self.stride))}]"
        )


@dataclass(frozen=True)
class Call:
    """Any other ATen call, with all that is needed to make it again on random operands.

    `args` and `kwargs` are the call's arguments as JSON, where {"t": i} stands for `inputs[i]`, {"ts": [i, n]} for
    the list of `inputs[i]` to `inputs[i + n - 1]`, {"rs": [x, n]} for n times the number x, {"d": name} for a dtype,
    {"m": name} for a memory format or layout, {"f": text} for an infinity or NaN, {"g": [n, step]} for a group of n
    ranks that lie so far apart, {"o": name} for an object of a class; anything else is itself. `outputs` lists what the
    call returns, `written` the inputs that it writes in place.
    """

    op: str  # "aten.mul.Tensor"
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    args: str = "[]"
    kwargs: str = "{}"
    written: tuple[Count, ...] = ()

    @property
    def flops(self) -> int:
        """0: only matrix products and attention are counted, as the field counts them."""
        return 0

    @cached_property
    def read_bytes(self) -> int:
        return sum(operand.bytes for operand in self.inputs)

    @cached_property
    def write_bytes(self) -> int:
        return sum(operand.bytes for operand in self.outputs) + sum(self.inputs[i].bytes for i in self.written)

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @cached_property
    def key(self) -> str:
        operands = ",".join(operand.key for operand in self.inputs)
        return f"call/{self.op}/({operands})/{self.args}{self.kwargs if self.kwargs != '{}' else ''}"


# --- Fused memory-bound operations. FLOPs are 0, as for any Call: the field counts products and attention only.


@dataclass(frozen=True, kw_only=True)
class RmsNorm:
    """RMSNorm over rows of n elements; with `residual` of x + residual, which is written too. One dtype for all.

    Backward: the gradient of x (which is the residual's too) and of the weight.
    """

    rows: Size
    n: Size
    residual: bool = False
    direction: str = "fwd"
    dtype: Dtype = "bf16"
    flops = 0

    @property
    def bytes(self) -> int:
        # forward x -> y, or x, residual -> y, new residual; backward dy, x (and the residual's gradient) -> dx
        tensors = (4 if self.residual else 2) if self.direction == "fwd" else (4 if self.residual else 3)
        weights = 1 if self.direction == "fwd" else 2
        size = DTYPE_BYTES[self.dtype]
        return tensors * self.rows * self.n * size + weights * self.n * size + 4 * self.rows

    @property
    def key(self) -> str:
        return f"rmsnorm/{self.direction}/{'residual' if self.residual else 'plain'}/{self.dtype}/{self.rows}x{self.n}"


@dataclass(frozen=True, kw_only=True)
class RopeQkNorm:
    """RMSNorm of every query and key head, then rotary embedding by fp32 tables [seq, head_dim], half of them read."""

    batch: Size
    seq: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    direction: str = "fwd"
    dtype: Dtype = "bf16"
    flops = 0

    @property
    def bytes(self) -> int:
        heads = self.batch * self.seq * (self.heads + self.kv_heads) * self.head_dim * DTYPE_BYTES[self.dtype]
        tables = 2 * self.seq * self.head_dim // 2 * 4
        weights = (2 if self.direction == "fwd" else 4) * self.head_dim * DTYPE_BYTES[self.dtype]
        return (2 if self.direction == "fwd" else 3) * heads + tables + weights

    @property
    def key(self) -> str:
        sizes = f"b{self.batch}s{self.seq}h{self.heads}k{self.kv_heads}d{self.head_dim}"
        return f"rope_qk_norm/{self.direction}/{self.dtype}/{sizes}"


@dataclass(frozen=True, kw_only=True)
class SwiGlu:
    """silu(gate) * up over `numel` elements; the backward makes both gradients."""

    numel: Size
    direction: str = "fwd"
    dtype: Dtype = "bf16"
    flops = 0

    @property
    def bytes(self) -> int:
        return (3 if self.direction == "fwd" else 5) * self.numel * DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        return f"swiglu/{self.direction}/{self.dtype}/{self.numel}"


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Mean cross-entropy of logits [rows, vocab]. "fwd": the loss; "bwd": the gradient, from logits and saved
    log-sum-exp; "both": loss and gradient in one kernel, which may read the logits once."""

    rows: Size
    vocab: Size = 151936
    direction: str = "both"
    dtype: Dtype = "bf16"
    flops = 0

    @property
    def bytes(self) -> int:
        """The logits once, the gradient once, and per row the target (int64) and the log-sum-exp (fp32)."""
        tensors = 1 if self.direction == "fwd" else 2
        return tensors * self.rows * self.vocab * DTYPE_BYTES[self.dtype] + 12 * self.rows

    @property
    def key(self) -> str:
        return f"cross_entropy/{self.direction}/{self.dtype}/{self.rows}x{self.vocab}"


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """One AdamW step over `tensors` fp32 parameters of `numel` elements in all: it reads parameter, gradient and two
    moments and writes all but the gradient, 28 bytes per element."""

    numel: Size
    tensors: Size = 1
    dtype: Dtype = "fp32"
    direction: str = "step"
    flops = 0

    @property
    def bytes(self) -> int:
        return 7 * self.numel * DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        return f"adamw/{self.dtype}/{self.tensors}x{self.numel}"


Fused = RmsNorm | RopeQkNorm | SwiGlu | CrossEntropy | AdamW

Shape = Gemm | Attention | Call


def shape_to_json(shape: Shape | Fused) -> dict[str, Any]:
    """A shape as a JSON-ready dictionary; `shape_from_json` inverts it but for fused ones."""
    fields = asdict(shape)
    # files from before there were these have none
    later = ("mask", "dropout", "window", "documents", "value_dim", "row_scales")
    fields = {name: value for name, value in fields.items() if value or name not in later}
    return {"kind": type(shape).__name__.lower(), **fields}


def shape_from_json(record: dict[str, Any]) -> Shape:
    """Raises ValueError on an unknown kind, TypeError on missing or unknown fields."""
    fields = dict(record)
    kind = fields.pop("kind", None)
    if kind == "gemm":
        return Gemm(**fields)
    if kind == "attention":
        return Attention(**fields)
    if kind == "call":
        for side in ("inputs", "outputs"):
            fields[side] = tuple(Operand(tuple(o["shape"]), tuple(o["stride"]), o["dtype"]) for o in fields[side])
        fields["written"] = tuple(fields.get("written", ()))
        return Call(**fields)
    raise ValueError(f"unknown shape kind {kind!r}: known are gemm, attention, call")


def canonical_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
