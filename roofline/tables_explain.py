"""What `flopcast explain` prints: the step taken apart, the gap to the speed of light, and what would help."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.canvas import byte_size
from flopcast.roofline.tables import (
    NONE,
    console,
    gigabytes,
    ms,
    parameters,
    percent,
    run_words,
    say,
    share,
    table,
)

if TYPE_CHECKING:
    from flopcast.roofline.advice import Advice
    from flopcast.roofline.explain import Explanation
    from flopcast.roofline.forecast import Forecast, Run

MODULES_SHOWN = 16
NAME_SHOWN = 50  # characters of a module's path
WORDS = {"matrix": "matrix units", "memory": "memory", "launch": "launch floor"}


def print_explanation(found: Explanation, advice: Sequence[Advice], run: Run) -> None:
    """Tables on stdout; what the forecast does not know well, on stderr."""
    from flopcast.roofline.explain import COUNTED

    out, step = console(), found.forecast
    total = step.step_seconds or 1.0
    depth = f"{step.depth} layers, " if step.depth else ""
    title = (
        f"{step.gpu} ({step.profile_basis}): {parameters(step.n_params)} parameters, {depth}"
        f"{run_words(run, step.unit)}"
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
            [
                f"{s.op} in {s.module}, {s.phase}",
                f"{s.calls:,}",
                ms(s.step_seconds),
                share(s.step_seconds / total),
            ]
            for s in found.syncs
        ]
        out.print(
            table(
                "Synchronisations: the host waits for the device",
                ("", "calls", "costs, ms", "of the step"),
                waits,
            )
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
        [
            "- slower at the power limit",
            ms(step.power_seconds),
            share(step.power_seconds / step.step_seconds),
            said,
        ]
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
            sum(getattr(m, name) for m in rest)
            for name in ("seconds", "share", "forward", "backward", "optimizer")
        ]
        rows.append(
            [f"{len(rest)} others", ms(sums[0]), share(sums[1]), *(_some(value) for value in sums[2:]), ""]
        )
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
            table(
                "What would help: each alternative's own forecast", columns, rows, "\n".join(bounds) or None
            )
        )
    for left in advice:
        if left.gain is None:
            say(f"not forecast: {left.name} ({left.reason})")
