"""Derives the stream of any depth from one of three layers, or of four for a step on several GPUs.

A step of a model with identical layers is traced at depth 3; `to_depth` derives the stream of any depth from it:

    pre, forward layer 0, 1, 2, loss, backward layer 2, 1, 0, post, optimizer
             the middle layer is repeated ^ and its storages renamed; in each of several micro-batches likewise.
             Of four layers it is the third.

A compiled step repeats nothing here: its middle layer's launches stand once, and `meta["repeated"]` says how often they
run. Only the optimizer, which is not compiled, gets the parameters of all layers.

Storages carry the layer they belong to ("home"), so that a reference from one layer to the next stays a
reference from one layer to the next after renaming; reuse distances and lifetimes stay right.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.ops.op_stream import (
    FOLDED_DEPTH,
    FOLDED_PARALLEL,
    NotDerivable,
    Op,
    Storage,
    Stream,
    TensorRef,
    packet,
)

_HELD = ("parameter", "buffer", "cache")  # before a call of inference
BEGIN_CACHE = "aten._foreach_zero_.default"  # by which a prefill begins a static cache of all layers anew


def to_depth(stream: Stream, depth: int) -> Stream:
    """Returns the stream of the same model with `depth` layers.

    Needs a stream traced at FOLDED_DEPTH, or at FOLDED_PARALLEL where it is one rank's, and a `depth` of no less than
    one below that; a stream already at `depth` is returned as it is. Raises NotDerivable for others.
    """
    if stream.depth == depth:
        return stream
    folded = FOLDED_PARALLEL if "parallel" in stream.meta else FOLDED_DEPTH
    if stream.depth != folded or depth < folded - 1:
        raise NotDerivable(f"cannot unfold a stream of depth {stream.depth} to {depth}: trace it at that depth")
    return _Unfolding(stream, depth).run()


class _Unfolding:
    """One pass over a folded stream that repeats the middle layer and renames what belongs to it."""

    def __init__(self, stream: Stream, depth: int) -> None:
        self.source, self.depth = stream, depth
        self.folded = stream.depth or 0
        self.middle = self.folded - 2  # the layer that is repeated
        self._tensors, self._storages = stream.tensors, stream.storages
        self.tensors: list[TensorRef] = []
        self.storages: list[Storage] = []
        self._storage_ids: dict[tuple[int, int | None], int] = {}
        self._tensor_ids: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[int | None, int | None], tuple[_TensorsAt, _StoragesAt]] = {}
        self._storage_homes = [storage.layer for storage in stream.storages]
        self._homes = [self._storage_homes[ref.storage] for ref in stream.tensors]
        self._of_lists = frozenset(number for number, op in enumerate(stream.ops) if _is_multi_tensor(op))
        # roles of storages, and operands, as numbers: they are compared for every operand of every layer
        roles: dict[Any, int] = {}
        pairs = _alike(stream) if self.folded == FOLDED_PARALLEL else []
        found = _linked(stream, pairs) if pairs else _storage_roles(stream)
        self._roles = [roles.setdefault(role, len(roles)) for role in found]
        self._likes = _likes(stream, pairs)
        operands: dict[Operand, int] = {}
        self._operands = [operands.setdefault(ref.operand, len(operands)) for ref in stream.tensors]
        self._grown = self._stacked()
        self._moved: dict[int, int] = {}

    def _stacked(self) -> dict[int, Operand]:
        """Returns what becomes of the results of stacking one number of each parameter, as clipping does their norms,
        and of what is made of them number by number, as of norms that ranks sum: by storage."""
        found: dict[int, Operand] = {}
        for op in self.source.ops:
            homes = [self._homes[tensor] for tensor in op.inputs]
            if _is_multi_tensor(op) and packet(op.name) == "aten.stack" and any(home is not None for home in homes):
                ((_, *rest),) = (self._tensors[made].operand.shape for made in op.outputs)
                count = sum(len(self._layers_of(home)) for home in homes)
                ref = self._tensors[op.outputs[0]]
                found[ref.storage] = replace(ref.operand, shape=(count, *rest))
            elif not _is_multi_tensor(op):
                given = (self._tensors[tensor] for tensor in op.inputs)
                if stacked := next((ref for ref in given if ref.storage in found), None):
                    for made in (self._tensors[tensor] for tensor in op.outputs):
                        if made.operand.shape == stacked.operand.shape:
                            found[made.storage] = replace(made.operand, shape=found[stacked.storage].shape)
        return found

    def run(self) -> Stream:
        placed = [
            (number, op, layer)
            for phase, run in groupby(enumerate(self.source.ops), key=lambda each: each[1].phase)  # micro-batches
            for number, op, layer in self._sequence(list(run), phase == "backward")
        ]
        more = self.depth - self.folded
        meta, idle = _repeated(self.source.meta, more)
        if "repeated" not in meta and "graphs" in meta:  # of layers that are compiled one by one
            meta = {**meta, "graphs": _placed_graphs(meta["graphs"], [number for number, _, _ in placed])}
        placed = list(_without(idle, placed)) if idle else placed
        self._moved = self._of_others(placed)
        ops = list(self._copies(placed))
        if any(op.waits for op in self.source.ops):
            ops = self._with_waits(ops, placed)
        if "repeated" in meta:
            self._hold_all()
        self._places.clear()  # they hold this object, which would wait for a collection of garbage
        repeated = int(self.source.meta["layer_params"]) * more
        return replace(
            self.source,
            meta=meta,
            ops=tuple(ops),
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            n_params=self.source.n_params + repeated,
            depth=self.depth,
            repeats=tuple([-1 if number in self._of_lists else number for number, _, _ in placed]),
        )

    def _of_others(self, placed: Iterable[tuple[int, Op, int | None]]) -> dict[int, int]:
        """Returns the layers that the middle layer's storages are of where a compiled step has two layers, none in the
        middle. The launches that are left stem from all three: what they write of the middle layer's gradients is of
        the last layer where they write the first one's as well. Parameters are there for the whole step."""
        if "repeated" not in self.source.meta or self.depth != self.middle + 1:
            return {}
        written = {
            self._tensors[i].storage for _, op, _ in placed if op.phase == "backward" for i in op.outputs
        }  # fmt: skip
        homes = self._storage_homes
        of_first = {role for storage, role in enumerate(self._roles) if storage in written and homes[storage] == 0}
        return {
            storage: self.depth - 1 if role in of_first else 0
            for storage, role in enumerate(self._roles)
            if homes[storage] == self.middle
        }

    def _hold_all(self) -> None:
        """Adds what is held of the layers that no op refers to, as one compiled layer stands for several and an
        inference has no optimizer."""
        for index, storage in enumerate(self._storages):
            if storage.kind in _HELD and storage.layer is not None:
                for layer in self._layers_of(storage.layer):
                    self._storage(index, layer)

    def _sequence(self, ops: list[tuple[int, Op]], is_reversed: bool) -> Iterator[tuple[int, Op, int | None]]:
        """Yields (number, op, the layer it stands for), with each run of the middle layer's ops repeated in order."""
        layers = range(self.middle, self.depth - 1)
        before: int | None = None  # the layer before the middle one
        for is_middle, run in groupby(ops, key=lambda each: each[1].layer == self.middle):
            block = list(run)
            if is_middle:  # what a backward reduces at its end goes from the first layer to the last
                ascends = before < self.middle if before is not None else not is_reversed
                yield from ((number, op, layer) for layer in layers[:: 1 if ascends else -1] for number, op in block)
            else:
                before = next((op.layer for _, op in reversed(block) if op.layer is not None), before)
                yield from ((number, op, op.layer and self._shifted(op.layer)) for number, op in block)

    def _with_waits(self, ops: list[Op], placed: Sequence[tuple[int, Op, int | None]]) -> list[Op]:
        """Returns the unfolded ops with what they wait for: of the layer that is as far away as in the folded stream,
        the op that does the same there."""
        roles = _op_roles(self.source)
        awaited = {roles[wait] for op in self.source.ops for wait in op.waits}
        of_likes = set(self._likes.values())
        some = [number in of_likes or role in awaited for number, role in enumerate(roles)]
        index = {(number, layer): place for place, (number, _, layer) in enumerate(placed) if some[number]}
        numbers = {
            (role, op.layer): number for number, (role, op) in enumerate(zip(roles, self.source.ops, strict=True))
        }
        last = self.depth - 1

        def found(wait: int, op: Op, layer: int | None) -> int:
            home = self.source.ops[wait].layer
            at = self._place(home, op.layer, None if op.layer is None or layer is None else layer - op.layer)
            folded = None if at is None else self.folded - 1 if at == last else min(at, self.middle)
            try:
                if folded == home:
                    return index[wait, at]
                like = None if folded is None else self._likes.get((wait, folded))
                return index[numbers[roles[wait], folded] if like is None else like, at]
            except KeyError:
                raise NotDerivable(f"op {wait} of layer {home} has no like in layer {at}") from None

        return [
            made._replace(waits=tuple(sorted(found(wait, op, layer) for wait in op.waits))) if op.waits else made
            for made, (_, op, layer) in zip(ops, placed, strict=True)
        ]

    def _place(self, home: int | None, layer: int | None, by: int | None) -> int | None:
        """Returns the layer that a layer of the folded stream is for an op of `layer` that was moved `by` layers; None:
        an op outside the stack, which refers to the first or the last layer. So do these two to each other: a
        micro-batch begins at the one where the one before ended."""
        if home is None:
            return None
        if by is None or {home, layer} == {0, self.folded - 1}:
            return self._shifted(home)
        return min(max(home + by, 0), self.depth - 1)

    def _shifted(self, layer: int) -> int:
        """Returns the unfolded number of a layer: from the middle one on they are counted from the end."""
        return layer if layer < self.middle else self.depth - self.folded + layer

    def _copies(self, placed: Iterable[tuple[int, Op, int | None]]) -> Iterator[Op]:
        """Yields each op (number, op, layer) as it is in its layer."""
        before: tuple[int | None, int | None] | None = None
        for number, op, layer in placed:
            if number in self._of_lists:
                yield self._copy_multi_tensor(op)
                continue
            name, phase, inputs, outputs, written, args, kwargs, home, module, kind, freed, again, lane, _ = op
            if before != (home, layer):
                before = home, layer
                tensor_at, storage_at = (places.__getitem__ for places in self._placed(home, layer))
            if freed:
                # before the first layer, an optimizer also frees what an op on all layers left
                is_of_all = layer is None or (layer == 0 and phase == "optimizer")
                freed = self._freed(op) if is_of_all else tuple(map(storage_at, freed))
            inputs, outputs = tuple(map(tensor_at, inputs)), tuple(map(tensor_at, outputs))
            module = rename_layer(module, home, layer)
            fields = name, phase, inputs, outputs, written, args, kwargs, layer, module, kind, freed, again, lane, ()
            yield tuple.__new__(Op, fields)  # as Op(*fields), which calls a function first

    def _freed(self, op: Op) -> tuple[int, ...]:
        """Lists the storages freed before an op outside the layers: of every layer, as autocast's cast weights are; of
        the layer next to the last alone, what only that one of the folded stream has freed here."""
        storages = self.source.storages
        freed = {(self._roles[s], storages[s].layer) for s in op.freed}

        def layers_of(s: int) -> list[int | None]:
            home = storages[s].layer
            is_alone = home == self.middle > 1 and (self._roles[s], home - 1) not in freed
            return [self._shifted(self.middle)] if is_alone else self._layers_of(home)

        return tuple(self._storage(s, at) for s in op.freed for at in layers_of(s))

    def _placed(self, home: int | None, layer: int | None) -> tuple[_TensorsAt, _StoragesAt]:
        """Maps the tensors and storages of the folded stream to those of the unfolded one, for ops of layer `home` that
        stand for `layer`."""
        by = None if home is None or layer is None else layer - home
        known = self._places.get((by, home))
        if known is None:
            layers = {of: self._place(of, home, by) for of in set(self._storage_homes)}
            storages = _StoragesAt(self, layers)
            known = self._places[by, home] = _TensorsAt(self, storages), storages
        return known

    def _copy_multi_tensor(self, op: Op) -> Op:
        """Copies an op over lists of tensors (the optimizer's); each list grows by the repeated layers' tensors."""
        grown = _GrownLists(self, op)
        # The order of keywords stays: it is part of the call's key.
        args, kwargs = (
            json.dumps(grown.convert(json.loads(text)), separators=(",", ":")) for text in (op.args, op.kwargs)
        )
        return op._replace(
            inputs=tuple(grown.inputs),
            outputs=tuple(self.expand(op.outputs)),
            written=tuple(grown.written),
            args=args,
            kwargs=kwargs,
            freed=self._freed(op),
        )

    def _layers_of(self, home: int | None) -> list[int | None]:
        """Lists the layers that a storage of the folded stream stands for in an op over all parameters."""
        if home is None:
            return [None]
        return list(range(self.middle, self.depth - 1)) if home == self.middle else [self._shifted(home)]

    def expand(self, tensors: Sequence[int]) -> list[int]:
        """Lists the tensors of all layers, layer by layer, as `model.parameters()` does."""
        result: list[int] = []
        for at, run in groupby(tensors, key=self._homes.__getitem__):
            block = list(run)
            result += [self._tensor(tensor, layer) for layer in self._layers_of(at) for tensor in block]
        return result

    def per_layer(self, numbers: Sequence[float], tensors: Sequence[int]) -> Iterator[float]:
        """Yields the numbers that go with tensors for those of all layers, as `expand` lists them."""
        homes = [self._homes[tensor] for tensor in tensors]
        for at, run in groupby(zip(homes, numbers, strict=True), key=lambda each: each[0]):
            block = [number for _, number in run]
            for _ in self._layers_of(at):
                yield from block

    def _tensor(self, index: int, layer: int | None) -> int:
        return self.tensor_in(index, self._storage(self._tensors[index].storage, layer))

    def tensor_in(self, index: int, storage: int) -> int:
        """The number of a tensor, which `storage` of the unfolded stream holds."""
        key = (self._operands[index], storage)
        known = self._tensor_ids.get(key)
        if known is None:
            known = self._tensor_ids[key] = len(self.tensors)
            source = self._tensors[index]
            operand = self._grown.get(source.storage, source.operand) if self._grown else source.operand
            self.tensors.append(tuple.__new__(TensorRef, (operand, storage)))
        return known

    def storage_at(self, index: int, layers: Mapping[int | None, int | None]) -> int:
        """The number of a storage, by the layers that those of the folded stream are."""
        return self._storage(index, self._moved[index] if index in self._moved else layers[self._storage_homes[index]])

    def _storage(self, index: int, layer: int | None) -> int:
        key = (self._roles[index], layer)
        known = self._storage_ids.get(key)
        if known is None:
            known = self._storage_ids[key] = len(self.storages)
            source = self._storages[index]
            grown = self._grown.get(index) if self._grown else None
            fields = grown.bytes if grown else source.bytes, source.kind, layer
            self.storages.append(tuple.__new__(Storage, fields))
        return known


