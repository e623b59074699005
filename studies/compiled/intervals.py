"""Remakes the spreads of compiled steps that their intervals are made of, from steps that nothing is judged by.

    python -m studies.compiled.intervals [--out FILE]

These are the recorded steps (`studies.compiled.steps`), each without the kernels that laws were fitted to, those of
group "intervals" that `python -m studies.compiled.validate` ran in both modes, and those that five seeds drew
(`beside_evidence.SETS_INTERVALS`). Only the recorded ones were timed without tiny models beside them, which tell what
hosts are off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.uncertainty import COMPILED_FILE, Spreads
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.validation.compare_steps import StepsFolder, compare_folders
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from flopcast.roofline.validation.step_plans import INTERVALS
from studies.beside_evidence import SETS_INTERVALS
from studies.command import parser_of
from studies.compiled.another_torch import STEPS, stream_of_its_torch
from studies.compiled.record import CASES, Case
from studies.compiled.steps import GPU, Compared, parts_fitted
from studies.compiled.steps import compared as compared_record
from studies.compiled.validation import compared, kept_stream
from studies.shipped.intervals import estimate

PARTLY_FORECAST = ("qwen3-moe-l2",)  # whose experts run outside of the graphs
GROUP_OF_LAW = {"generated": "generated", "dropout": "attention"}
LEAST_ERROR = -0.8  # of a group: below, most of what was measured is of no kernel that was forecast


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=COMPILED_FILE)
    given = parser.parse_args()
    chosen = (row for rows in compared(GPU, kept_stream).values() for row in rows)
    found = compiled_spreads([*chosen, *drawn()])
    given.out.write_text(json.dumps(asdict(found), indent=1) + "\n")
    print(given.out, json.dumps(asdict(found)))


def compiled_spreads(ran: Iterable[StepComparison]) -> Spreads:
    """Of the recorded steps and of those of `ran` whose group is "intervals"."""
    return estimate([*recorded(), *ran], {"gpu": GPU})


def drawn() -> Iterator[StepComparison]:
    """Steps of drawn models, each counted as one of group "intervals". A group of which nothing was forecast, as of the
    copies that only another version of torch makes, tells no spread."""
    profile = find_profile(GPU)
    for run in SETS_INTERVALS:
        (rows,) = compare_folders([StepsFolder(STEPS / run, profile)], find_stream=stream_of_its_torch)
        for row in rows:
            if row.status == "ok":
                classes = {
                    group: Part() if part.error is not None and part.error < LEAST_ERROR else part
                    for group, part in row.classes.items()
                }
                yield replace(row, plan=replace(row.plan, group=INTERVALS), classes=classes)


def recorded() -> Iterator[StepComparison]:
    profile = find_profile(GPU)
    for case in CASES:
        if case.name not in PARTLY_FORECAST:
            yield comparison(case, compared_record(case, profile))


def comparison(case: Case, step: Compared) -> StepComparison:
    """A recorded step beside its forecast, but for the groups of kernels that a law was fitted to, and where there are
    any for their sum."""
    fitted = {GROUP_OF_LAW[law] for law in parts_fitted(step.name)}
    classes = {
        group: Part(step.measured[group], None if group in fitted else step.forecast.get(group, 0.0))
        if step.measured.get(group) and step.forecast.get(group)
        else Part()
        for group in GROUPS
    }
    plan = StepPlan(name=step.name, config={}, batch=case.batch, seq=case.seq, optimizer=case.optimizer,
                    group=INTERVALS, mode="compile")  # fmt: skip
    measured, told = sum(step.measured.values()), sum(step.forecast.values())
    device = Part(measured, None if fitted & {"generated"} else told)
    return replace(StepComparison(plan, "ok"), device=device, classes=classes, own_sigmas=step.own_sigmas)


if __name__ == "__main__":
    main()
