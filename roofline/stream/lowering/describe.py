"""Describes an operation as a profile is asked for it: class, variant, FLOPs, bytes and the sizes that set its time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2, prod
from typing import Any

from flopcast.kernels.shapes import DTYPE_BYTES, Attention, Call, Gemm, Operand, Shape, columns_of_products
from flopcast.roofline.stream.lowering.attention_calls import TILE, attention_of
from flopcast.roofline.stream.lowering.classes import op_class as class_of_call
from flopcast.roofline.stream.lowering.fused import OWN_OPTIMIZER
from flopcast.roofline.stream.lowering.variants import AttentionVariant, CallVariant, ConvVariant, GemmVariant, Variant
from flopcast.roofline.stream.ops.op_stream import packet, tensor_places

# Up to this many indices the gradient of an embedding is one kernel after the fill; more are sorted first
# (aten/src/ATen/native/cuda/Embedding.cu).
_FEW_INDICES = 3072

# Up to this many rows of a table are copied one after the other by the same threads, 0.6 us each on an H200: 15 take
# 10.8 us where 36 take 1.9 (aten/src/ATen/native/cuda/Indexing.cu).
_IN_TURN = 16

# From so many rows on, of fewer columns than half of a large GPU's multiprocessors take (32 each), the gradient of a
# layer norm's weights is summed in parts by many blocks, which two sums add up; below, by one block for 32 columns. On
# an H200, 96 columns of 56,448 rows take 180 us so, of 69,120 rows 31 us
# (layer_norm_kernel.cu).
_PARTED_ROWS, _PARTED_COLUMNS = 64 * 1024, 2048

# Linear layers of fewer rows, as a decode has them, run on other kernels: narrow tiles, sums that are split. On an H200
# the law of the others was 9% fast for 170 of them.
FEW_ROWS = 64


@dataclass(frozen=True)
class Work:
    """A shape as the performance model sees it. `bytes` counts each operand moved once; `features` are log2 sizes."""

    shape: Shape
    op_class: str
    variant: Variant
    features: tuple[float, ...]
    bytes: int
    flops: int
    backend: str = "torch"

    @property
    def alike(self) -> Shape:
        """The shape whose time is wrong by one error with that of this one: of a generated kernel, which finds its
        operands warm or not in every layer, that without its arguments; else this one."""
        if isinstance(self.shape, Call) and self.op_class == "generated":
            return replace(self.shape, args="[]")
        return self.shape

    @property
    def matrix_dtype(self) -> str | None:
        """The dtype at whose matrix rate its FLOPs run; None for work that multiplies no matrices."""
        if not self.flops:
            return None
        return self.shape.inputs[0].dtype if isinstance(self.shape, Call) else self.shape.dtype


@lru_cache(maxsize=65536)
def describe(shape: Shape, backend: str = "torch") -> Work:
    """Returns the class, variant, FLOPs, bytes and features of a shape, for `backend`."""
    if isinstance(shape, Gemm):
        features: tuple[float, ...] = (log2(shape.m), log2(shape.n), log2(shape.k))
        is_batched = shape.batch > 1
        if is_batched:
            features = (*features, log2(shape.batch))
        is_aligned = _is_aligned(shape)
        is_few = shape.layout == "nt" and shape.m < FEW_ROWS and shape.dtype in ("bf16", "fp16") and is_aligned
        form = "batched" if is_batched else "few" if is_few else "rows" if shape.row_scales else ""
        product = GemmVariant(shape.layout, shape.dtype, form, is_aligned)
        return Work(shape, "gemm", product, features, shape.bytes, shape.flops, backend)
    if isinstance(shape, Attention):
        features = (log2(shape.batch * shape.heads), log2(shape.heads / shape.kv_heads), log2(shape.seq))
        attention = AttentionVariant(
            shape.direction, shape.causal, shape.dtype, shape.head_dim, shape.value_dim, is_masked=shape.mask
        )
        return Work(shape, "attention", attention, features, shape.bytes, shape.flops, backend)
    return _describe_call(shape)


def _is_aligned(shape: Gemm) -> bool:
    """Whether every row of operands and result starts at a multiple of 16 bytes. Other products run on other kernels,
    which cannot load through the tensor memory accelerator (TMA)."""
    of_a, of_b = (shape.k if shape.layout[0] == "n" else shape.m, shape.k if shape.layout[1] == "t" else shape.n)
    return (of_a | of_b | shape.n) * DTYPE_BYTES[shape.dtype] % 16 == 0  # OR: every bit that any size has


def operand_lists(call: Call) -> list[Sequence[Operand]]:
    """Returns the lists of tensors among a call's arguments, as multi-tensor kernels take them."""
    return [
        call.inputs[value["ts"][0] : value["ts"][0] + value["ts"][1]]
        for value in json.loads(call.args)
        if isinstance(value, dict) and "ts" in value
    ]