class _StoragesAt(dict[int, int]):
    """Maps storages of the folded stream to those of the unfolded one, which are made at the first lookup."""

    def __init__(self, unfolding: _Unfolding, layers: Mapping[int | None, int | None]) -> None:
        super().__init__()
        self._unfolding, self._layers = unfolding, layers

    def __missing__(self, storage: int) -> int:
        found = self[storage] = self._unfolding.storage_at(storage, self._layers)
        return found


class _TensorsAt(dict[int, int]):
    """Maps tensors as `_StoragesAt` does storages."""

    def __init__(self, unfolding: _Unfolding, storages: _StoragesAt) -> None:
        super().__init__()
        self._unfolding, self._storages = unfolding, storages

    def __missing__(self, tensor: int) -> int:
        unfolding = self._unfolding
        found = self[tensor] = unfolding.tensor_in(tensor, self._storages[unfolding.source.tensors[tensor].storage])
        return found


class _GrownLists:
    """The arguments of an op over lists of tensors, as each list grows by the repeated layers' tensors."""

    def __init__(self, unfolding: _Unfolding, op: Op) -> None:
        self._unfolding, self._op = unfolding, op
        self.inputs: list[int] = []
        self.written: list[int] = []
        self._lengths: list[int] = []
        self._placed: dict[int, tuple[int, int]] = {}  # a list that occurs twice is copied once
        self._first_list: tuple[int, ...] = ()

    def _append(self, first: int, count: int) -> tuple[int, int]:
        if first not in self._placed:
            start = len(self.inputs)
            self.inputs += self._unfolding.expand(self._op.inputs[first : first + count])
            if first in self._op.written:
                self.written += range(start, len(self.inputs))
            self._placed[first] = start, len(self.inputs) - start
        return self._placed[first]

    def convert(self, value: Any) -> Any:
        """Returns an argument as it is of all layers, in the form that `kernels.shapes.Call` describes."""
        match value:
            case {"ts": [first, count]}:
                self._first_list = self._first_list or self._op.inputs[first : first + count]
                start, length = self._append(first, count)
                self._lengths.append(length)
                return {"ts": [start, length]}
            case {"t": position}:
                return {"t": self._append(position, 1)[0]}
            case {"rs": [number, _]}:  # one number per tensor
                return {"rs": [number, self._lengths[0]]}
            case [int() | float(), *_] if self._lengths and len(value) == len(self._first_list):  # a number for each
                return list(self._unfolding.per_layer(value, self._first_list))
            case list():
                return [self.convert(item) for item in value]
            case dict() if not value.keys() & {"ts", "t", "rs", "d", "m", "f", "g", "o"}:
                return {name: self.convert(item) for name, item in value.items()}
        return value


