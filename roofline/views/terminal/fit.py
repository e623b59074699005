"""What `flopcast fit` prints: the quality of the fit, how far the cards of a folder and two runs lie apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flopcast.roofline.base.units import NONE, share
from flopcast.roofline.gpu.fit import cards
from flopcast.roofline.validation import repeatability
from flopcast.roofline.views.terminal.console import print_table, say, warn

if TYPE_CHECKING:
    from flopcast.roofline.gpu.fit.quality import FitReport
    from flopcast.roofline.validation.repeatability import Repeatability


def print_fit(report: FitReport) -> None:
    """One row per class; rows that were not used, and warnings, on stderr."""
    rows = [
        [q.name, str(q.n), share(q.left_out_median), share(q.left_out_p90),
         str(q.n_holdout) if q.n_holdout else NONE, share(q.holdout_median), share(q.holdout_p90),
         share(q.holdout_coverage)]
        for q in report.classes
    ]  # fmt: skip
    columns = ("class", "fitted", "left-out median", "p90", "held out", "median", "p90", "in 90% interval")
    print_table("Errors of the fit, |forecast / measured - 1|", columns, rows)
    for status, count in report.unused.items():
        say(f"{count} rows of status {status} not used")
    warn(report.warnings)


def print_spread(spread: Mapping[str, Any]) -> None:
    """How far the cards of one folder lie apart, class by class (`cards.spread`)."""
    print_table(f"{len(spread['cards'])} cards, row by row", cards.TABLE_COLUMNS, cards.table_rows(spread))


def print_repeatability(found: Repeatability) -> None:
    """How far two runs lie apart; remarks on stderr."""
    rows = repeatability.table_rows(found)
    print_table("Two runs, |difference| row by row", repeatability.TABLE_COLUMNS, rows)
    for remark in repeatability.remarks(found):
        say(remark)
