"""Draws forecasts against real steps: agreement, and residuals by component."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.validation.step_plans import INTERVALS, OPTIONS, PATCHED
from flopcast.roofline.validation.summary import inside
from flopcast.roofline.views.figures.canvas import Figure, finish, new_sheet, plain_log, styled
from flopcast.roofline.views.figures.colours import BLUE, CARD, CLASS_LABELS, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY

# Labels of the groups of steps whose names are not plain.
GROUP_WORDS = {
    "ladder": "ladder of widths",
    "ln ladder": "ladder of widths, ln depth law",
    "off the ladder": "other widths and depths",
    "published configs": "published Qwen3 models",
    "large batch": "large batches",
    "cpu": "small models",
    OPTIONS: "other precision, checkpointing, accumulation",
    PATCHED: "steps on other kernels (Triton, flash)",
    INTERVALS: "steps that set the width of intervals",
}


class _Point(NamedTuple):
    """A step that ran and has a forecast, in seconds, with the forecast's error."""

    row: StepComparison
    measured: float
    low: float
    forecast: float
    high: float
    error: float


def _points(rows: Sequence[StepComparison]) -> Iterator[_Point]:
    for row in rows:
        step = row.step
        if step.measured and step.forecast and step.low and step.high and step.error is not None:
            yield _Point(row, step.measured, step.low, step.forecast, step.high, step.error)


@styled
def agreement_figure(rows: Sequence[StepComparison]) -> Figure | None:
    """Draws forecast against measured steps, and below it the error with its interval. None without measured steps."""
    done = list(_points(rows))
    if not done:
        return None
    sheet = new_sheet(6.6, rows=2, sharex=True, height_ratios=(3, 2))
    upper, lower = sheet.axes
    groups = list(dict.fromkeys(point.row.plan.group for point in done))
    colours = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
    markers = ("o", "s", "D", "^", "v", "P")
    for index, group in enumerate(groups):
        members = [point for point in done if point.row.plan.group == group]
        colour, marker = colours[index % 6], markers[index % 6]
        xs = [point.measured * 1e3 for point in members]
        tips = [
            f"{point.row.label_with_optimizer}: measured {point.measured * 1e3:.2f} ms, forecast "
            f"{point.forecast * 1e3:.2f} ({point.low * 1e3:.2f} to {point.high * 1e3:.2f}), "
            f"{point.error:+.1%}, {point.row.bound}-bound"
            for point in members
        ]
        ends3 = [(point.low, point.forecast, point.high) for point in members]
        absolute = [[seconds * 1e3 for seconds in end] for end in zip(*ends3, strict=True)]
        relative = [
            [100 * (seconds / point.measured - 1) for seconds, point in zip(end, members, strict=True)]
            for end in zip(*ends3, strict=True)
        ]
        for ax, (low, middle, high) in ((upper, absolute), (lower, relative)):
            ax.vlines(xs, low, high, color=colour, lw=1.3, alpha=0.7)
            sheet.scatter(
                ax,
                xs,
                middle,
                tips,
                s=26,
                marker=marker,
                zorder=3,
                label=GROUP_WORDS.get(group, group),
                edgecolors=colour,
                facecolors=colour if index < 6 else CARD,
                linewidths=0.0 if index < 6 else 1.2,
            )
    values = [seconds * 1e3 for point in done for seconds in (point.measured, point.low, point.high)]
    ends = [min(values) / 1.15, max(values) * 1.15]
    upper.plot(ends, ends, color=INK, lw=1.0)
    upper.fill_between(
        ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color=GREY, alpha=0.18, lw=0, label="within 10%"
    )
    upper.set(xscale="log", yscale="log", xlim=ends, ylim=ends, ylabel="forecast, ms per step")
    upper.legend(loc="upper left", labelspacing=0.3)
    lower.axhspan(-10, 10, color=GREY, alpha=0.18, lw=0)
    lower.axhline(0, color=INK, lw=1.0)
    lower.set(xlabel="measured, ms per step", ylabel="forecast / measured - 1, %")
    for ax in (upper, lower):
        plain_log(ax, "x")
    plain_log(upper, "y")
    errors = [abs(point.error) for point in done]
    worst = max(done, key=lambda point: abs(point.error))
    caption = (
        f"{len(done)} real steps, none used in fitting: median error {median(errors):.1%}, worst "
        f"{worst.error:+.1%} ({worst.row.label_with_optimizer}); {inside(point.row for point in done).words}. "
        "Bars: 90% intervals of the forecast, in the lower panel relative to the measured step."
    )
    alt = f"Forecast against measured step time of {len(done)} steps, with the error of each below. {caption}"
    return finish(sheet, "agreement", "Forecast against measured steps", caption, alt,
                   "measured across, forecast up; none of these steps was used in fitting")  # fmt: skip


