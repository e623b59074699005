"""Products with a width 2 or 4 off a multiple of 64, and odd vocabularies, to judge the law of unaligned products by.

    python -m studies.widths.width_products OUT [--budget 60] [--count 60]

The suites draw such products too (`studies/suites/gemms.py`), by another seed and from other sizes; these are
measured as a suite's rows and fitted by nothing. Appends; run again to resume.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from flopcast.kernels.shapes import Gemm
from studies.command import parser_of
from studies.suites.gemms import LAYOUTS, MAX_BYTES, MAX_MACS

OFFSETS = (-4, -2, 2, 4)
TOKENS = (512, 1024, 2048, 4096, 8192, 12_288, 16_384, 32_768)
RATIOS = (0.25, 0.5, 1, 2, 3, 4)
SEED = 11


def draws(count: int) -> list[Gemm]:
    """`count` a layout: one width off by 2 or 4, now and then both; one in eight an odd vocabulary beside an aligned
    width. Shuffled; the same for the same count."""
    rng = random.Random(SEED)
    found: dict[Gemm, None] = {}
    for layout in LAYOUTS:
        wanted = len(found) + count
        while len(found) < wanted:
            tokens = rng.choice(TOKENS)
            width = round(512 * 16 ** rng.random() / 64) * 64
            if rng.random() < 1 / 8:
                pair = [width, 64 * rng.randint(500, 2400) + rng.choice((-21, -1, 1, 5, 27))]
            else:
                pair = [width, max(256, round(width * rng.choice(RATIOS) / 64) * 64)]
                for i in rng.choice(((0,), (0,), (1,), (1,), (0, 1))):
                    pair[i] += rng.choice(OFFSETS)
            if rng.random() < 0.5:
                pair.reverse()
            inputs, outputs = pair
            m, n, k = {
                "nt": (tokens, outputs, inputs),
                "nn": (tokens, inputs, outputs),
                "tn": (outputs, inputs, tokens),
            }[layout]
            shape = Gemm(m=m, n=n, k=k, layout=layout)
            if m * n * k <= 4 * MAX_MACS and shape.bytes <= MAX_BYTES:
                found[shape] = None
    shapes = list(found)
    rng.shuffle(shapes)
    return shapes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=60, help="products a layout")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    parser.add_argument("--device")
    given = parser.parse_args(arguments)

    from flopcast.microbench.recipe import training_step
    from flopcast.microbench.recipe.settings import Recipe
    from flopcast.microbench.records.recorder import Recorder
    from flopcast.microbench.sweep.cases import Case
    from flopcast.microbench.sweep.sweep import run_sweep
    from flopcast.microbench.timing.device import describe, pick_device
    from flopcast.microbench.timing.make_timer import make_timer
    from flopcast.microbench.timing.policy import POLICIES
    from flopcast.roofline.stream.model.models import make_config

    device = pick_device(given.device)
    cases = (Case(shape=shape, backend="torch", cache="cold", role="fit") for shape in draws(given.count))
    timer = make_timer(device, POLICIES[device.type]["quick" if device.type == "cpu" else "standard"])
    with Recorder(given.out, describe(device)) as recorder:
        # a process that has trained, as those of the steps have (`microbench/sweep`)
        training_step.build(make_config(width=128, depth=2, vocab=512), device, Recipe()).run()
        found = run_sweep(cases, recorder=recorder, timer=timer, suite="width gemms", budget_seconds=given.budget)
    print(found, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
