"""Makes the page's section on widths: rules from this GPU's own products, the sawtooth, and checks with real steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from flopcast.roofline.base.units import percent, yes_no
from flopcast.roofline.views.figures.width_checks import NEAR, ShapeCheck, SizeCheck, read_checks
from flopcast.roofline.views.page.data import Section, section
from flopcast.roofline.views.page.table import Column, Table, text

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.widths.measured_rules import MeasuredRule


COSTLY = 0.02  # median penalty above which a multiple is worth keeping
KINDS = {"odd sizes": (1,), "multiples of 2 or 4": (2, 4), "multiples of 8 to 32": (8, 16, 32)}


def width_section(profile: Profile, out: Path, *, may_trace: bool) -> Section | None:
    """The rules, the sawtooth, and the check against real steps where there is one. None for a CPU."""
    if profile.device.get("type") == "cpu":
        return None
    from flopcast.roofline.views.figures.widths import penalty_figure, sawtooth_figure
    from flopcast.roofline.widths.measured_rules import measured_rules
    from flopcast.roofline.widths.sawtooth import sawtooth_points, sawtooth_widths

    rules = measured_rules(profile)
    checks = read_checks(out)
    widths = [width for width in sawtooth_widths() if width % 64 == 0 or width // 512 % 2 == 0]
    points = sawtooth_points(profile, widths) if may_trace else []  # 61 steps
    whose = "this GPU's own" if profile.basis == "measured" else "its projected"
    return section(
        "widths",
        "Which widths to choose",
        [sawtooth_figure(points, profile), penalty_figure(checks.sizes, profile.gpu)],
        [
            rule_table(rules, profile),
            check_summary(checks.sizes),
            check_table(checks.sizes),
            shape_table(checks.shapes),
        ],
        advice=("Which multiple to keep", multiple_to_keep(rules, whose, what_steps_lost(checks.sizes))),
        commands={
            "sawtooth": f"flopcast widths --gpu {profile.gpu} --around 2048 --batch 8 --seq 1024 "
            "--optimizer adamw-fused --figure sawtooth.png",
            "penalties": "python -m studies.widths.steps STEPS && "
            "python -m studies.widths.check --forecasts TABLE --steps STEPS --out TABLE",
        },
    )


# --- text


def multiple_to_keep(rules: Sequence[MeasuredRule], whose: str = "this GPU's own", steps: str = "") -> str:
    """Names the multiple, its cost to real steps (`steps`) and single products if ignored, and the gain beyond it."""
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
    """A penalty in words: 6.4% longer, or 5.7 times as long."""
    return f"{penalty:.1%} longer" if penalty < 1.0 else f"{1.0 + penalty:.2g} times as long"


def _kind(multiples: Sequence[int]) -> str:
    if multiples == [1]:
        return "those with an odd size take"
    return f"with a size divisible by {' or '.join(map(str, multiples))} alone"


def what_steps_lost(checks: Sequence[SizeCheck]) -> str:
    """The measured cost of unaligned sizes to whole training steps, in words; "" where none was measured."""
    parts = []
    for kind, multiples in KINDS.items():
        lost = sorted(check.penalty_measured for check in checks if check.multiple in multiples)
        if lost:
            least = max(0.0, lost[0])
            parts.append(
                f"{kind} by {least:.0%} to {lost[-1]:.0%}" if least >= 0.05 else f"{kind} by up to {lost[-1]:.1%}"
            )
    return f"Real training steps of {len(checks)} unaligned sizes took longer: {', '.join(parts)}." if parts else ""


# --- tables


def _points(penalty: float) -> str:
    return f"{100 * penalty:+.1f}"


def _size(penalty: float) -> str:
    return f"{100 * penalty:.2g}"


def rule_table(rules: Sequence[MeasuredRule], profile: Profile) -> Table | None:
    if not rules:
        return None
    columns = [
        Column("multiple", "multiple of", lambda value: "1 (odd)" if value == 1 else str(value)),
        Column("against", "against"), text("layout", "layout"), Column("count", "products"),
        Column("median", "longer, median", percent), Column("low", "10th percentile", percent),
        Column("high", "90th percentile", percent), Column("worst", "worst", percent),
        text("worst_shape", "worst, m x n x k"), Column("sigma", "known to", "±{:.1%}".format),
    ]  # fmt: skip
    note = (
        f"{'Measured' if profile.basis == 'measured' else 'Projected'} products whose widths are multiples of no more "
        "than this, over the line between their neighbours that are multiples of the next. Layouts: nt forward, nn "
        "gradient of the input, tn gradient of the weights."
    )
    return Table("width-rules", "Rules of widths", note, columns, rules)


class Agreement(NamedTuple):
    """How near a set's forecasts came for one kind of size: `near` and so on count sizes, out of `number`."""

    set: str
    kind: str
    number: int
    near: int
    sign: int
    within: int
    median: float
    worst: float
    noise: float | None
    time: float


