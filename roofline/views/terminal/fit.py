"""The quality of a fit as the terminal shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flopcast.roofline.gpu.fit.quality import FitReport
from flopcast.roofline.base.units import NONE, share
from flopcast.roofline.views.terminal.console import console, say, table


def print_fit(report: FitReport) -> None:
    rows = [
        [q.name, str(q.n), share(q.left_out_median), share(q.left_out_p90),
         str(q.n_holdout) if q.n_holdout else NONE, share(q.holdout_median), share(q.holdout_p90),
         share(q.holdout_coverage)]
        for q in report.classes
    ]  # fmt: skip
    columns = ("class", "fitted", "left-out median", "p90", "held out", "median", "p90", "in 90% interval")
    console().print(table("Errors of the fit, |forecast / measured - 1|", columns, rows))
    for status, count in report.unused.items():
        say(f"{count} rows of status {status} not used")
    for warning in report.warnings:
        say(f"warning: {warning}")
