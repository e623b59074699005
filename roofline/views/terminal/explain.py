"""What `flopcast explain` prints: the step taken apart, the gap to the speed of light, and what would help."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import (
    NONE,
    byte_size,
    gigabytes,
    ms,
    parameters,
    percent,
    rate,
    scale,
    share,
    three_digits,
)
from flopcast.roofline.gpu.profile.roofs import DTYPES, Roofs, best_points, points_of, roofs_of
from flopcast.roofline.views.terminal.console import console, say, table
from flopcast.roofline.views.terminal.forecast import run_words

if TYPE_CHECKING:
    from flopcast.roofline.base.numbers import Number
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.step.alternatives import Advice
    from flopcast.roofline.step.explain import Explanation
    from flopcast.roofline.step.forecast import Forecast
    from flopcast.roofline.stream.model.run import Run


MODULES_SHOWN = 16
NAME_SHOWN = 50  # characters of a module's path
WORDS = {"matrix": "matrix units", "memory": "memory", "launch": "launch floor"}


def print_explanation(found: Explanation, advice: Sequence[Advice], run: Run) -> None:
    """Tables on stdout; what the forecast does not know well, on stderr."""
    from flopcast.roofline.step.explain import COUNTED

    out, step = console(), found.forecast
    total = step.step_seconds or 1.0
    depth = f"{step.depth} layers, " if step.depth else ""
    title = (
        f"{step.gpu} ({step.profile_basis}): {parameters(step.n_params)} parameters, {depth}{run_words(run, step.unit)}"
    )
    rows = [
        ["step", ms(step.step_seconds), "100%", f"90%: {ms(step.step_seconds_low)} to {ms(step.step_seconds_high)}"],
        ["- kernels run", ms(step.device_seconds), share(step.device_seconds / total), f"{step.kernels:,} kernels"],
        *_power_row(step),
        ["- gaps between kernels", ms(found.gap_seconds), share(found.gap_seconds / total), ""],
        [_idle_words(step.gpu), ms(found.idle_seconds), share(found.idle_seconds / total),
         f"host: {ms(step.host_seconds)} ms to enqueue a step, {step.host}"],
        ["the device alone", ms(found.device_only_seconds), share(found.device_only_seconds / total), "host none"],
        ["peak memory", "", "", gigabytes(step.peak_bytes) + ("" if step.fits else ", DOES NOT FIT")],
        ["speed of light", ms(found.light_seconds), share(found.light_seconds / total), "see below"],
        ["- with all but products fused", ms(found.fused_seconds), share(found.fused_seconds / total), ""],
    ]  # fmt: skip
    out.print(table(f"{title}; bound by {step.bound}", ("", "ms", "of the step", ""), rows))
    _print_classes(found)
    out.print("\n".join(textwrap.wrap(f"Speed of light: {COUNTED}.", 118)))
    _print_modules(found)
    if found.syncs:
        waits = [
            [f"{s.op} in {s.module}, {s.phase}", f"{s.calls:,}", ms(s.step_seconds), share(s.step_seconds / total)]
            for s in found.syncs
        ]
        out.print(
            table("Synchronisations: the host waits for the device", ("", "calls", "costs, ms", "of the step"), waits)
        )
    _print_advice(advice, step.unit)
    for warning in step.warnings:
        say(f"warning: {warning}")


def _power_row(step: Forecast) -> list[list[str]]:
    """What the power limit costs, where it does."""
    if not step.power_seconds:
        return []
    said = f"{step.power_watts:.0f} W: the clock falls to {step.clock_share:.0%} of the highest"
    return [
        ["- slower at the power limit", ms(step.power_seconds), share(step.power_seconds / step.step_seconds), said]
    ]


def _idle_words(gpu: str) -> str:
    return "- the host's part" if gpu == "cpu" else "- device waits for the host"


def _print_classes(found: Explanation) -> None:
    rows = [
        [
            part.op_class,
            ms(part.seconds),
            share(part.share),
            f"{WORDS[part.bound]} {share(part.bound_seconds[part.bound] / part.seconds if part.seconds else 0.0)}",
            ms(part.light_seconds),
            ms(part.gap_seconds),
            byte_size(part.bytes),
            byte_size(part.needed_bytes),
            f"{part.kernels:,}",
        ]
        for part in sorted(found.classes, key=lambda part: -part.seconds)
    ]
    columns = ("class", "ms", "share", "bound by", "speed of light", "gap", "moved", "unavoidable", "kernels")
    console().print(table("Device time by class", columns, rows))


def _print_modules(found: Explanation) -> None:
    shown, rest = found.modules[:MODULES_SHOWN], found.modules[MODULES_SHOWN:]
    rows = [
        [
            _end_of(m.module),
            ms(m.seconds),
            share(m.share),
            _some(m.forward),
            _some(m.backward),
            _some(m.optimizer),
            WORDS[m.bound],
        ]
        for m in shown
    ]
    if rest:
        sums = [
            sum(getattr(m, name) for m in rest) for name in ("seconds", "share", "forward", "backward", "optimizer")
        ]
        rows.append([f"{len(rest)} others", ms(sums[0]), share(sums[1]), *(_some(value) for value in sums[2:]), ""])
    columns = ("module, layers together", "ms", "share", "forward", "backward", "optimizer", "bound by")
    console().print(table("Device time by module", columns, rows))


def _end_of(module: str) -> str:
    """A path that fits into its column: the end tells modules apart."""
    return module if len(module) <= NAME_SHOWN else f"\u2026{module[1 - NAME_SHOWN :]}"


def _some(seconds: float) -> str:
    return ms(seconds) if seconds else NONE


def _print_advice(advice: Sequence[Advice], unit: str) -> None:
    done = [a for a in advice if a.gain is not None]
    rows = [
        [f"{a.name}{' *' if a.kind == 'bound' else ''}", ms(a.step_seconds), ms(a.device_seconds), percent(a.gain),
         percent(a.flops_gain), gigabytes(a.peak_bytes) + ("" if a.fits else ", does not fit"), a.option]
        for a in done
    ]  # fmt: skip
    bounds = [f"* {a.reason}" for a in done if a.kind == "bound"]
    columns = ("alternative", "step, ms", "device, ms", f"{unit}/s", "FLOP/s", "memory", "option")
    if rows:
        console().print(
            table("What would help: each alternative's own forecast", columns, rows, "\n".join(bounds) or None)
        )
    for left in advice:
        if left.gain is None:
            say(f"not forecast: {left.name} ({left.reason})")


def print_roofs(profile: Profile) -> None:
    """Tables on stdout, warnings on stderr. Every value with its basis; a projection's with its 90% interval."""
    out, roofs = console(), roofs_of(profile)
    is_projected = roofs.basis != "measured"
    title = f"{profile.gpu} ({roofs.basis})"
    if is_projected:
        out.print(f"{profile.gpu} was not measured: all of it is EXTRAPOLATED from another GPU, with 90% intervals.")

    by, unit = scale(max((roof.best.value for roof in roofs.matrix), default=1e12), "FLOP/s")

    def flops(number: Number | None) -> str:
        if number is None:
            return NONE
        bounds = f" ({three_digits(number.low / by)}-{three_digits(number.high / by)})" if is_projected else ""
        return three_digits(number.value / by) + bounds

    def ridge(value: float | None) -> str:
        return NONE if value is None else f"{value:.3g}"

    rows = [
        [
            roof.dtype,
            flops(roof.burst),
            flops(roof.sustained),
            NONE if roof.peak is None else f"{three_digits(roof.peak.value / by)} {roof.peak.basis}",
            share(roof.share),
            ridge(roof.ridge_memory),
            ridge(roof.ridge_cache),
            roof.best.basis,
        ]
        for roof in roofs.matrix
    ]
    columns = ("dtype", f"burst, {unit}", "sustained", "peak", "best of peak", "ridge, memory", "ridge, cache", "basis")
    caption = (
        "burst: best of cool single products; sustained: after seconds of load; peak: for reference only\n"
        "ridge: FLOP per byte from which the matrix units bound (sustained over copy bandwidth)"
    )
    out.print(table(f"{title}: matrix roofs", columns, rows, caption))
    unmeasured = [d for d in DTYPES if roofs.of(d) is None and d in profile.peaks]
    if unmeasured:
        out.print(f"not measured: {', '.join(f'{d} (peak {flops_of_peak(profile.peaks[d])})' for d in unmeasured)}")
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
         rate(b.rate, "FLOP/s", 1) if b.unit == "FLOP/s" else bandwidth(b.rate),
         NONE if b.share is None else f"{share(b.share)} of {b.of}"]
        for b in best_points(roofs, points_of(profile))
    ]  # fmt: skip
    if found:
        kind = "measured" if not is_projected else "extrapolated"
        out.print(table(f"Best points, {kind}", ("class, backend, cache", "points", "best", "of the roof"), found))
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
    return NONE if number is None else f"{rate(number.value, 'FLOP/s', 1)} {number.basis}"


def bandwidth(value: float) -> str:
    return f"{value / 1e12:.2f} TB/s" if value >= 1e12 else f"{value / 1e9:.1f} GB/s"


def _bandwidth_rows(roofs: Roofs) -> list[list[str]]:
    names = {"hbm_read": "memory read", "hbm_write": "memory write", "hbm_copy": "memory copy (read + written)"}
    numbers = [(names[name], number) for name, number in roofs.bandwidths.items()]
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