def layout_of(a: Operand, b: Operand) -> str:
    """Returns the layout of a product of two operands: n for a row-major operand, t for a column-major one."""
    return "".join("n" if _is_row_major(operand) else "t" for operand in (a, b))


def _is_row_major(operand: Operand) -> bool:
    rows, columns = operand.stride[-2:]
    return columns == 1 or not (rows == 1 or operand.shape[-2] == 1)


def _log2(size: float) -> float:
    return log2(max(size, 1))


# --- calls ------------------------------------------------------------------------------------------


def _describe_call(call: Call) -> Work:
    op_class = _call_class(call)
    if op_class in _PRODUCTS:
        return _PRODUCTS[op_class](call)
    name = packet(call.op).split(".")[1]
    if op_class == "generated":
        return Work(call, op_class, CallVariant(name), (_log2(call.bytes),), call.bytes, 0, "inductor")
    moved = _moved_bytes(call, name, op_class)
    pattern, sizes = _memory_pattern(call, name, op_class)
    dtypes = call.inputs[0].dtype if op_class == "optimizer" else _dtypes(call)
    kernel = "sum" if name == "mean" else name  # the same kernel, with a factor at its end
    variant = CallVariant(kernel, dtypes, pattern)
    backend = "triton" if op_class == "fused" or name in OWN_OPTIMIZER else "torch"
    return Work(call, op_class, variant, (_log2(moved), *sizes), moved, 0, backend)


def _memory_pattern(call: Call, name: str, op_class: str) -> tuple[str, tuple[float, ...]]:
    """Returns (the memory access pattern, log2 of the sizes that the time depends on besides the bytes moved)."""
    match op_class:
        case "pointwise" | "copy":
            return _walk(call)
        case "cat":
            pattern, sizes = _walk(Call(call.op, call.inputs[:1], call.inputs[:1]))
            return ("rows" if _is_vectorized(call) else pattern + " uneven" * _is_uneven(call)), sizes
        case "reduction":
            return _reduction(call, name)
        case "optimizer":
            lists = operand_lists(call)
            return "", (_log2(len(lists[0]) if lists else 1),)
        case "fused":
            return "", (_log2(call.inputs[0].shape[-1]),)  # per-row vectors end in the number of rows
        case "linalg":
            *batch, rows, columns = (1, 1, *call.inputs[0].shape)
            return "", (_log2(min(rows, columns)), _log2(prod(batch)))
    if call.op.startswith("bnb."):
        return "", ()  # blocks of numbers, whatever the shape
    innermost = _log2(max((o.shape[-1] for o in (*call.inputs, *call.outputs) if o.shape), default=1))
    if name == "embedding_dense_backward":
        n_indices = call.inputs[1].numel
        return "few" if n_indices <= _FEW_INDICES else "sorted", (innermost, _log2(n_indices))
    if name in ("embedding", "index_select") and (n_indices := call.inputs[1].numel) <= _IN_TURN:
        return "in turn", (innermost, _log2(n_indices))
    return "", (innermost,)


