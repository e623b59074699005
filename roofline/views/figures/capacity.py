"""Draws what bounds a step besides its kernels: the memory that it takes, and the host that launches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import count
from flopcast.roofline.step.forecast import tokens_of, width_of
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.views.figures.canvas import Figure, Layer, Sheet, finish, new_sheet, styled
from flopcast.roofline.views.figures.colours import BLUE, GREEN, GREY, INK, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flopcast.roofline.gpu.profile.host import HostCosts
    from flopcast.roofline.step.forecast import Forecast


WEIGHT_BYTES, STATE_BYTES = 4, 8  # per parameter: fp32 weights, AdamW's two moments in fp32
PHASES = ("forward", "backward", "optimizer")


@styled
def capacity_figure(
    ladder: Sequence[Forecast], batches: Sequence[Forecast], memory_bytes: float, name: str, seq: int,
    validation: Sequence[StepComparison] = (),
) -> Figure | None:  # fmt: skip
    """Draws peak memory over width and, for one model, over batch, against the GPU's memory. None without a ladder."""
    if not ladder or not memory_bytes:
        return None
    panels = 2 if len(batches) > 1 else 1
    sheet = new_sheet(3.3 * panels + 0.7, rows=panels)
    ax = sheet.axes[0]
    widths = [width_of(f) for f in ladder]
    labels = [str(w or count(f.n_params)) for w, f in zip(widths, ladder, strict=True)]
    _stack(sheet, ax, ladder, [f"width {label}" for label in labels], memory_bytes)
    ax.set_xticks(range(len(ladder)), labels, fontsize=8.5)
    ax.set(xlabel=f"width, steps of {tokens_of(ladder[0]):,} tokens", ylabel="GB at the peak")
    measured = [
        (i, row.peak.measured / 1e9, row)
        for i, f in enumerate(ladder)
        for row in validation
        if row.peak.measured and row.n_params == f.n_params and row.peak.forecast == f.peak_bytes
    ]
    if measured:
        tips = [
            f"{row.plan.name}: measured {size:.3g} GB, forecast off by {row.peak.error:+.1%}"
            for _, size, row in measured
        ]
        xs, ys = [i for i, _, _ in measured], [size for _, size, _ in measured]
        sheet.diamonds(ax, xs, ys, tips, "peak, measured")
    if panels == 2:
        lower = sheet.axes[1]
        sizes = [round(tokens_of(f) / seq) for f in batches]
        _stack(sheet, lower, batches, [f"batch {size}" for size in sizes], memory_bytes)
        lower.set_xticks(range(len(batches)), [str(size) for size in sizes])
        lower.set(xlabel=f"batch of {name}, sequences of {seq} tokens", ylabel="GB at the peak")
    handles, names = ax.get_legend_handles_labels()
    sheet.canvas.legend(handles, names, loc="outside upper center", ncols=3)
    last = ladder[-1]
    caption = (
        f"Bars: what the allocator holds at the peak of a step (fp32 weights, AdamW). On top, hollow: context, kernels "
        f"and 4% for fragmentation, which a GPU must hold too. The line: {memory_bytes / 1e9:.0f} GB."
    )
    full = next((f for f in batches if not f.fits), None)
    if full is not None:
        caption += (
            f" {name} no longer fits at batch {round(tokens_of(full) / seq)} (of the batches shown); its activations "
            "grow with the batch, its weights and optimizer state do not."
        )
    alt = (
        f"Stacked bars of peak memory: {ladder[0].peak_bytes / 1e9:.1f} GB at {count(ladder[0].n_params)} to "
        f"{last.peak_bytes / 1e9:.1f} GB at {count(last.n_params)} parameters, below a line at "
        f"{memory_bytes / 1e9:.0f} GB" + (", and the same of one model over batches." if panels == 2 else ".")
    )
    basis = "lifetimes of the traced step's storages" + ("; diamonds measured" if measured else "")
    return finish(sheet, "memory", "Memory of a step", caption, alt, basis)


