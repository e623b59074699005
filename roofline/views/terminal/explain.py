"""Prints the output of `flopcast explain`: the parts of a step, their distance from the speed of light, and advice."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import NONE, byte_size, gigabytes, ms, percent, rate, share, three_digits
from flopcast.roofline.views.terminal.console import console, print_table, say, warn
from flopcast.roofline.views.terminal.forecast import step_words
from flopcast.roofline.views.terminal.side_by_side import print_sides

if TYPE_CHECKING:
    from flopcast.roofline.step.forecast import Forecast
    from flopcast.roofline.step.questions.alternatives import Advice
    from flopcast.roofline.step.questions.call_roofline import CallRoofline
    from flopcast.roofline.step.questions.explain import Explanation, Windows
    from flopcast.roofline.step.questions.modes import Modes, ModeStep
    from flopcast.roofline.step.questions.side_by_side import Side
    from flopcast.roofline.stream.model.run import Run

MODULES_SHOWN = 16
NAME_SHOWN = 50  # characters of a module's path that are shown
BOUNDS = {"matrix": "matrix units", "memory": "memory", "launch": "launch floor"}


def print_explanation(
    found: Explanation,
    advice: Sequence[Advice],
    run: Run,
    modes: Modes | None = None,
    experts: Sequence[Side] = (),
    precisions: Sequence[Side] = (),
    calls: CallRoofline | None = None,
) -> None:
    """Prints tables on stdout and the forecast's warnings on stderr."""
    from flopcast.roofline.step.questions.explain import COUNTED

    step = found.forecast
    _print_step(found, run)
    _print_classes(found)
    console().print("\n".join(textwrap.wrap(f"Speed of light: {COUNTED}.", 118)))
    if found.windows is not None:
        _print_windows(found.windows)
    _print_modules(found)
    if found.syncs:
        waits = [
            [f"{s.op} in {s.module}, {s.phase}", f"{s.calls:,}", *_ms_and_share(s.step_seconds, step)]
            for s in found.syncs
        ]
        columns = ("", "calls", "costs, ms", "of the step")
        print_table("Synchronisations: the host waits for the device", columns, waits)
    if modes is not None:
        _print_modes(modes, step)
    if precisions:
        print_sides(precisions, "The step in each precision", "precision")
    if experts:
        print_sides(experts, "What the experts cost", "experts", with_warnings=False)
    if calls is not None:
        _print_calls(calls)
    _print_advice(advice, step.unit)
    warn(step.warnings)


def _print_windows(windows: Windows) -> None:
    told = (
        f"Sliding windows: {windows.calls:,} attention calls take {ms(windows.seconds)} ms. Their queries see pairs of "
        f"{windows.flops:.3g} FLOPs; the kernels visit blocks of {windows.flops_visited:.3g} with what they "
        f"recompute, {windows.flops_visited / windows.flops_causal:.0%} of the whole triangle's. No such call was "
        "timed: their time is that of the blocks, at the pace of causal calls on an H200."
    )
    console().print("\n".join(textwrap.wrap(told, 118)))


def _print_step(found: Explanation, run: Run) -> None:
    step = found.forecast
    waits = "- the host's part" if step.gpu == "cpu" else "- device waits for the host"
    parts: list[tuple[str, float, str]] = [
        ("- kernels run", step.device_seconds, f"{step.kernels:,} kernels"),
        ("- gaps between kernels", found.gap_seconds, ""),
        (waits, found.idle_seconds, f"host: {ms(step.host_seconds)} ms to enqueue a step, {step.host}"),
        ("the device alone", found.device_only_seconds, "host none"),
        ("speed of light", found.light_seconds, "see below"),
        ("- with all but products fused", found.fused_seconds, ""),
    ]
    if step.power_seconds:
        slower = f"{step.power_watts:.0f} W: the clock falls to {step.clock_share:.0%} of the highest"
        parts.insert(1, ("- slower at the power limit", step.power_seconds, slower))
    if step.num_gpus > 1:
        sent = f"of {ms(step.communication_seconds)} ms of collectives over {step.link}"
        parts.insert(1, ("- communication that no kernel hides", step.exposed_communication_seconds, sent))
        parts.insert(1, ("- slower beside collectives", step.contention_seconds, ""))
    if step.bubble_seconds:
        parts.insert(1, ("- bubble: waits for other stages", step.bubble_seconds, "of the last stage"))
    rows = [[name, *_ms_and_share(seconds, step), words] for name, seconds, words in parts]
    rows.insert(-2, ["peak memory", "", "", gigabytes(step.peak_bytes) + ("" if step.fits else ", DOES NOT FIT")])
    ends = f"90%: {ms(step.step_seconds_low)} to {ms(step.step_seconds_high)}"
    whole = ["step", ms(step.step_seconds), "100%", ends]
    print_table(f"{step_words(step, run)}; bound by {step.bound}", ("", "ms", "of the step", ""), [whole, *rows])


def _ms_and_share(seconds: float, step: Forecast) -> tuple[str, str]:
    return ms(seconds), share(seconds / (step.step_seconds or 1.0))


def _print_classes(found: Explanation) -> None:
    rows = [
        [part.op_class, ms(part.seconds), share(part.share),
         f"{BOUNDS[part.bound]} {share(part.bound_seconds[part.bound] / part.seconds if part.seconds else 0.0)}",
         ms(part.light_seconds), ms(part.gap_seconds), byte_size(part.bytes), byte_size(part.needed_bytes),
         f"{part.kernels:,}"]
        for part in sorted(found.classes, key=lambda part: -part.seconds)
    ]  # fmt: skip
    columns = ("class", "ms", "share", "bound by", "speed of light", "above it", "moved", "unavoidable", "kernels")
    print_table("Device time by class", columns, rows)


