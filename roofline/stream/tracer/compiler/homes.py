"""Says of which layer the ops of a compiled model are, whose modules nobody can follow: dynamo compiles their calls.

In the forward an op that reads parameters is of their layer, one that reads none of the layer of the op before. In the
backward it is of the layer of the forward op whose gradient autograd computes, told by the numbers of its nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from flopcast.roofline.stream.ops.op_stream import Op
from flopcast.roofline.stream.tracer.recorder import Recorder

_NO_NODE = 2**63  # from here on autograd numbers what adds to a parameter's gradient, which follows what made it


def place_by_parameters(recorder: Recorder) -> None:
    """Sets the layers of a recorded step's forward and backward, and of what they make, where no op of its forward has
    one and none reads the parameters of two layers: in such a step the graphs are of no layer."""
    ops, storages = recorder.ops, recorder.storages
    forward = [op for op in ops if op.phase == "forward"]
    homes = [_homes(op, recorder) for op in forward]
    if any(op.layer is not None for op in forward) or any(len(home) > 1 for home in homes):
        return
    layers: list[int | None] = []
    for home in homes:
        layers.append(next(iter(home)) if home else layers[-1] if layers else None)
    first = iter(layers)
    nodes = [node for node, op in zip(recorder.nodes, ops, strict=True) if op.phase == "forward"]
    before: int | None = None
    for place, (op, node) in enumerate(zip(ops, recorder.nodes, strict=True)):
        if op.phase == "optimizer":
            continue
        before = next(first) if op.phase == "forward" else _of_node(node, nodes, layers, before)
        ops[place] = op._replace(layer=before)
        for made in op.outputs:
            storage = recorder.tensors[made].storage
            if storages[storage].kind == "activation" and storages[storage].layer is None and op.kind != "view":
                storages[storage] = storages[storage]._replace(layer=before)


def _homes(op: Op, recorder: Recorder) -> set[int | None]:
    """The layers of the parameters that an op reads."""
    read = (recorder.storages[recorder.tensors[i].storage] for i in op.inputs)
    return {storage.layer for storage in read if storage.kind == "parameter"}


def _of_node(node: int, nodes: Sequence[int], layers: Sequence[int | None], before: int | None) -> int | None:
    """The layer of the first forward op after whose beginning autograd's next node had a higher number."""
    if node >= _NO_NODE:
        return before
    place = bisect_right(nodes, node)
    return layers[place] if node >= 0 and place < len(layers) else None
