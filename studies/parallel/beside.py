"""Measures by how much the processes of a host, one for each GPU, slow each other down.

    torchrun --nproc-per-node 4 -m studies.parallel.beside OUT                  on a host's GPUs, a minute
    ... --device cpu                                                            on processors, to try it
    python -m studies.parallel.beside OUT [OUT ...] --keep FILE                 puts what was measured into FILE
    python -m studies.parallel.beside                                           prints what the committed files say, and
                                                                                by how much steps exceed their hosts

Each process trains tiny models of its own, of two depths, without any collective: by itself while the others sleep,
then some of them at once, all of them, and all of them each on cores of its own. Sets take turns. What a call of the
host costs is the slope from one depth to the other, over the calls of a layer; OUT gets rankN.json.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import torch
import torch.distributed as dist

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.hosts.host import host_phases
from studies.command import parser_of
from studies.markdown import table
from studies.parallel.measured import AGAIN, FILE
from studies.parallel.measured import read as read_steps
from studies.parallel.phases import DEPTHS, FOLDER, NONE, keep_launches, rows_in, tiny
from studies.parallel.record import group_of
from studies.parallel.timeline import run_with

FILES = "beside*.json.gz"
ROUNDS, SECONDS = 4, 1.2  # of each set
NAP = 0.005  # of a process that has no turn: one that waited in a collective would keep a core busy
TIMED = ("forward", "backward")
HOST_BOUND = 1.25

Row = dict[str, Any]


def sets_of(ranks: int) -> list[tuple[tuple[int, ...], bool]]:
    """Ranks that run at once, and whether each keeps to cores of its own."""
    everybody = tuple(range(ranks))
    counts = [count for count in (2, 4, 8) if count < ranks]
    return [*(((rank,), False) for rank in everybody), *((everybody[:count], False) for count in counts),
            (everybody, False), (everybody, True)]  # fmt: skip


@contextmanager
def _on_own_cores(rank: int, ranks: int, is_wanted: bool) -> Iterator[None]:
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    if is_wanted and each:
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _all_there(store: Any, name: str, ranks: int) -> None:
    """Waits, asleep, until all ranks have come."""
    store.add(name, 1)
    while store.add(name, 0) < ranks:
        time.sleep(NAP)


def _own_turn(steps: Mapping[int, Any], device: torch.device) -> dict[int, list[dict[str, float]]]:
    found: dict[int, list[dict[str, float]]] = {depth: [] for depth in steps}
    gc.collect()
    with no_garbage_collection():
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            for depth, step in steps.items():
                phases = host_phases(step, device)
                found[depth].append({name: round(phases[name], 7) for name in TIMED})
    return found


def measure(device: str) -> list[Row]:
    """Rows of this rank: {"ranks": those that ran at once, "pinned", "depth", "phases": [{phase: seconds}]}."""
    steps = {depth: tiny(NONE, depth, "eager", device) for depth in DEPTHS}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    found: list[Row] = []
    for turn in range(ROUNDS):
        for number, (wanted, pinned) in enumerate(sets_of(ranks)):
            _all_there(store, f"begin {turn} {number}", ranks)
            if rank in wanted:
                with _on_own_cores(rank, ranks, pinned):
                    for depth, phases in _own_turn(steps, torch.device(device)).items():
                        found.append({"ranks": wanted, "pinned": pinned, "depth": depth, "phases": phases})
            _all_there(store, f"end {turn} {number}", ranks)
    return found


def slopes(rows: Iterable[Row]) -> dict[tuple[int, int, bool], dict[str, float]]:
    """Seconds per layer by phase, of (rank, number of ranks at once, pinned): the medians of all samples."""
    samples: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        for phase in TIMED:
            key = (row["rank"], len(row["ranks"]), row["pinned"]), phase, row["depth"]
            samples[key] += [one[phase] for one in row["phases"]]
    low, high = DEPTHS
    found: dict[tuple[int, int, bool], dict[str, float]] = defaultdict(dict)
    for (key, phase, depth), own in samples.items():
        if depth == low:
            found[key][phase] = (median(samples[key, phase, high]) - median(own)) / (high - low)
    return dict(found)


def report(rows: Sequence[Row]) -> str:
    """A table: by ranks at once, ms per layer of each rank, and the mean and the slowest over those alone."""
    found = slopes(rows)
    lines = []
    for count, pinned in sorted({key[1:] for key in found}):
        own = {rank: phases for (rank, *key), phases in found.items() if key == [count, pinned]}
        if count == 1 and pinned:
            continue
        for phase in TIMED:
            here = [phases[phase] for phases in own.values()]
            alone = [found[rank, 1, False][phase] for rank in own]
            lines.append([
                f"{count}{', each on its own cores' if pinned else ''}", phase,
                ", ".join(f"{one * 1e3:.2f}" for one in here),
                f"{geometric_mean(here) / geometric_mean(alone):.2f}", f"{max(here) / geometric_mean(alone):.2f}",
            ])  # fmt: skip
    return table(["at once", "phase", "ms per layer of each", "mean over alone", "slowest over mean alone"], lines)


def by_session() -> str:
    """A table of the committed steps that the host bounds: by session, their time over what their ranks take on average
    to enqueue one for idle GPUs, and over what the slowest does, medians. Pipelines, whose ranks do different work, are
    left out; the host bounds a step that takes at most `HOST_BOUND` times as long as its slowest rank enqueues."""
    found: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for file, again in ((FILE, ""), (AGAIN, ", again")):
        for step, ranks in read_steps(file).items():
            hosts = [median(rank.host_seconds) for rank in ranks]
            seconds = median(median(rank.step_seconds) for rank in ranks)
            if not step.layout.startswith("pp") and seconds <= HOST_BOUND * max(hosts):
                found[run_with(step) + again].append((len(ranks), seconds / fmean(hosts), seconds / max(hosts)))
    rows = [
        [session, str(some[0][0]), str(len(some)), *(f"{median(one[place] for one in some):.2f}" for place in (1, 2))]
        for session, some in found.items()
    ]
    return table(["session", "GPUs", "steps", "over the mean host", "over the slowest"], rows)


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="*")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    if options.keep:
        keep_launches(options.out, options.keep)
    elif not options.out:
        for file in sorted(FOLDER.glob(FILES)):
            print(f"{file.name}\n\n{report(rows_in(file))}\n")
        print(by_session())
    else:
        out: Path = options.out[0]
        out.mkdir(parents=True, exist_ok=True)
        with group_of(options.device):
            rows = measure(options.device)
            (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
