"""Prints the output of `flopcast prices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.gpu.catalogue.prices import EXPIRED_DAYS, OLD_DAYS
from flopcast.roofline.views.terminal.console import console, table

if TYPE_CHECKING:
    from flopcast.roofline.gpu.catalogue.prices import Price


def print_prices(found: Sequence[Price]) -> None:
    """Prints one row per price, with its age where it is old, and its source."""
    rows = [
        [p.gpu, p.provider, p.kind, f"{p.usd_per_hour:.4g}", f"{'about ' if p.date_inferred else ''}{p.date}",
         f"{p.age_days:,}" if p.is_old else "", p.source]
        for p in found
    ]  # fmt: skip
    columns = ("GPU", "provider", "kind", "$/h", "day", "days old", "source")
    caption = f"days old: where more than {OLD_DAYS}; a price of more than {EXPIRED_DAYS} days decides no ranking"
    made = table("Newest prices, $ per GPU and hour", columns, rows, caption)
    for index in (1, 2, 4, 6):
        made.columns[index].justify = "left"
    console().print(made)
