"""Prints the output of `flopcast roofline`: a GPU's ceilings, and how near measured kernels come to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flopcast.roofline.base.units import NONE, rate, scale, share, three_digits
from flopcast.roofline.gpu.profile.roofs import DTYPES, Roofs, best_points, peaks_of, points_of, roofs_of
from flopcast.roofline.views.terminal.console import console, print_table, warn

if TYPE_CHECKING:
    from flopcast.roofline.base.numbers import Number
    from flopcast.roofline.gpu.profile.profile import Profile

# Ceilings that bound small work, in the order of the table.
FLOORS = {
    "kernel_floor": "shortest kernel", "kernel_gap": "gap between kernels of a step",
    "kernel_gap_tiny": "gap between tiny kernels", "launch": "host, one launch that allocates",
    "launch_inplace": "host, one launch in place", "sync": "host, reading one value back",
    "queue_depth": "launches the host can be ahead",
}  # fmt: skip
BANDWIDTHS = {"hbm_read": "memory read", "hbm_write": "memory write", "hbm_copy": "memory copy (read + written)"}


def print_roofs(profile: Profile) -> None:
    """Prints tables on stdout, warnings on stderr. Every value has its basis, and a projection its 90% interval."""
    out, roofs = console(), roofs_of(profile)
    is_projected = roofs.basis != "measured"
    if is_projected:
        out.print(f"{profile.gpu} was not measured: all of it is EXTRAPOLATED from another GPU, with 90% intervals.")
    _print_matrix(profile, roofs, is_projected)
    peaks = peaks_of(profile)
    unmeasured = [f"{d} (peak {_peak(peaks[d])})" for d in DTYPES if roofs.of(d) is None and d in peaks]
    if unmeasured:
        out.print(f"not measured: {', '.join(unmeasured)}")
    print_table("Bandwidths", ("", "value", "90% interval", "basis"), _bandwidth_rows(roofs))
    for name, sweep in (("copy", roofs.working_sets), ("read", roofs.cache_reads)):
        if sweep:
            sizes = [[_binary(size), bandwidth(n.value), n.basis] for size, n in sweep]
            print_table(f"By working set: {name}", ("working set", "value", "basis"), sizes)
    floors = [
        [words, _small(name, profile.ceilings[name].value), profile.ceilings[name].basis]
        for name, words in FLOORS.items()
        if name in profile.ceilings
    ]
    print_table("Launch bound", ("", "value", "basis"), floors)
    best = [
        [f"{b.op_class}, {b.backend}, {b.cache}", f"{b.points:,}",
         rate(b.rate, "FLOP/s", 1) if b.unit == "FLOP/s" else bandwidth(b.rate),
         NONE if b.share is None else f"{share(b.share)} of {b.of}"]
        for b in best_points(roofs, points_of(profile))
    ]  # fmt: skip
    if best:
        kind = "extrapolated" if is_projected else "measured"
        print_table(f"Best points, {kind}", ("class, backend, cache", "points", "best", "of the roof"), best)
    warn(roofs.warnings)


def _print_matrix(profile: Profile, roofs: Roofs, is_projected: bool) -> None:
    by, unit = scale(max((roof.best.value for roof in roofs.matrix), default=1e12), "FLOP/s")

    def flops(number: Number | None) -> str:
        if number is None:
            return NONE
        bounds = f" ({three_digits(number.low / by)}-{three_digits(number.high / by)})" if is_projected else ""
        return three_digits(number.value / by) + bounds

    rows = [
        [roof.dtype, flops(roof.burst), flops(roof.sustained),
         NONE if roof.peak is None else f"{three_digits(roof.peak.value / by)} {roof.peak.basis}", share(roof.share),
         *(NONE if ridge is None else f"{ridge:.3g}" for ridge in (roof.ridge_memory, roof.ridge_cache)),
         roof.best.basis]
        for roof in roofs.matrix
    ]  # fmt: skip
    columns = ("dtype", f"burst, {unit}", "sustained", "peak", "best of peak", "ridge, memory", "ridge, cache", "basis")
    caption = (
        "burst: best of cool single products; sustained: after seconds of load; peak: for reference only\n"
        "ridge: FLOP per byte from which the matrix units bound (sustained over copy bandwidth)"
    )
    print_table(f"{profile.gpu} ({roofs.basis}): matrix roofs", columns, rows, caption)


def _peak(number: Number) -> str:
    return f"{rate(number.value, 'FLOP/s', 1)} {number.basis}"


def bandwidth(value: float) -> str:
    """A bandwidth with its unit: 2.04 TB/s, 61.3 GB/s."""
    return rate(value, "B/s", 2 if value >= 1e12 else 1)


def _bandwidth_rows(roofs: Roofs) -> list[list[str]]:
    numbers = [(BANDWIDTHS[name], number) for name, number in roofs.bandwidths.items()]
    if roofs.cache is not None:
        numbers.append(("cache copy, best", roofs.cache))
    rows = [[name, bandwidth(n.value), f"{bandwidth(n.low)} to {bandwidth(n.high)}", n.basis] for name, n in numbers]
    if roofs.reference_bandwidth:
        rows.append(["memory, for reference", bandwidth(roofs.reference_bandwidth), NONE, "datasheet"])
    return rows


def _small(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "queue_depth" else f"{value * 1e6:.2f} us"


def _binary(size: float) -> str:
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"
