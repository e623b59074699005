"""Draws a link that was measured against the law of collectives by terms of other machines."""

from __future__ import annotations

from collections.abc import Sequence

from flopcast.roofline.base.units import count
from flopcast.roofline.gpu.links.choice import KINDS, wire
from flopcast.roofline.gpu.links.fitted import Fitted, projected
from flopcast.roofline.views.figures.canvas import WIDTH, Figure, Sheet, finish, plain_log, styled
from flopcast.roofline.views.figures.colours import BLUE, GREY, INK
from studies.links.tables import Row

COLUMNS = 2


@styled
def link_figure(rows: Sequence[Row], others: Fitted) -> Figure | None:
    """Bus bandwidth against bytes, a panel a collective, of bf16. None without rows."""
    rows = sorted((row for row in rows if row.dtype == "bf16"), key=lambda row: row.asked.bytes)
    if not rows:
        return None
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDTH, 7.2), layout="constrained")
    axes = canvas.subplots(len(KINDS) // COLUMNS, COLUMNS, sharex=True, sharey=True)
    sheet = Sheet(canvas, list(axes.ravel()))
    link = rows[0].asked.group.link
    for ax, kind in zip(sheet.axes, KINDS, strict=True):
        some = [row for row in rows if row.asked.kind == kind]
        sizes = [row.asked.bytes for row in some]
        carried = [wire(kind, row.asked.group.gpus) * row.asked.bytes / 1e9 for row in some]
        times = [projected(row.asked, others) for row in some]
        low, high, middle = (
            [data / seconds for data, seconds in zip(carried, ends, strict=True)]
            for ends in zip(*((time.high, time.low, time.seconds) for time in times), strict=True)
        )
        ax.fill_between(sizes, low, high, color=BLUE, alpha=0.14, lw=0)
        ax.plot(sizes, middle, color=BLUE, lw=1.8, label="law, by other machines" if ax is axes[0, 0] else None)
        rates = [data / row.seconds for data, row in zip(carried, some, strict=True)]
        tips = [
            f"{kind} of {count(row.asked.bytes)} bytes: {rate:.3g} GB/s in {row.seconds * 1e6:.1f} us, "
            f"forecast {time.seconds / row.seconds - 1:+.0%} ({time.regime})"
            for row, rate, time in zip(some, rates, times, strict=True)
        ]
        sheet.scatter(ax, sizes, rates, tips, s=14, color=INK, linewidths=0, zorder=3,
                      label="measured" if ax is axes[0, 0] else None)  # fmt: skip
        ax.axhline(link.bytes_per_second / 1e9, color=GREY, lw=1.0, ls=":")
        ax.set(xscale="log", yscale="log", title=kind.replace("_", "-"))
        ax.set_xscale("log", base=2)
        plain_log(ax, "y")
    for ax in axes[:, 0]:
        ax.set_ylabel("bus GB/s")
    for ax in axes[-1]:
        ax.set_xlabel("bytes")
        ax.set_xticks([2**10, 2**15, 2**20, 2**25, 2**30], ["1 KiB", "32 KiB", "1 MiB", "32 MiB", "1 GiB"])
    canvas.legend(loc="outside lower center", ncols=2)
    caption = (
        "Bus bandwidth as nccl-tests counts it, of bf16. Points: measured. Line and 90% interval: the law with terms "
        "of other machines alone. Dotted: the line rate of one direction. Steps are where NCCL goes over from LL to "
        "Simple."
    )
    alt = "Bus bandwidth against bytes of six collectives, measured and by the law."
    return finish(sheet, "pair", f"{rows[0].machine}, {link.name}", caption, alt, "measured")
