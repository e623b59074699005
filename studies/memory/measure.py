"""Measures what real steps take of a GPU's memory, each alone in a process of its own.

    python -m studies.memory.measure OUT [--seed 11] [--mode compile] [--only NAME] [--at-once 6]

The steps are those that the seed draws (`flopcast validate --suite random`). Of each OUT/steps.jsonl gets a row: the
most that was allocated and reserved, and by bisection the least memory with which torch's allocator still runs three
steps (`torch.cuda.set_per_process_memory_fraction`). OUT/requests has a file for each: every block that the first steps
asked of the allocator and gave back, in order.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flopcast.files import write
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.steps.build import build_plan
from flopcast.roofline.validation.random_steps import random_steps
from studies.command import parser_of

STEPS = 3  # the optimizer makes its state in the first, the others are alike
STEP_OF_SEARCH = 0.005  # of the peak: the least memory is known to that
MOST_EVENTS = 2_000_000  # of torch's allocator, that are kept: more than any of these steps makes

Row = dict[str, Any]


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--only", default="", help="steps whose name begins so")
    parser.add_argument("--at-once", type=int, default=6, help="processes beside one another")
    parser.add_argument("--number", type=int, help="measure this one in this process")
    options = parser.parse_args()
    plans = [plan for plan in random_steps(options.seed) if options.mode == "eager" or _compiles(plan)]
    if options.number is not None:
        _write(measured(replace(plans[options.number], mode=options.mode)), options.out, options.number)
        return
    numbers = [number for number, plan in enumerate(plans) if plan.name.startswith(options.only)]
    arguments = ["--seed", options.seed, "--mode", options.mode, "--number"]
    command = [sys.executable, "-m", "studies.memory.measure", options.out, *arguments]

    def run(number: int) -> None:
        subprocess.run([*map(str, command), str(number)], check=False)
        print(f"{number} {plans[number].name}", flush=True)

    with ThreadPoolExecutor(options.at_once) as at_once:
        list(at_once.map(run, numbers))


def _write(row: Row, out: Path, number: int) -> None:
    (out / "requests").mkdir(parents=True, exist_ok=True)
    name = f"{row['plan']['name'].replace('/', '-')}-{row['plan']['mode']}-{number}.json.gz"
    write(out / "requests" / name, json.dumps(row.pop("requests")))
    with (out / "steps.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, "requests": name}) + "\n")


def measured(plan: StepPlan) -> Row:
    """A step's row. `allocated` and `reserved`: the peaks of each step; `least`: the bytes with which it runs, None
    where it was not searched for, since a step that is compiled anew for each try takes too long."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MOST_EVENTS)
    allocated, reserved, marks = _run(plan, with_marks=True)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    row = {
        "plan": asdict(plan), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "allocated": allocated, "reserved": reserved, "requests": requests(events, marks),
    }  # fmt: skip
    return {**row, "least": _least(plan, max(allocated), max(reserved)) if plan.mode == "eager" else None}


def requests(events: Sequence[Row], marks: Sequence[int]) -> list[list[int]]:
    """What each step, and before them the making of the model, asked for: bytes, or -n for the n-th block ever asked
    for, which is given back."""
    numbers: dict[int, int] = {}
    found: list[list[int]] = [[]]
    asked = 0
    for place, event in enumerate(events):
        while len(found) <= len(marks) and place >= marks[len(found) - 1]:
            found.append([])
        if event["action"] == "alloc":
            asked += 1
            numbers[event["addr"]] = asked
            found[-1].append(event["size"])
        elif event["action"] == "free_completed" and event["addr"] in numbers:
            found[-1].append(-numbers.pop(event["addr"]))
    return found


def _run(plan: StepPlan, *, with_marks: bool = False) -> tuple[list[int], list[int], list[int]]:
    """Runs a step a few times: the most allocated and reserved of each, and the requests before each."""
    step = build_plan(plan, torch.device("cuda"))
    allocated, reserved, marks = [], [], []
    for _ in range(STEPS):
        if with_marks:
            marks.append(len(torch.cuda.memory._snapshot()["device_traces"][0]))
        torch.cuda.reset_peak_memory_stats()
        step.run()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.max_memory_allocated())
        reserved.append(torch.cuda.max_memory_reserved())
    return allocated, reserved, marks


def _least(plan: StepPlan, allocated: int, reserved: int) -> int:
    """The least memory, between what is allocated and what is reserved where there is plenty, with which it runs."""
    total = torch.cuda.get_device_properties(0).total_memory
    too_few, enough = allocated - 1, reserved
    while enough - too_few > STEP_OF_SEARCH * allocated:
        tried = (too_few + enough) // 2
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(tried / total)
        try:
            _run(plan)
            enough = tried
        except torch.cuda.OutOfMemoryError:
            too_few = tried
    return enough


def _compiles(plan: StepPlan) -> bool:
    return plan.phase == "train" and not plan.module


def rows_in(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


if __name__ == "__main__":
    main()
