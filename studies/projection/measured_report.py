"""What `measured.py` found, as a page of Markdown and a figure. Plain rows in, words out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.views.figures.canvas import Figure, finish, new_sheet, styled
from flopcast.roofline.views.figures.colours import BLUE, CLASS_LABELS, INK, ORANGE
from studies.markdown import table

Row = Mapping[str, Any]
FEWEST = 4  # rows of a class that a line is worth
KIND_WORDS = {
    "step": "step, on the host of the H200's profile",
    "device": "device time",
    **{f"device/{group}": f"- {CLASS_LABELS.get(group, 'element-wise, casts, rest')}" for group in GROUPS},
}
LIMIT = 0.35  # of the figure's axis
MATRIX = ("gemm", "attention", "conv")
SIZES = (3e-6, 10e-6, 50e-6)  # seconds that kernels are told apart by
L2_READ = 24 * 2**20  # bytes: half of an H100's L2, in which they stay whatever else is there
# What each kind of ceiling is counted in, and by how much it is divided for the table.
UNITS = (("matrix_", 1e12, "TFLOP/s"), ("hbm_", 1e12, "TB/s"), ("l2_", 1e12, "TB/s"), ("copy/", 1e12, "TB/s"),
         ("queue", 1.0, "launches"), ("", 1e-6, "us"))  # fmt: skip


def headline(classes: Sequence[Row]) -> list[str]:
    """A line for each kind of kernel and step, of what was said ahead."""
    return [
        f"{_name(row):44} {row['rows']:5} rows: {_signed(row['median_error'])} median, |error| "
        f"{_percent(row['median_abs_error'])} median, {_percent(row['p90_abs_error'])} p90"
        for row in classes
        if row["stage"] == "ahead" and row["rows"] and (row["kind"] == "kernel" or row["group"] == "all")
    ]


def page(
    gpu: str,
    profile: Profile,
    classes: Sequence[Row],
    ceilings: Sequence[Row],
    steps: Sequence[Row],
    rows: Sequence[Row],
) -> str:
    """README.md of the folder."""
    source = profile.provenance["projected_from"]
    kernels = [row for row in classes if row["kind"] == "kernel" and (row["rows"] or 0) >= FEWEST]
    of_steps = [
        row
        for row in classes
        if row["stage"] == "ahead" and row["kind"] != "kernel" and row["group"] == "all" and row["rows"]
    ]
    groups = [row for row in classes if row["kind"] == "device" and row["group"] != "all" and row["rows"]]
    lines = [
        f"# The projection of the {gpu}, judged by a card",
        "",
        f"Made by `python -m studies.projection.measured {gpu}`; errors are forecast / measured - 1. "
        f"*Ahead*: `forecasts.csv.gz`, written down with the projection from the {source}'s profile and the datasheet "
        "before anything of this GPU had been measured (`python -m studies.projection.ahead`). *Today*: "
        "what the projection says now; whoever changes it has seen this card, so that it tests nothing. Measured: "
        f"`reports/{gpu}`, one card. `rows.csv.gz` has every number.",
        "",
        *_summary(classes, rows, source),
        *_offs(rows),
        "## Real steps",
        "",
        table(
            ("", "steps", *_HEAD, "median today"), [_cells(row, classes, KIND_WORDS[row["kind"]]) for row in of_steps]
        ),
        "",
        "Device time by what is run:",
        "",
        table(("", "steps", *_HEAD, "median today"), [_cells(row, classes, row["group"]) for row in groups
                                                         if row["stage"] == "ahead"]),
        "",
        "## Kernels",
        "",
        table(("kernels", "rows", *_HEAD, "median today"),
                [_cells(row, classes, _name(row)) for row in kernels if row["stage"] == "ahead"]),
        "",
        "## Ceilings",
        "",
        table(("", "measured", "ahead (90%)", "error", "inside", "today"), [_ceiling_cells(row) for row in ceilings]),
        "",
        "![Errors of the projection by class](ahead.png)",
        "",
        "## Every step",
        "",
        table(
            ("step", "what", "batch x seq", "optimizer", "step ms", "error", "device ms", "error", "inside",
             *(CLASS_LABELS.get(group, "rest") for group in GROUPS), "step, today, host of the run"),
            [_step_cells(row) for row in steps],
        ),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


_HEAD = ("median", "median abs.", "90th pct. abs.", "worst", "sum of seconds", "in 90% interval", "half width")


def _summary(classes: Sequence[Row], rows: Sequence[Row], source: str) -> list[str]:
    """The few sentences that the tables come to."""
    ahead = {(row["kind"], row["group"]): row for row in classes if row["stage"] == "ahead" and row["kind"] != "kernel"}
    whole = ahead.get(("device", "all"))
    if whole is None:
        return []
    parts = [
        f"{KIND_WORDS[f'device/{group}'].removeprefix('- ')} {_signed(part['median_error'])}"
        for group in GROUPS
        if (part := ahead.get((f"device/{group}", "all"))) is not None
    ]
    kernels = [row for row in rows if row["kind"] == "kernel" and row.get("ahead_error") is not None]
    signed = [row["ahead_error"] for row in kernels]
    inside = sum(bool(row["ahead_within"]) for row in kernels) / len(kernels)
    return [
        f"**{whole['rows']} real steps: device time {_signed(whole['median_error'])} at the median, "
        f"{_percent(whole['median_abs_error'])} of either sign, {_signed(whole['worst_error'])} at worst.** Part by "
        f"part (medians): {', '.join(parts)}: errors of opposite sign cancel in the sum. "
        f"{len(kernels):,} kernels: {_signed(median(signed))} at the median, "
        f"{_percent(median(abs(e) for e in signed))} of either sign. The 90% intervals held {inside:.1%} of the "
        f"kernels and {_percent(whole['inside_90'])} of the device times: too wide by far for a GPU that has the "
        f"{source}'s chip under another memory.",
        "",
    ]


def _offs(rows: Sequence[Row]) -> list[str]:
    """What is off whichever the kernel: latencies, what L2 gives, what memory gives to kernels that fill it."""
    ceilings = {row["key"]: row for row in rows if row["kind"] == "ceiling"}
    lines = []
    floor = ceilings.get("kernel_floor_cupti")
    memory_bound = [
        row for row in rows if row["kind"] == "kernel" and row["group"] not in MATRIX and "ahead_error" in row
    ]
    bins = []
    for low, high in zip((0.0, *SIZES), (*SIZES, float("inf")), strict=True):
        some = [row["ahead_error"] for row in memory_bound if low <= row["measured"] < high]
        if some:
            words = f"from {low * 1e6:g} us" if high == float("inf") else f"under {high * 1e6:g} us"
            bins.append(f"{words} {_signed(median(some))} ({len(some):,})")
    if bins:
        lines.append(f"- Kernels that are no products or attention, by their time: {', '.join(bins)}.")
    if floor is not None:
        lines.append(
            f"- A kernel that does nothing takes {floor['measured'] * 1e6:.2f} us, projected "
            f"{floor['ahead'] * 1e6:.2f}, the source's cycles at this clock."
        )
    within = [row["ahead_error"] for name, row in ceilings.items() if name.startswith("l2_read/")
              if float(name.split("/")[1]) <= L2_READ]  # fmt: skip
    if within:
        lines.append(
            "- L2, put at so many bytes a clock and multiprocessor as the source's: rates of reads that fit "
            f"{_signed(median(within))} at the median of {len(within)} sizes up to {L2_READ / 2**20:g} MiB."
        )
    copies = [row["ahead_error"] for name, row in ceilings.items() if name.startswith("hbm_")]
    held = {
        group: median(row["ahead_error"] for row in rows if row["kind"] == f"device/{group}" and "ahead_error" in row)
        for group in ("optimizer", "softmax")
        if any(row["kind"] == f"device/{group}" for row in rows)
    }
    if copies:
        words = ", ".join(f"{group} {_signed(error)}" for group, error in held.items())
        lines.append(
            f"- Memory: copies, reads and writes {_signed(min(copies))} to {_signed(max(copies))}. Kernels that do "
            "not fill it on the source are taken to be held back by their multiprocessors, and so to lose less where "
            f"memory is slower; in real steps {words}."
        )
    return ["## What is off", "", *lines, ""] if lines else []


def _name(row: Row) -> str:
    if row["kind"] != "kernel":
        return KIND_WORDS[row["kind"]]
    backend = "" if row["backend"] == "torch" else f", {row['backend']}"
    return f"{CLASS_LABELS.get(row['group'], row['group'])}{backend}, {row['cache']}"


def _cells(row: Row, classes: Sequence[Row], name: str) -> list[str]:
    same = ("kind", "group", "backend", "cache")
    now = next((c for c in classes if c["stage"] == "today" and all(c[k] == row[k] for k in same)), None)
    return [
        name, f"{row['rows']:,}", _signed(row["median_error"]), _percent(row["median_abs_error"]),
        _percent(row["p90_abs_error"]), _signed(row["worst_error"]), _signed(row["sum_error"]),
        "" if row["inside_90"] is None else f"{row['inside_90']:.0%}",
        "" if row["median_half_width"] is None else f"{row['median_half_width']:.0%}",
        _signed(now["median_error"]) if now and now["rows"] else "",
    ]  # fmt: skip


def _ceiling_cells(row: Row) -> list[str]:
    by, unit = next((by, unit) for start, by, unit in UNITS if row["key"].startswith(start))
    low, high = row.get("ahead_low"), row.get("ahead_high")
    ends = "" if low is None or high is None else f" ({low / by:.3g} to {high / by:.3g})"
    return [
        row["key"], f"{row['measured'] / by:.3g} {unit}", f"{row['ahead'] / by:.3g}{ends}", _signed(row["ahead_error"]),
        {True: "yes", False: "**no**", None: ""}[row["ahead_within"]],
        _signed(row["today_error"]) if row.get("today_error") is not None else "",
    ]  # fmt: skip


def _step_cells(row: Row) -> list[str]:
    fused = "" if row["fused"] == "none" else ", fused kernels"
    precision = "" if row["precision"] == "autocast-bf16" else f", {row['precision']}"
    return [
        str(row["name"]), f"{row['group']}{precision}{fused}", f"{row['batch']} x {row['seq']}", str(row["optimizer"]),
        f"{row['step_seconds'] * 1e3:.1f}", _signed(row["step_error"]), f"{row['device_seconds'] * 1e3:.1f}",
        _signed(row["device_error"]), "yes" if row["step_within"] and row["device_within"] else "**no**",
        *(_signed(row[f"{group}_error"]) if row.get(f"{group}_error") is not None else "" for group in GROUPS),
        _signed(row["step_error_today_run_host"]) if row["step_error_today_run_host"] is not None else "",
    ]  # fmt: skip


@styled
def figure(rows: Sequence[Row], gpu: str) -> Figure | None:
    """Signed errors ahead by class: of kernels the middle 80% and the median, of steps' parts each step."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.get("ahead_error") is None or row["kind"] == "ceiling":
            continue
        name = _name(row) if row["kind"] == "kernel" else KIND_WORDS[row["kind"]].removeprefix("- ")
        found.setdefault(("kernels" if row["kind"] == "kernel" else "steps", name), []).append(row)
    steps = [(name, found["steps", name]) for kind, name in found if kind == "steps"]
    kernels = sorted(
        ((name, members) for (kind, name), members in found.items() if kind == "kernels" and len(members) >= FEWEST),
        key=lambda pair: -len(pair[1]),
    )
    if not kernels and not steps:
        return None
    sheet = new_sheet(0.26 * (len(steps) + len(kernels)) + 1.6)
    ax = sheet.axes[0]
    for place, (name, members) in enumerate([*steps, *kernels]):
        signed = sorted(row["ahead_error"] for row in members)
        is_step = place < len(steps)
        colour = ORANGE if is_step else BLUE
        low, high = (signed[round(share * (len(signed) - 1))] for share in (0.1, 0.9))
        ax.plot([100 * _cut(low), 100 * _cut(high)], [place] * 2, color=colour, lw=5, alpha=0.35, solid_capstyle="butt")
        middle = median(signed)
        tip = f"{name}: {middle:+.1%} at the median, {low:+.1%} to {high:+.1%}, {len(members)} rows"
        sheet.scatter(ax, [100 * _cut(middle)], [place], [tip], s=26, color=colour, zorder=3, linewidths=0)
    ax.axvline(0, color=INK, lw=1.0)
    if steps and kernels:
        ax.axhline(len(steps) - 0.5, color=INK, lw=0.6)
    ax.set_yticks(range(len(steps) + len(kernels)), [f"{name} ({len(m):,})" for name, m in [*steps, *kernels]])
    ax.set(xlim=(-105 * LIMIT, 105 * LIMIT), ylim=(len(steps) + len(kernels) - 0.4, -0.6),
           xlabel="projected / measured - 1, %")  # fmt: skip
    ax.grid(False, axis="y")
    caption = (
        f"How far the {gpu} as projected, written down before the card was measured, was from the card: medians, and "
        f"bars from the 10th to the 90th percentile (cut at {LIMIT:.0%}); above the line real "
        "steps and their parts, below single kernels."
    )
    alt = "Ranges of signed errors by class. Medians: " + ", ".join(
        f"{name} {median(row['ahead_error'] for row in members):+.1%}" for name, members in [*steps, *kernels]
    )
    return finish(sheet, "ahead", f"The projection of the {gpu} against the card", caption, alt, "forecasts made ahead")


def _cut(value: float) -> float:
    return max(-LIMIT, min(LIMIT, value))


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _signed(value: float) -> str:
    return f"{value:+.1%}"
