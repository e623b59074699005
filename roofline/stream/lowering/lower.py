"""Lowers ATen calls to device work: which kind of kernel a call is, and the sizes that its time depends on.

`describe` gives for a shape its class, its variant (calls of one variant share a curve: same operation, dtypes and
memory pattern) and its features (log2 of the sizes along that curve). `lower` turns an op of a stream into a shape.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod

from flopcast.errors import UsageError
from flopcast.kernels.shapes import DTYPE_BYTES, Attention, Call, Gemm, Operand, Shape
from flopcast.roofline.stream.lowering.attention_calls import ATTENTION, is_given
from flopcast.roofline.stream.lowering.classes import MULTI_TENSOR
from flopcast.roofline.stream.lowering.describe import layout_of, operand_lists
from flopcast.roofline.stream.lowering.fused import FUSED_LAUNCHES, fused_call, is_fused
from flopcast.roofline.stream.ops.collectives import is_collective
from flopcast.roofline.stream.ops.op_stream import Op, Stream, packet, tensor_places

# Calls that allocate memory or make an alias: they launch no kernel.
_ALLOCATING = "empty empty_like empty_strided new_empty new_empty_strided set_ resize_ _unsafe_view _reshape_alias"
_IN_PLACE_VIEWS = "as_strided_ detach_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_"
_NO_KERNEL = {
    *_ALLOCATING.split(), *_IN_PLACE_VIEWS.split(), "detach", "lift", "lift_fresh", "alias", "is_same_size",
    "as_strided",
}  # fmt: skip


# The copies by which FSDP makes one buffer of a layer's shards, and shards of a buffer. Each is priced as the flat copy
# from one dtype to another, of which every profile has a curve, that moves as many bytes: on an H200 buffers of 150 MB
# to 2 GB were copied in 0.9 to 1.2 times that.
_SHARDED = {
    "aten._foreach_copy_": ("fp32", "bf16"), "fsdp.all_gather_copy_in": ("fp32", "bf16"),
    "fsdp.split_with_sizes_copy": ("fp32", "bf16"), "fsdp.chunk_cat": ("bf16", "fp32"),
}  # fmt: skip

# Matrix products: the places of the two factors among the arguments.
_GEMMS = {
    "aten.mm": (0, 1), "aten.addmm": (1, 2), "aten.addmm_": (1, 2), "aten.bmm": (0, 1), "aten.baddbmm": (1, 2),
    "aten._scaled_mm": (0, 1),
}  # fmt: skip

# torch's multi-tensor kernels: one launch takes at most this many chunks of 65,536 elements
# (aten/src/ATen/native/cuda/MultiTensorApply.cuh), and at most this many tensors for each number of lists.
_CHUNK, _MAX_CHUNKS = 65536, 320
_MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


def lower(stream: Stream, op: Op) -> tuple[Shape, str] | None:
    """Returns (shape, backend) of what `op` runs on the device, None where it runs nothing.

    The backend "sdpa" stands for the one that torch picks on the device.
    """
    if op.kind in ("view", "host"):
        return None
    name = packet(op.name)
    if name.split(".")[1] in _NO_KERNEL or is_collective(name):
        return None
    if name in _SHARDED:
        return _flat_copy(stream, op, name), "torch"
    if name in _GEMMS:
        a, b = _operands(stream, op, _GEMMS[name])
        return _gemm(a, b, stream.meta.get("precision", "")), "torch"
    if name in ATTENTION and _is_square(stream, op, name):
        return _attention(stream, op, name), ATTENTION[name].backend
    call = stream.call(op)
    if name == "aten._grouped_mm" and (ranks := ranks_of_experts(stream)) > 1:
        call = _of_own_experts(call, ranks)
    if is_fused(name):
        return fused_call(call, int(stream.meta.get("accumulate", 1))), "triton"
    is_copied_to_itself = name == "aten.copy_" and len(op.inputs) == 1  # torch returns at once
    if not call.bytes or is_copied_to_itself:
        return None
    return call, "torch"


def ranks_of_experts(stream: Stream) -> int:
    """Returns among how many ranks a step divides its experts."""
    layout = stream.meta.get("parallel", {}).get("layout", "")
    return next((int(part[3:]) for part in layout.split(",") if part.startswith("ep=")), 1)


def _of_own_experts(call: Call, ranks: int) -> Call:
    """Returns a grouped product of the rows that come to a rank's own experts, their mean share. The call gets those
    of all experts, of which the kernel leaves out what lies behind the last group."""
    a, b, *rest = call.inputs
    of_weights = len(b.shape) == 2  # their gradient: summed over rows

    def own(operand: Operand, place: int) -> Operand:
        shape = list(operand.shape)
        shape[place] = max(1, shape[place] // ranks)
        return replace(operand, shape=tuple(shape))

    if of_weights:
        return replace(call, inputs=(own(a, -1), own(b, 0), *rest))
    return replace(call, inputs=(own(a, 0), b, *rest), outputs=tuple(own(out, 0) for out in call.outputs))


def _flat_copy(stream: Stream, op: Op, name: str) -> Call:
    """Returns the flat copy that moves as many bytes as one of FSDP's does."""
    inputs, outputs = ([stream.tensors[i].operand.bytes for i in places] for places in (op.inputs, op.outputs))
    # a gathered buffer is handed over whole, of which a shard is written; into others all is copied
    moved = 2 * outputs[0] if name == "fsdp.all_gather_copy_in" else sum(inputs)
    source, target = _SHARDED[name]
    count = max(1, moved // (DTYPE_BYTES[source] + DTYPE_BYTES[target]))
    a, b = (Operand((count,), (1,), dtype) for dtype in (source, target))
    return Call("aten._to_copy.default", (a,), (b,), '[{"t":0}]')


def _operands(stream: Stream, op: Op, places: Sequence[int]) -> list[Operand]:
    """Returns the tensors at these places of a call's arguments."""
    found = tensor_places(op.args)
    return [stream.tensors[op.inputs[position]].operand for i in places if (position := found[i]) is not None]


def launches(shape: Shape) -> int:
    """Counts the kernels a call launches on CUDA, by torch's own rules. Measured counts, where known, replace it."""
    if not isinstance(shape, Call):
        return 1
    name = packet(shape.op).split(".")[1]
    if name.startswith(MULTI_TENSOR):
        lists = operand_lists(shape)
        depth = max(1, len(lists) + (len(lists[0]) == len(shape.outputs) if lists and shape.outputs else 0))
        chunks = sum(ceil(operand.numel / _CHUNK) for operand in (lists[0] if lists else ()))
        return max(1, ceil(chunks / _MAX_CHUNKS), ceil(len(lists[0]) / _MAX_TENSORS[min(depth, 5)]) if lists else 1)
    if is_fused(packet(shape.op)):
        return FUSED_LAUNCHES[name]
    if name == "_grouped_mm":  # in bf16 one kernel and one that prepares its arguments, else one product per group
        return 2 if shape.inputs[0].dtype == "bf16" else max(1, shape.inputs[-1].numel)
    if name == "convolution_backward":  # one kernel for the input's gradient and one for the weights'
        return max(1, sum(map(bool, json.loads(shape.args)[10][:2])))
    return 1


def _gemm(a: Operand, b: Operand, precision: str) -> Gemm:
    dtype = "tf32" if a.dtype == "fp32" and precision == "tf32" else a.dtype
    m, k = a.shape[-2:]
    batch = prod(a.shape[:-2])
    return Gemm(m=m, n=b.shape[-1], k=k, dtype=dtype, layout=layout_of(a, b), batch=batch)


def _is_square(stream: Stream, op: Op, name: str) -> bool:
    """Whether an attention has as many keys as queries, four dimensions, and does not stand in for another kind."""
    query, key, _ = (operand.shape for operand in _query_key_and_value(stream, op, name))
    return len(query) == 4 and len(key) == 4 and query[2] == key[2]


def _query_key_and_value(stream: Stream, op: Op, name: str) -> list[Operand]:
    is_backward = name.endswith("_backward")  # its first operand is the gradient of the result
    return _operands(stream, op, (is_backward, 1 + is_backward, 2 + is_backward))


def _attention(stream: Stream, op: Op, name: str) -> Attention:
    query, key, value = _query_key_and_value(stream, op, name)
    arguments, places = json.loads(op.args), ATTENTION[name]

    if is_given(arguments, places.documents):
        raise UsageError(
            "attention of packed documents cannot be forecast: its time depends on their lengths, which are values in "
            "a tensor; leave position_ids and cu_seqlens out for a forecast of whole sequences, which take longer"
        )
    window = arguments[places.window] if is_given(arguments, places.window) and places.window is not None else 0
    batch, heads, seq, head_dim = query.shape
    return Attention(
        batch=batch,
        heads=heads,
        kv_heads=key.shape[1],
        seq=seq,
        head_dim=head_dim,
        causal=is_given(arguments, places.causal),
        direction="bwd" if name.endswith("_backward") else "fwd",
        dtype=query.dtype,
        mask=is_given(arguments, places.mask),
        dropout=is_given(arguments, places.dropout),
        window=window if window < seq else 0,
        value_dim=value.shape[-1] if value.shape[-1] != head_dim else 0,
    )
