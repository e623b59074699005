"""Prints the output of `flopcast prices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.views.terminal.console import console, table

if TYPE_CHECKING:
    from flopcast.roofline.gpu.catalogue.prices import Price


def print_prices(found: Sequence[Price]) -> None:
    """Prints one row per price, with its source."""
    rows = [
        [p.gpu, p.provider, p.kind, f"{p.usd_per_hour:.4g}", f"{'about ' if p.date_inferred else ''}{p.date}", p.source]
        for p in found
    ]
    made = table("Newest prices, $ per GPU and hour", ("GPU", "provider", "kind", "$/h", "day", "source"), rows)
    for index in (1, 2, 4, 5):
        made.columns[index].justify = "left"
    console().print(made)