def _without(
    idle: Collection[int], placed: Iterable[tuple[int, Op, int | None]]
) -> Iterator[tuple[int, Op, int | None]]:
    """Yields the ops (number, op, layer) but for those whose numbers are `idle`; the next one frees what these would
    have freed."""
    freed: tuple[int, ...] = ()
    for number, op, layer in placed:
        if number in idle:
            freed += op.freed
        elif freed:
            yield number, op._replace(freed=tuple(dict.fromkeys((*freed, *op.freed)))), layer
            freed = ()
        else:
            yield number, op, layer


def _repeated(meta: dict[str, Any], more: int) -> tuple[dict[str, Any], frozenset[int]]:
    """Returns the meta of a compiled step whose middle layer runs `more` times more, and the numbers of the ops that
    then run no more: two layers have none in the middle. Numbers of ops in the meta count those that are left."""
    if "repeated" not in meta:
        return meta, frozenset()
    idle = frozenset(i for start, stop, times in meta["repeated"] if times + more == 0 for i in range(start, stop))

    def left(number: int) -> int:
        return number - sum(i < number for i in idle)

    runs = [(left(start), left(stop), times + more) for start, stop, times in meta["repeated"] if times + more]
    graphs = [(label, left(first), left(last + 1) - 1) for label, first, last in meta["graphs"]]
    return {**meta, "repeated": runs, "graphs": graphs}, idle


