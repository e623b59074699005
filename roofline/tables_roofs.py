"""What `flopcast roofline` prints: roofs and ridge points, bandwidths and floors, the best points below them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flopcast.roofline.canvas import plain, scale
from flopcast.roofline.roofs import DTYPES, Roofs, best_points, points_of, roofs_of
from flopcast.roofline.tables import NONE, console, rate, say, share, table

if TYPE_CHECKING:
    from flopcast.roofline.profile import Number, Profile


def print_roofs(profile: Profile) -> None:
    """Tables on stdout, warnings on stderr. Every value with its basis; a projection's with its 90% interval."""
    out, roofs = console(), roofs_of(profile)
    is_projected = roofs.basis != "measured"
    title = f"{profile.gpu} ({roofs.basis})"
    if is_projected:
        out.print(
            f"{profile.gpu} was not measured: all of it is EXTRAPOLATED from another GPU, with 90% intervals."
        )

    by, unit = scale(max((roof.best.value for roof in roofs.matrix), default=1e12), "FLOP/s")

    def flops(number: Number | None) -> str:
        if number is None:
            return NONE
        bounds = f" ({plain(number.low / by)}-{plain(number.high / by)})" if is_projected else ""
        return plain(number.value / by) + bounds

    def ridge(value: float | None) -> str:
        return NONE if value is None else f"{value:.3g}"

    rows = [
        [
            roof.dtype,
            flops(roof.burst),
            flops(roof.sustained),
            NONE if roof.peak is None else f"{plain(roof.peak.value / by)} {roof.peak.basis}",
            share(roof.share),
            ridge(roof.ridge_memory),
            ridge(roof.ridge_cache),
            roof.best.basis,
        ]
        for roof in roofs.matrix
    ]
    columns = (
        "dtype",
        f"burst, {unit}",
        "sustained",
        "peak",
        "best of peak",
        "ridge, memory",
        "ridge, cache",
        "basis",
    )
    caption = (
        "burst: best of cool single products; sustained: after seconds of load; peak: for reference only\n"
        "ridge: FLOP per byte from which the matrix units bound (sustained over copy bandwidth)"
    )
    out.print(table(f"{title}: matrix roofs", columns, rows, caption))
    unmeasured = [d for d in DTYPES if roofs.of(d) is None and d in profile.peaks]
    if unmeasured:
        out.print(
            f"not measured: {', '.join(f'{d} (peak {flops_of_peak(profile.peaks[d])})' for d in unmeasured)}"
        )
    out.print(table("Bandwidths", ("", "value", "90% interval", "basis"), list(_bandwidth_rows(roofs))))
    for name, sweep in (("copy", roofs.working_sets), ("read", roofs.cache_reads)):
        if sweep:
            sizes = [[_binary(size), bandwidth(n.value), n.basis] for size, n in sweep]
            out.print(table(f"By working set: {name}", ("working set", "value", "basis"), sizes))
    floors = [
        [words, _small(name, profile.ceilings[name].value), profile.ceilings[name].basis]
        for name, words in FLOORS.items()
        if name in profile.ceilings
    ]
    out.print(table("Launch bound", ("", "value", "basis"), floors))
    found = [
        [f"{b.op_class}, {b.backend}, {b.cache}", f"{b.points:,}",
         rate(b.rate) if b.unit == "FLOP/s" else bandwidth(b.rate),
         NONE if b.share is None else f"{share(b.share)} of {b.of}"]
        for b in best_points(roofs, points_of(profile))
    ]  # fmt: skip
    if found:
        kind = "measured" if not is_projected else "extrapolated"
        out.print(
            table(f"Best points, {kind}", ("class, backend, cache", "points", "best", "of the roof"), found)
        )
    for warning in roofs.warnings:
        say(f"warning: {warning}")


# Ceilings that bound small work, in the order of the table.
FLOORS = {
    "kernel_floor": "shortest kernel", "kernel_gap": "gap between kernels of a step",
    "kernel_gap_tiny": "gap between tiny kernels", "launch": "host, one launch that allocates",
    "launch_inplace": "host, one launch in place", "sync": "host, reading one value back",
    "queue_depth": "launches the host can be ahead",
}  # fmt: skip


def flops_of_peak(number: Number | None) -> str:
    return NONE if number is None else f"{rate(number.value)} {number.basis}"


def bandwidth(value: float) -> str:
    return f"{value / 1e12:.2f} TB/s" if value >= 1e12 else f"{value / 1e9:.1f} GB/s"


def _bandwidth_rows(roofs: Roofs) -> list[list[str]]:
    names = {
        "hbm_read": "memory read",
        "hbm_write": "memory write",
        "hbm_copy": "memory copy (read + written)",
    }
    numbers = [(names[name], number) for name, number in roofs.bandwidths.items()]
    if roofs.cache is not None:
        numbers.append(("cache copy, best", roofs.cache))
    rows = [
        [name, bandwidth(n.value), f"{bandwidth(n.low)} to {bandwidth(n.high)}", n.basis]
        for name, n in numbers
    ]
    if roofs.reference_bandwidth:
        rows.append(["memory, for reference", bandwidth(roofs.reference_bandwidth), NONE, "datasheet"])
    return rows


def _small(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "queue_depth" else f"{value * 1e6:.2f} us"


def _binary(size: float) -> str:
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"
