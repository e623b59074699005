"""Figures of single kernels: the roofline of matrix products and attention, and the bandwidth of everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flopcast.kernels.shapes import DTYPE_BYTES, Attention, Gemm, shape_from_json
from flopcast.roofline.canvas import (
    BLUE,
    CLASS_COLOURS,
    CLASS_LABELS,
    GREEN,
    GREY,
    INK,
    MARKERS_OF_BACKENDS,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    Figure,
    Row,
    byte_size,
    duration,
    finish,
    new_sheet,
    plain_log,
    rate,
    scale,
    styled,
)
from flopcast.roofline.gpus import GpuSpec, load_specs, spec_of_device
from flopcast.roofline.lower import describe

if TYPE_CHECKING:
    from flopcast.roofline.profile import Profile


def spec_of(profile: Profile) -> GpuSpec | None:
    return load_specs().get(profile.gpu) or spec_of_device(str(profile.device.get("name")))


@dataclass(frozen=True)
class _Point:
    series: str
    backend: str
    dtype: str
    cache: str
    x: float
    y: float
    tip: str


def _timed(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """(row, kernel seconds) of those that were measured."""
    times = ((row, row.get("kernel_seconds") or row.get("seconds")) for row in rows if row.get("shape"))
    return [(row, float(seconds)) for row, seconds in times if seconds and row["status"] == "ok"]


def _matrix_points(rows: Sequence[Row]) -> list[_Point]:
    points = []
    for row, seconds in _timed(rows):
        if row["shape"]["kind"] not in ("gemm", "attention"):  # before it is parsed: calls are many
            continue
        shape = shape_from_json(row["shape"])
        if isinstance(shape, Gemm):
            series, size = f"matmul {shape.layout}", f"{shape.m} x {shape.n} x {shape.k}"
        else:
            assert isinstance(shape, Attention)
            series = f"attention {'forward' if shape.direction == 'fwd' else 'backward'}"
            size = f"batch {shape.batch}, {shape.heads}/{shape.kv_heads} heads, {shape.seq} tokens"
        backend, cache = row.get("backend", "torch"), row.get("cache", "cold")
        achieved, throttled = shape.flops / seconds, ", power-throttled" if row.get("throttled") else ""
        tip = f"{series}, {backend}, {shape.dtype}, {size}: {rate(achieved, 'FLOP/s')}, {duration(seconds)}, {cache}"
        points.append(
            _Point(series, backend, shape.dtype, cache, shape.flops / shape.bytes, achieved, tip + throttled)
        )
    return points


_SERIES_COLOURS = {"matmul nt": BLUE, "matmul nn": GREEN, "matmul tn": ORANGE, "matmul tt": YELLOW,
                   "attention forward": RED, "attention backward": PURPLE}  # fmt: skip
_SERIES_NOTES = {
    "matmul nt": "matmul nt (forward)",
    "matmul nn": "matmul nn (dgrad)",
    "matmul tn": "matmul tn (wgrad)",
}


@styled
def roofline_figure(profile: Profile, rows: Sequence[Row]) -> Figure | None:
    """Achieved FLOP/s of matrix products and attention against FLOPs per byte, under the roofs. None without roofs."""
    points = _matrix_points(rows)
    dtypes = [p.dtype for p in points]
    dtype = max(set(dtypes), key=dtypes.count) if dtypes else "bf16"
    points = [p for p in points if p.dtype == dtype and p.cache == "cold"]
    ceilings = profile.ceilings
    burst, sustained = ceilings.get(f"matrix_burst/{dtype}"), ceilings.get(f"matrix_sustained/{dtype}")
    copy, l2, floor = ceilings.get("hbm_copy"), ceilings.get("l2_copy"), ceilings.get("kernel_floor")
    top = max((n.value for n in (burst, sustained) if n), default=0.0)
    if not top or copy is None:
        return None
    sheet = new_sheet(6.2)
    ax = sheet.axes[0]
    peak = profile.peaks.get(dtype)
    has_datasheet = peak is not None and peak.basis != "measured"
    most = max(peak.value if peak and has_datasheet else 0.0, top)
    by, unit = scale(top, "FLOP/s")
    left = min([p.x for p in points] or [4.0 * top / copy.value]) / 4
    left = min(left, top / copy.value / 2)  # the memory roof shows
    right = max(max((p.x for p in points), default=1e3), 4 * top / copy.value) * 1.6
    bottom = min(min((p.y for p in points), default=top / 1e3) / 2, top / 20)
    dash = (0, (5, 2)) if profile.basis == "projected" else "-"
    if has_datasheet and peak is not None:
        ax.axhline(peak.value / by, color=GREY, lw=1.2, ls=(0, (2, 2)),
                   label=f"dense peak {rate(peak.value, 'FLOP/s')} ({peak.basis})")  # fmt: skip
    for number, name, colour in ((burst, "burst", INK), (sustained, "sustained", "#6b4e00")):
        if number is not None:
            knee = number.value / copy.value
            label = f"matrix {name} {rate(number.value, 'FLOP/s')}, ridge {knee:.3g} FLOP/B ({number.basis})"
            ax.plot([knee, right], [number.value / by] * 2, color=colour, lw=1.8, ls=dash, label=label)
            ax.plot([knee], [number.value / by], "o", color=colour, ms=5)
    wide = (
        ceilings.get("matrix_burst/fp32") if profile.device.get("type") == "cpu" and dtype != "fp32" else None
    )
    if wide is not None:  # a processor without matrix units for narrow types is faster in fp32
        label = f"fp32 burst {rate(wide.value, 'FLOP/s')} ({wide.basis})"
        ax.axhline(wide.value / by, color=PURPLE, lw=1.4, label=label)
        most = max(most, wide.value)
    ax.plot([left, top / copy.value], [left * copy.value / by, top / by], color=INK, lw=1.8, ls=dash,
            label=f"memory copy {rate(copy.value, 'B/s')} ({copy.basis})")  # fmt: skip
    if l2 is not None:
        ax.plot([left, top / l2.value], [left * l2.value / by, top / by], color=GREY, lw=1.2,
                label=f"cache copy {rate(l2.value, 'B/s')} ({l2.basis})")  # fmt: skip
    if floor is not None:
        # A square product of intensity i has n = 1.5 x bytes per element x i, and 2 n^3 FLOPs.
        edge = DTYPE_BYTES[dtype] * 1.5
        end = ((top * floor.value / 2) ** (1 / 3)) / edge
        start = max(left, ((bottom * floor.value / 2) ** (1 / 3)) / edge)
        xs = [start * (end / start) ** (i / 20) for i in range(21)]
        ax.plot(xs, [2 * (edge * x) ** 3 / floor.value / by for x in xs], color=SKY, lw=1.2, ls=(0, (4, 2)),
                label=f"launch floor {duration(floor.value)}, square products ({floor.basis})")  # fmt: skip
    roofs = ax.legend(loc="upper left", handlelength=2.2, labelspacing=0.35)
    ax.add_artist(roofs)
    groups: dict[tuple[str, str], list[_Point]] = defaultdict(list)
    for point in points:
        groups[point.series, point.backend].append(point)
    clouds = [
        sheet.scatter(ax, [p.x for p in members], [p.y / by for p in members], [p.tip for p in members], s=16,
                      marker=MARKERS_OF_BACKENDS.get(backend, "v"), color=_SERIES_COLOURS.get(series, GREY), alpha=0.6,
                      linewidths=0, label=f"{_SERIES_NOTES.get(series, series)}, {backend}")
        for (series, backend), members in sorted(groups.items(), key=lambda item: _series_order(item[0]))
    ]  # fmt: skip
    # room above the roofs for their legend
    ax.set(
        xscale="log", yscale="log", xlim=(left, right), ylim=(bottom / by, most / by * (most / bottom) ** 0.5)
    )
    ax.set_xlabel("arithmetic intensity, FLOP per byte (each operand moved once)")
    ax.set_ylabel(f"achieved {unit}, {dtype}")
    plain_log(ax, "x")
    plain_log(ax, "y", (1.0,))
    if clouds:
        sheet.canvas.legend(handles=clouds, loc="outside lower center", ncols=2, markerscale=1.6, columnspacing=1.5,
                            handletextpad=0.3)  # fmt: skip
    best = max(points, key=lambda p: p.y, default=None)
    fastest = (
        f" The fastest point reaches {rate(best.y, 'FLOP/s')}: {best.tip.split(':')[0]}." if best else ""
    )
    caption = (
        f"{len(points)} measured shapes, operands from memory (cold), kernel time without launch. A point below all "
        "lines loses to tile and wave quantisation or a slow kernel; near the dashed blue line, to the cost of any "
        "kernel at all."
    )
    alt = (
        f"Log-log roofline of {profile.gpu}: roofs of {rate(top, 'FLOP/s')} {dtype} and {rate(copy.value, 'B/s')} "
        f"meeting at {top / copy.value:.3g} FLOP per byte, with {len(points)} measured matrix products and attention "
        f"calls.{fastest}"
    )
    basis = f"points measured; roofs {profile.basis}; " + (
        f"dotted: {peak.basis} peak" if has_datasheet and peak else "no datasheet peak known"
    )
    return finish(sheet, "roofline", "Roofline: matrix products and attention", caption + fastest, alt, basis)


def _series_order(key: tuple[str, str]) -> tuple[int, str]:
    series, backend = key
    return (list(_SERIES_COLOURS).index(series) if series in _SERIES_COLOURS else 99, backend)


@styled
def memory_figure(profile: Profile, rows: Sequence[Row]) -> Figure | None:
    """Achieved bytes/s of the memory-bound classes against bytes moved. None without measured points."""
    points: list[_Point] = []
    for row, seconds in _timed(rows):
        if row["shape"]["kind"] != "call":
            continue
        work = describe(shape_from_json(row["shape"]), row.get("backend", "torch"))
        name = work.op_class if work.op_class in CLASS_COLOURS else "rest"
        cache = row.get("cache", "cold")
        tip = f"{work.variant.split('|')[0]} ({work.op_class}), {cache}: {work.bytes:,} bytes in {duration(seconds)}, "
        points.append(
            _Point(
                name,
                "torch",
                "",
                cache,
                work.bytes,
                work.bytes / seconds,
                tip + rate(work.bytes / seconds, "B/s"),
            )
        )
    small = sum(p.x < 1024 for p in points)
    points = [p for p in points if p.x >= 1024]
    if not points:
        return None
    sheet = new_sheet(5.6)
    ax = sheet.axes[0]
    copy, l2, floor = (profile.ceilings.get(n) for n in ("hbm_copy", "l2_copy", "kernel_floor"))
    by, unit = scale(copy.value if copy else max(p.y for p in points), "B/s")
    spec = spec_of(profile)
    if spec is not None:
        value = spec.bandwidth_bytes_per_second
        ax.axhline(
            value / by, color=GREY, lw=1.2, ls=(0, (2, 2)), label=f"memory {rate(value, 'B/s')} (datasheet)"
        )
    if copy is not None:
        ax.axhline(copy.value / by, color=INK, lw=1.8, label=f"copy {rate(copy.value, 'B/s')} ({copy.basis})")
    if l2 is not None:
        ax.axhline(
            l2.value / by, color=GREY, lw=1.2, label=f"cache copy {rate(l2.value, 'B/s')} ({l2.basis})"
        )
    left, right = min(p.x for p in points) / 1.6, max(p.x for p in points) * 1.6
    bottom, top = min(p.y for p in points) / 1.6, max(p.y for p in points) * 1.6
    if floor is not None:
        ax.plot([left, top * floor.value], [left / floor.value / by, top / by], color=SKY, lw=1.2, ls=(0, (4, 2)),
                label=f"launch floor {duration(floor.value)} ({floor.basis})")  # fmt: skip
    sizes = sorted(
        (int(k.split("/")[1]), n.value) for k, n in profile.ceilings.items() if k.startswith("copy/")
    )
    if sizes:
        ax.plot([s for s, _ in sizes], [v / by for _, v in sizes], color=INK, lw=1.0, alpha=0.6, marker=".", ms=4,
                label="plain copy by working set (measured)")  # fmt: skip
    ax.add_artist(ax.legend(loc="lower right", labelspacing=0.35))
    handles, labels = [], []
    for name in CLASS_COLOURS:
        for cache in ("cold", "hot"):
            members = [p for p in points if p.series == name and p.cache == cache]
            if not members:
                continue
            colour = CLASS_COLOURS[name]
            fill = {"color": colour, "linewidths": 0} if cache == "cold" else {
                "facecolors": "none", "edgecolors": colour, "linewidths": 0.7}  # fmt: skip
            handles.append(sheet.scatter(ax, [p.x for p in members], [p.y / by for p in members],
                                         [p.tip for p in members], s=15, alpha=0.7, **fill))  # fmt: skip
            labels.append(f"{CLASS_LABELS[name].split(' (')[0]}, {cache}")
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom / by, top / by),
           xlabel="bytes moved by one call", ylabel=f"achieved {unit}")  # fmt: skip
    from matplotlib.ticker import FuncFormatter

    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: byte_size(value)))
    plain_log(ax, "y", (1.0,))
    sheet.canvas.legend(handles, labels, loc="outside lower center", ncols=4, markerscale=1.6, columnspacing=1.2,
                        handletextpad=0.2)  # fmt: skip
    caption = (
        f"{len(points)} measured calls. Filled: operands from memory (cold); hollow: found in the cache (hot). Large "
        "calls of a class level out at different bandwidths: casts, broadcasts and row reductions have their own. "
        f"Not drawn: {small} calls that move less than 1 kB."
    )
    level = f" of {rate(copy.value, 'B/s')}" if copy else ""
    alt = (
        f"Log-log scatter of achieved bandwidth against bytes moved on {profile.gpu}: rising along the launch floor, "
        f"then levelling out near the copy bandwidth{level}."
    )
    basis = "points and lines measured" if profile.basis == "measured" else "lines projected"
    return finish(sheet, "bandwidth", "Memory-bound calls: achieved bandwidth", caption, alt,
                   basis + ("; dotted: datasheet" if spec else ""))  # fmt: skip
