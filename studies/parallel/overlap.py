"""Says how two H200s spent steps that were profiled: computing, communicating, both, neither.

    python -m studies.parallel.overlap OUT          puts what `studies.parallel.steps` wrote into kernels.csv
    python -m studies.parallel.overlap              prints what was written

Of each step and rank the last profiled step. Communication counts from when the last rank has come, waiting what a
rank waits before that; exposed is when NCCL's kernels run alone, waiting included. `slower`: how many times as long the
same kernels took where a collective ran beside them all the time, by what bounds them, over both profiled steps; `gap`:
the median between kernels, of the last one.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median

from flopcast.microbench.ranks.measure import Interval, Kernel, spent
from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table
from studies.parallel.steps import ALL, Measured, load

FILE = ROOT / "reports" / "parallel" / "kernels.csv"
COMPUTES = 7  # the number that the profiler gives the default stream
AT_ONCE = 8e-6  # seconds
FREE, BESIDE = 0.02, 0.95  # shares of a kernel's time beside collectives from which it counts as neither, or as both
_BOUND_BY = {"matrix": ("nvjet", "gemm", "cutlass"), "attention": ("sdp", "fmha", "flash")}


@dataclass(frozen=True)
class Spent:
    """Seconds of one rank's step, and factors, 0 where no kernel ran both ways."""

    step: str
    rank: int
    span: float
    compute: float
    communication: float
    waiting: float
    overlapped: float
    exposed: float
    idle: float
    slower_matrix: float
    slower_attention: float
    slower_memory: float
    gap_microseconds: float


def spent_by(name: str, ranks: Sequence[Measured]) -> list[Spent]:
    """What each rank did; the n-th collective of one is that of the others."""
    factors = slower([step for rank in ranks for step in rank.kernels])
    found = []
    for rank, one in zip(ranks, spent([rank.kernels[-1] for rank in ranks]), strict=True):
        last = [*(factors.get(bound, 0.0) for bound in ("matrix", "attention", "memory")), gap_of(rank.kernels[-1])]
        found.append(Spent(name, rank.rank, *astuple(one), *last))
    return found


def slower(steps: Sequence[Sequence[Kernel]]) -> dict[str, float]:
    """By what bounds kernels: the seconds of those that ran beside collectives in some of these steps, and by
    themselves in others, over the latter."""
    rows = []
    for step in steps:
        sent = sorted(kernel.interval for kernel in step if kernel.is_sent)
        rows.append([(kernel, _share_beside(kernel, sent)) for kernel in step if _computes(kernel)])
    alike = min(map(len, rows))
    alone, beside = defaultdict[str, float](float), defaultdict[str, float](float)
    for same in zip(*(row for row in rows if len(row) == alike), strict=True):
        if len({kernel.name for kernel, _ in same}) > 1:
            continue
        free = [kernel.seconds for kernel, share in same if share < FREE]
        both = [kernel.seconds for kernel, share in same if share > BESIDE]
        if free and both:
            bound = bound_of(same[0][0].name)
            alone[bound] += fmean(free)
            beside[bound] += fmean(both)
    return {bound: beside[bound] / seconds for bound, seconds in alone.items()}


def gap_of(step: Sequence[Kernel]) -> float:
    """The median, in microseconds, of the gaps between kernels of the default stream that follow each other at once;
    where the host is slow it says how slow."""
    own = sorted((kernel for kernel in step if _computes(kernel)), key=lambda kernel: kernel.start)
    gaps = (after.start - before.interval[1] for before, after in pairwise(own))
    return median(gap for gap in gaps if gap < AT_ONCE) * 1e6


def bound_of(kernel: str) -> str:
    return next((bound for bound, words in _BOUND_BY.items() if any(word in kernel for word in words)), "memory")


def _computes(kernel: Kernel) -> bool:
    return kernel.stream == COMPUTES and not kernel.is_sent


def _share_beside(kernel: Kernel, sent: Sequence[Interval]) -> float:
    """`sent`: in order, of which the three that began last before the kernel's end are seen."""
    start, end = kernel.interval
    last = bisect_left(sent, (end, 0.0))
    both = (min(end, its_end) - max(start, its) for its, its_end in sent[max(last - 3, 0) : last])
    return sum(max(0.0, seconds) for seconds in both) / kernel.seconds


def write(found: Iterable[Spent], path: Path = FILE) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([field.name for field in fields(Spent)])
        for one in found:
            name, rank, *values = astuple(one)
            rows.writerow([name, rank, *(f"{value:.6f}" for value in values)])


def read(path: Path = FILE) -> list[Spent]:
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Spent(row.pop("step"), int(row.pop("rank")), *(float(value) for value in row.values()))
            for row in csv.DictReader(file)
        ]


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    out: Path | None = parser.parse_args().out
    if out is not None:
        found = {name: list(ranks) for name, ranks in groupby(read(), attrgetter("step"))} if FILE.is_file() else {}
        for step in ALL:
            ranks = [load(path) for path in sorted(out.glob(f"{step.name}.rank*.json.gz"))]
            if ranks and all(rank.kernels for rank in ranks):
                found[step.name] = spent_by(step.name, ranks)
        write(one for step in ALL for one in found.get(step.name, ()))
    columns = ["step", "rank", *(f"{field.name}, ms" for field in fields(Spent)[2:9]), "slower: matrix", "attention",
               "memory", "gap, us"]  # fmt: skip
    print(table(columns, [_row(one) for one in read()]))


def _row(one: Spent) -> list[str]:
    name, rank, *values = astuple(one)
    seconds, factors = values[:7], values[7:]  # and microseconds
    return [name, str(rank), *(f"{value * 1e3:.2f}" for value in seconds), *(f"{f:.2f}" * (f > 0) for f in factors)]


if __name__ == "__main__":
    main()
