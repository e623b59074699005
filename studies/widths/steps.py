"""Real training steps of aligned and unaligned widths, for the table of penalties: needs a GPU, three minutes.

    python -m studies.widths.steps OUT [--table reports/nvidia-h200/widths-3.csv] [--budget 190]
    python -m studies.widths.steps OUT --part 1/2                             # of two GPUs, each its neighbourhoods
    python -m studies.widths.steps OUT --smoke                                # no GPU: does the script run?
    python -m studies.widths.check --forecasts TABLE --steps OUT --out TABLE      # here or elsewhere

Which steps: the rows of a table of forecasts (`studies/widths/check.py`), which is written and committed before they
are run. First the times of all, shuffled, the aligned ones twice; then, since CUDA's profiler makes every later launch
dearer, the kernels, the aligned ones twice too, those of products one by one in the order of the step. Each result is
a line in OUT as soon as it is there; a run that stops, by its budget or otherwise, is continued by the same command.
Exit 1 when steps are missing at the end.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.command import parser_of
from studies.widths.sets import SEED, are_kernels_wanted, plans

if TYPE_CHECKING:
    import torch

    from flopcast.microbench.recipe.inference import InferenceStep
    from flopcast.microbench.recipe.plans import StepPlan
    from flopcast.microbench.recipe.training_step import TrainingStep
    from flopcast.microbench.records.recorder import Recorder


ROUNDS, STEPS_PER_ROUND = 3, 3
SUITE = "widths"
PRODUCTS = ("aten::mm", "aten::addmm")


def main(arguments: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--table", type=Path, default=Path("reports/nvidia-h200/widths-3.csv"))
    parser.add_argument("--budget", type=float, default=190.0, help="seconds, start of the process included")
    parser.add_argument("--seed", type=int, default=SEED, help="of the order: another for a second run")
    parser.add_argument("--device")
    parser.add_argument("--only-kernels", action="store_true", help="kernels again, in another folder: how they repeat")
    parser.add_argument("--part", type=part, default=(1, 1), help="I/N: every Nth neighbourhood, from the Ith on")
    parser.add_argument("--smoke", action="store_true", help="a few steps, tiny, on any machine")
    given = parser.parse_args(arguments)

    from flopcast.microbench.records.recorder import Recorder
    from flopcast.microbench.steps.run import run_steps
    from flopcast.microbench.timing.device import describe, pick_device

    with given.table.open(newline="", encoding="utf-8") as file:
        wanted = plans(rows_of_part(list(csv.DictReader(file)), *given.part), given.seed)
    if given.smoke:
        tiny = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
        wanted = [replace(p, config={**p.config, **tiny}, batch=1, seq=16) for p in wanted[:6]]
    device = pick_device(given.device)
    with_kernels = [plan for plan in wanted if are_kernels_wanted(plan)]
    begun = time.monotonic() - start
    times = None
    with Recorder(given.out, describe(device)) as recorder:
        if not given.only_kernels:
            times = run_steps(
                wanted, device=device, recorder=recorder, rounds=ROUNDS, steps_per_round=STEPS_PER_ROUND,
                suite=SUITE, parts=("times",), budget_seconds=given.budget - begun, retry=("error",),
            )  # fmt: skip
            print(f"times, from {begun:.0f} s: {times}", flush=True)
            with_kernels = [plan for plan in with_kernels if recorder.status(plan.key) == "ok"]
        left = time_kernels(with_kernels, device, recorder, start + given.budget)
    print(f"kernels: {left} left; {time.monotonic() - start:.0f} s in all", flush=True)
    return 1 if left or (times is not None and times.remaining) else 0


def part(text: str) -> tuple[int, int]:
    """From I/N. Raises ValueError, which argparse reports."""
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise ValueError(text)
    return index, count


def rows_of_part(rows: Sequence[dict[str, str]], index: int, count: int) -> list[dict[str, str]]:
    """Those of every `count`th neighbourhood, whole: a penalty is told by one card's steps."""
    names = list(dict.fromkeys(row["neighbourhood"] for row in rows))
    return [row for row in rows if names.index(row["neighbourhood"]) % count == index - 1]


def time_kernels(plans: Sequence[StepPlan], device: torch.device, recorder: Recorder, until: float) -> int:
    """The kernels of steps, as `run_steps` writes them and one by one those of products; how many were left at
    `until`, in seconds of `time.monotonic`."""
    from flopcast.microbench.steps.measure import profile_step
    from flopcast.microbench.steps.run import kernel_fields, measure_plan

    def measure(step: TrainingStep | InferenceStep) -> dict[str, Any]:
        found = profile_step(step, warm_up=1)
        products = [[kernel.name, kernel.seconds] for kernel in found.kernels if kernel.op in PRODUCTS]
        return {**kernel_fields(found), "products": products}

    todo = [plan for plan in plans if not recorder.is_done(plan.kernels_key, retry=("error",))]
    for done, plan in enumerate(todo):
        if time.monotonic() >= until:
            return len(todo) - done
        shared = {"key": plan.kernels_key, "backend": "torch", "cache": "cold", "shape": None, "suite": SUITE}
        recorder.append({**shared, **measure_plan(plan, device, measure)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
