"""The page's part on widths: rules of this GPU's own products, the sawtooth, and the checks with real steps."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flopcast.roofline.base.units import percent, yes_no
from flopcast.roofline.views.page.data import Section
from flopcast.roofline.views.page.table import Column, Table, text

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.widths.measured_rules import MeasuredRule


# Beside the page: real steps of aligned and unaligned widths, a table a set (`widths_check.py`).
TABLES = ("widths.csv", "widths-2.csv", "widths-3.csv")
COSTLY = 0.02  # a median above which a multiple is worth keeping
GOAL_POINTS = 1.5
_KINDS = (("odd sizes", (1,)), ("multiples of 2 or 4", (2, 4)), ("multiples of 8 to 32", (8, 16, 32)))


def width_parts(profile: Profile, out: Path, may_trace: bool) -> Iterator[Section | tuple[str, str]]:
    """Rules, the sawtooth, and the check against real steps where there is one. Nothing of a processor."""
    if profile.device.get("type") == "cpu":
        return
    from flopcast.roofline.views.figures.widths import penalty_figure, sawtooth_figure
    from flopcast.roofline.widths.measured_rules import measured_rules
    from flopcast.roofline.widths.sawtooth import sawtooth_points, sawtooth_widths

    rules = measured_rules(profile)
    checks = [row for name in reversed(TABLES) for row in rows_of(out / name)]
    widths = [width for width in sawtooth_widths() if width % 64 == 0 or width // 512 % 2 == 0]
    points = sawtooth_points(profile, widths) if may_trace else []  # 61 steps
    drawn = (sawtooth_figure(points, profile), penalty_figure(checks, profile.gpu))
    found = (rule_table(rules, profile), check_summary(checks), check_table(checks), shape_table(checks))
    whose = "this GPU's own" if profile.basis == "measured" else "its projected"
    if advice := multiple_to_keep(rules, whose, what_steps_lost(checks)):
        yield "Which multiple to keep", advice
    yield Section(
        "widths",
        "Which widths to choose",
        [figure for figure in drawn if figure is not None],
        [table for table in found if table is not None],
        commands={
            "sawtooth": f"flopcast widths --gpu {profile.gpu} --around 2048 --batch 8 --seq 1024 "
            "--optimizer adamw-fused --figure sawtooth.png",
            "penalties": "python -m studies.widths.steps STEPS && "
            "python -m studies.widths.check --forecasts TABLE --steps STEPS --out TABLE",
        },
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table of checks, each with the number of its set; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{**row, "set": row.get("set") or "1"} for row in csv.DictReader(file)]


# --- in words


def multiple_to_keep(rules: Sequence[MeasuredRule], whose: str = "this GPU's own", steps: str = "") -> str:
    """The multiple, what ignoring it costs real steps (`steps`) and single products, what is left to gain beyond."""
    found = [rule for rule in rules if rule.layout == "all"]
    costly = [rule for rule in found if rule.median > COSTLY]
    if not costly:
        return ""
    keep = max(rule.against for rule in costly)
    alike: list[list[MeasuredRule]] = []  # multiples that cost the same, give or take a tenth
    for rule in costly:
        if alike and max(alike[-1][0].median, rule.median) < 1.1 * min(alike[-1][0].median, rule.median):
            alike[-1].append(rule)
        else:
            alike.append([rule])
    parts = [f"{_kind([rule.multiple for rule in some])} {_longer(some[0].median)}" for some in alike]
    worst = max(costly, key=lambda rule: rule.worst)
    beyond = [rule.median for rule in found if rule.multiple >= keep]
    rest = f" Beyond {keep} at most {max(beyond):.1%} is left to gain." if beyond and max(beyond) > 0 else ""
    return (
        f"Keep hidden, ffn and vocabulary sizes to multiples of {keep}. {steps + ' ' if steps else ''}Of {whose} "
        f"matrix products, at the median, {'; '.join(parts)} (the worst {_longer(worst.worst)}).{rest}"
    )


def _longer(penalty: float) -> str:
    """6.4% longer, or 5.7 times as long."""
    return f"{penalty:.1%} longer" if penalty < 1.0 else f"{1.0 + penalty:.2g} times as long"


def _kind(multiples: Sequence[int]) -> str:
    if multiples == [1]:
        return "those with an odd size take"
    return f"with a size divisible by {' or '.join(map(str, multiples))} alone"


def what_steps_lost(rows: Sequence[Mapping[str, Any]]) -> str:
    """What unaligned sizes cost whole training steps, as measured; "" where nothing was."""
    known = [row for row in rows if row.get("penalty_measured") not in (None, "")]
    parts = []
    for kind, multiples in _KINDS:
        lost = sorted(float(row["penalty_measured"]) for row in known if int(row["multiple"]) in multiples)
        if lost:
            least = max(0.0, lost[0])
            parts.append(
                f"{kind} by {least:.0%} to {lost[-1]:.0%}" if least >= 0.05 else f"{kind} by up to {lost[-1]:.1%}"
            )
    return f"Real training steps of {len(known)} unaligned sizes took longer: {', '.join(parts)}." if parts else ""


# --- tables


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


def _size(share: float) -> str:
    return f"{100 * share:.2g}"


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The unaligned sizes whose penalty is known, forecast and measured; numbers as such."""
    numbers = ("penalty_forecast", "penalty_low", "penalty_high", "penalty_measured", "penalty_error")
    return [
        {
            "set": str(row.get("set") or "1"),
            "neighbourhood": row["neighbourhood"],
            "axis": row["axis"],
            **{name: int(row[name]) for name in ("value", "multiple", "below", "above")},
            **{name: float(row[name]) for name in numbers},
            "penalty_spread": float(row["penalty_spread"]) if row.get("penalty_spread") else None,
            "time_error": (1 + float(row["penalty_forecast"])) / (1 + float(row["penalty_measured"])) - 1,
            "within": float(row["penalty_low"]) <= float(row["penalty_measured"]) <= float(row["penalty_high"]),
            "near": 100 * abs(float(row["penalty_error"])) <= GOAL_POINTS,
        }
        for row in rows
        if all(row.get(name) not in (None, "") for name in numbers)
    ]