def _placed_graphs(graphs: Sequence[tuple[str, int, int]], placed: Sequence[int]) -> list[tuple[str, int, int]]:
    """Returns the calls of graphs among unfolded ops, given by their numbers in the folded stream."""
    begun = {first: (label, last - first) for label, first, last in graphs}
    calls = ((place, *begun[number]) for place, number in enumerate(placed) if number in begun)
    return [(label, place, place + more) for place, label, more in calls]


def _is_multi_tensor(op: Op) -> bool:
    """Whether an op works on lists of all layers' tensors, as the optimizer's calls do, and what begins a cache."""
    return '"ts"' in op.args and (op.phase == "optimizer" or (op.name == BEGIN_CACHE and op.layer is None))


def _op_roles(stream: Stream) -> list[tuple[int, int]]:
    """Returns the role of each op in its layer, equal for corresponding ops of different layers: (n-th run of one
    phase, n-th op of the layer in it)."""
    roles: list[tuple[int, int]] = []
    for run, (_, ops) in enumerate(groupby(stream.ops, key=lambda op: op.phase)):
        counts: dict[int | None, int] = defaultdict(int)  # a Counter takes four times as long
        for op in ops:
            roles.append((run, counts[op.layer]))
            counts[op.layer] += 1
    return roles


def _alike(stream: Stream) -> list[tuple[int, int]]:
    """Lists the ops of the second layer with those of the third, the middle one, that do the same. Raises NotDerivable
    where the two do not make the same calls."""
    second, third = (
        [number for number, op in enumerate(stream.ops) if op.layer == layer] for layer in (1, FOLDED_PARALLEL - 2)
    )
    names = [[(stream.ops[number].phase, stream.ops[number].name) for number in layer] for layer in (second, third)]
    if names[0] != names[1]:
        raise NotDerivable("the second and the third layer make other calls")
    return list(zip(second, third, strict=True))


