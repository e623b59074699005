"""The launches of a deep model from those of two shallower ones, since layers repeat.

A graph of d + 1 layers launches what one of d does and a layer more. In inductor's text the added launches are not
marked, and kernels are numbered anew. So the layer is found by what it launches: the difference of the two lists, each
launch by kind, name without its number, sizes, bytes and operands; and its place, the stretch of the deeper list that
holds most of it. (Qwen3-0.6B on an H200 at 8 x 1024: 22 launches a layer forward and 36 backward, each in one stretch.
Lists of two and three layers unfold to the real one of 28, in order.)

Inductor may order a graph for its peak of memory, and then layers overlap: those of the added launches that lie outside
of the stretch repeat where they stand. What is launched is still right, and only the order is not that of the deep
model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flopcast.errors import DataError
from flopcast.roofline.stream.compiled.launches import Graph, Launch

_NUMBER = re.compile(r"_\d+$")
_SEEDS = "aten.randint"  # of dropout, one number of 8 bytes for each place where it is drawn, so more with every layer


class Stretch(NamedTuple):
    """Launches of a graph, from number `start` to before `stop`, that run `times` times one after the other."""

    start: int
    stop: int
    times: int


@dataclass(frozen=True)
class Layered:
    """Graph of a model of one layer more than `base`. `layer`: its launches, from a number to before another, that a
    layer more launches once more."""

    graph: Graph
    layer: tuple[tuple[int, int], ...]
    base: int

    def launches(self, layers: int) -> tuple[Launch, ...]:
        """The launches at a depth, in order."""
        found: list[Launch] = []
        place = 0
        for start, stop, times in self.stretches(layers):
            found += self.graph.launches[place:start] + self.graph.launches[start:stop] * times
            place = stop
        return (*found, *self.graph.launches[place:])

    def stretches(self, layers: int) -> tuple[Stretch, ...]:
        """The repeated launches at a depth."""
        return tuple(Stretch(start, stop, layers - self.base) for start, stop in self.layer)


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
    if few - many:
        lost = next(iter(few - many))
        raise DataError(
            f"graph {shallow.label}: {layers} layers launch {lost.name} {few[lost]} times, {layers + 1} layers "
            f"{many[lost]} times: their layers are not alike"
        )
    return Layered(deep, tuple(_runs(_added(shallow, deep, many - few))), layers)


def alike(launch: Launch) -> Launch:
    """The launch without what numbers it: two that are alike cost the same."""
    if launch.name == _SEEDS:
        launch = replace(launch, bytes_written=0, results=(), args="[]")
    name = _NUMBER.sub("", launch.name) if launch.is_generated else launch.name
    return replace(launch, name=name, nodes=(), ops=())


def _added(shallow: Graph, deep: Graph, added: Counter[Launch]) -> list[int]:
    """Which launches of `deep` are those that a layer adds, in order: as many of them as possible in one stretch, the
    others as near to it as they are. Of several such stretches, which are turns of one another where layers do not
    overlap, the last to which both lists begin alike."""
    length = added.total()
    if not length:
        return []
    ours = [alike(launch) for launch in deep.launches]
    shares = [(Counter(ours[start : start + length]) & added).total() for start in range(len(ours) - length + 1)]
    best = [start for start, share in enumerate(shares) if share == max(shares)]
    theirs = [alike(launch) for launch in shallow.launches]
    begun = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), len(theirs))
    start = max((place for place in best if place <= begun), default=best[0])
    wanted = Counter(added)
    found = []
    for place in sorted(range(len(ours)), key=lambda place: max(start - place, place - start - length + 1, 0)):
        if wanted[ours[place]]:
            wanted[ours[place]] -= 1
            found.append(place)
    return sorted(found)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Numbers in a row as (first, one after the last)."""
    for place, before in zip(places, (None, *places), strict=False):
        if before is None or place != before + 1:
            start = place
        if place + 1 not in places:
            yield start, place + 1
