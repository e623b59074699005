"""Which storages of the eager step's stream a compiled step's graphs take and return.

A graph's inputs are matched to that stream's parameters, buffers, inputs and cache of keys and values, and the
gradients that backward graphs return to its gradients, by their bytes: which of several equal ones is taken changes no
time. They are the same ones in every micro-batch. Where none is left, a parameter of the same shape that another graph
takes is meant: tied embeddings, of which one graph looks tokens up and another computes logits. What graphs hand to one
another has no place there, whatever its size: the bf16 logits of 1,024 tokens and their gradient have the bytes of an
fp32 embedding 512 wide.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, Sequence

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.compiled.launches import Graph, storage_bytes
from flopcast.roofline.stream.ops.op_stream import Stream


class EagerStorages:
    """A call of a graph is told by its place among a micro-batch's."""

    def __init__(self, eager: Stream) -> None:
        self._existing = _by_bytes(eager, ("parameter", "buffer", "input", "cache"))
        self._gradients = _by_bytes(eager, ("gradient",))
        self._parameters = {i for i, storage in enumerate(eager.storages) if storage.kind == "parameter"}
        self._taken: dict[tuple[int, str], int] = {}
        self._returned: dict[int, list[tuple[str, int]]] = {}
        self._operands = {
            tensor.storage: tensor.operand for tensor in sorted(eager.tensors, key=lambda tensor: tensor.operand.numel)
        }

    def taken(self, place: int, name: str, operand: Operand, new: Callable[[Operand], int]) -> int:
        """The storage that a graph reads as its input of this name; a `new` one where none is left of its size and no
        other graph takes a parameter of its shape."""
        key = place, name
        if key not in self._taken:
            found = self._existing[storage_bytes(operand)]
            shared = None if found else self._shared(place, operand)
            self._taken[key] = found.popleft() if found else new(operand) if shared is None else shared
        return self._taken[key]

    def _shared(self, place: int, operand: Operand) -> int | None:
        """The first parameter of this dtype and shape that graphs at other places take."""
        own = {storage for (other, _), storage in self._taken.items() if other == place}
        wanted = operand.dtype, operand.shape
        for storage in self._taken.values():
            held = self._operands.get(storage) if storage in self._parameters and storage not in own else None
            if held is not None and (held.dtype, held.shape) == wanted:
                return storage
        return None

    def gradients(self, place: int, graph: Graph, passed_on: Container[int]) -> list[tuple[str, int]]:
        """The gradients that a backward graph returns: buffers, and the storages that hold them after the backward.
        `passed_on`: the places among its results of those that are no parameter's, but go to another backward graph."""
        if place not in self._returned:
            self._returned[place] = list(self._results(graph, passed_on))
        return self._returned[place]

    def _results(self, graph: Graph, passed_on: Container[int]) -> Iterator[tuple[str, int]]:
        sizes = {buffer.name: buffer.bytes for buffer in graph.buffers if not buffer.is_input}
        own = (name for number, name in enumerate(graph.outputs) if number not in passed_on)
        for name in dict.fromkeys(own):
            if name in sizes and self._gradients[sizes[name]]:
                yield name, self._gradients[sizes[name]].popleft()

    def operand_of(self, storage: int) -> Operand:
        """A storage as a tensor: the largest that it holds."""
        return self._operands[storage]

    def relaid(self, graph: Graph, gradients: Sequence[tuple[str, int]]) -> list[tuple[str, int, Operand]]:
        """Those of a graph's gradients that autograd copies, and as what they are returned: their elements lie in
        another order than the parameter's, as of convolutions that run channels last."""
        made = {name: tensor for name, tensor in zip(graph.outputs, graph.returned, strict=False) if tensor is not None}
        return [
            (name, storage, made[name])
            for name, storage in gradients
            if name in made and not _lies_as(made[name], self.operand_of(storage))
        ]


def _by_bytes(stream: Stream, kinds: Sequence[str]) -> dict[int, deque[int]]:
    """Storages of these kinds in order, by their bytes."""
    found: dict[int, deque[int]] = defaultdict(deque)
    for index, storage in enumerate(stream.storages):
        if storage.kind in kinds:
            found[storage.bytes].append(index)
    return found


def _lies_as(tensor: Operand, other: Operand) -> bool:
    """Whether elements lie in the same order. What is not of one shape was matched by bytes alone, to another of its
    kind: a parameter's elements lie in rows."""
    if tensor.shape != other.shape:
        return tensor.is_contiguous
    strides = zip(tensor.shape, tensor.stride, other.stride, strict=True)
    return all(one == another for size, one, another in strides if size != 1)
