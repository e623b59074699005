"""Reduces a training step to its forward, as inference on a prompt runs it: no loss, nothing kept for a backward."""

from __future__ import annotations

from dataclasses import replace

from flopcast.roofline.stream.ops.op_stream import Op, Stream, packet

# Memory that only training needs.
_TRAINING = ("gradient", "state")


def forward_only(stream: Stream) -> Stream:
    """Returns the stream's forward up to the last product, the logits; each activation is freed after its last use.

    A model that is asked for logits and no loss runs exactly this. Autocast's cast weights live to the end, as they do
    in such a run. Of several micro-batches the first is taken.
    """
    ops: list[Op] = []
    for op in stream.ops:
        if op.phase != "forward":
            break
        ops.append(op)
    logits = max((i for i, op in enumerate(ops) if packet(op.name) in _PRODUCTS), default=len(ops) - 1)
    while logits + 1 < len(ops) and ops[logits + 1].kind == "view" and ops[logits + 1].module:
        logits += 1  # the product's result, reshaped
    ops = ops[: logits + 1]
    last: dict[int, int] = {}
    for i, op in enumerate(ops):
        for index in (*op.inputs, *op.outputs):
            last[stream.tensors[index].storage] = i
    kept = _cast_weights(stream, ops)
    freed: dict[int, list[int]] = {}
    for storage, i in last.items():
        if stream.storages[storage].kind == "activation" and storage not in kept and i + 1 < len(ops):
            freed.setdefault(i + 1, []).append(storage)
    storages = tuple(storage._replace(bytes=0) if storage.kind in _TRAINING else storage for storage in stream.storages)
    return replace(
        stream,
        ops=tuple(op._replace(freed=tuple(freed.get(i, ()))) for i, op in enumerate(ops)),
        storages=storages,
        repeats=(),
        meta={**stream.meta, "forward_only": True},
    )


_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")


def _cast_weights(stream: Stream, ops: list[Op]) -> set[int]:
    """Finds the storages of weights that autocast has cast, which it keeps until its context ends."""
    found = set()
    for op in ops:
        if packet(op.name) == "aten._to_copy" and op.inputs and op.outputs:
            source = stream.storages[stream.tensors[op.inputs[0]].storage]
            operand = stream.tensors[op.inputs[0]].operand
            if source.kind == "parameter" and len(operand.shape) >= 2:
                found.add(stream.tensors[op.outputs[0]].storage)
    return found