def check_summary(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """How near the forecasts came, by set and kind of size."""
    found = judged(rows)
    lines = []
    for name in sorted({row["set"] for row in found}, reverse=True):
        for kind, multiples in (("all", (1, 2, 4, 8, 16, 32)), *_KINDS):
            mine = [row for row in found if row["set"] == name and row["multiple"] in multiples]
            if not mine:
                continue
            errors = [abs(row["penalty_error"]) for row in mine]
            spreads = [row["penalty_spread"] for row in mine if row["penalty_spread"] is not None]
            lines.append({
                "set": name, "kind": kind, "count": len(mine), "near": sum(row["near"] for row in mine),
                "sign": sum((r["penalty_forecast"] > 0) == (r["penalty_measured"] > 0) for r in mine),
                "within": sum(row["within"] for row in mine), "median": median(errors), "worst": max(errors),
                "noise": median(spreads) if spreads else None,
                "time": median(abs(row["time_error"]) for row in mine),
            })  # fmt: skip
    if not lines:
        return None
    columns = [
        text("kind", "sizes"), text("set", "set"), Column("count", "of them"),
        Column("near", f"within {GOAL_POINTS} points"),
        Column("sign", "right sign"), Column("within", "in 90% interval"), Column("median", "off by, points", _size),
        Column("worst", "worst, points", _size), Column("noise", "standard error, points", _size),
        Column("time", "off by, of the time", lambda v: f"{v:.2%}"),
    ]  # fmt: skip
    note = (
        "Penalties forecast and measured, the same sizes as below. A point is 1% of the aligned step. Standard error: "
        "of a measured penalty, from repetitions, at the median."
    )
    return Table("width-summary", "How near the forecast penalties came", note, columns, lines)


def check_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Penalties of real steps: forecast, measured and the difference, where both are known."""
    found = judged(rows)
    if not found:
        return None
    columns = [
        text("neighbourhood", "around"), Column("value", "size"), Column("multiple", "multiple of"),
        Column("below", "from"), Column("above", "to"),
        Column("penalty_measured", "measured", percent), Column("penalty_spread", "± points", _size),
        Column("penalty_forecast", "forecast", percent),
        Column("penalty_low", "low", percent), Column("penalty_high", "high", percent),
        Column("penalty_error", "off by, points", _points, is_error=True),
        Column("time_error", "of the time", percent),
        Column("within", "in interval", yes_no, is_number=False),
        text("axis", "axis"), text("set", "set"),
    ]  # fmt: skip
    note = (
        "Kernel time of real steps over the line between the aligned neighbours (from, to), less 1; ±: standard error "
        f"of the measured, from repetitions. {_whose(found)}"
    )
    return Table("width-checks", "Checked with real steps", note, columns, found)


def _whose(found: Sequence[Mapping[str, Any]]) -> str:
    """How each set's forecasts came about."""
    sets = {row["set"] for row in found}
    said = {
        "1": "Set 1: today's profile; these steps were looked at while it was made.",
        "2": "Set 2: forecast and committed before any of its steps ran.",
        "3": "Set 3: so too, by the laws of today.",
    }
    return " ".join(said[name] for name in sorted(sets) if name in said)


def shape_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Shapes of equal parameters, by their forecast."""
    found = [row for row in rows if row["axis"] == "shape" and row.get("rank_measured") not in (None, "")]
    if not found:
        return None
    whole = ("rank_forecast", "rank_measured", "width", "depth", "ffn", "vocab", "batch", "seq", "n_params")
    lines = [
        {
            "set": row["set"],
            **{name: int(row[name]) for name in whole},
            **{name: float(row[name]) for name in ("step_forecast", "step_seconds", "step_error", "slower_than_best")},
        }
        for row in found
    ]
    columns = [
        Column("rank_forecast", "rank forecast"), Column("rank_measured", "measured"), Column("width", "width"),
        Column("depth", "layers"), Column("ffn", "ffn"), Column("vocab", "vocabulary"),
        Column("n_params", "parameters", lambda n: f"{n / 1e6:.0f}M"),
        Column("step_forecast", "forecast, ms", lambda s: f"{s * 1e3:.1f}"),
        Column("step_seconds", "measured, ms", lambda s: f"{s * 1e3:.1f}"),
        Column("step_error", "step error", percent, is_error=True),
        Column("slower_than_best", "slower than the best, a parameter", percent), text("set", "set"),
    ]  # fmt: skip
    note = "Shapes of equal parameters, whole steps: is the one that is forecast fastest the fastest?"
    return Table("width-shapes", "Shapes of equal parameters", note, columns, lines)
