"""Parts of the page that other modules know how to make: rules of widths, and the article's claims.

A part that its data do not suffice for is left out; a fault in making one is said on the page, and the page goes on.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopcast.errors import FlopcastError
from flopcast.roofline.report_data import Section
from flopcast.roofline.report_table import Column, Table, percent, prose, text

if TYPE_CHECKING:
    from flopcast.roofline.profile import Profile
    from flopcast.roofline.widths_rules import MeasuredRule

ECONOMICS = "economics"  # folder beside the pages, of `python -m flopcast.roofline.claims`
WIDTHS = "widths.csv"  # beside the page: real steps of aligned and unaligned widths
COSTLY = 0.02  # a median above which a multiple is worth keeping
SHOWN_CHECKS = ("neighbourhood", "axis", "value", "below", "above")


@dataclass(frozen=True)
class Extra:
    """Sections, (heading, sentence) for the summary, and what could not be made."""

    sections: Sequence[Section]
    advice: Sequence[tuple[str, str]]
    faults: Sequence[str]


def extra_parts(profile: Profile, out: Path, *, may_trace: bool) -> Extra:
    """`out`: the page's folder. `may_trace`: op streams that are not at hand, which takes torch."""
    sections: list[Section] = []
    advice: list[tuple[str, str]] = []
    faults: list[str] = []
    makers: tuple[tuple[str, Callable[[], Iterator[Section | tuple[str, str]]]], ...] = (
        ("the article's claims", lambda: claim_parts(out.resolve().parent / ECONOMICS)),
        ("rules of widths", lambda: width_parts(profile, out, may_trace)),
    )
    for name, make in makers:
        try:
            for part in make():
                if isinstance(part, Section):
                    sections.append(part)
                else:
                    advice.append(part)
        except (FlopcastError, ArithmeticError, LookupError, OSError, ValueError) as fault:
            faults.append(f"{name} could not be made: {type(fault).__name__}: {fault}")
    return Extra(sections, advice, faults)


# --- widths


