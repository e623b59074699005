"""Prints the output of `flopcast fit`: the quality of the fit, and differences between cards and between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flopcast.roofline.base.units import NONE, share
from flopcast.roofline.gpu.fit import cards
from flopcast.roofline.validation.repeatability import TARGETS, Repeatability
from flopcast.roofline.views.terminal.console import print_table, say, warn

if TYPE_CHECKING:
    from flopcast.roofline.gpu.fit.quality import FitReport


def print_fit(report: FitReport) -> None:
    """Prints one row per class; measurements that were not used, and warnings, go to stderr."""
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
    """Prints how far the cards of one folder differ, class by class (`cards.spread`)."""
    print_table(f"{len(spread['cards'])} cards, row by row", cards.TABLE_COLUMNS, cards.table_rows(spread))


def print_repeatability(found: Repeatability) -> None:
    """Prints how far two runs differ; remarks go to stderr."""
    lengths = {"long": ">= 50 us", "short": "< 50 us", "any": ""}
    columns = ("rows", "length", "reading", "n", "median", "p90", "greatest", "signed median")
    rows = [
        [a.group, lengths[a.length], a.reading, f"{a.n:,}", f"{a.median:.2%}", f"{a.p90:.2%}", f"{a.greatest:.1%}",
         f"{a.signed:+.2%}"]
        for a in found.agreements
    ]  # fmt: skip
    print_table("Two runs, |difference| row by row", columns, rows)
    for remark in remarks(found):
        say(remark)


def remarks(found: Repeatability) -> list[str]:
    """What a reader has to know besides the table."""
    lines = []
    if found.machines[0] != found.machines[1]:
        lines.append(
            f"machines {found.machines[0]} and {found.machines[1]}: these are two cards, power limits or stacks, "
            "not two runs of one"
        )
    lines += [f"{count} rows {reason}" for reason, count in sorted(found.unmatched.items())]
    for name, is_met in found.targets.items():
        if is_met is not None:
            rows = "50 us and more" if name == "long" else "less than 50 us"
            verdict = f"{'within' if is_met else 'ABOVE'} {TARGETS[name]:.0%}"
            lines.append(f"median of rows of {rows} {verdict}, by what the profile takes")
    walls = [f"{seconds:.0f} s" for seconds in found.wall_seconds if seconds is not None]
    return [*lines, f"first row to last: {', '.join(walls)}"] if walls else lines
