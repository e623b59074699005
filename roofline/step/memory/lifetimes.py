"""Follows the storages of a step through its operations, with a block of torch's allocator for each.

A step is followed twice: the optimizer makes its state in the first, and the second finds the blocks that the first has
left, as every later step does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate, groupby
from typing import NamedTuple

from flopcast.roofline.step.memory.allocator import Block, CachingAllocator, RecordingAllocator, Requests, rounded
from flopcast.roofline.step.memory.scratch import has_scratch, scratch_bytes
from flopcast.roofline.stream.ops.op_stream import Op, Stream, once_per_stream, packet
from flopcast.roofline.stream.ops.to_micro_batches import layers_run
from flopcast.roofline.stream.ops.touches import touches

PRODUCTS = ("aten.mm", "aten.addmm", "aten.addmm_", "aten.bmm", "aten.baddbmm")  # that cuBLAS computes

_EXISTING = ("parameter", "state", "buffer", "bucket", "input", "cache")


class Most(NamedTuple):
    """The most that is live at once: bytes as the allocator counts them, how much of the log had happened then, and the
    bytes of gradients of layers for which another layer's operations stand, as far as they had been counted."""

    bytes: int
    events: int = 0
    gradients_of_others: int = 0


class Followed(NamedTuple):
    """What a step's memory comes to: the most that is live anywhere, and of that while a compiled graph runs that has
    multiplied; the most bytes that are taken of the device; which storages got how many bytes, or none again (0); and,
    but for a rank of several GPUs, what the allocator was asked for: only on one GPU is a smaller device looked for."""

    anywhere: Most
    beside_products: Most
    reserved: int
    log: Sequence[tuple[int, int]]
    requests: Requests

    def held_at(self, most: Most) -> Mapping[int, int]:
        """The bytes of each storage that has memory at that time."""
        held: dict[int, int] = {}
        for storage, size in self.log[: most.events]:
            if size:
                held[storage] = size
            else:
                held.pop(storage, None)
        return held


def follow(stream: Stream, sm_count: int | None = None) -> Followed:
    """Follows two steps: what is live before each, while each op of them runs that takes memory, and between layers
    that are repeated.

    A call of inference is followed once: what it leaves, keys and values, are another call's input. `sm_count`: the
    GPU's multiprocessors, where it is known."""
    walk = _Walk(stream, sm_count)
    for _ in range(2 if walk.trains else 1):
        walk.step()
    requests = walk.allocator.requests if isinstance(walk.allocator, RecordingAllocator) else ()
    return Followed(walk.anywhere, walk.beside_products, walk.reserved, walk.log, requests)


class _Moment(NamedTuple):
    """An op around which the allocator is asked for something: storages that were released before it, those that it
    touches first, and the bytes that it takes while it runs."""

    number: int
    freed: Sequence[int]
    first_touched: Sequence[int]
    scratch: int
    lane: int


class _Walk:
    def __init__(self, stream: Stream, sm_count: int | None) -> None:
        self.stream = stream
        self.allocator = CachingAllocator() if "parallel" in stream.meta else RecordingAllocator()
        self.optimizer = _optimizer(stream)
        self.trains = self.optimizer is not None
        self.existing = _existing(stream)
        self.state = [i for i in sorted(self.existing) if self.trains and stream.storages[i].kind == "state"]
        self.counts = layers_run(stream)  # a micro-batch that stands for several leaves nothing behind
        self.multiplied = _after_products(stream)
        self.sizes = [storage.bytes for storage in stream.storages]
        self.moments = _moments(stream, sm_count)
        self.blocks: dict[int, Block | None] = {}
        self.log: list[tuple[int, int]] = []
        self.anywhere = self.beside_products = Most(0)
        self.reserved = 0
        for storage in sorted(self.existing.difference(self.state)):
            self._take(storage)

    def step(self) -> None:
        """One step, at whose beginning the gradients of the one before are dropped."""
        allocator, blocks, sizes, log = self.allocator, self.blocks, self.sizes, self.log
        for storage in [i for i in blocks if i not in self.existing]:
            self._give_back(storage)
        self._note(0, 0, False)
        stretches = _Stretches(self.stream, self.counts)
        beyond = 0  # what layers hold for which others stand
        for number, freed, made, scratch, lane in self.moments:
            for storage in freed:  # as `_give_back` and `_take` do, which a deep step would call 20,000 times
                allocator.give_back(blocks.pop(storage))
                log.append((storage, 0))
            has_multiplied = number in self.multiplied
            if number in stretches.bounds:
                beyond += stretches.pass_bound(number, allocator.allocated + beyond)
                self._note(beyond, stretches.more_gradients, has_multiplied)
            if number == self.optimizer and self.state and self.state[0] not in blocks:
                for storage in self.state:
                    self._take(storage)
            for storage in made:
                block = blocks[storage] = allocator.take(sizes[storage], lane)
                if block is not None:
                    log.append((storage, block.bytes))
            if not self.counts[number]:
                continue
            if scratch:
                held = allocator.take(scratch, lane)
                self._note(beyond, stretches.more_gradients, has_multiplied)
                allocator.give_back(held)
            elif made or number == self.optimizer or has_multiplied:
                self._note(beyond, stretches.more_gradients, has_multiplied)

    def _take(self, storage: int) -> None:
        block = self.blocks[storage] = self.allocator.take(self.sizes[storage])
        if block is not None:
            self.log.append((storage, block.bytes))

    def _give_back(self, storage: int) -> None:
        self.allocator.give_back(self.blocks.pop(storage))
        self.log.append((storage, 0))

    def _note(self, beyond: int, gradients_of_others: int, has_multiplied: bool) -> None:
        """Keeps what is live now where it is the most so far. `beyond`: what layers hold for which others stand."""
        live, reserved = self.allocator.allocated + beyond, self.allocator.reserved + beyond
        if live > self.anywhere.bytes:
            self.anywhere = Most(live, len(self.log), gradients_of_others)
        if has_multiplied and live > self.beside_products.bytes:
            self.beside_products = Most(live, len(self.log), gradients_of_others)
        if reserved > self.reserved:
            self.reserved = reserved


