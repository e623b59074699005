"""A number with its 90% interval and its origin, and the normal quantile of such an interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A value with its 90% interval and where it comes from. `source` names the file, page or measurement."""

    value: float
    low: float
    high: float
    basis: str
    source: str = ""


Z_90 = 1.6449  # standard normal quantile of a two-sided 90% interval
