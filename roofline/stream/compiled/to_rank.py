"""The op stream of a compiled step that was recorded, a rank's or one that compiles itself, from what it called:
operations as they are, and compiled graphs.

A recorded call of a graph is one op, GRAPH, with the tensors that the graph takes and returns. Its launches take its
place. What surrounds graphs is recorded and not derived: collectives with their CUDA streams, copies into buckets,
hooks, the optimizer, and until when the code between graphs holds what they return. What captured graphs copy at every
replay is added, as `to_stream` says it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flopcast.errors import DataError
from flopcast.roofline.stream.compiled.launches import Graph
from flopcast.roofline.stream.compiled.op_writer import OpWriter
from flopcast.roofline.stream.ops.op_stream import Op, Stream

GRAPH = "inductor.graph"  # an op that calls a graph; its arguments: the number of the graph
# Inputs of a backward graph that others hold until it is done: parameters, and gradients, which autograd passes on
# (torch/csrc/autograd/python_function.cpp, PyNode::apply). The rest is what its forward saved.
_TANGENTS = "tangents_"
_HELD = ("primals_", _TANGENTS)
_STATIC = ("parameter", "buffer")  # where captured graphs read them; so they do what captured graphs have made


def to_rank(recorded: Stream, graphs: Sequence[Graph]) -> Stream:
    """`recorded`: a step, with GRAPH where it calls one of `graphs`. Its meta gets `graphs`, as
    `to_stream.to_stream` has it. Raises DataError where a graph was called with other tensors than it takes."""
    return _Placing(recorded, graphs).run()


class _Placing:
    def __init__(self, recorded: Stream, graphs: Sequence[Graph]) -> None:
        self.recorded, self.graphs = recorded, graphs
        self.written = OpWriter(recorded)
        self.called: list[tuple[str, int, int]] = []
        self._numbers: dict[int, int] = {}  # by a recorded op: the last op that stands for it
        self._alias: dict[int, int] = {}  # of a result in the memory of another tensor: that one's storage
        self._holders: dict[int, set[int]] = {}  # by such a storage: what lies in it and is held
        self._freed_early: set[int] = set()
        self._fixed = {i for i, storage in enumerate(recorded.storages) if storage.kind in _STATIC}

    def run(self) -> Stream:
        recorded, written = self.recorded, self.written
        following = (*recorded.ops[1:], None)
        for number, (op, after) in enumerate(zip(recorded.ops, following, strict=True)):
            self._free(op.freed)
            waits = tuple(sorted(self._numbers[wait] for wait in op.waits if self._numbers[wait] >= 0))
            first = len(written.ops)
            if op.name == GRAPH:
                written.home = op.module, op.layer
                entered = self._call(op, after.freed if after is not None else ())
                if len(written.ops) > entered:
                    self.called.append((self._graph(op).label, entered, len(written.ops) - 1))
            else:
                written.ops.append(op._replace(freed=tuple(dict.fromkeys(written.freed))))
                written.freed.clear()
            if len(written.ops) > first:
                written.ops[first] = written.ops[first]._replace(waits=waits)
            self._numbers[number] = len(written.ops) - 1
        storages = tuple(written.storages)
        tensors = tuple(ref._replace(storage=self._alias.get(ref.storage, ref.storage)) for ref in written.tensors)
        meta = {**recorded.meta, "graphs": self.called}
        return replace(recorded, ops=tuple(written.ops), tensors=tensors, storages=storages, meta=meta)

    def _free(self, storages: Sequence[int]) -> None:
        for storage in storages:
            home = self._alias.get(storage, storage)
            holders = self._holders.get(home, {storage})
            holders.discard(storage)
            if not holders and home not in self._freed_early:
                self.written.freed.append(home)

    def _graph(self, op: Op) -> Graph:
        return self.graphs[int(json.loads(op.args)[0])]

    def _call(self, op: Op, freed_after: Sequence[int]) -> int:
        """Returns the number of the graph's first launch."""
        graph, written = self._graph(op), self.written
        given, made = ([self.recorded.tensors[i].storage for i in tensors] for tensors in (op.inputs, op.outputs))
        returned = [name for name, tensor in zip(graph.outputs, graph.returned, strict=True) if tensor is not None]
        if len(given) != len(graph.inputs) or len(made) != len(returned):
            raise DataError(
                f"graph {graph.label} takes {len(graph.inputs)} tensors and returns {len(returned)}: it was called "
                f"with {len(given)} and returned {len(made)}"
            )
        places = {
            name: self._alias.get(storage, storage) for (name, _), storage in zip(graph.inputs, given, strict=True)
        }
        own = {buffer.name: buffer for buffer in graph.buffers}
        for name, storage in zip(returned, made, strict=True):
            if (home := places.setdefault(name, storage)) != storage:
                self._alias[storage] = home
                self._holders.setdefault(home, {home}).add(storage)
            elif name in own:  # what is returned may be a part of it
                size = max(own[name].bytes, written.storages[storage].bytes)
                written.storages[storage] = written.storages[storage]._replace(bytes=size)
        dying = self._dying(graph, given, places, set(freed_after), {places[name] for name in returned})
        if graph.captured:
            self._copy(op.phase, graph, places, dying)
            self._fixed.update(places[name] for name in returned)
        first = len(written.ops)
        for number, launch in enumerate(graph.launches):
            written.freed += dying[number]
            for touch in launch.touches:
                if touch.buffer not in places:
                    places[touch.buffer] = written.storage(own[touch.buffer].bytes if touch.buffer in own else 0)
                    dies = own[touch.buffer].died if touch.buffer in own else None
                    dying[len(graph.launches) if dies is None else dies].append(places[touch.buffer])
            written.launch(launch, op.phase, places)
        written.freed += dying[len(graph.launches)]
        return first

    def _copy(self, phase: str, graph: Graph, places: dict[str, int], dying: dict[int, list[int]]) -> None:
        """Copies what a captured graph reads elsewhere to where the capture found it: of a backward graph gradients, of
        a forward one what is neither a parameter nor a buffer, and was made by no captured graph. `dying` gets the
        launches after which the copies are read."""
        died = {buffer.name: buffer.died for buffer in graph.buffers if buffer.is_input}
        for name, operand in graph.inputs:
            if places[name] not in self._fixed and (not graph.is_backward or name.startswith(_TANGENTS)):
                places[name] = self.written.copy(phase, operand, places[name])
                dies = died.get(name)
                dying[len(graph.launches) if dies is None else dies].append(places[name])

    def _dying(
        self, graph: Graph, given: Sequence[int], places: Mapping[str, int], freed_after: set[int], returned: set[int]
    ) -> dict[int, list[int]]:  # fmt: skip
        """By launch: what the graph drops before it of what its forward saved and nobody else holds. `given`: the
        recorded storages of its inputs, of which several may lie in one."""
        found: dict[int, list[int]] = defaultdict(list)
        if not graph.is_backward:
            return found
        last: dict[int, int] = {}
        own: dict[int, set[int]] = defaultdict(set)
        died = {buffer.name: buffer.died for buffer in graph.buffers if buffer.is_input}
        for (name, _), storage in zip(graph.inputs, given, strict=True):
            dies = died.get(name)
            is_held = dies is None or name.startswith(_HELD)
            last[places[name]] = max(last.get(places[name], 0), len(graph.launches) if is_held else dies or 0)
            own[places[name]].add(storage)
        for home, launch in last.items():
            is_alone = self._holders.get(home, {home}) <= own[home] <= freed_after and home not in returned
            if is_alone and launch < len(graph.launches):
                found[launch].append(home)
                self._freed_early.add(home)
        return found
