"""Draws the parts of a step: device time by class, with host and step time, over width and over batch; and calls of
inference below the roofs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import hypot, log10
from typing import TYPE_CHECKING, Literal

from flopcast.roofline.base.units import count, ms, rate, scale, short_name
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.views.figures.canvas import (
    Figure,
    Layer,
    Sheet,
    finish,
    halo,
    legend_below,
    new_sheet,
    plain_log,
    styled,
)
from flopcast.roofline.views.figures.colours import (
    BLUE,
    CARD,
    CLASS_COLOURS,
    CLASS_LABELS,
    GREY,
    INK,
    LIGHT,
    RED,
    Theme,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flopcast.roofline.step.forecast import Forecast
    from flopcast.roofline.step.questions.call_roofline import Call, CallRoofline
from flopcast.roofline.step.forecast import tokens_of, width_of


@styled
def anatomy_figure(found: Sequence[Forecast], validation: Sequence[StepComparison] = ()) -> Figure | None:
    """Draws device time by class, stacked, over width, with host and step times and the same models' measured steps."""
    if not found:
        return None
    sheet = new_sheet(5.6)
    ax = sheet.axes[0]
    top = _stack(sheet, ax, found, [1e3] * len(found), "ms", _model_of)
    measured = [
        (i, row, row.step.measured)
        for i, f in enumerate(found)
        for row in validation
        if row.step.measured and _same_run(row, f)
    ]
    if measured:
        tips = [
            f"{row.plan.name}: measured {seconds * 1e3:.2f} ms, forecast off by {row.step.error:+.1%}"
            for _, row, seconds in measured
        ]
        # beside the forecast, so that neither hides the other
        xs, ys = [i + 0.22 for i, _, _ in measured], [seconds * 1e3 for _, _, seconds in measured]
        sheet.diamonds(ax, xs, ys, tips, "step, measured")
        top = max(top, *ys)
    widths = [width_of(f) for f in found]
    labels = [f"{w or count(f.n_params)}\n{f.depth}" for w, f in zip(widths, found, strict=True)]
    ax.set_xticks(range(len(found)), labels, fontsize=8.5)
    ax.set(xlabel="width (upper), layers (lower)" if any(widths) else "parameters, layers", ylabel="ms per step")
    ax.set_ylim(0, 1.06 * top)
    _legend(ax)
    first = next((f for f in found if f.bound != "host"), None)
    turn = (
        "the host bounds every step here"
        if first is None
        else f"the device bounds the step from {count(first.n_params)} parameters"
    )
    caption = f"One training step of {tokens_of(found[0]):,} tokens. Bars: kernel time by class, summed. " + (
        "Each operator runs when it is called, so that host and bars add up."
        if found[0].gpu == "cpu"
        else f"Where the host line lies above the bars, the GPU waits: {turn}."
    )
    alt = (
        f"Stacked bars of device milliseconds by operation class for {len(found)} models, "
        f"{found[0].step_seconds * 1e3:.1f} to {found[-1].step_seconds * 1e3:.1f} ms per step, with lines for host "
        f"time and step time; bound by {found[0].bound} at {count(found[0].n_params)}, by {found[-1].bound} at "
        f"{count(found[-1].n_params)} parameters."
    )
    basis = f"forecast from a {found[0].profile_basis} profile" + ("; diamonds measured" if measured else "")
    return finish(sheet, "anatomy", "Anatomy of a step over width", caption, alt, basis)


@styled
def batch_figure(found: Sequence[Forecast], name: str, seq: int) -> Figure | None:
    """Draws the same for one model over batches, in microseconds per token, to show what a larger batch saves.

    Returns None with fewer than two forecasts.
    """
    if len(found) < 2:
        return None
    sheet = new_sheet(5.2)
    ax = sheet.axes[0]
    scales = [1e6 / tokens_of(f) for f in found]
    batches = [round(tokens_of(f) / seq) for f in found]
    labels = dict(zip(map(id, found), batches, strict=True))
    top = _stack(sheet, ax, found, scales, "µs per token", lambda f: f"{labels[id(f)]} x {seq}")
    ax.set_xticks(range(len(found)), [f"{b}{'' if f.fits else ' *'}" for b, f in zip(batches, found, strict=True)])
    ax.set(xlabel=f"batch, sequences of {seq} tokens", ylabel="µs per token")
    ax.set_ylim(0, 1.06 * top)
    _legend(ax, "upper right")
    per_token = [f.step_seconds * s for f, s in zip(found, scales, strict=True)]
    first = next((b for b, f in zip(batches, found, strict=True) if f.bound != "host"), None)
    full = [b for b, f in zip(batches, found, strict=True) if not f.fits]
    caption = (
        f"A step of {name}, its time divided by its tokens: {per_token[0]:.3g} µs per token at batch {batches[0]}, "
        f"{per_token[-1]:.3g} at {batches[-1]}. What host and optimizer cost is per step, not per token, and fades; "
        + ("the host bounds every one." if first is None else f"the device bounds from batch {first} on.")
        + (" *: does not fit into the memory." if full else "")
    )
    alt = (
        f"Stacked bars of device microseconds per token by operation class over batches {batches[0]} to {batches[-1]} "
        f"of {name}, falling from {per_token[0]:.3g} to {per_token[-1]:.3g} µs per token for the whole step."
    )
    basis = f"forecast from a {found[0].profile_basis} profile"
    return finish(sheet, "batches", "Anatomy of a step over batch", caption, alt, basis)


