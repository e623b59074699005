"""How long ago a launch's operands were touched: what may still lie in the GPU's L2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flopcast.roofline.stream.compiled.launches import Launch


def with_ages(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """The launches of a graph, in order, each with the `ages` of what it reads: for every buffer that an earlier launch
    of the graph has touched (bytes read, bytes that were moved since)."""
    moved = 0
    touched: dict[str, int] = {}
    aged = []
    for launch in launches:
        ages = [(touch.read, moved - touched[touch.buffer]) for touch in launch.touches if touch.buffer in touched]
        aged.append(replace(launch, ages=tuple((read, age) for read, age in ages if read)))
        moved += launch.bytes
        touched |= {touch.buffer: moved for touch in launch.touches}
    return tuple(aged)