RESIDUALS = {"step": "step", "device": "device time", "host": "host time", "peak": "peak memory"} | {
    name: "element-wise and rest" if name == "elementwise" else CLASS_LABELS.get(name, name) for name in GROUPS
}


@styled
def residual_figure(rows: Sequence[StepComparison]) -> Figure | None:
    """Draws the signed error of every component of every step. None without measured steps."""
    errors = {
        name: [(error, row) for row in rows if (error := row.parts[name].error) is not None] for name in RESIDUALS
    }
    names = [name for name, found in errors.items() if found]
    if not names:
        return None
    everything = sorted(abs(e) for found in errors.values() for e, _ in found)
    limit = min(1.0, max(0.1, 1.25 * everything[int(0.95 * (len(everything) - 1))]))
    sheet = new_sheet(0.46 * len(names) + 1.2)
    ax = sheet.axes[0]
    clipped = 0
    for place, name in enumerate(names):
        inside = [(e, row) for e, row in errors[name] if abs(e) <= limit]
        below = [(e, row) for e, row in errors[name] if e < -limit]
        above = [(e, row) for e, row in errors[name] if e > limit]
        clipped += len(below) + len(above)
        for points, marker, size in ((inside, "o", 20), (below, "<", 34), (above, ">", 34)):
            if not points:
                continue
            xs = [100 * max(-limit, min(limit, e)) for e, _ in points]
            # spread sideways in the order of the rows, so that equal errors do not hide each other
            ys = [place + 0.5 * ((i * 0.618) % 1 - 0.5) for i in range(len(points))]
            tips = [f"{row.label_with_optimizer}: {RESIDUALS[name]} {e:+.1%}" for e, row in points]
            colours = [ORANGE if row.is_host_bound else BLUE for _, row in points]
            sheet.scatter(ax, xs, ys, tips, s=size, marker=marker, c=colours, alpha=0.75, linewidths=0)
        middle = 100 * max(-limit, min(limit, median(e for e, _ in errors[name])))
        ax.plot([middle] * 2, [place - 0.36, place + 0.36], color=INK, lw=2)
    ax.axvline(0, color=INK, lw=1.0)
    ax.set_yticks(range(len(names)), [RESIDUALS[name] for name in names])
    ax.set(xlim=(-108 * limit, 108 * limit), ylim=(len(names) - 0.4, -0.6), xlabel="forecast / measured - 1, %")
    ax.grid(False, axis="y")
    bounds = {row.is_host_bound for found in errors.values() for _, row in found}
    for is_host, colour, label in ((False, BLUE, "bound by the device"), (True, ORANGE, "bound by the host")):
        if is_host in bounds:
            ax.scatter([], [], s=20, color=colour, label=label)
    ax.plot([], [], color=INK, lw=2, label="median")
    sheet.canvas.legend(loc="outside upper center", ncols=3)
    note = f" Triangles at the edge: {clipped} errors beyond {limit:.0%}, in full in the table." if clipped else ""
    caption = f"Signed error of each component of each step: what cancels in the step shows in its parts.{note}"
    middles = ", ".join(f"{RESIDUALS[name]} {median(e for e, _ in errors[name]):+.1%}" for name in names)
    alt = f"Strip plot of signed forecast errors by component. Medians: {middles}."
    return finish(sheet, "residuals", "Residuals by component", caption, alt,
                   "forecast against measured; none of these steps was used in fitting")  # fmt: skip
