"""One line of a suite: a shape, how it is run and what it is for. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from flopcast.kernels.shapes import Shape

HOT_BYTES = 128 * 1024**2  # above about twice the largest L2 nothing stays hot


@dataclass(frozen=True)
class SuiteCase:
    """A shape to measure with a backend and a cache policy ("cold" or "hot"), for "fit" or "holdout"."""

    shape: Shape
    backend: str
    cache: str
    role: str