def _agreement(name: str, kind: str, checks: Sequence[SizeCheck]) -> Agreement:
    errors = [abs(check.penalty_error) for check in checks]
    spreads = [check.penalty_spread for check in checks if check.penalty_spread is not None]
    return Agreement(
        name, kind, len(checks),
        near=sum(check.is_near for check in checks),
        sign=sum((check.penalty_forecast > 0) == (check.penalty_measured > 0) for check in checks),
        within=sum(check.is_within for check in checks),
        median=median(errors), worst=max(errors), noise=median(spreads) if spreads else None,
        time=median(abs(check.time_error) for check in checks),
    )  # fmt: skip


def check_summary(checks: Sequence[SizeCheck]) -> Table | None:
    """How near the forecasts came, by set and kind of size."""
    everything = tuple(multiple for multiples in KINDS.values() for multiple in multiples)
    found = [
        _agreement(name, kind, mine)
        for name in sorted({check.set for check in checks}, reverse=True)
        for kind, multiples in {"all": everything, **KINDS}.items()
        if (mine := [check for check in checks if check.set == name and check.multiple in multiples])
    ]
    if not found:
        return None
    columns = [
        text("kind", "sizes"), text("set", "set"), Column("count", "of them", of=lambda found: found.number),
        Column("near", f"within {100 * NEAR:g} points"), Column("sign", "right sign"),
        Column("within", "in 90% interval"), Column("median", "off by, points", _size),
        Column("worst", "worst, points", _size), Column("noise", "standard error, points", _size),
        Column("time", "off by, of the time", "{:.2%}".format),
    ]  # fmt: skip
    note = (
        "Penalties forecast and measured, the same sizes as below. A point is 1% of the aligned step. Standard error: "
        "of a measured penalty, from repetitions, at the median."
    )
    return Table("width-summary", "How near the forecast penalties came", note, columns, found)


# How each set's forecasts were made.
_SETS = {
    "1": "Set 1: today's profile; these steps were looked at while it was made.",
    "2": "Set 2: forecast and committed before any of its steps ran.",
    "3": "Set 3: likewise, by the laws of today.",
}


def check_table(checks: Sequence[SizeCheck]) -> Table | None:
    """Penalties of real steps: forecast, measured and the difference, where both are known."""
    if not checks:
        return None
    columns = [
        text("neighbourhood", "around"), Column("value", "size"), Column("multiple", "multiple of"),
        Column("below", "from"), Column("above", "to"),
        Column("penalty_measured", "measured", percent), Column("penalty_spread", "± points", _size),
        Column("penalty_forecast", "forecast", percent),
        Column("penalty_low", "low", percent), Column("penalty_high", "high", percent),
        Column("penalty_error", "off by, points", _points, is_error=True),
        Column("time_error", "of the time", percent),
        Column("within", "in interval", yes_no, lambda check: check.is_within, is_number=False),
        text("axis", "axis"), text("set", "set"),
    ]  # fmt: skip
    sets = " ".join(words for name, words in _SETS.items() if any(check.set == name for check in checks))
    note = (
        "Kernel time of real steps over the line between the aligned neighbours (from, to), less 1; ±: standard error "
        f"of the measured, from repetitions. {sets}"
    )
    return Table("width-checks", "Checked with real steps", note, columns, checks)


def shape_table(checks: Sequence[ShapeCheck]) -> Table | None:
    """Shapes with equal numbers of parameters, by their forecast."""
    if not checks:
        return None
    columns = [
        Column("rank_forecast", "rank forecast"), Column("rank_measured", "measured"), Column("width", "width"),
        Column("depth", "layers"), Column("ffn", "ffn"), Column("vocab", "vocabulary"),
        Column("n_params", "parameters", lambda n: f"{n / 1e6:.0f}M"),
        Column("step_forecast", "forecast, ms", lambda s: f"{s * 1e3:.1f}"),
        Column("step_seconds", "measured, ms", lambda s: f"{s * 1e3:.1f}"),
        Column("step_error", "step error", percent, is_error=True),
        Column("slower_than_best", "slower per parameter than the best", percent), text("set", "set"),
    ]  # fmt: skip
    note = "Shapes of equal parameters, whole steps: is the one that is forecast fastest the fastest?"
    return Table("width-shapes", "Shapes of equal parameters", note, columns, checks)