def _existing(stream: Stream) -> set[int]:
    """Returns the storages that are there before a step."""
    return {i for i, storage in enumerate(stream.storages) if storage.kind in _EXISTING}


def _optimizer(stream: Stream) -> int | None:
    """Returns the optimizer's first op, by which it has made its state."""
    return next((number for number, op in enumerate(stream.ops) if op.phase == "optimizer"), None)


@once_per_stream
def _moments(stream: Stream, sm_count: int | None) -> list[_Moment]:
    """Returns the ops around which memory is asked for or given back, behind which a layer's stretch ends, or that run
    when a graph has multiplied."""
    stretches, multiplied = _Stretches(stream, layers_run(stream)), _after_products(stream)
    anyway = stretches.bounds | multiplied | {_optimizer(stream)}
    elsewhere = {i for i, storage in enumerate(stream.storages) if storage.kind == "host"}
    elsewhere |= stretches.gradients_of_others
    known = _existing(stream) | elsewhere
    takes_scratch = frozenset(name for name in {op.name for op in stream.ops} if has_scratch(name))
    found = []
    following_ops = (*stream.ops[1:], None)
    for number, (op, following, touch) in enumerate(zip(stream.ops, following_ops, touches(stream), strict=True)):
        name, freed, made = op.name, touch.freed, touch.first
        is_sum = op.phase == "backward" and name == "aten.add.Tensor"
        reused = summed_in_place(stream, number, following) if is_sum else ()
        if freed or reused:
            freed = tuple([storage for storage in freed + reused if storage in known and storage not in elsewhere])
            known.difference_update(freed)
        if made:
            made = tuple([storage for storage in made if storage not in known and storage not in reused])
            known.update(made)
        scratch = scratch_bytes(stream, op, sm_count) if name in takes_scratch else 0
        if freed or made or scratch or number in anyway:
            # as _Moment(...), which calls a function first
            found.append(tuple.__new__(_Moment, (number, freed, made, scratch, op.lane)))
    return found


def _after_products(stream: Stream) -> frozenset[int]:
    """Returns the ops of compiled graphs from each graph's first product on."""
    found: set[int] = set()
    for _, first, last in stream.meta.get("graphs", ()):
        ops = range(first, last + 1)
        start = next((number for number in ops if packet(stream.ops[number].name) in PRODUCTS), last + 1)
        found.update(range(start, last + 1))
    return frozenset(found)


class _Stretches:
    """What stretches of ops that stand for several layers (`layers_run`) add to what they leave behind themselves.

    Each run of a graph leaves a layer's gradients, and what was last written in the stretch and is still live when the
    forward, or the backward's graph, ends: what the backward is to read, what autograd is to add to gradients. The
    difference between what is live before a stretch and behind it is not that: the first layer hands on other buffers
    than a layer in the middle does. What layers have kept is gone behind the last stretch of the backward. Behind
    graphs, where autograd runs an op for each gradient, the difference is what counts.
    """

    def __init__(self, stream: Stream, counts: Sequence[int]) -> None:
        self.counts = (1, *counts)
        self.bounds = {number for number in range(len(counts)) if counts[number] != self.counts[number]}
        self._made = [0]  # bytes of gradients that are done before each op
        self._outliving = [0]  # bytes that were written before each op and outlive its forward, or its graph
        self.gradients_of_others: set[int] = set()  # which only the optimizer touches: they count with the stretches'
        self._forward: set[int] = set()  # bounds behind a stretch of a forward
        self._graph: set[int] = set()  # and of a backward's graph; of these the last of a graph, and of a micro-batch
        self._ends: set[int] = set()
        self._last: set[int] = set()
        self._left = self._left_gradients = self._left_outliving = self._kept = self._pending = 0
        self.more_gradients = 0
        if not self.bounds:
            return
        gradients = {i for i, s in enumerate(stream.storages) if s.kind == "gradient"}
        done = _done(stream, gradients)
        self.gradients_of_others = gradients - done.keys()
        self._made = _sums_before(done.items(), stream)
        self._outliving = _sums_before(_outliving(stream, gradients), stream)
        stretches = [number for number in sorted(self.bounds) if self.counts[number] > 1]
        self._forward = {number for number in stretches if stream.ops[number - 1].phase == "forward"}
        for _, first, last in stream.meta.get("graphs", ()):
            own = [number for number in stretches if first < number <= last + 1 and number not in self._forward]
            self._graph.update(own)
            self._ends.update(own[-1:])
        ends = sorted(self._ends)
        for end, following in zip(ends, (*ends[1:], None), strict=False):
            if following is None or any(op.phase == "forward" for op in stream.ops[end:following]):
                self._last.add(end)

    def pass_bound(self, number: int, total: int) -> int:
        """Returns the bytes that the stretch before op `number`, if any, leaves behind beyond those of its first run.
        `total`: what is live there."""
        others, gradients, outliving = self.counts[number] - 1, self._made[number], self._outliving[number]
        more = 0
        if others:
            made = others * (gradients - self._left_gradients)
            left = others * (outliving - self._left_outliving)
            self.more_gradients += made
            if number in self._forward:
                self._kept += left
                more = left
            elif number in self._graph:
                self._pending += left + made
                if number in self._ends:
                    more, self._pending = self._pending, 0
                if number in self._last:
                    more, self._kept = more - self._kept, 0
            else:
                more = others * (total - self._left)
        self._left, self._left_gradients, self._left_outliving = total + more, gradients, outliving
        return more


