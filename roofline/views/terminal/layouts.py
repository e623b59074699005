"""Prints layouts over several GPUs, the fastest first."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import NONE, gigabytes, ms, parameters, short_name, three_digits
from flopcast.roofline.step.forecast import usd_per_million
from flopcast.roofline.views.terminal.console import console, print_table, warn

if TYPE_CHECKING:
    from flopcast.roofline.dollars.layouts import LaidOut, Ranking, Workload

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
        say(f"- fastest: {_leaders(found)}")
    if len(found.too_large) > SHOWN_LARGE:
        say(f"- {len(found.too_large) - SHOWN_LARGE} more need more memory than a GPU has")
    reasons = Counter(one.reason for one in found.refused)
    for reason, count in reasons.most_common(SHOWN_LARGE):
        say(f"- {count} cannot be: {reason}", highlight=False)
    if len(reasons) > SHOWN_LARGE:
        say(f"- {len(reasons) - SHOWN_LARGE} more reasons, in --json")
    fastest = found.fitting[0].forecast if found.fitting else first
    warn(fastest.warnings if fastest is not None else ())


def _leaders(found: Ranking) -> str:
    first, *others = found.fitting[: found.undecided]
    if not others:
        return first.run.parallel
    names = ", ".join(f"{one.run.parallel} ({batch_words(one)})" for one in others)
    return f"{first.run.parallel}, by the middle of its interval; not decided between it and {names}"


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
