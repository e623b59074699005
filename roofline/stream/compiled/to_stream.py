"""The op stream of a compiled step: its graphs' launches as the forward and the backward, the optimizer as it is.

`torch.compile(model)` leaves the optimizer eager, so that its calls, parameters and states are those of the eager
step's stream. A graph's inputs are matched to that stream's parameters, buffers and inputs, and the gradients that
backward graphs return to its gradients, by their bytes: which of several equal ones is taken changes no time. From the
second micro-batch on, autograd adds what a backward graph returns to the gradients, one by one.

Where graphs are captured as CUDA graphs, they read fixed memory, as torch/_inductor/cudagraph_trees.py has it: what is
neither a parameter or buffer nor made by another captured graph is copied, at every replay, to where the capture found
it, in memory that the graph takes again once it has read the copy. So is a gradient that autograd makes, as the zeros
for logits that only the loss read, which autograd holds until the graph is done (input_buffer.cpp), captured or not.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from flopcast.errors import DataError
from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.compiled.generated_kernel import kernel_of_launch
from flopcast.roofline.stream.compiled.launches import Graph, Launch, storage_bytes
from flopcast.roofline.stream.compiled.layers import Stretch
from flopcast.roofline.stream.ops.op_stream import Op, Storage, Stream, TensorRef

MIDDLE = 1  # the layer that stands for several, in an eager stream of three
_TANGENTS = "tangents_"  # the backward's inputs that are gradients of the forward's results
_BYTES = "uint8"


def to_stream(
    graphs: Sequence[Graph], eager: Stream, stretches: Mapping[str, Sequence[Stretch]] | None = None,
    waited_after: Sequence[int] = (),
) -> Stream:  # fmt: skip
    """The stream of a step whose model was compiled into `graphs`, given in the order in which a step calls them, one
    as often as it is called. `eager`: the same step's eager stream, with as many micro-batches. `stretches`: by a
    graph's label, its launches that stand for those of several layers (`layers.Layered.stretches`). `waited_after`: of
    each read of a value from the GPU between graphs, how many of `graphs` were called before it.

    Its meta has `mode`, `repeated` (`ops.op_stream.Meta`) and `graphs`: of each call of a graph its label and the
    numbers of its first and its last op. Raises DataError where a backward graph has no forward of its number."""
    return _Conversion(eager, stretches or {}, waited_after).run(graphs)


class _Conversion:
    def __init__(self, eager: Stream, stretches: Mapping[str, Sequence[Stretch]], waited_after: Sequence[int]) -> None:
        self.eager = eager
        self.waited_after = waited_after
        self.stretches = stretches
        self.micro_batches = int(eager.meta.get("accumulate", 1))
        self.is_first = True  # of the micro-batches
        self.repeated: list[tuple[int, int, int]] = []
        self.called: list[tuple[str, int, int]] = []
        self.storages = list(eager.storages)
        self.tensors = list(eager.tensors)
        self.ops: list[Op] = []
        # by a graph's number: what its forward keeps for its backward, of each call that the backward has yet to follow
        self.saved: dict[str, list[list[int | None]]] = defaultdict(list)
        self.freed: list[int] = []  # storages that the next op's memory may take
        self._known: dict[TensorRef, int] = {}
        self._existing = _by_bytes(eager, ("parameter", "buffer", "input"))
        self._gradients = _by_bytes(eager, ("gradient",))
        # by the place of a call among a micro-batch's: what it takes and returns that exists in all of them
        self._taken: dict[tuple[int, str], int] = {}
        self._returned: dict[int, list[tuple[str, int]]] = {}
        # what graphs return to the code between them, which hands it to the next graph: results, then their gradients
        self._handed: dict[int, deque[int]] = defaultdict(deque)
        self._held: set[int] = set()  # results that the code between graphs holds while the forward runs
        self._operands: dict[int, Operand] = {}

    def run(self, graphs: Sequence[Graph]) -> Stream:
        for number in range(self.micro_batches):
            self.is_first = number == 0
            self._micro_batch(graphs)
        first, *others = [op for op in self.eager.ops if op.phase == "optimizer"]
        self.ops += [first._replace(freed=tuple(dict.fromkeys((*self.freed, *first.freed)))), *others]
        meta = {**self.eager.meta, "mode": "compile", "repeated": self.repeated, "graphs": self.called}
        return Stream(
            tuple(self.ops), tuple(self.tensors), tuple(self.storages), self.eager.n_params, self.eager.depth, meta
        )

    def _micro_batch(self, graphs: Sequence[Graph]) -> None:
        backward = {_number(graph): graph for graph in graphs if graph.is_backward}
        n_forward = sum(not graph.is_backward for graph in graphs)
        for place, graph in enumerate(graphs):
            if not graph.is_backward:
                self._wait("forward", place)
                self._forward(place, graph, backward.get(_number(graph)))
        self._wait("forward", n_forward)
        if self.micro_batches > 1:
            self._divide("forward")
        # the caller keeps the loss alone
        kept = {storage for calls in self.saved.values() for saved in calls for storage in saved}
        self.freed += sorted(self._held - kept)
        self._held.clear()
        self._handed.clear()
        if self.micro_batches > 1:
            self._divide("backward")
        for place, graph in enumerate(graphs):
            if graph.is_backward:
                if place > n_forward:  # those between forward and backward are the forward's
                    self._wait("backward", place)
                self._backward(place, graph)
        self._handed.clear()

    def _wait(self, phase: str, calls: int) -> None:
        """The reads of values from the GPU after so many calls of graphs, for each of which the host waits."""
        for _ in range(self.waited_after.count(calls)):
            number = Operand((), (), "bool")
            value = self._new(number)
            self._append("aten._local_scalar_dense.default", phase, [(number, value)], [])
            self.ops[-1] = self.ops[-1]._replace(kind="sync")
            self.freed.append(value)

    def _divide(self, phase: str) -> None:
        """The loss, or its gradient, by the number of micro-batches."""
        number = Operand((), (), "fp32")
        before, after = self._new(number), self._new(number)
        self._append("aten.div.Tensor", phase, [(number, before)], [(number, after)], '[{"t":0},1]')
        self.freed += [before, after]

    def _forward(self, place: int, graph: Graph, backward: Graph | None) -> None:
        places: dict[str, int] = {}
        for name, operand in graph.inputs:
            handed = self._handed[storage_bytes(operand)]
            if handed:
                places[name] = handed[0]
            else:
                key = place, name
                if key not in self._taken:
                    self._taken[key] = self._take(self._existing, operand)
                places[name] = self._taken[key]
                if graph.captured and self.storages[places[name]].kind == "input":
                    places[name] = self._copied("forward", operand, places[name])
        self._launches(graph, "forward", places)
        outputs = [places.get(name) for name in graph.outputs]
        n_results = len(outputs) - (len(_saved_inputs(backward)) if backward is not None else 0)
        self.saved[_number(graph)].append(outputs[n_results:])
        for storage in outputs[:n_results]:
            if storage is not None:
                self._held.add(storage)
                self._handed[self.storages[storage].bytes].append(storage)

    def _copied(self, phase: str, operand: Operand, source: int) -> int:
        """Copies an input to where a captured graph reads it; the storage there."""
        target = self._new(operand)
        tensors = [(operand, target), (operand, source)]
        self._append("aten.copy_.default", phase, tensors, [], '[{"t":0},{"t":1}]', (0,))
        return target

    def _backward(self, place: int, graph: Graph) -> None:
        if not self.saved[_number(graph)]:
            raise DataError(f"graph {graph.label} has no forward graph")
        saved = self.saved[_number(graph)].pop()
        places: dict[str, int] = {}
        made_by_autograd: list[int] = []  # which holds them until the graph is done
        for (name, operand), storage in zip(_saved_inputs(graph), saved, strict=True):
            places[name] = self._new(operand) if storage is None else storage
        for name, operand in graph.inputs:
            if not name.startswith(_TANGENTS):
                continue
            handed = self._handed[storage_bytes(operand)]
            if handed:
                places[name] = handed.popleft()
            else:  # autograd makes them: ones of the loss, zeros of what it does not depend on
                places[name] = self._new(operand)
                self._append("aten.full.default", "backward", [], [(operand, places[name])])
                made_by_autograd.append(places[name])
                if graph.captured:
                    places[name] = self._copied("backward", operand, places[name])
        self._held.update(made_by_autograd)
        if place not in self._returned:
            self._returned[place] = list(self._results(graph))
        gradients = self._returned[place]
        cloned = self._cloned(graph, gradients) if self.is_first else []
        own = {storage for _, storage, _ in cloned}
        for name, storage in gradients:
            is_taken = self.is_first and storage not in own
            places[name] = storage if is_taken else self._storage(self.storages[storage].bytes)
        self._launches(graph, "backward", places)
        for name, storage, returned_as in cloned:
            made = (returned_as, places[name])
            self._append("aten.clone.default", "backward", [made], [(self._operand_of(storage), storage)], '[{"t":0}]')
            self.freed.append(places[name])
        self._held.difference_update(made_by_autograd)
        self.freed += made_by_autograd
        if not self.is_first:
            self._accumulate(graph, [(storage, places[name]) for name, storage in gradients])
        returned = {name for name, _ in gradients}
        for name in graph.outputs:
            result = places.get(name)
            if result is not None and name not in returned and self.storages[result].kind == "activation":
                self._handed[self.storages[result].bytes].append(result)

    def _results(self, graph: Graph) -> Iterator[tuple[str, int]]:
        """The gradients that a backward graph returns, by buffer, as storages of the eager stream."""
        sizes = {buffer.name: buffer.bytes for buffer in graph.buffers if not buffer.is_input}
        for name in dict.fromkeys(graph.outputs):
            if name in sizes and self._gradients[sizes[name]]:
                yield name, self._gradients[sizes[name]].popleft()

    def _cloned(self, graph: Graph, gradients: Sequence[tuple[str, int]]) -> list[tuple[str, int, Operand]]:
        """The gradients that autograd copies, and as what they are returned: those whose elements lie in another order
        than the parameter's, as of convolutions that run channels last."""
        made = {name: tensor for name, tensor in zip(graph.outputs, graph.returned, strict=False) if tensor is not None}
        return [
            (name, storage, made[name])
            for name, storage in gradients
            if name in made and not _lies_as(made[name], self._operand_of(storage))
        ]

    def _accumulate(self, graph: Graph, pairs: Sequence[tuple[int, int]]) -> None:
        """Adds what a graph returned to the gradients: of pairs the second to the first. Those of the layer that stands
        for several follow one another."""
        times = max((stretch.times for stretch in self.stretches.get(graph.label, ())), default=None)
        first, stop = len(self.ops), len(self.ops)
        for gradient, more in sorted(pairs, key=lambda pair: self.storages[pair[0]].layer != MIDDLE):
            operand = self._operand_of(gradient)
            self._append(
                "aten.add_.Tensor", "backward", [(operand, gradient), (operand, more)], [], '[{"t":0},{"t":1}]', (0,)
            )
            self.freed.append(more)
            if self.storages[gradient].layer == MIDDLE:
                stop = len(self.ops)
        if times is not None and stop > first:
            self.repeated.append((first, stop, times))

    def _operand_of(self, storage: int) -> Operand:
        """A storage of the eager stream as a tensor: the largest that it holds."""
        if not self._operands:
            for tensor in sorted(self.eager.tensors, key=lambda tensor: tensor.operand.numel):
                self._operands[tensor.storage] = tensor.operand
        return self._operands[storage]

    def _launches(self, graph: Graph, phase: str, places: dict[str, int]) -> None:
        """Appends a graph's launches. `places`: storages by buffer, to which the graph's own are added."""
        dying: dict[int, list[str]] = defaultdict(list)
        own = {buffer.name: buffer for buffer in graph.buffers}
        for buffer in graph.buffers:
            if buffer.died is not None:
                dying[buffer.died].append(buffer.name)
        first = len(self.ops)  # a launch is an op
        for stretch in self.stretches.get(graph.label, ()):
            self.repeated.append((first + stretch.start, first + stretch.stop, stretch.times))
        for number, launch in enumerate(graph.launches):
            self._drop(dying[number], places)
            for touch in launch.touches:
                if touch.buffer not in places:
                    size = own[touch.buffer].bytes if touch.buffer in own else 0
                    places[touch.buffer] = self._storage(size)
            self._launch(launch, phase, places)
        self._drop(dying[len(graph.launches)], places)
        self.called.append((graph.label, first, len(self.ops) - 1))

    def _drop(self, names: Sequence[str], places: dict[str, int]) -> None:
        found = (places[name] for name in names if name in places)
        self.freed += [s for s in found if self.storages[s].kind == "activation" and s not in self._held]

    def _launch(self, launch: Launch, phase: str, places: dict[str, int]) -> None:
        buffers = [places[touch.buffer] for touch in launch.touches]
        if launch.is_generated:
            read = [(_bytes(touch.read), at) for touch, at in zip(launch.touches, buffers, strict=True) if touch.read]
            written = [
                (_bytes(touch.written), at) for touch, at in zip(launch.touches, buffers, strict=True) if touch.written
            ]
            kernel = kernel_of_launch(launch)
            self._append(kernel.op, phase, read, written, kernel.args)
            return
        name = launch.name if "." in launch.name else f"aten.{launch.name}"
        operands = list(zip(launch.operands, buffers, strict=False))
        results = list(zip(launch.results, buffers[len(operands) :], strict=False))
        self._append(f"{name}.default", phase, operands, results, launch.args)

    def _append(
        self,
        name: str,
        phase: str,
        operands: Sequence[tuple[Operand, int]],
        results: Sequence[tuple[Operand, int]],
        args: str = "[]",
        written: tuple[int, ...] = (),
    ) -> None:
        inputs, outputs = (
            tuple(self._tensor(operand, storage) for operand, storage in tensors) for tensors in (operands, results)
        )
        self.ops.append(Op(name, phase, inputs, outputs, written, args, freed=tuple(dict.fromkeys(self.freed))))
        self.freed.clear()

    # --- tensors and storages

    def _tensor(self, operand: Operand, storage: int) -> int:
        ref = TensorRef(operand, storage)
        if ref not in self._known:
            self._known[ref] = len(self.tensors)
            self.tensors.append(ref)
        return self._known[ref]

    def _storage(self, size: int) -> int:
        self.storages.append(Storage(size, "activation"))
        return len(self.storages) - 1

    def _new(self, operand: Operand) -> int:
        return self._storage(storage_bytes(operand))

    def _take(self, known: dict[int, deque[int]], operand: Operand) -> int:
        found = known[storage_bytes(operand)]
        return found.popleft() if found else self._new(operand)


def _number(graph: Graph) -> str:
    """What a forward and its backward share: "0" of "0_forward"."""
    return graph.label.rpartition("_")[0]


def _saved_inputs(graph: Graph) -> list[tuple[str, Operand]]:
    return [(name, operand) for name, operand in graph.inputs if not name.startswith(_TANGENTS)]


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


def _bytes(count: int) -> Operand:
    return Operand((count,), (1,), _BYTES)
