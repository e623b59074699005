"""Times many configurations of the Triton matmul at random shapes, beside cuBLAS: what the law of tiles is fitted to.

    python -m studies.kernels.tiles RECORD --table            # what a record knows better, into the shipped table
    python -m studies.kernels.tiles OUT [--budget 380] [--seed 1] [--count 300] [--tried 28] [--workers 14] [--split]

Two of three shapes are random (`microbench.tuning.shapes.drawn`, multiples of 64 and of 8 in turn), the third is of a
published model's layer that the tuned table lacks. At each are tried what a call takes today, the configurations that
the law finds fastest, of a tile one or two, and some that it does not, drawn at random. Checks, timings and their
record are those of `flopcast tune-kernels`: OUT/matmul_tuning.jsonl, a line for each, appended as it is made. The same
command goes on where it stopped. With --split those of the tuned table are among them, and but for multiples of 8
only shapes at which parts of k come near the fastest by the law.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

from flopcast.kernels.matmul_configs import MatmulConfig, shared_memory_limit
from flopcast.kernels.matmul_law import estimates, tile_key
from flopcast.kernels.matmul_table import FOLDER, choose, find
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.tuning.record import Row
from flopcast.microbench.tuning.shapes import drawn, grid, of_models
from flopcast.microbench.tuning.table import best, write_table
from studies.command import parser_of
from studies.kernels.tile_law import SM_COUNT, Timed, read

HOPPER, DEVICE, TABLE = (9, 0), "NVIDIA H200", "matmul_nvidia_h200.json"
RANDOM, SPLIT = 6, 4  # of the configurations tried at a shape: drawn, and splits beyond the best of each tile
# Rows of the profile are of the law's pick there, measured before the models' shapes came into the table.
LEFT_TO_THE_LAW = {("tn", 8192, 5120, 1024)}
WITHIN = 1.7  # times the fastest's estimate
SPLIT_WITHIN = 1.15
FASTER = 1.02  # configurations timed in turn differ by 0.5% from one run to the next
GROUPS = (0.25, 4)  # other groups, of the fastest by estimate


def tried(shape: Gemm, sm_count: int, count: int) -> list[MatmulConfig]:
    """The configurations to time at a shape."""
    options = estimates(shape, sm_count, shared_memory_limit(HOPPER))
    of_tile = Counter[str]()
    firsts: list[MatmulConfig] = []
    others: list[MatmulConfig] = []
    for cost, config in options:
        of_tile[tile_key(config)] += 1
        if of_tile[tile_key(config)] == 1 and len(firsts) < count - RANDOM - SPLIT - len(GROUPS):
            firsts.append(config)
        elif cost < WITHIN * options[0][0]:
            others.append(config)
    split = [config for config in others if config.split != 1][:SPLIT]
    left = [config for config in others if config not in split]
    drawn_ = random.Random(shape.key).sample(left, min(RANDOM, len(left)))
    groups = [replace(firsts[0], group_m=int(firsts[0].group_m * x)) for x in GROUPS]
    today = choose(shape, sm_count, HOPPER, tma=True, table=find(DEVICE, ""))
    grouped = [config for config in groups if 1 <= config.group_m <= 64]
    return list({config.key: config for config in (today, *firsts, *split, *grouped, *drawn_)}.values())


def shapes(count: int, seed: int, split: bool) -> list[Gemm]:
    """`count` random shapes of each kind, and the models' among them, in turn. With `split` the table's too, and of all
    but multiples of 8 only those at which parts come near."""
    aligned, tuned = drawn(64, count, seed), of_models()
    if split:
        aligned, tuned = ([*filter(has_split_near, some)] for some in (aligned, [*tuned, *grid()]))
    in_turn = zip_longest(aligned, drawn(8, count, seed), tuned)
    return [shape for shape in chain.from_iterable(in_turn) if shape is not None]


def has_split_near(shape: Gemm, sm_count: int = SM_COUNT) -> bool:
    """Whether a configuration that splits k is within SPLIT_WITHIN of the fastest by its estimate."""
    options = estimates(shape, sm_count, shared_memory_limit(HOPPER))
    return any(config.split > 1 and cost < SPLIT_WITHIN * options[0][0] for cost, config in options)


def with_models(document: Row, records: Sequence[Row]) -> Row:
    """A table's document with the fastest configurations of the models' shapes on record, where it lacks them."""
    shapes: dict[str, list[list[int]]] = {layout: list(rows) for layout, rows in document["shapes"].items()}
    configs: list[str] = list(document["configs"])
    known = {(layout, *row[:3]) for layout, rows in shapes.items() for row in rows}
    chosen = best(records)
    for shape in of_models():
        place = (shape.layout, shape.m, shape.n, shape.k)
        if place in chosen and place not in known | LEFT_TO_THE_LAW:
            config, _ = chosen[place]
            configs += [config] * (config not in configs)
            shapes[shape.layout].append([*place[1:], configs.index(config)])
    return {**document, "configs": configs, "shapes": {layout: sorted(rows) for layout, rows in shapes.items()}}


def with_faster(document: Row, timed: Sequence[Timed]) -> Row:
    """A table's document with the fastest configuration where its own was timed in turn and took FASTER times as
    long."""
    configs: list[str] = list(document["configs"])
    known = {one.place: one for one in timed}
    shapes: dict[str, list[list[int]]] = {}
    for layout, rows in document["shapes"].items():
        shapes[layout] = []
        for *place, index in rows:
            one = known.get((layout, *place))
            seconds = {} if one is None else dict(zip([c.key for c in one.configs], one.seconds, strict=True))
            fastest = min(seconds, key=seconds.__getitem__, default=configs[index])
            if seconds.get(configs[index], 0.0) > FASTER * seconds.get(fastest, 0.0):
                configs += [fastest] * (fastest not in configs)
                index = configs.index(fastest)
            shapes[layout].append([*place, index])
    return {**document, "configs": configs, "shapes": shapes}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=380.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="random shapes of each kind")
    parser.add_argument("--split", action="store_true", help="shapes at which parts of k come near the fastest")
    parser.add_argument("--tried", type=int, default=28, help="configurations at a shape")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--table", action="store_true", help="OUT is a record, for the shipped table")
    options = parser.parse_args(arguments)
    if options.table:
        path = FOLDER / TABLE
        document = with_faster(json.loads(path.read_text()), read([options.out]))
        with gzip.open(options.out, "rt", encoding="utf-8") as file:
            write_table(with_models(document, list(map(json.loads, file))), path)
        return 0
    from flopcast.microbench.tuning.tune import tune_matmul

    tune_matmul(
        options.out, options.budget, lambda text: print(text, file=sys.stderr, flush=True),
        shapes(options.count, options.seed, options.split), options.workers, in_order=True,
        propose=lambda shape, sm_count: tried(shape, sm_count, options.tried),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
