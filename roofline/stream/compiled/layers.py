"""The launches of a deep model from those of two shallower ones, since layers repeat.

A graph of d + 1 layers launches what one of d does and a layer more. In inductor's text the added launches are not
marked, and kernels are numbered anew. So the layer is found by what it launches: the difference of the two lists, each
launch by kind, name without its number, sizes, bytes and operands; and its place, a stretch of the deeper list that
launches just that. (Qwen3-0.6B on an H200: 22 launches a layer forward and 36 backward. Lists of two and three layers
unfold to the real one of 28, in order, with its peak of memory to the byte.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flopcast.errors import DataError
from flopcast.roofline.stream.compiled.launches import Graph, Launch

_NUMBER = re.compile(r"_\d+$")


class Stretch(NamedTuple):
    """Launches of a graph, from number `start` to before `stop`, that run `times` times one after the other."""

    start: int
    stop: int
    times: int


@dataclass(frozen=True)
class Layered:
    """Graph of a model as launches before, of and after a layer that may be repeated: `layers` times for a graph of
    that depth less `base`. `peak_bytes` of the two depths that it was made from grow by as much with every layer."""

    label: str
    before: tuple[Launch, ...]
    layer: tuple[Launch, ...]
    after: tuple[Launch, ...]
    base: int  # layers that lie in `before` and `after`
    base_peak_bytes: int
    layer_peak_bytes: int

    def launches(self, layers: int) -> tuple[Launch, ...]:
        """The launches at a depth, in order."""
        return self.before + self.layer * (layers - self.base) + self.after

    def stretch(self, layers: int) -> Stretch:
        """The repeated launches at a depth, by their numbers in the graph of one layer more than `base`."""
        return Stretch(len(self.before), len(self.before) + len(self.layer), layers - self.base)

    def peak_bytes(self, layers: int) -> int:
        return self.base_peak_bytes + (layers - self.base) * self.layer_peak_bytes


def fold(shallow: Sequence[Graph], deep: Sequence[Graph], layers: int) -> tuple[Layered, ...]:
    """`shallow`: the graphs of a model of `layers` layers, `deep`: those of one layer more.

    A graph that both have alike, as that of the loss behind a graph break, has no layer. Raises DataError for graphs
    that do not differ by a layer: the model's layers are not alike, or inductor compiled the two differently.
    """
    if len(shallow) != len(deep):
        raise DataError(
            f"{layers} layers were compiled as {len(shallow)} graphs, {layers + 1} as {len(deep)}: "
            "layers break the graph differently, so that a deeper model's cannot be foretold"
        )
    return tuple(_fold(one, other, layers) for one, other in zip(shallow, deep, strict=True))


def _fold(shallow: Graph, deep: Graph, layers: int) -> Layered:
    few, many = (Counter(alike(launch) for launch in graph.launches) for graph in (shallow, deep))
    added = many - few
    if few - many:
        lost = next(iter(few - many))
        raise DataError(
            f"graph {shallow.label}: {layers} layers launch {lost.name} {few[lost]} times, {layers + 1} layers "
            f"{many[lost]} times: their layers are not alike"
        )
    length = added.total()
    start = _place(shallow, deep, added)
    return Layered(
        deep.label,
        deep.launches[:start],
        deep.launches[start : start + length],
        deep.launches[start + length :],
        layers,
        shallow.peak_bytes(),
        deep.peak_bytes() - shallow.peak_bytes(),
    )


def alike(launch: Launch) -> Launch:
    """The launch without what numbers it: two that are alike cost the same."""
    name = _NUMBER.sub("", launch.name) if launch.is_generated else launch.name
    return replace(launch, name=name, nodes=(), ops=())


def _place(shallow: Graph, deep: Graph, added: Counter[Launch]) -> int:
    """Where in `deep` the added launches stand in one stretch. Of several places, which are turns of one another, the
    last to which both lists begin alike."""
    length = added.total()
    ours = [alike(launch) for launch in deep.launches]
    window = Counter(ours[:length])
    places = []
    for start in range(len(ours) - length + 1):
        if window == added:
            places.append(start)
        if start + length < len(ours):
            window[ours[start]] -= 1
            window[ours[start + length]] += 1
            if not window[ours[start]]:
                del window[ours[start]]
    if not places:
        raise DataError(
            f"graph {deep.label}: the {length} launches that a layer adds stand in no one stretch: layers overlap, so "
            "that a deeper model's order cannot be foretold"
        )
    theirs = [alike(launch) for launch in shallow.launches]
    begun = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), len(theirs))
    return max((place for place in places if place <= begun), default=places[0])
