"""Prints the output of `flopcast compare` and `flopcast validate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopcast.roofline.base.units import NONE, duration, ms, percent, share
from flopcast.roofline.validation.compare import ROWS_SHOWN, Change, Comparison, StepChange
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.validation.summary import Errors, busy_words, compare_methods, summaries
from flopcast.roofline.views.terminal.console import console, print_table, say, warn

NAME_SHOWN = 60


def print_comparison(found: Comparison, steps: Sequence[StepChange] = ()) -> None:
    """Prints the tables of a comparison on stdout, remarks on stderr."""
    if found.differences:
        rows = [[name, _shown(a), _shown(b)] for name, a, b in found.differences]
        print_table("Device and software, where they differ", ("", "A", "B"), rows)
    else:
        console().print("Device and software are the same.")
    rows = [
        [change.group, f"{change.rows:,}", ratio(change.change), f"\u00b1{change.noise * 100:.1f}%",
         f"{ratio(change.low)} to {ratio(change.high)}", f"{change.slower} / {change.faster}",
         _verdict(change, found.of_one_kind)]
        for change in found.changes
    ]  # fmt: skip
    columns = ("class", "rows", "time, B over A", "noise", "8 of 10 rows", "rows slower / faster", "")
    caption = (
        f"A: {found.a}\nB: {found.b}\nmedian over the rows; more is slower. Noise: 98% interval of a median that did "
        "not change\nrows slower / faster: each beyond its own noise and the tolerance of "
        f"{found.tolerance:.1%}"
    )
    print_table("Time by class", columns, rows, caption)
    if found.rows:
        shown = found.rows[:ROWS_SHOWN]
        lines = [
            [_cut(row.name), _time(row.seconds_a), _time(row.seconds_b), ratio(row.change),
             f"\u00b1{row.noise * 100:.1f}%"]
            for row in shown
        ]  # fmt: skip
        title = f"Rows that changed most, of {len(found.rows):,} beyond their own noise"
        print_table(title, ("", "A", "B", "change", "noise"), lines)
    if steps:
        lines = [
            [step.name, *(f"{ms(v)} ({ms(low)} to {ms(high)})" for v, low, high in (step.a, step.b)),
             ratio(step.b[0] / step.a[0] - 1), ratio(step.device_b / step.device_a - 1)]
            for step in steps
        ]  # fmt: skip
        heads = ("step, ms (90% interval)", "A", "B", "B over A", "its device time")
        print_table("Forecasts of training steps with either", heads, lines)
    for number, which in zip(found.unmatched, "AB", strict=True):
        if number:
            say(f"{number:,} measurements only in {which}")
    warn(found.warnings)


def ratio(change: float) -> str:
    """A change in time: +3.1%, and 2.31x from twice as long on."""
    return percent(change) if change < 1.0 else f"{1.0 + change:.3g}x"


def _time(seconds: float) -> str:
    """A time in words; for a rate, the time of a billion bytes or FLOPs."""
    return duration(seconds) if seconds > 1e-9 else f"{duration(seconds * 1e9)} a G"


def _verdict(change: Change, of_one_kind: bool) -> str:
    if change.has_regressed:
        return "REGRESSED" if of_one_kind else "SLOWER"
    return "" if change.verdict == "same" else change.verdict


def _shown(value: Any) -> str:
    return NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _cut(name: str) -> str:
    return name if len(name) <= NAME_SHOWN else f"{name[: NAME_SHOWN - 3]}..."


def print_validation(rows: Sequence[StepComparison]) -> None:
    """Prints the tables of `validate`: every step, the errors by component, and the errors of other methods."""
    shown = [
        [row.label, ms(row.step.measured), ms(row.step.forecast), percent(row.step.error),
         ms(row.device.measured), percent(row.device.error), ms(row.host.measured), percent(row.host.error),
         percent(row.peak.error), share(row.measured_share), row.bound or NONE, row.status]
        for row in rows
    ]  # fmt: skip
    columns = ("step", "ms", "forecast", "error", "device ms", "error", "host ms", "error", "memory", "measured",
               "bound", "status")  # fmt: skip
    title = "Forecast against real steps (none used in fitting)"
    print_table(title, columns, shown, "measured: share of the kernel time in shapes that were", ruled=False)
    for row in rows:
        if row.reason:
            say(f"{row.label}: {row.reason}")
    sets = summaries(rows)
    parts = ("device", "host", "peak")
    totals = [[entry.label, str(entry.n), *(_median_and_worst(entry.parts[name]) for name in parts)] for entry in sets]
    print_table("|error|, median / worst", ("rows", "n", *parts), totals)
    totals = [
        [entry.label, str(entry.n), _median_and_worst(entry.parts["step"]), share(entry.coverage),
         share(entry.interval_width), _median_and_worst(entry.parts["profile_host_step"]),
         share(entry.profile_host_coverage), share(entry.profile_host_width)]
        for entry in sets
    ]  # fmt: skip
    names = ("step, host of its run", "in 90% interval", "its width", "step, profile's host", "in 90% interval",
             "its width")  # fmt: skip
    print_table("|error| of the step, median / worst, and its interval", ("rows", "n", *names), totals)
    warn(filter(None, [busy_words(rows)]))
    methods = compare_methods(rows)
    if len(methods) > 1:
        lines = [[method.label, *map(_median_and_worst, method.sets.values())] for method in methods]
        title = f"|error| of the step, median / worst, on the same {methods[0].n} steps"
        print_table(title, ("forecast by", *methods[0].sets), lines)


def _median_and_worst(found: Errors) -> str:
    return NONE if found.median is None else f"{share(found.median)} / {share(found.worst)}"