def _is_vectorized(call: Call) -> bool:
    """Whether tensors are put together by a kernel that reads 16 bytes at a time: where each is contiguous, of one
    dtype, and makes up whole multiples of them in a row of the result. Large ones are put together at 4 TB/s so on an
    H200, else at 1 or 2 (aten/src/ATen/native/cuda/Shape.cu)."""
    arguments = json.loads(call.args)
    along = arguments[1] if len(arguments) > 1 else 0
    return len({operand.dtype for operand in call.inputs}) == 1 and all(
        operand.is_contiguous
        and prod(operand.shape[along % max(len(operand.shape), 1) :]) * DTYPE_BYTES[operand.dtype] % 16 == 0
        for operand in call.inputs
    )


def _is_uneven(call: Call) -> bool:
    """Whether one of these tensors, of one floating-point dtype, has more than all others. The kernel gives each as
    many threads, of which most then have nothing to do: a row is added to a large cache of 16-bit numbers at 0.65 TB/s,
    halves make up a whole at 1."""
    dtypes, sizes = {operand.dtype for operand in call.inputs}, [operand.numel for operand in call.inputs]
    is_one = len(dtypes) == 1 and dtypes < {"bf16", "fp16", "fp32"}
    return is_one and len(sizes) > 1 and 2 * max(sizes) > sum(sizes)


# Calls that multiply matrices but are not one product: described by the products they amount to. 2 FLOPs per FMA.


def _describe_convolution(call: Call) -> Work:
    """Describes a convolution of [n, c, ...] with weights [o, c / groups, ...] by its sizes.

    Each result sums c / groups x window elements; the backward does so once for the gradient of the input and once for
    that of the weights. A transposed one is the gradient of the input of another, and that gradient its forward.
    """
    arguments = json.loads(call.args)
    is_backward = _is_backward(call)
    data, weight = _arguments(call, 1, 2) if is_backward else _arguments(call, 0, 1)
    result = _arguments(call, 0)[0] if is_backward else call.outputs[0]
    strides, is_transposed, groups = (arguments[i + is_backward] for i in (3, 6, 8))
    wanted = tuple(map(bool, arguments[10])) if is_backward else ()
    has_bias = wanted[2] if is_backward else arguments[2] is not None
    direction = {(): "fwd", (True, False): "dgrad", (False, True): "wgrad"}.get(wanted[:2], "bwd")
    layout = "nchw" if data.is_contiguous else "nhwc"
    if is_transposed:
        data, result = result, data
        direction = {"fwd": "dgrad", "dgrad": "fwd"}.get(direction, direction)
    (images, channels, *sides), (_, results, *result_sides) = data.shape, result.shape
    places, taps = prod(result_sides), prod(weight.shape[2:])
    form = _form_of_convolution(channels, results, groups, taps, prod(strides), prod(sides), layout)
    rank = "" if len(sides) == 2 else f"-{len(sides)}d"
    sizes = tuple(map(_log2, (images, channels, results, prod(sides), places, taps, groups)))
    flops = 2 * images * places * results * channels // groups * taps * (sum(wanted[:2]) if is_backward else 1)
    variant = ConvVariant(direction, data.dtype, layout, form + rank)
    return Work(call, "conv", variant, (*sizes, float(has_bias)), call.bytes, flops)


def _form_of_convolution(
    channels: int, results: int, groups: int, taps: int, stride: int, places: int, layout: str
) -> str:
    """The form by which libraries choose among their kernels (`ConvVariant`)."""
    if groups > 1:
        return "depthwise" if groups == channels else "grouped"
    is_few = bool(channels % 8 or results % 8)
    if places == taps == 1:
        return "pooled-few" if is_few else "pooled"
    if is_few:
        return "few"
    if taps != 1 or stride != 1:
        return "dense"
    return "unaligned" if layout == "nchw" and places % 8 else "point"


