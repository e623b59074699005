"""What an op over lists of all layers' tensors becomes in a stream of more layers; whole streams are compared with
traces where they are traced."""

from __future__ import annotations

import json

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Op, Storage, Stream, TensorRef
from flopcast.roofline.stream.ops.to_depth import to_depth


def test_a_group_of_ranks_does_not_grow_with_the_list_that_is_sent_among_it() -> None:
    """A group is two numbers, and the list here is of two tensors, those of all layers but the first."""
    operand = Operand((4,), (1,), "fp32")
    layers = range(FOLDED_DEPTH)
    used = [Op("aten.relu_.default", "forward", (i,), (), layer=i, module=f"layers.{i}") for i in layers]
    args = json.dumps([{"ts": [0, 2]}, [0.5, 0.5], {"g": [2, 1]}])
    sent = Op("c10d.allreduce_.default", "optimizer", (1, 2), (), args=args)
    folded = Stream(
        (*used, sent),
        tuple(TensorRef(operand, i) for i in layers),
        tuple(Storage(16, "parameter", i) for i in layers),
        n_params=12,
        depth=FOLDED_DEPTH,
        meta={"layer_params": 4},
    )
    made = to_depth(folded, 5).ops[-1]
    assert len(made.inputs) == 4
    assert json.loads(made.args) == [{"ts": [0, 4]}, [0.5] * 4, {"g": [2, 1]}]
