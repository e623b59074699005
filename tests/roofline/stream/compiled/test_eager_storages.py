"""Which storages of the eager step the graphs of a compiled one take."""

from __future__ import annotations

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.compiled.eager_storages import EagerStorages
from flopcast.roofline.stream.ops.op_stream import Storage, Stream, TensorRef

EMBEDDING, WEIGHT = Operand((64, 8), (8, 1), "fp32"), Operand((8, 8), (8, 1), "fp32")
NEW = 99


def storages() -> EagerStorages:
    """Of a model with an embedding, tied to its output, and two weights of one shape."""
    operands = (EMBEDDING, WEIGHT, WEIGHT)
    return EagerStorages(Stream(
        ops=(), tensors=tuple(TensorRef(operand, place) for place, operand in enumerate(operands)),
        storages=tuple(Storage(4 * operand.numel, "parameter") for operand in operands), n_params=640, depth=1, meta={},
    ))  # fmt: skip


def new(operand: Operand) -> int:
    return NEW


def test_tied_embeddings_that_two_graphs_take_are_one_storage() -> None:
    """Of a checkpointed Qwen3-4B of two layers, whose graph breaks before its logits, they were counted twice: 18% of
    its memory."""
    found = storages()
    assert found.taken(0, "primals_1", EMBEDDING, new) == 0
    assert found.taken(2, "primals_2", EMBEDDING, new) == 0
    assert found.taken(2, "primals_2", EMBEDDING, new) == 0, "in the next micro-batch"


def test_one_graph_takes_no_storage_twice() -> None:
    found = storages()
    assert found.taken(0, "primals_1", EMBEDDING, new) == 0
    assert found.taken(0, "primals_2", EMBEDDING, new) == NEW


def test_another_shape_of_as_many_bytes_is_another_tensor() -> None:
    """Logits in bf16 have the bytes of an embedding in fp32."""
    found = storages()
    assert found.taken(0, "primals_1", EMBEDDING, new) == 0
    assert found.taken(1, "primals_1", Operand((128, 8), (8, 1), "bf16"), new) == NEW
    assert found.taken(1, "primals_2", Operand((8, 64), (64, 1), "fp32"), new) == NEW


def test_storages_that_are_left_come_first() -> None:
    found = storages()
    assert [found.taken(place, "primals_1", WEIGHT, new) for place in range(3)] == [1, 2, 1]
