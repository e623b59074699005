"""The committed real steps of all machines beside their forecasts, and the sets of them that tables and tests judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.projection.project import project
from flopcast.roofline.validation.compare_steps import StepsFolder, compare_folders
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.validation.step_plans import FAMILIES, INTERVALS, OPTIONS, OWN, PATCHED
from flopcast.roofline.validation.summary import GROUP_LABELS, by_bound
from studies.shipped.hosts import launching_anew

H200, H100 = "nvidia-h200", "nvidia-h100-sxm"
# Machines named by what they ran: steps on Triton's kernels, whose operators replay their launches, as today's do.
# Those of all other machines made their launches anew, and are forecast by what the operators cost the host then. The
# host of REPLAYED was calibrated with calls that are not replayed (`studies.shipped.hosts.DISTINCT`), all others as
# models call. LONG_ROUNDS ran the steps of REPLAYED for a second each where the power limit holds the clock.
REPLAYED = "H200, Triton's kernels, replayed"
REPLAYED_AGAIN = f"{REPLAYED} again"
LONG_ROUNDS = "H200, Triton's kernels, long rounds"
WHOLE_LAYERS = "H200, whole layers"  # each a single node of autograd
WHOLE_AGAIN = f"{WHOLE_LAYERS} again"  # the same steps, on a slow host
# On a third host, which showed that such models, too, pay for their Python around the layers, and on one after that.
WHOLE_THIRD, WHOLE_FOURTH = f"{WHOLE_LAYERS}, third host", f"{WHOLE_LAYERS}, fourth host"
# Steps on Triton's products. Those before split-K are forecast by today's tiles, which split k and which trees choose;
# when they ran again, each kernel counted from the end of the one before it.
BEFORE_SPLIT = "H200, Triton's products before split-K"
BEFORE_SPLIT_AGAIN = f"{BEFORE_SPLIT}, again"
WITH_SPLIT = "H200, Triton's products with split-K"
# Steps of 2,048 tokens and more, whose backward of attention takes one pass, all but one: 3 x 2,500 tokens of 40 heads
# took it when they ran, and take two kernels since.
ONE_PASS = "H200, attention in one pass"
# The set that the steps of each are judged in.
REPLAYING = {
    REPLAYED: REPLAYED, REPLAYED_AGAIN: REPLAYED_AGAIN, BEFORE_SPLIT: BEFORE_SPLIT, BEFORE_SPLIT_AGAIN: BEFORE_SPLIT,
    WITH_SPLIT: WITH_SPLIT, WHOLE_LAYERS: WHOLE_LAYERS, WHOLE_AGAIN: WHOLE_AGAIN,
    WHOLE_THIRD: WHOLE_THIRD, WHOLE_FOURTH: WHOLE_FOURTH, LONG_ROUNDS: LONG_ROUNDS, ONE_PASS: ONE_PASS,
}  # fmt: skip
# The machines that ran steps, each with a host of its own, and where their steps lie below the reports.
MACHINES = {
    "H200, first": f"{H200}/steps/run0",
    "H200, second": f"{H200}/steps/run1",
    "H200, third": f"{H200}/steps/run2",
    "H200, fourth": f"{H200}/steps/run3",
    "H200, fifth": f"{H200}/steps-other-host",
    "H200, sixth": f"{H200}/host-processes/1",
    "H200, seventh": f"{H200}/host-processes/2",
    "H100 SXM": f"{H100}/steps/run0",
    REPLAYED: f"{H200}/steps-on-kernels/replayed",
    REPLAYED_AGAIN: f"{H200}/steps-on-kernels/replayed-2",
    BEFORE_SPLIT: f"{H200}/steps-on-kernels/products",
    BEFORE_SPLIT_AGAIN: f"{H200}/steps-on-kernels/products-2",
    WHOLE_LAYERS: f"{H200}/steps-on-kernels/whole",
    WHOLE_AGAIN: f"{H200}/steps-on-kernels/whole/again",
    WHOLE_THIRD: f"{H200}/steps-on-kernels/whole/third",
    WHOLE_FOURTH: f"{H200}/steps-on-kernels/whole/fourth",
    LONG_ROUNDS: f"{H200}/steps-on-kernels/replayed-3",
    WITH_SPLIT: f"{H200}/steps-on-kernels/products-3",
    ONE_PASS: f"{H200}/steps-on-kernels/onepass",
}
OF_HOSTS = ("H200, sixth", "H200, seventh")  # three processes each, most of whose steps the host bounds
# Steps on Triton's products that ran before a law chose their tiles. Forecasts are of today's faster tiles, so that all
# of these come out fast: products by 4 to 14%, where the tiles that ran were forecast within 8.3%; attention of five by
# 8 to 9.4%, whose backward had not its variants, where the tiles that ran were forecast within 2.4%. Part of it, here
# and in all other steps on Triton's products, is how device times were recorded: a kernel that is launched before the
# one before it has ended counted its wait, until `microbench.steps.measure.seconds_alone`.
EARLIER_TILES = "H200, Triton's kernels by earlier tiles"
PROJECTED = "H100 SXM, projected"  # the steps of the H100, forecast as if it had not been measured
ESTIMATES = f"{H200}/steps/estimates"

Rows = Sequence[StepComparison]
Wanted = Callable[[str, StepPlan], bool]


def compared(
    reports: Path, is_wanted: Wanted = lambda machine, plan: True, *, with_projected: bool = True
) -> dict[str, list[StepComparison]]:
    """The steps of every machine beside today's forecasts; `is_wanted`: those to forecast. `with_projected`: also those
    of the H100 by its projection."""
    h200 = find_profile(H200)
    profiles = {H200: h200, H100: find_profile(H100)}
    made_anew = {gpu: launching_anew(profile) for gpu, profile in profiles.items()}
    folders = {
        name: StepsFolder(reports / folder, (profiles if name in REPLAYING else made_anew)[folder.partition("/")[0]])
        for name, folder in MACHINES.items()
    }
    for name, folder in MACHINES.items():
        if folder.startswith(f"{H200}/steps/"):  # torch's estimates are of the plans, whichever of these ran them
            folders[name] = replace(folders[name], estimates=reports / ESTIMATES)
    if with_projected:
        projected = launching_anew(project(h200, load_specs()[H100]))
        folders[PROJECTED] = replace(folders["H100 SXM"], profile=projected)
    chosen = [replace(folder, is_wanted=partial(is_wanted, name)) for name, folder in folders.items()]
    return dict(zip(folders, compare_folders(chosen), strict=True))


def judged(by_machine: Mapping[str, Rows], is_wanted: Wanted = lambda machine, plan: True) -> dict[str, Rows]:
    """Those steps that ran and test the forecast: those that set the width of intervals do not."""
    return {
        machine: [
            row for row in rows if row.status == "ok" and row.plan.group != INTERVALS and is_wanted(machine, row.plan)
        ]
        for machine, rows in by_machine.items()
    }


def is_plain(row: StepComparison) -> bool:
    """Whether a step is of plain Qwen3 on torch's kernels, which the forecast is made for."""
    return row.plan.group not in (*GROUP_LABELS, OWN)