def _describe_packed_gemm(call: Call) -> Work:
    """Describes rows [m, k] times weights of 4 bits, which the kernel unpacks as it goes."""
    rows = call.inputs[0]
    (m, k), n = rows.shape, call.outputs[0].shape[1]
    variant = CallVariant(packet(call.op).split(".")[1], _dtypes(call), f"g{json.loads(call.args)[2]}")
    return Work(call, "gemm", variant, (_log2(call.bytes), _log2(m), _log2(n), _log2(k)), call.bytes, 2 * m * n * k)


def _describe_gemm(call: Call) -> Work:
    """Describes a product that is not of two matrices of one dtype: of packed weights or of groups, whose rows are
    taken to be shared evenly among them."""
    if packet(call.op) == "aten._weight_int4pack_mm":
        return _describe_packed_gemm(call)
    a, b = _arguments(call, 0, 1)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    groups = next((o.shape[0] for o in (a, b) if len(o.shape) == 3), call.outputs[0].shape[0])
    each: tuple[float, ...] = (m / groups, n, k)
    if len(a.shape) == len(b.shape):
        each = (m, n, k / groups)
    elif len(a.shape) == 3:
        each = (m, n / groups, k)
    sizes = tuple(_log2(size) for size in (*each, groups))
    variant = GemmVariant(layout_of(a, b), a.dtype, "grouped")
    return Work(call, "gemm", variant, sizes, call.bytes, 2 * m * n * k)


def _describe_attention(call: Call) -> Work:
    """Describes attention in which keys and queries differ in number: every pair counts. Of more queries than one it is
    as that of so many fewer heads, of as many queries as keys, as it has fewer tiles of scores."""
    is_backward = _is_backward(call)
    query, key, value = _arguments(call, is_backward, 1 + is_backward, 2 + is_backward)
    own, values = query.shape[-1], value.shape[-1]
    direction = "bwd" if is_backward else "fwd"
    flops = 2 * prod(query.shape[:-1]) * key.shape[-2] * columns_of_products(direction, own, values)
    heads, group, keys = prod(query.shape[:-2]), _log2(query.shape[1] / key.shape[1]), key.shape[-2]
    value_dim = values if values != own else 0
    if query.shape[-2] == 1:  # of one token: it reads the cache, which no other attention's time says
        is_masked = len(_arguments(call, *range(3, len(tensor_places(call.args))))) > 0
        decoding = CallVariant("decode", query.dtype, f"d{query.shape[-1]}{'-masked' * is_masked}")
        sizes = _log2(call.bytes), log2(heads), group, _log2(keys) / 2
        return Work(call, "attention", decoding, sizes, call.bytes, flops)
    fewer = ceil(query.shape[-2] / TILE) / max(ceil(keys / TILE), 1)
    features = _log2(heads * fewer), group, _log2(keys)
    alike = attention_of(call)
    variant = AttentionVariant(
        direction, False, query.dtype, own, value_dim, is_masked=alike is not None and alike.mask
    )
    return Work(call, "attention", variant, features, call.bytes, flops, "sdpa")


