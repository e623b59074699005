"""Prints the output of `flopcast widths`: rules, penalties, layouts, heads, shapes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import NONE, count, gigabytes, ms, parameters, percent
from flopcast.roofline.views.terminal.console import console, print_table, say
from flopcast.roofline.widths.verdict import NAMES

if TYPE_CHECKING:
    from flopcast.roofline.widths.answer import Answer
    from flopcast.roofline.widths.measured_rules import MeasuredRule
    from flopcast.roofline.widths.penalties import Point


SHAPES_SHOWN = 12
UNMEASURED = 0.02  # share of a step in kernels of no measured kind from which on a remark is printed


def print_answer(found: Answer) -> None:
    """Prints the verdict, then tables, on stdout; remarks on what was not measured go to stderr."""
    out, center, run = console(), found.center, found.run
    what = "forward" if found.forward else "step"
    title = (
        f"{found.gpu} ({found.basis}): around {_named(center)}, {parameters(center.n_params)} parameters, "
        f"{_batch(found)}{run.precision}{'' if found.forward else ', ' + run.optimizer}"
        f"{'' if run.mode == 'eager' else ', mode ' + run.mode}; {what} "
        f"{_ranged(center)} ms, bound by {center.bound}"
    )
    out.print(_wrapped(found.verdict.sentence))
    if (words := found.host_words()) is not None:
        out.print(_wrapped(words[0].upper() + words[1:] + "."))
    if (words := found.padding_words()) is not None:
        out.print(_wrapped(words[0].upper() + words[1:] + "."))
    if found.points:
        _print_rules(found, title, what)
    else:
        out.print(title)
    for axis in found.points:
        _print_axiss(found, axis, what)
    if found.heads:
        _print_shapes("Heads x head_dim, fastest per parameter first", found.heads, center, what)
    if found.shapes:
        named = f"Shapes of {found.constraint}, fastest first; ffn, hidden size and depth against one another"
        _print_shapes(named, found.shapes[:SHAPES_SHOWN], center, what)
        if len(found.shapes) > SHAPES_SHOWN:
            say(f"{len(found.shapes) - SHAPES_SHOWN} slower shapes are in --json and --out")
    elif found.constraint is not None:
        say(f"no other shape of {found.constraint} lies near")
    if found.points and found.run.mode == "eager":  # padding changes a compiled product's layout
        _print_layouts(found)
    if found.measured:
        _print_measured(found.measured)
    if found.refused:
        value, why = next(iter(found.refused.items()))
        say(
            f"left out, since the factory refuses them: {', '.join(map(str, sorted(found.refused)))}; of {value}: {why}"
        )
    unsure = max((p.extrapolated for p in (*found.heads, *found.shapes)), default=0.0)
    if unsure > UNMEASURED and found.basis == "measured":
        say(f"warning: up to {unsure:.0%} of a row's device time is in kernels of no measured kind (marked *)")


def _named(center: Point) -> str:
    config = center.config
    if "module" in config:
        return f"width {center.value} of {config['module']}"
    return f"hidden {config['hidden_size']}, {config['num_hidden_layers']} layers"


def _batch(found: Answer) -> str:
    """What a step is of, with a comma; nothing for a step function, whose batch is not known."""
    run, unit = found.run, found.center.config.get("unit", "tokens")
    return {"samples": f"batch {run.batch}, ", "steps": ""}.get(unit, f"{run.batch} x {run.seq} tokens, ")


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 118))


def _print_rules(found: Answer, title: str, what: str) -> None:
    rows = []
    for axis, rule in found.rules.items():
        worst = NONE if rule.worst is None else f"{percent(rule.worst)} ({rule.worst_value})"
        rows.append([NAMES[axis], f"{rule.multiple}", percent(rule.median), percent(rule.best), worst,
                     percent(rule.step_median), percent(rule.step_worst)])  # fmt: skip
    columns = ("", "keep to a multiple of", "ignoring it: median", "best", "worst", f"of the {what}: median", "worst")
    caption = (
        "Ignoring it: kernel time against the line between aligned neighbours, of sizes that are no such multiple. "
        "Kept is the smallest multiple from which on no power of two loses more than "
        f"{found.tolerated:.1%} at the median."
    )
    print_table(title, columns, rows, caption)


def _print_axiss(found: Answer, axis: str, what: str) -> None:
    penalties = {p.value: p for p in found.penalties[axis]}
    is_eager = found.run.mode == "eager"
    rows = []
    for one in found.points[axis]:
        penalty = penalties.get(one.value)
        cells = [str(one.value), str(one.multiple), count(one.n_params), _ranged(one)]
        if is_eager:
            cells += [f"{one.flops_per_second / 1e12:.1f}", f"{one.seconds_per_parameter * 1e12:.1f}"]
        cells.append(gigabytes(one.peak_bytes))
        if penalty is None:
            cells += [NONE] * 3
        else:
            low, high = 100 * penalty.device_low, 100 * penalty.device_high
            cells += [percent(penalty.step), percent(penalty.device), f"{low:+.1f} to {high:+.1f}"]
        if not is_eager:
            cells += [NONE if penalty is None else percent(penalty.parts[part]) for part in ("products", "passes")]
            cells.append(f"{one.padded} of {one.products}" if one.padded else "none")
        rows.append(cells)
    rates = ("TFLOP/s", "ps/param") if is_eager else ()
    padding = () if is_eager else ("in\nproducts", "in\npasses", "products\npadded")
    columns = (NAMES[axis], "of", "params", f"{what}, ms (90%)", *rates, "memory", f"{what}\nloses", "kernels\nlose",
               "90%", *padding)  # fmt: skip
    print_table("", columns, rows)


def _print_layouts(found: Answer) -> None:
    """Prints the median penalties of the three layouts, by axis and multiple."""
    from flopcast.roofline.widths.penalties import LAYOUTS, MULTIPLES

    rows = []
    for axis, penalties in found.penalties.items():
        for multiple in MULTIPLES:
            mine = [p for p in penalties if p.multiple == multiple]
            if not mine:
                continue
            layouts = [
                percent(median(known)) if (known := [p.layouts[name] for p in mine if name in p.layouts]) else NONE
                for name in LAYOUTS
            ]
            rows.append([f"{NAMES[axis]}, of {multiple}", str(len(mine)), *layouts,
                         percent(median(p.device for p in mine))])  # fmt: skip
    columns = ("", "sizes", *(f"{name}, {what}" for name, what in LAYOUTS.items()), "all kernels")
    print_table("Products by layout, median of what they lose against the line", columns, rows)


def _print_measured(rules: Sequence[MeasuredRule]) -> None:
    """Prints the penalties of multiples that this GPU's measured matrix products show."""
    rows = [
        ["odd" if r.multiple == 1 else str(r.multiple), str(r.against), str(r.count), percent(r.median),
         f"{r.low * 100:+.1f}% to {r.high * 100:+.1f}%", percent(r.worst), r.worst_shape]
        for r in rules
    ]  # fmt: skip
    print_table(
        "Measured products of this GPU, by the largest power of two that divides both widths",
        ("of", "against", "products", "median", "80% of them", "worst", "m x n x k"),
        rows,
        "One product alone, against the line between neighbours of the multiple in the second column.",
    )


def _ranged(one: Point) -> str:
    return f"{ms(one.step_seconds)} ({one.step_seconds_low * 1e3:.3g}-{one.step_seconds_high * 1e3:.3g})"


def _print_shapes(title: str, points: Sequence[Point], center: Point, what: str) -> None:
    rows = []
    for one in points:
        c = one.config
        mark = "*" if one.extrapolated > UNMEASURED else ""
        rows.append(
            [f"{c['hidden_size']} x {c['num_hidden_layers']}{mark}", str(c["intermediate_size"]),
             f"{c['num_attention_heads']}/{c['num_key_value_heads']} x {c['head_dim']}", parameters(one.n_params),
             _ranged(one), f"{one.flops_per_second / 1e12:.1f}", f"{one.seconds_per_parameter * 1e12:.1f}",
             percent(one.seconds_per_parameter / center.seconds_per_parameter - 1), gigabytes(one.peak_bytes)]
        )  # fmt: skip
    columns = ("hidden x layers", "ffn", "heads", "parameters", f"{what}, ms (90%)", "TFLOP/s", "ps/param", "to asked",
               "memory")  # fmt: skip
    print_table(title, columns, rows)