def sets_of(by_machine: Mapping[str, Rows]) -> dict[str, list[StepComparison]]:
    """The sets of steps that are judged, by name, none empty."""
    first, fifth, h100 = (by_machine.get(name, ()) for name in ("H200, first", "H200, fifth", "H100 SXM"))
    before = [name for name in by_machine if name.startswith("H200") and name not in REPLAYING]
    on_h200 = [row for name in before for row in by_machine[name]]
    found = {
        **_split("H200", first),
        "H200, other kernels": [row for row in _of(on_h200, PATCHED) if row.plan.matmul == "torch"],
        **{
            told: [
                row
                for name, its in REPLAYING.items()
                if its == told
                for row in _on_our_kernels(by_machine.get(name, ()))
            ]
            for told in REPLAYING.values()
        },
        EARLIER_TILES: [row for row in _of(on_h200, PATCHED) if row.plan.matmul != "torch"],
        "H200, other families": _of(first, FAMILIES),
        "H200, other options": _of(first, OPTIONS),
        **_split("H200, fifth machine", fifth),
        **_split("H100 SXM", h100),
        "H100 SXM, other kernels": _of(h100, PATCHED),
        PROJECTED: list(by_machine.get(PROJECTED, ())),
    }
    return {name: rows for name, rows in found.items() if rows}


def _split(name: str, rows: Iterable[StepComparison]) -> dict[str, list[StepComparison]]:
    """Plain steps: all, and by what bounds them."""
    parts = by_bound([row for row in rows if is_plain(row)])
    return {name if part == "all" else f"{name}, {part}": members for part, members in parts.items()}


def _on_our_kernels(rows: Iterable[StepComparison]) -> list[StepComparison]:
    """Those on our kernels, of suites or asked for one by one."""
    return _of(rows, PATCHED, OWN)


def _of(rows: Iterable[StepComparison], *groups: str) -> list[StepComparison]:
    return [row for row in rows if row.plan.group in groups]