def _describe_recurrent(call: Call) -> Work:
    """Describes a recurrent network on an input of [places, rows, size] by its steps in sequence, rows and hidden size.

    Each place of each row is multiplied by every weight matrix of every layer and direction; in the backward once for
    the gradients of states and layers' inputs, of which the network's own may not be wanted, and once for the weights.
    """
    name = packet(call.op).split(".")[1]
    arguments = json.loads(call.args)
    first, count = arguments[1]["ts"]
    weights = call.inputs[first : first + count]
    after = 4 * _is_backward(call)  # the backward takes four operands more before these
    mode, hidden, _, layers, is_batch_first, *_ = arguments[6 + after :]
    directions = 1 + bool(arguments[13 + after])
    data = call.inputs[0]
    places, rows = (data.shape[1], data.shape[0]) if is_batch_first else data.shape[:2]
    per_place = sum(weight.numel for weight in weights if len(weight.shape) == 2)
    if after:
        of_input = sum(weight.numel for weight in weights[: arguments[2] * directions : arguments[2]])
        wants_input, *_, wants_weights = arguments[21]
        per_place = per_place * (1 + bool(wants_weights)) - of_input * (not wants_input)
    variant = CallVariant(name, data.dtype, ("relu", "tanh", "lstm", "gru")[mode])
    steps = places * layers * directions
    return Work(
        call,
        "rnn",
        variant,
        (_log2(steps), _log2(rows), _log2(hidden)),
        call.bytes,
        2 * data.numel // data.shape[-1] * per_place,
    )


_PRODUCTS = {
    "conv": _describe_convolution, "gemm": _describe_gemm, "attention": _describe_attention,
    "rnn": _describe_recurrent,
}  # fmt: skip


def _arguments(call: Call, *places: int) -> list[Operand]:
    """Returns the tensors at these places of the call's arguments."""
    found = tensor_places(call.args)
    return [call.inputs[position] for i in places if (position := found[i]) is not None]


def _is_backward(call: Call) -> bool:
    return packet(call.op).endswith("_backward")


def _call_class(call: Call) -> str:
    """Returns the class of a call. One that its name does not determine is element-wise where all its results have the
    shape that its inputs broadcast to."""
    if found := class_of_call(call.op, default=""):
        return found
    outputs = [*call.outputs, *(call.inputs[i] for i in call.written)]
    shapes = {o.shape for o in outputs}
    return "pointwise" if len(shapes) == 1 and _broadcasts(call.inputs, next(iter(shapes))) else "other"


def _broadcasts(inputs: Sequence[Operand], shape: tuple[int, ...]) -> bool:
    return all(
        len(o.shape) <= len(shape)
        and all(size in (1, target) for size, target in zip(reversed(o.shape), reversed(shape), strict=False))
        for o in inputs
    )


def _dtypes(call: Call) -> str:
    sources = [o.dtype for o in call.inputs if o.shape]
    if packet(call.op) == "aten.copy_":
        sources = sources[1:]
    results = [o.dtype for o in call.outputs] or [call.inputs[i].dtype for i in call.written]
    sources, results = sources[:4], results[:3]
    return f"{'+'.join(sources)}>{'+'.join(results)}"


def _moved_bytes(call: Call, name: str, op_class: str) -> int:
    """Counts the bytes that the kernel has to move, each operand once; of a lookup table only the rows read."""
    written = sum(o.bytes for o in call.outputs) + sum(call.inputs[i].bytes for i in call.written)
    if op_class == "fill":
        return written
    if name == "copy_":
        return written + call.inputs[1].bytes
    if name == "index_copy_":  # of what it writes to, the places of its source
        return sum(o.bytes for o in call.inputs[1:]) + call.inputs[-1].bytes
    if name in ("embedding", "index", "index_select"):
        return 2 * written + sum(o.bytes for o in call.inputs[1:])
    if name == "nll_loss_forward":
        rows = call.inputs[0].shape[0]
        return rows * (32 + DTYPE_BYTES["int64"])  # per row one sector (32 bytes) and one label
    if name == "nll_loss_backward":
        return written
    if name.startswith("_fused_adam"):  # gradients are written only where they are unscaled, whatever the schema says
        first, count = json.loads(call.args)[1]["ts"]
        written -= sum(call.inputs[i].bytes for i in call.written if first <= i < first + count)
    return written + sum(o.bytes for o in call.inputs)


