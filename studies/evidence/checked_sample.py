"""Measures a random sample of the profile's unchecked rows again, as suites are measured. Needs a GPU.

    python -m studies.evidence.checked_sample FOLDER OUT [--rows 200] [--seed 1] [--budget 60]

Products of unaligned widths were timed thousands in minutes, in turn with others, without a reference and without a
flush of the cache (`studies/widths/unaligned_products.py`). Here each product of the sample is compared with a
reference of higher precision first, and then timed with a cold cache by the timer of the suites.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from flopcast.kernels.shapes import shape_from_json
from flopcast.microbench.records.rows import OperationRow, select
from studies.command import parser_of

SUITE = "checked-sample"


def unchecked(rows: Iterable[OperationRow]) -> list[OperationRow]:
    """The rows that count and whose result was compared with no reference."""
    return [row for row in rows if row["status"] == "ok" and row["relative_error"] is None]


def sample(rows: Sequence[OperationRow], count: int, seed: int) -> list[OperationRow]:
    """`count` rows, or all where there are fewer, drawn without replacement."""
    return random.Random(seed).sample(list(rows), min(count, len(rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the sample into a folder of rows, and prints how many results were right."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("folder", type=Path, help="measurements to draw from")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, help="seconds")
    parser.add_argument("--device")
    given = parser.parse_args(arguments)

    from flopcast.microbench.records import records
    from flopcast.microbench.records.recorder import Recorder
    from flopcast.microbench.sweep.cases import Case
    from flopcast.microbench.sweep.sweep import run_sweep
    from flopcast.microbench.timing.device import describe, pick_device
    from flopcast.microbench.timing.make_timer import make_timer
    from flopcast.microbench.timing.policy import POLICIES

    device = pick_device(given.device)
    drawn = sample(unchecked(select(records.read(given.folder).rows, OperationRow)), given.rows, given.seed)
    cases = [Case(shape=shape_from_json(row["shape"] or {}), role="holdout") for row in drawn]
    policy = "standard" if device.type == "cuda" else "quick"
    with Recorder(given.out, describe(device)) as recorder:
        timer = make_timer(device, POLICIES[device.type][policy])
        print(run_sweep(cases, recorder=recorder, timer=timer, suite=SUITE, budget_seconds=given.budget), flush=True)


if __name__ == "__main__":
    main()