def _linked(stream: Stream, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the role of each storage in its layer: that of the storage one layer on with which an op of the third
    layer does what the like op of the second one does with this. Of those that no such op uses, one is like another
    that is first touched alike; what the first or the last layer has beyond others, as to gather its own parameters,
    is like none."""
    homes = [storage.layer for storage in stream.storages]
    following: dict[int, int] = {}
    for one, other in ((stream.ops[i], stream.ops[j]) for i, j in pairs):
        before, after = ([stream.tensors[i].storage for i in (*op.inputs, *op.outputs)] for op in (one, other))
        for old, new in zip(before, after, strict=True):
            home, next_home = homes[old], homes[new]
            if home is not None and next_home == home + 1 and following.setdefault(old, new) != new:
                raise NotDerivable("the second and the third layer use memory in other ways")
    preceding = {new: old for old, new in following.items()}
    touched = {(role, homes[storage]): storage for storage, role in enumerate(_storage_roles(stream))}
    for (role, home), new in touched.items():
        if home is not None and new not in preceding:
            before_it = touched.get((role, home - 1))
            if before_it is not None and before_it not in following:
                preceding[new], following[before_it] = before_it, new
    roles = list(range(len(homes)))
    for storage in sorted(preceding, key=lambda storage: homes[storage] or 0):
        roles[storage] = roles[preceding[storage]]
    return roles


def _likes(stream: Stream, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Returns, by an op that others wait for and a layer, the op that those of the layer before or after wait for."""
    found: dict[tuple[int, int], int] = {}
    for i, j in pairs:
        one, other = ({stream.ops[wait].lane: wait for wait in stream.ops[op].waits} for op in (i, j))
        for lane in one.keys() & other.keys():
            old, new = one[lane], other[lane]
            home, next_home = stream.ops[old].layer, stream.ops[new].layer
            if home is not None and next_home is not None and next_home == home + 1:
                found[new, home], found[old, next_home] = old, new
    return found


def _storage_roles(stream: Stream) -> list[Any]:
    """Returns the role of each storage in its layer, equal for corresponding storages of different layers.

    The role is where the layer's own operations first touch it: (phase, operator, module, n-th of these calls, n-th
    operand). All of a layer's calls are not counted together, since the first layer's are fewer behind a frozen
    embedding: there is no gradient of its input. What no operation of its layer touches is like nothing in other
    layers; but of a compiled step, whose launches are of no layer, the role of parameters, gradients and states is
    their place among their layer's tensors in the optimizer's lists.
    """
    homes = [storage.layer for storage in stream.storages]
    roles: list[Any] = [("once", i) for i in range(len(homes))]
    if "repeated" in stream.meta:
        for position, op in enumerate(stream.ops):
            places: Counter[int | None] = Counter()
            for tensor in (*op.inputs, *op.outputs) if op.phase == "optimizer" else ():
                storage = stream.tensors[tensor].storage
                places[homes[storage]] += 1
                if homes[storage] is not None and roles[storage][0] == "once":
                    roles[storage] = ("list", position, places[homes[storage]])
    counts: dict[Any, int] = defaultdict(int)
    for op in stream.ops:
        if op.layer is None:
            continue
        part = op.phase, op.name, rename_layer(op.module, op.layer, -1)
        counts[part, op.layer] += 1
        for operand, tensor in enumerate((*op.inputs, *op.outputs)):
            storage = stream.tensors[tensor].storage
            if homes[storage] == op.layer and roles[storage][0] == "once":
                roles[storage] = (*part, counts[part, op.layer], operand)
    return roles


@lru_cache(maxsize=65536)
def rename_layer(module: str, old: int | None, new: int | str | None) -> str:
    """Replaces the layer in a module's name: model.layers.1.mlp -> model.layers.7.mlp."""
    if old is None or old == new:
        return module
    return f"{module}.".replace(f".{old}.", f".{new}.", 1)[:-1]