def _sums_before(done: Iterable[tuple[int, int]], stream: Stream) -> list[int]:
    """Returns for each op the bytes of the storages that are done (`done`: each with the op that does it) before it."""
    bytes_of = [0] * len(stream.ops)
    for storage, number in done:
        bytes_of[number] += rounded(stream.storages[storage].bytes)
    return list(accumulate(bytes_of, initial=0))


def _outliving(stream: Stream, gradients: Set[int]) -> list[tuple[int, int]]:
    """Returns each storage that outlives a forward, or a graph of the backward, but for gradients and what was there
    before it, and the last op in it to write it."""
    graph_of = {place: first for _, first, last in stream.meta.get("graphs", ()) for place in range(first, last + 1)}

    def part_of(numbered: tuple[int, Op]) -> str:
        number, op = numbered
        if op.phase == "backward" and number in graph_of:
            return f"graph from {graph_of[number]}"
        return "forward" if op.phase == "forward" else ""

    found: list[tuple[int, int]] = []
    for part, ops in groupby(enumerate(stream.ops), key=part_of):
        if not part:
            continue
        written: dict[int, int] = {}
        for number, op in ops:
            for storage in op.freed:
                written.pop(storage, None)
            for i in (*(op.inputs[place] for place in op.written), *(op.outputs if op.kind != "view" else ())):
                written[stream.tensors[i].storage] = number
        found += written.items()
    there_before = (*_EXISTING, "host")
    return [(i, op) for i, op in found if i not in gradients and stream.storages[i].kind not in there_before]


def _done(stream: Stream, gradients: Set[int]) -> dict[int, int]:
    """Returns the op that is the last to write each gradient in the micro-batch that makes it. Before that one its
    memory may hold something else: the code that inductor generates reuses buffers, that of one layer's activation for
    another one's gradient."""
    done: dict[int, int] = {}
    made_in: dict[int, int] = {}
    for run, (phase, ops) in enumerate(groupby(enumerate(stream.ops), key=lambda each: each[1].phase)):
        if phase == "optimizer":
            continue
        for number, op in ops:
            for i in (*op.inputs, *op.outputs):
                storage = stream.tensors[i].storage
                if storage in gradients and made_in.setdefault(storage, run) == run:
                    done[storage] = number
    return done


def summed_in_place(stream: Stream, number: int, following: Op | None) -> tuple[int, ...]:
    """Returns the storage that receives the sum of two gradients of one tensor (an `add` in the backward) in place; ()
    where the sum gets a storage of its own.

    Autograd adds to the first gradient where nothing else holds a reference to it or to its storage
    (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`), which it does not where that is a view, as a
    linear layer's are but for those that autocast casts. A recorder of calls holds one, and so sees an `add` with a
    result of its own, after which the first operand is released. For tied embeddings of 151,936 x 2560 in fp32 that is
    1.6 GB at the peak.
    """
    op = stream.ops[number]
    if following is None or len(op.inputs) != 2:
        return ()
    first, second, out = (stream.tensors[i] for i in (*op.inputs, *op.outputs))
    is_sum = first.operand == out.operand and second.operand.shape == out.operand.shape
    if not is_sum or first.storage not in following.freed or _is_view(stream, op.inputs[0], number):
        return ()
    return (first.storage,)


def _is_view(stream: Stream, tensor: int, before: int) -> bool:
    """Whether the last op before that one which gave this tensor had its storage from its own operands."""
    storage = stream.tensors[tensor].storage
    for number in range(before - 1, -1, -1):
        op = stream.ops[number]
        if tensor in op.outputs:
            return any(stream.tensors[i].storage == storage for i in op.inputs)
    return False