def _walk(call: Call) -> tuple[str, tuple[float]]:
    """Returns (the relative memory order of the operands, log2 of the innermost run).

    Dimensions that can be traversed as one are merged and lettered from the output's slowest to its fastest; each
    operand is the letters in the order of its own strides, broadcast ones left out. "a" for all: one flat pass.
    "ab,b>ab": a row added to every row. "~": the innermost elements are not adjacent. "0": one number in the device's
    memory, which every element reads: such kernels are not vectorized (bf16 divided by one at 1.2 TB/s on an H200, by
    one of Python's at 4).
    """
    results = list(call.outputs) or [call.inputs[i] for i in call.written]
    if not results:
        return "", (0.0,)
    out = max(results, key=lambda o: o.numel)
    sources = [
        o for i, o in enumerate(call.inputs) if o.shape and not (i in call.written and packet(call.op) == "aten.copy_")
    ]
    operands = [*sources, out]
    strides = [_broadcast_strides(o, out.shape) for o in operands]
    dims = [d for d in range(len(out.shape)) if out.shape[d] != 1]
    dims.sort(key=lambda d: -out.stride[d])
    merged: list[tuple[int, tuple[int, ...]]] = []  # (size, strides of all operands)
    for d in dims:
        size, steps = out.shape[d], tuple(s[d] for s in strides)
        if merged and all(outer == step * size for outer, step in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    names = []
    for i in range(len(operands)):
        own = sorted(
            ((steps[i], chr(ord("a") + j)) for j, (_, steps) in enumerate(merged) if steps[i] != 0), reverse=True
        )
        names.append("".join(letter for _, letter in own) + ("~" if own and own[-1][0] != 1 else "") or "0")
    if out.shape:
        names[-1:-1] = ["0"] * sum(not operand.shape for operand in call.inputs)
    return f"{','.join(names[:-1])}>{names[-1]}", (_log2(merged[-1][0] if merged else 1),)


def _broadcast_strides(operand: Operand, shape: tuple[int, ...]) -> tuple[int, ...]:
    missing = len(shape) - len(operand.shape)
    if missing < 0:
        return (0,) * len(shape)
    own = tuple(0 if size == 1 else step for size, step in zip(operand.shape, operand.stride, strict=True))
    return (0,) * missing + own


def _reduction(call: Call, name: str) -> tuple[str, tuple[float, ...]]:
    """Returns (which dimensions are reduced: "row", "col", "all" or "mix", "~" behind it where an operand is not
    contiguous; log2 of the elements per result and of the number of results, and for a batch norm over planes log2 of a
    plane's size)."""
    source = call.inputs[0]
    arguments: list[Any] = json.loads(call.args)
    rank = len(source.shape)
    dims = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], (list, int)) else []
    if "layer_norm" in name:  # its argument is the normalized shape, not the dimensions
        shape = arguments[2 if name.endswith("_backward") else 1]
        dims = list(range(rank - len(shape), rank))
    elif "batch_norm" in name:  # all dimensions but the channels
        dims = [d for d in range(rank) if d != 1]
    reduced = {d % max(rank, 1) for d in (dims if isinstance(dims, list) else [dims])} & set(range(rank))
    reduced = reduced or set(range(rank))
    count = prod(source.shape[d] for d in reduced)
    if len(reduced) == rank:
        kind = "all"
    elif reduced == set(range(rank - len(reduced), rank)):
        kind = "row"
    elif reduced == set(range(len(reduced))):
        kind = "col"
    else:
        kind = "mix"
    sizes: tuple[float, ...] = (_log2(count), _log2(source.numel // max(count, 1)))
    pattern = kind + ("" if source.is_contiguous else "~")
    if name == "native_layer_norm_backward":
        is_parted = source.numel // max(count, 1) > _PARTED_ROWS and count < _PARTED_COLUMNS
        is_copied = not all(operand.is_contiguous for operand in call.inputs[:2])  # the normalized input too
        pattern = kind + " parted" * is_parted + "~" * is_copied
    if "batch_norm" in name and pattern == "mix":
        sizes = (*sizes, _log2(prod(source.shape[2:])))
    return pattern, sizes