def _model_of(found: Forecast) -> str:
    width = width_of(found)
    return f"width {width} x {found.depth}" if width else count(found.n_params)


def _stack(
    sheet: Sheet,
    ax: Axes,
    found: Sequence[Forecast],
    scales: Sequence[float],
    unit: str,
    name_of: Callable[[Forecast], str],
) -> float:
    """Draws bars by class, the host's line and the step with its interval, in seconds times `scales`.

    Returns the highest end.
    """
    places = [float(i) for i in range(len(found))]
    names = [name_of(f) for f in found]
    layers = []
    for name, colour in CLASS_COLOURS.items():
        heights = [
            sum(part.seconds for part in f.breakdown if _shown_class(part.op_class) == name) * by
            for f, by in zip(found, scales, strict=True)
        ]
        if not any(heights):
            continue
        tips = [
            f"{who}, {CLASS_LABELS[name]}: {height:.3g} {unit}, {height / (f.device_seconds * by):.0%} of the device's "
            for who, height, f, by in zip(names, heights, found, scales, strict=True)
        ]
        layers.append(Layer(CLASS_LABELS[name], colour, heights, tips))
    tops = sheet.stack(ax, len(found), layers, 0.8)
    hosts = [f.host_seconds * by for f, by in zip(found, scales, strict=True)]
    ax.plot(places, hosts, color=INK, lw=1.8, ls="-", marker=".", label="host: time to enqueue the step")
    steps, lows, highs = (
        [getattr(f, end) * by for f, by in zip(found, scales, strict=True)]
        for end in ("step_seconds", "step_seconds_low", "step_seconds_high")
    )
    errors = [
        [s - low for s, low in zip(steps, lows, strict=True)],
        [high - s for s, high in zip(steps, highs, strict=True)],
    ]
    ax.errorbar(places, steps, errors, color=RED, lw=0, elinewidth=1.4, capsize=3, marker="_", ms=11, mew=2,
                label="step, forecast with 90% interval")  # fmt: skip
    tips = [
        f"{who}, step: {step:.3g} {unit} ({low:.3g} to {high:.3g}), device {f.device_seconds * by:.3g}, host "
        f"{host:.3g}, bound by {f.bound}"
        for who, f, by, step, low, high, host in zip(names, found, scales, steps, lows, highs, hosts, strict=True)
    ]
    sheet.scatter(ax, places, steps, tips, s=22, color=RED, linewidths=0, zorder=4)
    ax.grid(False, axis="x")
    return float(max(*highs, *tops, *hosts))


def _legend(ax: Axes, place: Literal["upper left", "upper right"] = "upper left") -> None:
    """Draws the legend: lines first, then the classes as they are stacked, the uppermost first."""
    handles, names = ax.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda i: (names[i] in CLASS_LABELS.values(), -i))
    ax.legend([handles[i] for i in order], [names[i] for i in order], loc=place, labelspacing=0.3)


def _shown_class(op_class: str) -> str:
    return op_class if op_class in CLASS_COLOURS else "rest"


def _same_run(row: StepComparison, found: Forecast) -> bool:
    """Whether a real step ran what `found` forecasts, so that its own forecast is the same number."""
    forecast = row.step.forecast or 0.0
    return row.n_params == found.n_params and abs(forecast / found.step_seconds - 1) < 1e-9


