"""Real training steps of aligned and unaligned widths, for the table of penalties: needs a GPU, three minutes.

    python benchmarks/width_steps.py OUT [--table reports/nvidia-h200/widths.csv] [--budget 200]
    python benchmarks/width_steps.py OUT --smoke                                # no GPU: does the script run?
    python -m flopcast.roofline.widths_check --steps OUT                        # the table, here or elsewhere

Which steps: the rows of a table of forecasts (`roofline/widths_check.py`), which is written and committed before they
are run. First the times of all, shuffled, the aligned ones twice; then, since CUDA's profiler makes every later launch
dearer, the kernels. Each result is a line in OUT as soon as it is there; a run that stops, by its budget or otherwise,
is continued by the same command. Exit 1 when steps are missing at the end.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flopcast.roofline.widths_check import SEED, are_kernels_wanted, plans

if TYPE_CHECKING:
    import torch

    from flopcast.microbench.plans import StepPlan

ROUNDS, STEPS_PER_ROUND = 3, 3


def main(arguments: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--table", type=Path, default=Path("reports/nvidia-h200/widths.csv"))
    parser.add_argument("--budget", type=float, default=200.0, help="seconds, start of the process included")
    parser.add_argument("--seed", type=int, default=SEED, help="of the order: another for a second run")
    parser.add_argument("--device")
    parser.add_argument(
        "--only-kernels", action="store_true", help="kernels again, in another folder: how they repeat"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps, tiny, on any machine")
    given = parser.parse_args(arguments)

    from flopcast.microbench.device import describe, pick_device
    from flopcast.microbench.records import Recorder
    from flopcast.microbench.run_steps import run_steps

    with given.table.open(newline="", encoding="utf-8") as file:
        wanted = plans(csv.DictReader(file), given.seed)
    if given.smoke:
        tiny = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
        wanted = [replace(p, config={**p.config, **tiny}, batch=1, seq=16) for p in wanted[:6]]
    device = pick_device(given.device)
    if given.only_kernels:
        kernels_alone(
            [plan for plan in wanted if are_kernels_wanted(plan)], device, given.out, start + given.budget
        )
        print(f"kernels alone: {time.monotonic() - start:.0f} s in all", flush=True)
        return 0
    begun = time.monotonic() - start
    with Recorder(given.out, describe(device)) as recorder:
        left = given.budget - begun
        times = run_steps(
            wanted, device=device, recorder=recorder, rounds=ROUNDS, steps_per_round=STEPS_PER_ROUND,
            suite="widths", parts=("times",), budget_seconds=left, retry=("error",),
        )  # fmt: skip
        print(f"times, from {begun:.0f} s: {times}", flush=True)
        kernels = run_steps(
            [plan for plan in wanted if are_kernels_wanted(plan)], device=device, recorder=recorder,
            suite="widths", parts=("kernels",), budget_seconds=given.budget - (time.monotonic() - start),
            retry=("error",),
        )  # fmt: skip
        print(f"kernels: {kernels}; {time.monotonic() - start:.0f} s in all", flush=True)
    return 1 if times.remaining or kernels.remaining else 0


def kernels_alone(plans: Sequence[StepPlan], device: torch.device, out: Path, until: float) -> None:
    """The kernels of steps that another folder has the times of, as `run_steps` writes them; stops at `until`."""
    from flopcast.microbench.device import describe
    from flopcast.microbench.measure_step import profile_step
    from flopcast.microbench.records import Recorder
    from flopcast.microbench.run_steps import kernel_fields, measure_plan

    with Recorder(out, describe(device)) as recorder:
        for plan in plans:
            if time.monotonic() >= until:
                print("stopped by the budget", flush=True)
                return
            row = measure_plan(plan, device, lambda step: kernel_fields(profile_step(step, warm_up=1)))
            recorder.append(
                {
                    "key": plan.kernels_key,
                    "backend": "torch",
                    "cache": "cold",
                    "shape": None,
                    "suite": "widths",
                    **row,
                }
            )


if __name__ == "__main__":
    sys.exit(main())
