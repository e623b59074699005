"""The op stream of a compiled step: its graphs' launches as the forward and the backward, the optimizer as it is.

`torch.compile(model)` leaves the optimizer eager, so that its calls, parameters and states are those of the eager
step's stream (`eager_storages`). From the second micro-batch on, autograd adds what a backward graph returns to the
gradients, one by one.

Where graphs are captured as CUDA graphs, they read fixed memory, as torch/_inductor/cudagraph_trees.py has it: what is
neither a parameter or buffer nor made by another captured graph is copied, at every replay, to where the capture found
it, in memory that the graph takes again once it has read the copy. So is a gradient that autograd makes, as the zeros
for logits that only the loss read, which autograd holds until the graph is done (input_buffer.cpp), captured or not.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from flopcast.errors import DataError
from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.compiled.eager_storages import EagerStorages
from flopcast.roofline.stream.compiled.launches import Graph, storage_bytes
from flopcast.roofline.stream.compiled.layers import Stretch
from flopcast.roofline.stream.compiled.op_writer import OpWriter
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_depth import BEGIN_CACHE

MIDDLE = 1  # the layer that stands for several, in an eager stream of three
Each = TypeVar("Each")
_TANGENTS = "tangents_"  # the backward's inputs that are gradients of the forward's results


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
        self.is_scaled = eager.meta.get("precision") == "autocast-fp16"
        self.is_first = True  # of the micro-batches
        self.written = OpWriter(eager)
        self.known = EagerStorages(eager)
        self.repeated: list[tuple[int, int, int]] = []
        self.called: list[tuple[str, int, int]] = []
        # by a graph's number: what its forward keeps for its backward, of each call that the backward has yet to follow
        self.saved: dict[str, list[list[int | None]]] = defaultdict(list)
        # what graphs return to the code between them, which hands it to the next graph: results, then their gradients,
        # by their bytes from the first element to the last: of padded rows fewer than those of their storage
        self._handed: dict[int, deque[int]] = defaultdict(deque)
        self._held: set[int] = set()  # results that the code between graphs holds while the forward runs
        # by a graph's number: the places among its forward's inputs of other graphs' results, whose gradients go
        # there; a backward graph returns one for each input of its forward, in order (torch/_functorch/_aot_autograd)
        self._passed_on: dict[str, frozenset[int]] = {}

    def run(self, graphs: Sequence[Graph]) -> Stream:
        self._before_the_model()
        for number in range(self.micro_batches):
            self.is_first = number == 0
            self._micro_batch(graphs)
        eager, written = self.eager, self.written
        own = [op for op in eager.ops if op.phase == "optimizer"]  # none of a call of inference
        if own:
            own[0] = own[0]._replace(freed=tuple(dict.fromkeys((*written.freed, *own[0].freed))))
        meta = {**eager.meta, "mode": "compile", "repeated": self.repeated, "graphs": self.called}
        return Stream(
            (*written.ops, *own), tuple(written.tensors), tuple(written.storages), eager.n_params,
            eager.depth, meta,
        )  # fmt: skip

    def _before_the_model(self) -> None:
        """What a call of inference does before it calls the model: a prefill begins its cache anew."""
        for op in self.eager.ops[:1]:
            if op.name == BEGIN_CACHE:
                self.written.ops.append(op)

    def _micro_batch(self, graphs: Sequence[Graph]) -> None:
        backward = {_number(graph): graph for graph in graphs if graph.is_backward}
        n_forward = sum(not graph.is_backward for graph in graphs)
        for place, graph in enumerate(graphs):
            if not graph.is_backward:
                self._wait("forward", place)
                self._forward(place, graph, backward.get(_number(graph)))
        self._wait("forward", n_forward)
        if self.micro_batches > 1:
            self._of_the_loss("aten.div.Tensor", "forward")
        # the caller keeps the loss alone
        kept = {storage for calls in self.saved.values() for saved in calls for storage in saved}
        self.written.freed += sorted(self._held - kept)
        self._held.clear()
        self._handed.clear()
        if self.is_scaled:  # the loss by the scaler's factor, and its gradient
            self._of_the_loss("aten.mul.Tensor", "backward")
            self._of_the_loss("aten.mul.Tensor", "backward")
        if self.micro_batches > 1:
            self._of_the_loss("aten.div.Tensor", "backward")
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
            value = self.written.new(number)
            self.written.append("aten._local_scalar_dense.default", phase, [(number, value)], [], kind="sync")
            self.written.freed.append(value)

    def _of_the_loss(self, name: str, phase: str) -> None:
        """What the code around the graphs makes of the loss, or of its gradient: by the number of micro-batches, or by
        a gradient scaler's factor."""
        number = Operand((), (), "fp32")
        before, after = self.written.new(number), self.written.new(number)
        self.written.append(name, phase, [(number, before)], [(number, after)], '[{"t":0},1]')
        self.written.freed += [before, after]

    # --- forward

    def _forward(self, place: int, graph: Graph, backward: Graph | None) -> None:
        places: dict[str, int] = {}
        passed_on = set[int]()
        for number, (name, operand) in enumerate(graph.inputs):
            handed = self._handed[storage_bytes(operand)]
            if handed:
                passed_on.add(number)
            places[name] = handed[0] if handed else self._read(place, graph, name, operand)
        self._passed_on[_number(graph)] = frozenset(passed_on)
        self._launches(graph, "forward", places)
        outputs = [places.get(name) for name in graph.outputs]
        n_results = len(outputs) - (len(_saved_inputs(backward)) if backward is not None else 0)
        self.saved[_number(graph)].append(outputs[n_results:])
        for storage, tensor in zip(outputs[:n_results], graph.returned[:n_results], strict=True):
            if storage is not None and tensor is not None:
                self._held.add(storage)
                self._handed[storage_bytes(tensor)].append(storage)

    def _read(self, place: int, graph: Graph, name: str, operand: Operand) -> int:
        """What is there before the step, or, of the batch, its copy that a captured graph reads."""
        storage = self.known.taken(place, name, operand, self.written.new)
        if graph.captured and self.written.storages[storage].kind == "input":
            return self.written.copy("forward", operand, storage)
        return storage

    # --- backward

    def _backward(self, place: int, graph: Graph) -> None:
        if not self.saved[_number(graph)]:
            raise DataError(f"graph {graph.label} has no forward graph")
        saved = self.saved[_number(graph)].pop()
        places = {
            name: self.written.new(operand) if storage is None else storage
            for (name, operand), storage in zip(_saved_inputs(graph), saved, strict=True)
        }
        tangents = self._tangents(graph, places)
        self._held.update(tangents)
        gradients = self.known.gradients(place, graph, self._passed_on[_number(graph)])
        relaid = self.known.relaid(graph, gradients) if self.is_first else []
        own = {storage for _, storage, _ in relaid}
        for name, storage in gradients:
            is_taken = self.is_first and storage not in own
            places[name] = storage if is_taken else self.written.storage(self.written.storages[storage].bytes)
        self._launches(graph, "backward", places)
        relaid = self._middle_first(graph, relaid, lambda each: each[1])
        for name, storage, returned_as in relaid:
            returned, laid = (returned_as, places[name]), (self.known.operand_of(storage), storage)
            self.written.append("aten.clone.default", "backward", [returned], [laid], '[{"t":0}]')
            self.written.freed.append(places[name])
        self._held.difference_update(tangents)
        self.written.freed += tangents
        if not self.is_first:
            self._accumulate(graph, [(storage, places[name]) for name, storage in gradients])
        are_gradients = {name for name, _ in gradients}
        for name, tensor in zip(graph.outputs, graph.returned, strict=True):
            if tensor is not None and name in places and name not in are_gradients:
                made = self.written.storages[places[name]]
                if made.kind == "activation":
                    self._handed[storage_bytes(tensor)].append(places[name])

    def _tangents(self, graph: Graph, places: dict[str, int]) -> list[int]:
        """Places the gradients of the forward's results: ones of the loss, zeros of what the loss does not depend on,
        which autograd makes, and what other backward graphs have returned. Returns them: it holds all of them until the
        graph is done (torch/csrc/autograd/python_function.cpp, PyNode::apply)."""
        held: list[int] = []
        for name, operand in graph.inputs:
            if not name.startswith(_TANGENTS):
                continue
            handed = self._handed[storage_bytes(operand)]
            is_made = not handed
            places[name] = self.written.new(operand) if is_made else handed.popleft()
            held.append(places[name])
            if is_made:
                self.written.append("aten.full.default", "backward", [], [(operand, places[name])])
                if graph.captured:
                    places[name] = self.written.copy("backward", operand, places[name])
        return held

    def _accumulate(self, graph: Graph, pairs: Sequence[tuple[int, int]]) -> None:
        """Adds what a graph returned to the gradients: of pairs the second to the first."""
        for gradient, more in self._middle_first(graph, pairs, lambda pair: pair[0]):
            operand = self.known.operand_of(gradient)
            added = [(operand, gradient), (operand, more)]
            self.written.append("aten.add_.Tensor", "backward", added, [], '[{"t":0},{"t":1}]', (0,))
            self.written.freed.append(more)

    def _middle_first(self, graph: Graph, found: Sequence[Each], gradient_of: Callable[[Each], int]) -> list[Each]:
        """Orders those for each of which autograd now runs an op, so that those of the layer that stands for several
        come first, and has their ops repeated as often as that layer's launches."""
        is_of_middle = [self.written.storages[gradient_of(each)].layer == MIDDLE for each in found]
        times = max((stretch.times for stretch in self.stretches.get(graph.label, ())), default=None)
        if times is not None and any(is_of_middle):
            first = len(self.written.ops)
            self.repeated.append((first, first + sum(is_of_middle), times))
        order = sorted(range(len(found)), key=lambda place: not is_of_middle[place])
        return [found[place] for place in order]

    # --- a graph

    def _launches(self, graph: Graph, phase: str, places: dict[str, int]) -> None:
        """Appends a graph's launches. `places`: storages by buffer, to which the graph's own are added."""
        dying: dict[int, list[str]] = defaultdict(list)
        own = {buffer.name: buffer for buffer in graph.buffers}
        for buffer in graph.buffers:
            if buffer.died is not None:
                dying[buffer.died].append(buffer.name)
        first = len(self.written.ops)  # a launch is an op
        for stretch in self.stretches.get(graph.label, ()):
            self.repeated.append((first + stretch.start, first + stretch.stop, stretch.times))
        for number, launch in enumerate(graph.launches):
            self._drop(dying[number], places)
            for touch in launch.touches:
                if touch.buffer not in places:
                    size = own[touch.buffer].bytes if touch.buffer in own else 0
                    places[touch.buffer] = self.written.storage(size)
            self.written.launch(launch, phase, places)
        self._drop(dying[len(graph.launches)], places)
        self.called.append((graph.label, first, len(self.written.ops) - 1))

    def _drop(self, names: Sequence[str], places: dict[str, int]) -> None:
        found, storages = (places[name] for name in names if name in places), self.written.storages
        self.written.freed += [s for s in found if storages[s].kind == "activation" and s not in self._held]


def _number(graph: Graph) -> str:
    """What a forward and its backward share: "0" of "0_forward"."""
    return graph.label.rpartition("_")[0]


def _saved_inputs(graph: Graph) -> list[tuple[str, Operand]]:
    return [(name, operand) for name, operand in graph.inputs if not name.startswith(_TANGENTS)]