@styled
def calls_figure(found: CallRoofline, *, theme: Theme = LIGHT) -> Figure | None:
    """FLOP/s of prefills and decodes against FLOPs per byte, below the roofs, points named by their batch. None without
    calls."""
    if not found.calls:
        return None
    sheet = new_sheet(5.2)
    (ax,) = sheet.axes
    ink, grey = theme.of(INK), theme.of(GREY)
    by, unit = scale(found.roofs.matrix, "FLOP/s")
    matrix, bandwidth = found.roofs
    ridge = matrix / bandwidth
    left = min(ridge, *(call.intensity for call in found.calls)) / 2.5
    right = max(ridge, *(call.intensity for call in found.calls)) * 3
    ax.plot([left, ridge, right], [left * bandwidth / by, matrix / by, matrix / by], color=ink, lw=1.9,
            ls="-" if found.basis == "measured" else (0, (5, 2)))  # fmt: skip
    ax.axvline(ridge, color=grey, lw=1.0, ls=(0, (1, 2)))
    at = left * 1.3
    sheet.label_along(
        ax,
        (at, at * bandwidth / by * 1.05),
        (2 * at, 2 * at * bandwidth / by * 1.05),
        f"memory {rate(bandwidth, 'B/s')}",
    )
    ax.text(right / 1.1, matrix / by * 1.2, f"matrix units {rate(matrix, 'FLOP/s')}", ha="right", fontsize=8.2,
            path_effects=halo())  # fmt: skip
    for phase, colour, marker in (("decode", theme.of(BLUE), "o"), ("prefill", theme.of(RED), "s")):
        own = [call for call in found.calls if call.phase == phase]
        if not own:
            continue
        xs, ys = [call.intensity for call in own], [call.flops_per_second / by for call in own]
        ax.plot(xs, ys, color=colour, lw=0.9, alpha=0.6)
        tips = [_call_tip(call) for call in own]
        sheet.scatter(ax, xs, ys, tips, s=34, marker=marker, color=[colour if c.fits else "none" for c in own],
                      edgecolors=colour, linewidths=1.2, zorder=4, label=phase)  # fmt: skip
        offset, ha = ((7, -3), "left") if phase == "decode" else ((-7, -3), "right")
        for names, x, y, is_asked in _named(own, xs, ys):
            weight = "bold" if is_asked else "normal"
            ax.annotate(names, (x, y), offset, textcoords="offset points", ha=ha, fontsize=8.0,
                        fontweight=weight, color=colour, path_effects=halo())  # fmt: skip
    if found.turning_batch is not None:
        ax.plot([ridge], [matrix / by], ls="", marker="D", ms=6, mfc=theme.of(CARD), mec=ink, zorder=5)
        ax.annotate(f"decodes turn at {found.turning_batch:,.0f}", (ridge, matrix / by), (-9, 4), ha="right",
                    textcoords="offset points", fontsize=8.2, color=ink, path_effects=halo())  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(left, right))
    ax.set_xlabel("FLOP per byte (products' weights and cache, once each)")
    ax.set_ylabel(f"{unit} while kernels run; points named by batch")
    ax.set_ylim(min(call.flops_per_second for call in found.calls) / by / 2.5, matrix / by * 2.2)
    plain_log(ax, "x", (1.0, 3.0))
    plain_log(ax, "y", (1.0,))
    legend_below(ax, ax.get_legend_handles_labels()[0], 0.16)
    context = found.calls[0].context
    ax.set_title(f"{short_name(found.gpu)}, context {context:,}, {found.mode}: {found.turns}", fontsize=8.8, loc="left",
                 wrap=True)  # fmt: skip
    caption = (
        "Calls below the roofs: a decode of more sequences reads the weights once for all of them, and each sequence's "
        "cache; hollow: it does not fit into the memory. Bold: the call that was asked for."
    )
    alt = f"Roofline of prefill and decode: {found.turns}. " + " ".join(f"{_call_tip(call)}." for call in found.calls)
    return finish(sheet, "calls", "Roofline of prefill and decode", caption, alt, f"{found.gpu} {found.basis}")


_NEAR = 0.12  # decades, as wide as a name: points nearer to each other share one


def _named(calls: Sequence[Call], xs: Sequence[float], ys: Sequence[float]) -> list[tuple[str, float, float, bool]]:
    """Names of points by their batches, and where they stand: decodes of many sequences lie together where the cache is
    most of what is read."""
    found: list[tuple[str, float, float, bool]] = []
    for call, x, y in zip(calls, xs, ys, strict=True):
        if found and hypot(log10(x / found[-1][1]), log10(y / found[-1][2])) < _NEAR:
            names, *_, is_asked = found.pop()
            found.append((f"{names}, {call.batch:,}", x, y, is_asked or call.is_asked))
        else:
            found.append((f"{call.batch:,}", x, y, call.is_asked))
    return found


def _call_tip(call: Call) -> str:
    return (
        f"{call.phase} of {call.batch} x {call.context:,}: {ms(call.device_seconds)} ms of kernels, "
        f"{call.roof_seconds / call.device_seconds:.0%} of the roof, {call.bound}-bound by it"
    )