def width_parts(profile: Profile, out: Path, may_trace: bool) -> Iterator[Section | tuple[str, str]]:
    """Rules, the sawtooth, and the check against real steps where there is one. Nothing of a processor."""
    if profile.device.get("type") == "cpu":
        return
    from flopcast.roofline.plots_widths import penalty_figure, sawtooth_figure
    from flopcast.roofline.widths_rules import measured_rules
    from flopcast.roofline.widths_sawtooth import sawtooth_points, sawtooth_widths

    rules = measured_rules(profile)
    checks = _rows_of(out / WIDTHS)
    widths = [width for width in sawtooth_widths() if width % 64 == 0 or width // 512 % 2 == 0]
    points = sawtooth_points(profile, widths) if may_trace else []  # 61 steps
    drawn = (sawtooth_figure(points, profile), penalty_figure(checks, profile.gpu))
    tables = [table for table in (rule_table(rules, profile), check_table(checks)) if table is not None]
    whose = "this GPU's own" if profile.basis == "measured" else "its projected"
    if advice := multiple_to_keep(rules, whose):
        yield "Which multiple to keep", advice
    yield Section(
        "widths", "Which widths to choose", [figure for figure in drawn if figure is not None], tables,
        commands={"sawtooth": f"flopcast widths --gpu {profile.gpu} --around 2048 --figure widths.png",
                  "penalties": "python -m flopcast.roofline.widths_check --help"},
    )  # fmt: skip


def multiple_to_keep(rules: Sequence[MeasuredRule], whose: str = "this GPU's own") -> str:
    """In a sentence: the multiple, what ignoring it costs, and from which on nothing is left to gain."""
    found = [rule for rule in rules if rule.layout == "all"]
    costly = [rule for rule in found if rule.median > COSTLY]
    if not costly:
        return ""
    keep = max(rule.against for rule in costly)
    parts = [
        f"{_kind(rule.multiple)} take {_longer(rule.median)} at the median, {_longer(rule.worst)} at worst"
        for rule in costly
    ]
    beyond = [rule for rule in found if rule.multiple >= keep]
    rest = "; ".join(f"{_kind(rule.multiple)} {percent(rule.median)}" for rule in beyond)
    return (
        f"Keep hidden, ffn and vocabulary to multiples of {keep}. Of {whose} matrix products, against the line "
        f"between multiples of {keep}: {'; '.join(parts)}."
        + (f" Beyond that little is left, at the median: {rest}, against the next multiple." if rest else "")
    )


def _longer(penalty: float) -> str:
    """6.4% longer, or 5.7 times as long."""
    return f"{penalty:.1%} longer" if penalty < 1.0 else f"{1.0 + penalty:.2g} times as long"


def _kind(multiple: int) -> str:
    return "odd widths" if multiple == 1 else f"multiples of no more than {multiple}"


def rule_table(rules: Sequence[MeasuredRule], profile: Profile) -> Table | None:
    if not rules:
        return None
    rows = [{**rule.to_json(), "sentence": rule.sentence} for rule in rules]
    columns = [
        Column("multiple", "multiple of", _multiple), Column("against", "against"),
        text("layout", "layout"), Column("count", "products"), Column("median", "longer, median", percent),
        Column("low", "10th percentile", percent), Column("high", "90th percentile", percent),
        Column("worst", "worst", percent), text("worst_shape", "worst, m x n x k"),
        Column("sigma", "known to", _plus_minus),
    ]  # fmt: skip
    note = (
        f"{'Measured' if profile.basis == 'measured' else 'Projected'} products whose widths are multiples of no more "
        "than this, over the line between their neighbours that are multiples of the next. Layouts: nt forward, nn "
        "gradient of the input, tn gradient of the weights."
    )
    return Table("width-rules", "Rules of widths", note, columns, rows)


def _multiple(value: int) -> str:
    return "1 (odd)" if value == 1 else str(value)


def _plus_minus(sigma: float) -> str:
    return f"±{sigma:.1%}"


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def check_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Penalties of real steps: forecast, measured and the difference, where both are known."""
    known = ("penalty_forecast", "penalty_low", "penalty_high", "penalty_measured", "penalty_error")
    found = [
        {**{name: row[name] for name in SHOWN_CHECKS}, **{name: float(row[name]) for name in known},
         "multiple": int(row["multiple"]), "within": row.get("within_interval")}
        for row in rows
        if all(row.get(name) not in (None, "") for name in known)
    ]  # fmt: skip
    if not found:
        return None
    columns = [
        text("neighbourhood", "neighbourhood"), text("axis", "axis"), Column("value", "size"),
        Column("multiple", "multiple of"), Column("below", "from"), Column("above", "to"),
        Column("penalty_measured", "measured", percent), Column("penalty_forecast", "forecast", percent),
        Column("penalty_low", "low", percent), Column("penalty_high", "high", percent),
        Column("penalty_error", "difference, points", _points, is_error=True),
        text("within", "in interval"),
    ]  # fmt: skip
    note = "Device time of real steps over the line between the aligned neighbours (from, to), less 1."
    return Table("width-checks", "Checked with real steps", note, columns, found)


def _rows_of(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- claims


def claim_parts(folder: Path) -> Iterator[Section]:
    """The verdicts of `claims.json`, by the printed depth law and each GPU on a host of its own."""
    path = folder / "claims.json"
    if not path.is_file():
        return
    from flopcast.roofline.claims import summary
    from flopcast.roofline.curves import OWN

    found = json.loads(path.read_text(encoding="utf-8"))["claims"]
    rows = [row for row in found if row.get("depth_law") == "printed" and row.get("hosts") == OWN]
    if not rows:
        return
    shown = [
        {**row, "sentence": sentence.partition("; ")[2] or sentence}
        for row, sentence in zip(rows, summary(rows), strict=True)
    ]
    columns = [
        text("claim", "claim"), text("prices", "prices"), text("verdict", "verdict"),
        Column("middle_for", "by middle estimates, models for it"), Column("models", "of"), prose("sentence", "why"),
    ]  # fmt: skip
    note = (
        "Decided at 90%, model by model of the ladder: it holds where every comparison is decided for it, it does not "
        "where one model decides against it. Other depth laws, hosts and the curves: reports/economics."
    )
    table = Table("claims", "The source article's claims under several price lists", note, columns, shown)
    yield Section("claims", "The article's claims", (), [table])