def _stack(sheet: Sheet, ax: Axes, found: Sequence[Forecast], names: Sequence[str], room: float) -> None:
    parts = (
        ("weights", BLUE, [WEIGHT_BYTES * f.n_params / 1e9 for f in found]),
        ("optimizer state", ORANGE, [STATE_BYTES * f.n_params / 1e9 for f in found]),
        ("gradients, activations, temporaries", GREEN,
         [(f.peak_bytes - (WEIGHT_BYTES + STATE_BYTES) * f.n_params) / 1e9 for f in found]),
    )  # fmt: skip
    layers = []
    for label, colour, heights in parts:
        tips = [
            f"{name}, {label}: {height:.3g} GB of {f.peak_bytes / 1e9:.3g} at the peak"
            for name, height, f in zip(names, heights, found, strict=True)
        ]
        layers.append(Layer(label, colour, heights, tips))
    tops = sheet.stack(ax, len(found), layers, 0.72)
    needed = [f.needed_bytes / 1e9 for f in found]
    ax.bar(range(len(found)), [n - top for n, top in zip(needed, tops, strict=True)], 0.72, tops, facecolor="none",
           edgecolor=GREY, linewidth=0.9, label="context, and what blocks leave over")  # fmt: skip
    ax.axhline(room / 1e9, color=RED, lw=1.6, label="the GPU's memory")
    ax.set_ylim(0, 1.12 * max(room / 1e9, min(max(needed), 1.6 * room / 1e9)))
    ax.grid(False, axis="x")


# --- the host


@styled
def host_figure(hosts: Sequence[HostCosts]) -> Figure | None:
    """Draws each host's time per layer, by phase, with the range of its runs. None if no host has such times."""
    shown = [host for host in hosts if host.layers]
    if not shown:
        return None
    sheet = new_sheet(1.5 + 0.62 * len(shown))
    ax = sheet.axes[0]
    colours = dict(zip(PHASES, (BLUE, ORANGE, GREEN), strict=True))
    for place, host in enumerate(shown):
        left = 0.0
        for phase in PHASES:
            found = host.layers[phase]
            width = found["seconds"] * 1e3
            bars = ax.barh([place], [width], 0.5, left=[left], color=colours[phase], linewidth=0,
                           label=phase if place == 0 else None)  # fmt: skip
            bars[0].set_gid(f"host-{place}-{phase}")
            sheet.tips[f"host-{place}-{phase}"] = [
                f"{host.name}, {phase}: {width:.2f} ms per layer ({found['low'] * 1e3:.2f} to "
                f"{found['high'] * 1e3:.2f}), and {found['fixed'] * 1e3:.2f} ms per step whatever the depth"
            ]
            left += width
        step = host.layers["step"]
        ax.errorbar([step["seconds"] * 1e3], [place], xerr=[[(step["seconds"] - step["low"]) * 1e3],
                    [(step["high"] - step["seconds"]) * 1e3]], color=INK, lw=0, elinewidth=1.4, capsize=4,
                    label="range of its runs" if place == 0 else None)  # fmt: skip
    ax.set_yticks(range(len(shown)), [_label(host, place == 0) for place, host in enumerate(shown)], fontsize=8.8)
    ax.set(xlabel="ms of host time per layer of Qwen3, eager, AdamW", ylim=(len(shown) - 0.5, -0.5), xlim=(0, None))
    ax.grid(False, axis="y")
    sheet.canvas.legend(loc="outside upper center", ncols=4)
    first = shown[0]
    step = first.layers["step"]
    caption = (
        f"An eager step enqueues each kernel from Python: {step['seconds'] * 1e3:.2f} ms per layer and "
        f"{step['fixed'] * 1e3:.1f} ms per step on {first.name}, whatever the width. Where the kernels of a layer take "
        f"less, the GPU waits. Runs of one host differ by {first.sigma:.0%} (standard deviation of the logarithm)."
    )
    alt = (
        f"Horizontal bars of host milliseconds per layer by phase for {len(shown)} host"
        f"{'s' if len(shown) > 1 else ''}: "
        + "; ".join(f"{host.name} {host.layers['step']['seconds'] * 1e3:.2f} ms" for host in shown)
        + "."
    )
    basis = "measured with tiny models of several depths"
    return finish(sheet, "host", "What the host costs", caption, alt, basis)


def _label(host: HostCosts, is_own: bool) -> str:
    """The label of a host; it tells hosts with the same kind of processor apart, since they differ."""
    machines = len(host.layers["step"].get("machines") or ())
    told = [f"{host.cores} cores"] if host.cores else []
    told += [f"{machines} machines"] if machines > 1 else ["one machine"]
    told += [host.date[:10]] if host.date else []
    return f"{host.name}\n{', '.join(told)}" + ("\nthis profile's own" if is_own else "")
