"""How long forecasts take on this machine, against what they should: no test asserts wall time, this prints it.

    python -m studies.predict_speed [--gpu nvidia-h200]
    python -m studies.predict_speed --layouts [--cache FOLDER]

Each command runs in a process of its own with a cache of its own, for streams and for profiles as they were last used;
"first" and "cold" with an empty one each time. Printed, medians: wall and processor seconds (children
included), and processor seconds over the target. On a busy machine wall says nothing; processor time is a bound for a
quiet one with one core. Targets (2-core x86): cold predict 6 s, cached 1 s, a sweep of 200 configurations 60 s, a
user's module on 13 GPUs at 20 batches 20 s.

`--layouts`: of Qwen3-0.6B over 384 GPUs, whose layouts that fit are more than 100; they should be ranked within 30 s
on two cores, once they are traced. That takes eight minutes of processor time, which a `--cache` keeps.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from studies.command import parser_of

WIDTHS = (320, 448, 640, 832, 1088, 1344, 1728, 2112, 2624, 3200)
DEPTHS = (4, 8, 12, 24)
BATCHES = (2, 4, 8, 16, 32)


def run(arguments: list[str], cache: Path, out: Path | None = None) -> tuple[float, float]:
    """(wall, processor) seconds of one command, including its children's. `out`: the file for what it prints."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with Path(os.devnull if out is None else out).open("wb") as printed:
        subprocess.run(
            [sys.executable, "-m", "flopcast", *arguments],
            env=environment,
            check=True,
            stdout=printed,
            stderr=subprocess.DEVNULL,
        )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def show(name: str, target: float, times: list[tuple[float, float]]) -> None:
    wall, processor = (sorted(column)[len(column) // 2] for column in zip(*times, strict=True))
    print(f"{name:42s} wall {wall:6.2f} s  processor {processor:6.2f} s  {processor / target:5.2f} of {target:g} s")


def show_layouts(gpu: str, repeat: int, cache: Path) -> None:
    """Ranks layouts whose streams are in the cache, or will be after a first time."""
    step = ["--config", "qwen3-0.6b", "--batch", "2", "--seq", "1024", "--optimizer", "adamw-fused"]
    rank = ["predict", "--gpu", gpu, *step, "--parallel", "auto", "--num-gpus", "384", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ranking.json"
        run(rank, cache)
        times = [run(rank, cache, out) for _ in range(repeat)]
        show(f"{len(json.loads(out.read_bytes())['fitting'])} layouts ranked, cached", 30 * 2, times)


def main() -> None:
    """Runs the commands and prints one line per command."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--cache", type=Path)
    given = parser.parse_args()
    predict = ["predict", "--gpu", given.gpu, "--json"]
    unknown = [*predict, "--width", "1472", "--depth", "9", "--batch", "6"]

    if given.layouts:
        with tempfile.TemporaryDirectory() as folder:
            show_layouts(given.gpu, given.repeat, given.cache or Path(folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        show("predict, cold (traced)", 6, [run(unknown, root / f"cold{i}") for i in range(given.repeat)])
        show("predict, cached", 1, [run(unknown, root / "cold0") for _ in range(given.repeat)])
        shipped = [*predict, "--config", "qwen3-0.6b"]
        first = [run(shipped, root / f"first{i}") for i in range(given.repeat)]
        show("predict qwen3-0.6b, shipped stream, first", 1, first)
        again = [run(shipped, root / "first0") for _ in range(given.repeat)]
        show("predict qwen3-0.6b, shipped stream, again", 1, again)
        table = root / "steps.csv"
        with table.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("width", "depth", "batch"))
            writer.writerows(product(WIDTHS, DEPTHS, BATCHES))
        sweep = ["sweep", "--gpu", given.gpu, "--from", str(table), "--out", str(root / "out.csv")]
        count = len(WIDTHS) * len(DEPTHS) * len(BATCHES)
        cores = os.cpu_count() or 1
        show(f"sweep of {count}, cold, {cores} cores", 60 * cores, [run(sweep, root / "sweep")])
        show(f"sweep of {count}, cached", 60, [run(sweep, root / "sweep")])
        module = ["--module", "flopcast.microbench.zoo:vit_b16", "--batches", "1..20"]
        grid = ["sweep", "--gpus", ",".join(load_specs()), *module, "--out", str(root / "grid.csv")]
        size = f"ViT-B/16 on {len(load_specs())} GPUs at 20 batches"
        show(f"{size}, cold", 20 * cores, [run(grid, root / "grid")])
        show(f"{size}, profiles cached", 20 * cores, [run(grid, root / "grid")])


if __name__ == "__main__":
    main()
