"""Draws how steps scale, throughput per GPU against their number, and what a GPU of several does when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import ms, short_name, three_digits
from flopcast.roofline.step.questions.lanes import joined
from flopcast.roofline.views.figures.canvas import Figure, finish, halo, new_sheet, styled
from flopcast.roofline.views.figures.colours import BLUE, CARD, GREEN, GREY, INK, ORANGE, RED, SKY
from flopcast.roofline.views.figures.cost import COLOURS

if TYPE_CHECKING:
    from flopcast.roofline.dollars.scaling import Scaled, Scaling
    from flopcast.roofline.step.questions.lanes import Busy, Lanes

Named = Sequence[tuple[str, Sequence["Scaling"]]]


@styled
def scaling_figure(answers: Named) -> Figure | None:
    """Efficiency against GPUs with 90% bands, a panel per kind of scaling and a line per answer; None where fewer than
    two numbers of GPUs were forecast."""
    shown = {
        kind: [(label, one) for label, scalings in answers for one in scalings if one.kind == kind and one.doublings]
        for kind in ("strong", "weak")
    }
    shown = {kind: some for kind, some in shown.items() if some}
    if not shown:
        return None
    sheet = new_sheet(2.7 * len(shown) + 0.7, rows=len(shown), sharex=True, sharey=True)
    said, gpu, basis = [], "", ""
    for ax, (kind, some) in zip(sheet.axes, shown.items(), strict=True):
        labels = []
        for (label, one), colour in zip(some, COLOURS * len(some), strict=False):
            points = [point for point in one.points if point.forecast is not None]
            gpu, basis = _of(points[0])
            xs = [point.num_gpus for point in points]
            middle, low, high = zip(*(_efficiencies(point) for point in points), strict=True)
            ax.fill_between(xs, low, high, color=colour, alpha=0.14, linewidth=0)
            ax.plot(xs, middle, color=colour, lw=1.8)
            for is_host in (True, False):
                own = [
                    (x, y, point)
                    for x, y, point in zip(xs, middle, points, strict=True)
                    if point.forecast is not None and (point.forecast.bound == "host") == is_host
                ]
                sheet.scatter(
                    ax, [x for x, _, _ in own], [y for _, y, _ in own], [_tip(point) for _, _, point in own], s=22,
                    facecolors=CARD if is_host else colour, edgecolors=colour, linewidths=1.2, zorder=3,
                )  # fmt: skip
            if one.last is not None:
                at = middle[xs.index(one.last)]
                ax.annotate(
                    f"pays up to {one.last}", (one.last, at), (0, -13), textcoords="offset points", ha="center",
                    fontsize=8.2, color=colour, path_effects=halo(), zorder=6,
                )  # fmt: skip
            if label:
                labels.append((middle[-1], label, colour))
            said.append(f"{kind}{f' ({label})' if label else ''}: {middle[-1]:.0%} on {xs[-1]} GPUs")
        ax.axhline(1.0, color=INK, lw=0.8, alpha=0.5)
        ax.set(xscale="log", ylabel="throughput per GPU", ylim=(0.0, 1.3))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        _powers(ax, max(point.num_gpus for _, one in some for point in one.points))
        ax.text(0.01, 0.06, _SAID[kind], transform=ax.transAxes, fontsize=9.2, fontweight="bold", path_effects=halo(),
                zorder=6)  # fmt: skip
        if labels:
            sheet.label_right(ax, labels)
    sheet.axes[-1].set_xlabel("GPUs")
    sheet.axes[0].scatter([], [], s=22, facecolors=CARD, edgecolors=INK, linewidths=1.1, label="bound by the host")
    sheet.axes[0].legend(loc="upper right")
    caption = (
        f"Throughput per {short_name(gpu)} over that of the fewest that hold the step, each number of GPUs in the "
        "fastest of its layouts; shaded: the 90% interval of the step's own time; hollow points: bound by the host."
    )
    alt = f"Throughput per GPU against the number of GPUs. {'; '.join(said)}."
    return finish(sheet, "scale", "How the step scales over GPUs", caption, alt, f"{short_name(gpu)} {basis}")


_SAID = {"strong": "strong: the same sequences in all", "weak": "weak: the same sequences per GPU"}


def _of(point: Scaled) -> tuple[str, str]:
    assert point.forecast is not None
    return point.forecast.gpu, point.forecast.profile_basis


def _efficiencies(point: Scaled) -> tuple[float, float, float]:
    """Its efficiency, and the ends by its own interval."""
    found, middle = point.forecast, point.efficiency or 0.0
    assert found is not None
    step = found.step_seconds
    return middle, middle * step / found.step_seconds_high, middle * step / found.step_seconds_low


def _tip(point: Scaled) -> str:
    found, best = point.forecast, point.best
    assert found is not None
    assert best is not None
    layout = "one GPU" if point.num_gpus == 1 else best.run.parallel
    usd = "" if point.per_usd is None else f", {three_digits(point.per_usd)} {found.unit} per dollar"
    return (
        f"{layout}: {ms(found.step_seconds)} ms ({ms(found.step_seconds_low)} to {ms(found.step_seconds_high)}), "
        f"{three_digits(found.tokens_per_second)} {found.unit}/s, {point.efficiency or 0:.0%} per GPU{usd}, bound by "
        f"{found.bound}"
    )


def _powers(ax: object, most: int) -> None:
    from typing import Any

    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis: Any = getattr(ax, "xaxis")  # noqa: B009
    axis.set_major_locator(FixedLocator([2**power for power in range(most.bit_length())]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


THINNEST = 2e-3  # of the longest step: what takes less is drawn as wide, what lies nearer to its like as one
# What a lane is filled with, by phase or by what is beside it.
_FILLS = {
    "forward": ("forward", SKY), "backward": ("backward", BLUE), "optimizer": ("optimizer", GREEN),
    "beside kernels": ("sent beside kernels", ORANGE), "alone": ("sent alone: exposed", RED),
}  # fmt: skip


@styled
def lanes_figure(found: Sequence[Lanes], gpu: str, basis: str, words: str) -> Figure | None:
    """Two lanes per layout, kernels above and collectives below, over the milliseconds of a step. `words`: which step.
    None without layouts."""
    if not found:
        return None
    from matplotlib.colors import to_rgba

    sheet = new_sheet(0.95 * len(found) + 1.0)
    (ax,) = sheet.axes
    thin = THINNEST * max(one.step_seconds for one in found)
    used: dict[str, str] = {}
    for place, one in enumerate(found):
        base = -2.6 * place
        for lane, busy in enumerate((one.kernels, one.sent)):
            for what in dict.fromkeys(each.what for each in busy):
                label, colour = _FILLS.get(what, (what, GREY))
                own = joined((each for each in busy if each.what == what), thin)
                bars = [(each.start * 1e3, max(each.end - each.start, thin) * 1e3) for each in own]
                shares = [max(min(each.seconds / (each.end - each.start), 1.0), 0.2) for each in own]
                sheet.bars(ax, bars, (base - lane, 0.9), [f"{one.parallel}, {label}: {_when(each)}" for each in own],
                           facecolors=[to_rgba(colour, share) for share in shares], linewidth=0)  # fmt: skip
                used.setdefault(label, colour)
        ax.broken_barh([(0.0, one.step_seconds * 1e3)], (base - 1, 1.9), facecolors="none", edgecolors=GREY,
                       linewidth=0.7)  # fmt: skip
        ax.annotate(
            f"{one.step_seconds * 1e3:.0f} ms", (one.step_seconds * 1e3, base - 0.05), (5, 0),
            textcoords="offset points", va="center", fontsize=8.8,
        )  # fmt: skip
    ax.set_yticks(
        [-2.6 * place + at for place in range(len(found)) for at in (0.45, -0.55)],
        [text for one in found for text in (f"{one.parallel}: kernels", "collectives")],
    )
    ax.set(xlabel="ms of a step", xlim=(0.0, 1.1e3 * max(one.step_seconds for one in found)))
    ax.grid(axis="y", visible=False)
    for label, colour in used.items():
        ax.broken_barh([], (0, 1), facecolors=colour, label=label)
    sheet.canvas.legend(loc="outside lower center", ncols=len(used))
    caption = (
        f"{words}. A steady step of one GPU, as forecast; the paler, the more of "
        "the time it waits for the host between kernels; white: neither."
    )
    alt = "What one GPU does when. " + " ".join(
        f"{one.parallel}: {ms(one.step_seconds)} ms, kernels {ms(_length(one.kernels))}, sent alone "
        f"{ms(one.shares.exposed)}."
        for one in found
    )
    return finish(
        sheet, "lanes", "Where the milliseconds go on several GPUs", caption, alt, f"{short_name(gpu)} {basis}"
    )


def _when(one: Busy) -> str:
    return f"{ms(one.seconds)} ms between {ms(one.start)} and {ms(one.end)} ms"


def _length(busy: Sequence[Busy]) -> float:
    return sum(one.seconds for one in busy)
