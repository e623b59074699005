"""Estimates real steps by torch's RuntimeEstimator in its benchmark mode, which runs every call. Needs a GPU.

    python -m studies.evidence.torch_benchmark STEPS OUT [--first NAME ...] [--budget 180]

STEPS: a folder that `flopcast validate` wrote on the same kind of GPU. Those named first come first, in their order;
the others follow, small steps before large ones, as far as the budget goes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopcast.microbench.records.rows import Row, StepRow, merged, select
from flopcast.roofline.validation.compare_steps import plan_of
from flopcast.roofline.validation.step_plans import FAMILIES, INTERVALS, OPTIONS, PATCHED
from studies.command import parser_of

SUITE = "torch-benchmark"
OTHER_GROUPS = (FAMILIES, INTERVALS, OPTIONS, PATCHED)


def steps_of(rows: Sequence[Row], first: Sequence[str]) -> list[StepRow]:
    """The plain Qwen3 steps that ran: those named, then the rest by their measured time."""
    ran = [row for row in select(rows, StepRow) if row["status"] == "ok" and plan_of(row).group not in OTHER_GROUPS]
    by_time = sorted(ran, key=lambda row: row["value"] or 0.0)
    by_key = {row["key"]: row for row in by_time}
    chosen = [by_key[key] for key in first if key in by_key]
    return [*chosen, *(row for row in by_time if row not in chosen)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes a row of estimate per step, as far as the budget goes."""
    begun = time.monotonic()
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("steps", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--first", nargs="*", default=[], help="keys of steps")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds, start of the process included")
    given = parser.parse_args(arguments)

    import torch

    from flopcast.microbench.records import records
    from flopcast.microbench.records.recorder import Recorder
    from flopcast.microbench.steps.torch_estimate import BENCHMARK, estimate_row
    from flopcast.microbench.timing.device import describe, pick_device

    device = pick_device(None)
    with Recorder(given.out, describe(device)) as recorder:
        for row in steps_of(records.read(given.steps).rows, given.first):
            if time.monotonic() - begun >= given.budget:
                break
            plan = plan_of(row)
            if recorder.is_done(plan.estimate_key):
                continue
            what: dict[str, Any] = {"key": plan.estimate_key, "backend": "torch", "cache": "cold", "shape": None}
            fields = estimate_row(plan, device.type, BENCHMARK)
            recorder.append(merged(Row, what, {"suite": SUITE}, fields))
            torch.cuda.empty_cache()
            said = fields["reason"] or f"{1e3 * float(str(fields['value'])):.1f} ms"
            print(
                f"{time.monotonic() - begun:4.0f} s  {plan.key}: {said}, {1e3 * (row['value'] or 0):.1f} ms", flush=True
            )


if __name__ == "__main__":
    main()
