"""Prints steps on several GPUs: layouts, the fastest first, and real steps beside their forecasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from flopcast.microbench.recipe.settings import ONE_GPU
from flopcast.roofline.base.units import NONE, gigabytes, ms, parameters, percent, share, short_name, three_digits
from flopcast.roofline.step.forecast import usd_per_million
from flopcast.roofline.views.terminal.console import console, print_table, warn

if TYPE_CHECKING:
    from flopcast.roofline.dollars.layouts import LaidOut, Ranking, Workload
    from flopcast.roofline.dollars.scaling import Scaled, Scaling, Turning
    from flopcast.roofline.step.forecast import Forecast
    from flopcast.roofline.validation.parallel import ParallelComparison
    from flopcast.roofline.validation.step_comparison import Part

SHOWN = 24  # layouts that fit
SHOWN_LARGE = 4  # and that do not


def batch_words(found: LaidOut) -> str:
    """Describes the micro-batches of a layout: 4 x 8, checkpointed."""
    run = found.run
    times = f"{run.accumulate} x {run.batch}" if run.accumulate > 1 else str(run.batch)
    return times + (", checkpointed" if run.checkpoint != "none" else "")


def print_ranking(found: Ranking, work: Workload) -> None:
    """Prints a row per layout, those between which the intervals do not decide above a line that says so."""
    first = next((one.forecast for one in (*found.fitting, *found.too_large) if one.forecast is not None), None)
    if first is None:
        for one in found.refused[:SHOWN]:
            console().print(f"{one.run.parallel}: {one.reason}")
        return
    unit = first.unit
    columns = ("layout", "batch", "step, ms", "90% interval", f"{unit}/s", f"$/M {unit}", "exposed, ms", "memory",
               "bound by")  # fmt: skip
    kind = "sequences" if unit == "tokens" else unit
    title = (
        f"{short_name(work.profile.gpu)} ({work.profile.basis}): {parameters(first.n_params)} parameters, "
        f"{found.sequences:,} {kind} per step on {found.num_gpus} GPUs, {work.run.precision}, {first.optimizer}: "
        f"{len(found.fitting)} of {found.tried} layouts fit"
    )
    rows = [_row(one) for one in (*found.fitting[:SHOWN], *found.too_large[:SHOWN_LARGE])]
    print_table(title, columns, rows, ruled=False)
    say = console().print
    if (hidden := len(found.fitting) - SHOWN) > 0:
        say(f"and {hidden} slower ones, in --json")
    if found.fitting:
        say(f"- {_leaders(found)}")
    if len(found.too_large) > SHOWN_LARGE:
        say(f"- {len(found.too_large) - SHOWN_LARGE} more need more memory than a GPU has")
    # what several layouts are left out for alike stands once
    reasons = Counter(
        short_reason(one.reason.replace(f" with parallel {one.run.parallel}", "", 1)) for one in found.refused
    )
    for reason, count in reasons.most_common(SHOWN_LARGE):
        say(f"- left out {count}: {reason}", highlight=False)
    if len(reasons) > SHOWN_LARGE:
        say(f"- left out for {len(reasons) - SHOWN_LARGE} more reasons, in --json")
    fastest = found.fitting[0].forecast if found.fitting else first
    warn(fastest.warnings if fastest is not None else ())


def short_reason(reason: str) -> str:
    """Why a layout cannot be, without what can."""
    return reason.partition(": valid")[0].partition("; valid")[0]


def _leaders(found: Ranking) -> str:
    """Says which layout is the fastest, by how much, and between which ones that is not decided."""
    first, *others = (one.run.parallel for one in found.fitting)
    if found.lead is None:
        return f"fastest: {first}, the only one that fits"
    more, low, high = (percent(value - 1) for value in (found.lead.value, found.lead.low, found.lead.high))
    after = f"{others[0]}, {more} ({low} to {high})"
    if found.undecided == 1:
        return f"fastest: {first}; next {after}: decided, since both err alike"
    also = "".join(f", or {name}" for name in others[1 : found.undecided - 1])
    return f"not decided which is the fastest: {first}, or {after}{also}"


def _row(one: LaidOut) -> list[str]:
    found = one.forecast
    if found is None:
        return [one.run.parallel, batch_words(one), *[NONE] * 7]
    usd = usd_per_million(found)
    memory = gigabytes(found.needed_bytes)
    return [
        one.run.parallel, batch_words(one), ms(found.step_seconds),
        f"{ms(found.step_seconds_low)} to {ms(found.step_seconds_high)}", three_digits(found.tokens_per_second),
        NONE if usd is None else three_digits(usd), ms(found.exposed_communication_seconds),
        memory if found.fits else f"{memory}: DOES NOT FIT", found.bound,
    ]  # fmt: skip


def print_scaling(
    work: Workload, found: Sequence[Scaling], turnings: Sequence[Turning], sizes: Mapping[str, int]
) -> None:
    """Prints a table per kind of scaling, and below it where more GPUs stop paying and from which step on they pay."""
    first = next((point.forecast for one in found for point in one.points if point.forecast is not None), None)
    if first is None:
        console().print(f"no number of GPUs holds the step: {found[0].points[0].reason}")
        return
    unit = first.unit
    kind = "sequences" if unit == "tokens" else unit
    words = {
        "strong": f"strong scaling, {work.sequences:,} {kind} per step in all",
        "weak": f"weak scaling, {work.sequences:,} {kind} per step and GPU",
    }
    own = "".join(f", {name} {value}" for name, value in sizes.items())
    model = f"{short_name(work.profile.gpu)} ({work.profile.basis}): {parameters(first.n_params)} parameters{own}"
    say = console().print
    columns = ("GPUs", "layout", "batch", "step, ms", "90% interval", f"{unit}/s", "efficiency", f"$/M {unit}",
               "exposed, ms", "memory", "bound by")  # fmt: skip
    for one in found:
        title = f"{model}, {work.run.precision}, {first.optimizer}: {words[one.kind]}"
        print_table(title, columns, [_scaled_row(point) for point in one.points], ruled=False)
        say(f"- {_pays_words(one)}")
        for turning in turnings if one.kind == "strong" else ():
            say(f"- {_turning_words(turning, kind)}")
        if sharded := _above_one(one):
            say(f"- {sharded} does more per GPU than one GPU: it gathers weights in bf16, which autocast casts anew")
    ends = [points[end] for one in found if (points := _forecasts(one)) for end in (0, -1)]
    warn(dict.fromkeys(warning for forecast in ends for warning in forecast.warnings))


def _forecasts(one: Scaling) -> list[Forecast]:
    return [point.forecast for point in one.points if point.forecast is not None]


def _above_one(one: Scaling) -> str:
    """The fully sharded layouts whose throughput per GPU is above that of one GPU under autocast."""
    found = [
        point.best.run
        for point in one.points
        if point.best is not None and one.points[0].best is not None and (point.efficiency or 0) > 1
    ]
    return ", ".join(
        run.parallel
        for run in found
        if run.parallel != ONE_GPU and run.layout.is_fully_sharded and run.precision == "autocast-bf16"
    )


def _scaled_row(point: Scaled) -> list[str]:
    found, best = point.forecast, point.best
    if found is None or best is None:
        return [str(point.num_gpus), NONE, NONE, point.reason, *[NONE] * 7]
    usd = usd_per_million(found)
    layout = "one GPU" if point.num_gpus == 1 else best.run.parallel
    return [
        str(point.num_gpus), layout, batch_words(best), ms(found.step_seconds),
        f"{ms(found.step_seconds_low)} to {ms(found.step_seconds_high)}", three_digits(found.tokens_per_second),
        share(point.efficiency), NONE if usd is None else three_digits(usd), ms(found.exposed_communication_seconds),
        gigabytes(found.needed_bytes), found.bound,
    ]  # fmt: skip


def _pays_words(one: Scaling) -> str:
    rule = f"the GPUs added do {one.worth:.0%} of what as many did"
    turns = one.turns
    if turns is None:
        reached = max((point.num_gpus for point in one.points if point.best is not None), default=0)
        return f"every doubling pays up to {reached} GPUs ({rule})" if one.doublings else "no doubling was forecast"
    sure = "" if turns.is_decided(one.worth) else ", which the intervals do not decide"
    return (
        f"stops paying after {one.last}: as many GPUs again do {turns.gain:.0%} ({turns.low:.0%} to {turns.high:.0%}) "
        f"of what these do; it pays where {rule}{sure}"
    )


def _turning_words(one: Turning, kind: str) -> str:
    value = ("width {:,}" if one.what == "width" else f"{{:,}} {kind} per step").format(one.value or one.most)
    if one.value is None:
        return f"the doubling to {one.num_gpus} GPUs does not pay up to {value}"
    return f"the doubling to {one.num_gpus} GPUs pays from {value} on"


def print_parallel(found: Sequence[ParallelComparison]) -> None:
    """Prints a row per step, measured and forecast with the error, and how far the steps are off."""
    columns = ("step", "layout", "batch", "ms", "forecast", "error", "kernels", "communication", "exposed", "host",
               "memory", "bound by")  # fmt: skip
    rows = []
    for one in found:
        plan = one.plan
        micro = f"{plan.accumulate} x " if plan.accumulate > 1 else ""
        head = [plan.name, plan.parallel, f"{micro}{plan.batch} x {plan.seq}"]
        if not one.parts:
            rows.append([*head, *[NONE] * 8, one.reason or NONE])
            continue
        step = one.parts["step"]
        inside = "" if step.is_within in (True, None) else ", outside"
        ends = f" ({ms(step.low)} to {ms(step.high)}{inside})" if step.low is not None else ""
        rows.append(
            [
                *head, ms(step.measured), f"{ms(step.forecast)}{ends}", percent(step.error),
                *(_pair(one.parts[name]) for name in ("compute", "communication", "exposed", "host")),
                f"{gigabytes(one.parts['memory'].measured)}, {percent(one.parts['memory'].error)}",
                one.bound or one.reason or NONE,
            ]
        )  # fmt: skip
    print_table("Steps on several GPUs: measured, forecast (times in ms: measured / forecast)", columns, rows,
                ruled=False)  # fmt: skip
    for name, words in (("step", "step"), ("memory", "peak memory of the fullest GPU")):
        errors = [abs(part.error) for one in found if (part := one.parts.get(name)) and part.error is not None]
        if errors:
            console().print(f"- {words}: off by {median(errors):.1%} at the median, {max(errors):.1%} at worst")
    within = [part.is_within for one in found if (part := one.parts.get("step")) and part.is_within is not None]
    if within:
        console().print(f"- {sum(within)} of {len(within)} steps inside their 90% intervals")


def _pair(part: Part) -> str:
    return f"{ms(part.measured)} / {ms(part.forecast)}"
