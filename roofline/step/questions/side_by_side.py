"""Sets forecasts of one step side by side, such as ways to fine-tune it: what each saves against the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flopcast.errors import FlopcastError
from flopcast.roofline.step.forecast import Forecast, usd_per_million


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of several forecasts. `forecast` is None where there is none: `reason` says why."""

    name: str
    forecast: Forecast | None = None
    reason: str = ""

    def to_json(self, first: Forecast | None) -> dict[str, Any]:
        """`saves`: relative to `first`, 0.25 for a quarter less of step seconds, needed bytes and dollars a token."""
        found = self.forecast
        return {
            "name": self.name,
            "reason": self.reason,
            "saves": None if found is None or first is None else savings(found, first),
            "forecast": None if found is None else found.to_json(),
        }


def side(name: str, forecast: Callable[[], Forecast | None]) -> Side:
    """Makes a forecast; one that fails is kept with the reason, and None has to be traced first."""
    try:
        found = forecast()
    except FlopcastError as fault:
        return Side(name=name, reason=str(fault))
    if found is None:
        return Side(name=name, reason="its operations have to be traced first: --what-if")
    return Side(name=name, forecast=found)


def savings(found: Forecast, first: Forecast) -> Mapping[str, float | None]:
    """What one saves against another, as shares of that; None for dollars that are not known."""
    usd, of_first = usd_per_million(found), usd_per_million(first)
    return {
        "step_seconds": 1 - found.step_seconds / first.step_seconds,
        "needed_bytes": 1 - found.needed_bytes / first.needed_bytes,
        "usd": None if usd is None or not of_first else 1 - usd / of_first,
    }
