"""Prints the output of `flopcast finetune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import NONE, gigabytes, ms, parameters, percent, short_name, three_digits, yes_no
from flopcast.roofline.step.forecast import usd_per_million
from flopcast.roofline.step.questions.fine_tuning import savings
from flopcast.roofline.views.terminal.console import console, print_table, say, warn
from flopcast.roofline.views.terminal.forecast import run_words

if TYPE_CHECKING:
    from flopcast.roofline.step.forecast import Forecast
    from flopcast.roofline.step.questions.fine_tuning import Way
    from flopcast.roofline.stream.model.run import Run


def print_ways(ways: Sequence[Way], run: Run) -> None:
    """Prints a row per way on stdout; below it where each fits, on stderr why some were not forecast and warnings."""
    done = [(way, way.forecast) for way in ways if way.forecast is not None]
    if done:
        _print_done(done, run)
    for way in ways:
        if way.forecast is None:
            say(f"{way.finetune}: {way.reason}")
    warn(dict.fromkeys(f"{way.finetune}: {warning}" for way, found in done for warning in found.warnings))


def _print_done(done: Sequence[tuple[Way, Forecast]], run: Run) -> None:
    first = done[0][1]
    rows = []
    for way, found in done:
        saved = savings(found, first)
        usd = usd_per_million(found)
        rows.append([
            way.finetune, parameters(found.n_params_trained), ms(found.step_seconds),
            f"{ms(found.step_seconds_low)} to {ms(found.step_seconds_high)}", gigabytes(found.needed_bytes),
            yes_no(found.fits), NONE if usd is None else three_digits(usd),
            *(percent(None if (part := saved[name]) is None else -part) for name in ("step_seconds", "needed_bytes")),
        ])  # fmt: skip
    columns = ("trained", "parameters", "step, ms", "90% interval", "memory needed", "fits", "$/M tokens", "time",
               "memory")  # fmt: skip
    title = f"{first.gpu} ({first.profile_basis}): {parameters(done[0][1].n_params)} parameters, {run_words(run)}"
    print_table(f"{title}; changes against {done[0][0].finetune}", columns, rows, ruled=False)
    if first.price is not None:
        console().print(f"price: {first.price.label}")
    for way, _ in done:
        names = ", ".join(short_name(gpu) for gpu in way.fits_on)
        console().print(f"{way.finetune} fits on: {names or 'none that is known'}")
