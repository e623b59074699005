"""Derives the stream of any depth from one of few layers where not every layer is like the next, but groups are.

DeepSeek-V3's first layers have no experts, and every fourth one of Qwen3-Next attends otherwise: layers of its own come
first, and what follows repeats itself. Such a stream is traced with the first layers and as many groups as `to_depth`
takes layers. For the unfolding each group counts as one layer, and what comes before them as no layer:

    layers   0 1 2 | 3 4 5 6 | 7 8 9 10 | 11 12 13 14          first 3, period 4
    counted        |    0    |    1     |     2
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, FOLDED_PARALLEL, NotDerivable, Op, Storage, Stream
from flopcast.roofline.stream.ops.to_depth import rename_layer, to_depth

_PLACE = "@"  # before the number of the layer in its group, in the kind of a storage


class Pattern(NamedTuple):
    """How layers repeat themselves: after the `first` ones each is like the one `period` before it."""

    first: int = 0
    period: int = 1

    @property
    def is_of_one(self) -> bool:
        """Whether all layers are of one kind."""
        return self == Pattern()

    def depth_of(self, groups: int) -> int:
        """Returns the number of layers with so many groups."""
        return self.first + groups * self.period

    def groups_of(self, depth: int) -> int | None:
        """Returns the number of groups of `depth` layers; None where they do not divide what follows the first ones."""
        groups, rest = divmod(depth - self.first, self.period)
        return groups if rest == 0 and groups > 0 else None


def unfolded(stream: Stream, pattern: Pattern, depth: int) -> Stream:
    """Returns the stream of the same model with `depth` layers. Of layers of one kind: as `to_depth` does.

    Raises NotDerivable as that does, and for a depth that groups do not make up.
    """
    if pattern.is_of_one:
        return to_depth(stream, depth)
    groups = pattern.groups_of(depth)
    if groups is None:
        raise NotDerivable(f"{depth} layers are not {pattern.first} and groups of {pattern.period}")
    traced = FOLDED_PARALLEL if "parallel" in stream.meta else FOLDED_DEPTH
    made = to_depth(_in_groups(stream, pattern, traced), groups)
    sources = [stream.ops[at] if at >= 0 else None for at in made.repeats]
    return replace(
        made,
        ops=tuple(_op_of_its_layer(op, source, pattern) for op, source in zip(made.ops, sources, strict=True)),
        storages=tuple(_storage_of_its_layer(storage, pattern) for storage in made.storages),
        depth=depth,
        meta={**made.meta, "layer_params": stream.meta["layer_params"]},
    )


def _in_groups(stream: Stream, pattern: Pattern, groups: int) -> Stream:
    """The stream of `groups` groups with each as one layer. What is of a layer says beside it which one of its group it
    is of, or of the layers before them: a module in its name, a storage in its kind."""
    first, period = pattern

    def counted(layer: int | None) -> tuple[int | None, int | None]:
        if layer is None or layer < first:
            return None, layer
        return (layer - first) // period, (layer - first) % period

    def op_in_group(op: Op) -> Op:
        group, place = counted(op.layer)
        module = op.module if group is None else rename_layer(op.module, op.layer, f"{group}.+{place}")
        return op._replace(layer=group, module=module)

    def storage_in_group(storage: Storage) -> Storage:
        group, place = counted(storage.layer)
        return storage if place is None else storage._replace(layer=group, kind=f"{storage.kind}{_PLACE}{place}")

    of_layers = stream.meta.get("params_of_layers") or [stream.meta["layer_params"]] * (stream.depth or 0)
    if len(of_layers) != pattern.depth_of(groups):
        raise NotDerivable(f"a stream of {len(of_layers)} layers is not one of {groups} groups: {pattern}")
    return replace(
        stream,
        ops=tuple(map(op_in_group, stream.ops)),
        storages=tuple(map(storage_in_group, stream.storages)),
        depth=groups,
        meta={**stream.meta, "layer_params": sum(of_layers[first : first + period])},
    )


def _op_of_its_layer(op: Op, source: Op | None, pattern: Pattern) -> Op:
    """The op of a group with the layer that it is of, as `source`, the traced op that it repeats, is of one."""
    if source is None or source.layer is None:
        return op
    if op.layer is None:  # before the groups
        return op._replace(layer=source.layer)
    layer = pattern.depth_of(op.layer) + (source.layer - pattern.first) % pattern.period
    return op._replace(layer=layer, module=rename_layer(source.module, source.layer, layer))


def _storage_of_its_layer(storage: Storage, pattern: Pattern) -> Storage:
    kind, mark, place = storage.kind.partition(_PLACE)
    if not mark:
        return storage
    layer = int(place) if storage.layer is None else pattern.depth_of(storage.layer) + int(place)
    return Storage(storage.bytes, kind, layer)
