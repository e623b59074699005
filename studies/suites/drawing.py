"""Draws distinct shapes at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from flopcast.kernels.shapes import Shape

Drawn = TypeVar("Drawn", bound=Shape)


def first(draw: Callable[[], Drawn], is_allowed: Callable[[Drawn], bool]) -> Drawn:
    """Draws until a shape is allowed."""
    while not is_allowed(shape := draw()):
        pass
    return shape


def distinct(draw: Callable[[], Drawn], taken: set[Drawn], count: int) -> Iterator[Drawn]:
    """Draws `count` shapes that are not in `taken`, and adds them to it."""
    for _ in range(count):
        shape = first(draw, lambda shape: shape not in taken)
        taken.add(shape)
        yield shape