def _print_modules(found: Explanation) -> None:
    shown, rest = found.modules[:MODULES_SHOWN], found.modules[MODULES_SHOWN:]
    rows = [
        [_end_of(m.module), ms(m.seconds), share(m.share), *map(_some, (m.forward, m.backward, m.optimizer)),
         BOUNDS[m.bound]]
        for m in shown
    ]  # fmt: skip
    if rest:
        seconds, part, *phases = (
            sum(getattr(m, name) for m in rest) for name in ("seconds", "share", "forward", "backward", "optimizer")
        )
        rows.append([f"{len(rest)} others", ms(seconds), share(part), *map(_some, phases), ""])
    columns = ("module, layers together", "ms", "share", "forward", "backward", "optimizer", "bound by")
    print_table("Device time by module", columns, rows)


def _end_of(module: str) -> str:
    """Shortens a module's path to its column; the end is kept, since it tells modules apart."""
    return module if len(module) <= NAME_SHOWN else f"\u2026{module[1 - NAME_SHOWN :]}"


def _some(seconds: float) -> str:
    return ms(seconds) if seconds else NONE


def _print_modes(modes: Modes, step: Forecast) -> None:
    known = [one for one in modes.steps if one.step_seconds is not None]
    if len(known) > 1:
        rows = [[name, *(words(one) for one in known)] for name, words in _mode_lines(known, step.unit)]
        print_table("The step in each mode", ("", *(one.mode for one in known)), rows)
    for one in modes.steps:
        if one.step_seconds is None:
            say(f"not forecast: mode {one.mode} ({one.reason})")
    if modes.interruptions:
        interrupted = [
            [one.kind, f"{one.where}\n{one.reason}", *_ms_and_share(one.step_seconds, step), one.remedy]
            for one in modes.interruptions
        ]
        columns = ("", "where, why", "costs, ms", "of the step", "remedy")
        print_table("What interrupts the compiled code", columns, interrupted)
    if modes.zeros_bytes:
        console().print(
            f"Of the compiled step {ms(modes.zeros_seconds)} ms fill and read {byte_size(modes.zeros_bytes)} of zeros: "
            "gradients of results that the loss does not need, such as logits; a forward that returns the loss alone "
            "makes none."
        )


def _mode_lines(known: Sequence[ModeStep], unit: str) -> list[tuple[str, Callable[[ModeStep], str]]]:
    """The lines of the table of modes: a name, and what it says of a mode."""
    first = known[0]
    lines: list[tuple[str, Callable[[ModeStep], str]]] = [
        ("step, ms", lambda one: ms(one.step_seconds or 0.0)),
        ("- 90%", lambda one: f"{ms(one.step_seconds_low or 0.0)} to {ms(one.step_seconds_high or 0.0)}"),
        (f"- of {first.mode}'s", lambda one: share((one.step_seconds or 0.0) / (first.step_seconds or 1.0))),
        ("device, ms", lambda one: ms(one.device_seconds or 0.0)),
        ("host, ms", lambda one: ms(one.host_seconds or 0.0)),
        ("device waits for the host", lambda one: share((one.waiting_seconds or 0.0) / (one.step_seconds or 1.0))),
        ("kernels", lambda one: f"{one.kernels or 0:,}"),
        ("launches by the host", lambda one: f"{one.launches or 0:,}"),
        ("moved", lambda one: byte_size(one.bytes or 0)),
        ("peak memory", lambda one: gigabytes(one.peak_bytes or 0) + ("" if one.fits else ", does not fit")),
    ]
    if any(one.usd_per_million is not None for one in known):
        lines.append(
            (f"$ per million {unit}", lambda one: NONE if (usd := one.usd_per_million) is None else three_digits(usd))
        )
    return lines


def _print_calls(calls: CallRoofline) -> None:
    rows = [
        [f"{call.phase} of {call.batch}{' (asked)' * call.is_asked}", three_digits(call.flops / 1e9),
         byte_size(call.bytes), three_digits(call.intensity), call.bound, ms(call.roof_seconds),
         ms(call.device_seconds), share(call.roof_seconds / call.device_seconds), "" if call.fits else "does not fit"]
        for call in calls.calls
    ]  # fmt: skip
    columns = (
        "call",
        "GFLOPs",
        "least moved",
        "FLOP/byte",
        "roof",
        "at the roof, ms",
        "kernels, ms",
        "of the roof",
        "",
    )
    title = (
        f"Roofline of calls, context {calls.calls[0].context:,}: {rate(calls.roofs.matrix, 'FLOP/s')} sustained, "
        f"{rate(calls.roofs.bandwidth, 'B/s')}"
    )
    more = f"By the roofline {calls.turns}. Least moved: the products' weights and the cache, once each."
    print_table(title, columns, rows, more)


def _print_advice(advice: Sequence[Advice], unit: str) -> None:
    rows = [
        [f"{a.name}{' *' if a.kind == 'bound' else ''}", ms(a.step_seconds), ms(a.device_seconds), percent(a.gain),
         percent(a.flops_gain), gigabytes(a.peak_bytes) + ("" if a.fits else ", does not fit"), a.option]
        for a in advice if a.gain is not None
    ]  # fmt: skip
    bounds = "\n".join(f"* {a.reason}" for a in advice if a.gain is not None and a.kind == "bound")
    columns = ("alternative", "step, ms", "device, ms", f"{unit}/s", "FLOP/s", "memory", "option")
    if rows:
        print_table("What would help: each alternative's own forecast", columns, rows, bounds or None)
    for left in advice:
        if left.gain is None:
            say(f"not forecast: {left.name} ({left.reason})")
