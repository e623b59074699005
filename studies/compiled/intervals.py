"""Remakes the spreads of compiled steps that their intervals are made of, from steps that nothing is judged by.

    python -m studies.compiled.intervals [--out FILE]

These are the recorded steps (`studies.compiled.steps`), each without the kernels that laws were fitted to, those of
group "intervals" that `python -m studies.compiled.validate` ran in both modes, and those of the third to the sixth seed
of suite "random" (`studies.compiled.another_torch`), whose kernels are of as many sorts as people's are: by the others
alone 73% of 112 drawn steps had their device time inside. What a step is off beyond its kernels, and what hosts are
off, the second alone tell: the first were timed without tiny models beside them, and the kernels of the third were
profiled at a lower clock than forecasts are for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.uncertainty import COMPILED_FILE, Spreads
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.validation.compare_steps import StepsFolder, compare_folders
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from flopcast.roofline.validation.step_plans import INTERVALS
from studies.command import parser_of
from studies.compiled.another_torch import STEPS, path_of
from studies.compiled.another_torch import kept_stream as drawn_stream
from studies.compiled.record import CASES, Case
from studies.compiled.steps import GPU, Compared, parts_fitted
from studies.compiled.steps import compared as compared_record
from studies.compiled.validation import compared, kept_stream
from studies.shipped.intervals import estimate

PADDED_BY_LOT = ("gpt2-d3", "gpt2-d9")
PARTLY_FORECAST = ("qwen3-moe-l2",)  # whose experts run outside of the graphs
GROUP_OF_LAW = {"generated": "generated", "dropout": "attention"}


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=COMPILED_FILE)
    given = parser.parse_args()
    found = compiled_spreads([row for rows in compared(GPU, kept_stream).values() for row in rows], drawn())
    given.out.write_text(json.dumps(asdict(found), indent=1) + "\n")
    print(given.out, json.dumps(asdict(found)))


def compiled_spreads(ran: Sequence[StepComparison], drawn: Sequence[StepComparison]) -> Spreads:
    """Of the recorded steps, of those that `ran` in both modes, of group "intervals", and of `drawn` ones."""
    timed = estimate([*recorded(), *ran], {"gpu": GPU})
    kernels = estimate([*recorded(), *ran, *drawn])
    steps = [*timed.source["steps"], *(row.label for row in drawn)]
    return replace(timed, classes=kernels.classes, common=kernels.common, source={**timed.source, "steps": steps})


def drawn() -> list[StepComparison]:
    """Drawn steps by the code of the torch that ran them, but for those whose products are padded by lot: their
    intervals are widened for it (`step/unsure_pads.py`)."""
    wanted = StepsFolder(STEPS, find_profile(GPU), is_wanted=lambda plan: plan.mode == "compile" and is_kept(plan))
    (rows,) = compare_folders([wanted], find_stream=drawn_stream)
    return [
        replace(row, plan=replace(row.plan, group=INTERVALS), classes=forecast_alone(row))
        for row in rows
        if row.status == "ok" and row.plan.name not in PADDED_BY_LOT
    ]


def is_kept(plan: StepPlan) -> bool:
    return path_of(plan).is_file()


def forecast_alone(row: StepComparison) -> dict[str, Part]:
    """A step's classes of kernels; those of which none is forecast have no error."""
    return {name: part if part.forecast else Part(part.measured) for name, part in row.classes.items()}


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
