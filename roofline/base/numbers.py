"""A number with its 90% interval and its origin, and the normal quantile of such an interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from flopcast.bounds import NonNegative

# How a number came about.
Basis = Annotated[str, Literal["measured", "interpolated", "extrapolated", "published", "datasheet"]]


@dataclass(frozen=True)
class Number:
    """A value with its 90% interval and where it comes from. `source` names the file, page or measurement."""

    value: NonNegative
    low: NonNegative
    high: NonNegative
    basis: Basis
    source: str = ""


Z_90 = 1.6449  # standard normal quantile of a two-sided 90% interval
