"""Prints forecasts of one step side by side, such as the ways to fine-tune a model of `flopcast finetune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import NONE, gigabytes, ms, parameters, percent, short_name, three_digits, yes_no
from flopcast.roofline.step.forecast import usd_per_million
from flopcast.roofline.step.questions.side_by_side import savings
from flopcast.roofline.views.terminal.console import console, print_table, say, warn
from flopcast.roofline.views.terminal.forecast import run_words

if TYPE_CHECKING:
    from flopcast.roofline.step.questions.fine_tuning import Way
    from flopcast.roofline.step.questions.side_by_side import Side
    from flopcast.roofline.stream.model.run import Run


def print_sides(sides: Sequence[Side], title: str, column: str, *, with_warnings: bool = True) -> None:
    """Prints a row per forecast on stdout, on stderr why some were not made and their warnings. `column`: what their
    names are."""
    done = [(side, side.forecast) for side in sides if side.forecast is not None]
    if done:
        first = done[0][1]
        rows = []
        for side, found in done:
            saved, usd = savings(found, first), usd_per_million(found)
            changed = (saved["step_seconds"], saved["needed_bytes"])
            rows.append([
                side.name, parameters(found.n_params_trained), ms(found.step_seconds),
                f"{ms(found.step_seconds_low)} to {ms(found.step_seconds_high)}", gigabytes(found.needed_bytes),
                yes_no(found.fits), NONE if usd is None else three_digits(usd),
                *(percent(None if part is None else -part) for part in changed),
            ])  # fmt: skip
        columns = (column, "parameters", "step, ms", "90% interval", "memory needed", "fits", f"$/M {first.unit}",
                   "time", "memory")  # fmt: skip
        print_table(f"{title}; changes against {done[0][0].name}", columns, rows, ruled=False)
    for side in sides:
        if side.forecast is None:
            say(f"not forecast: {side.name} ({side.reason})")
    if with_warnings:
        warn(dict.fromkeys(f"{side.name}: {warning}" for side, found in done for warning in found.warnings))


def print_ways(ways: Sequence[Way], run: Run) -> None:
    """Prints a row per way on stdout; below it where each fits, on stderr why some were not forecast and warnings."""
    first = next((way.forecast for way in ways if way.forecast is not None), None)
    if first is not None:
        title = f"{first.gpu} ({first.profile_basis}): {parameters(first.n_params)} parameters, {run_words(run)}"
        print_sides(ways, title, "trained")
        if first.price is not None:
            console().print(f"price: {first.price.label}")
    for way in ways:
        if way.forecast is not None:
            names = ", ".join(short_name(gpu) for gpu in way.fits_on)
            console().print(f"{way.name} fits on: {names or 'none that is known'}")
