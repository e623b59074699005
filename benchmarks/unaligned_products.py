"""Products of unaligned widths, thousands in minutes, for `flopcast fit`: kernel times alone. Needs a GPU.

    python benchmarks/unaligned_products.py OUT [--budget 180]
    python benchmarks/unaligned_products.py OUT --smoke                # no GPU: does the script run?

Which products: `roofline/suite_widths.py`, in its order, so that whatever the budget allows is spread over all. Each is
a row in OUT as a suite's are, that a profile is fitted with; a run that stops is continued by the same command.

How. A batch of products runs in turn, ROUNDS times over, under CUDA's profiler, each between two markers; a row's
`kernel_seconds` is the median, its `samples` are the rounds. What a product finds in L2 is what the product before it
left, as in a step; its operands lie elsewhere in a large pool each time. No graphs, no flushes, no reference: a row of
6 ms for the 60 of a sweep. Of 6,311 unaligned products of over 50 us the sweep's two readings, this and the timer's,
differ by 0.4% at the median.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.suite_widths import DRAWS, Drawn, products

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flopcast.microbench.device import Reading

    Read = Callable[[], Reading]

SUITE = "widths"
ROUNDS = 5
BATCH_SECONDS, BATCH_MOST = 2.0, 250  # of a profiler session, which takes 0.3 s besides
SLOW_FLOPS = 1e14  # per second, of the slowest kernels: how many products fill a batch
POOL_BYTES = 12 << 30
MOST_CACHED = 32 << 30  # of the allocator, before what it holds is given back
ALIGNMENT = 256  # items: where an allocator's tensors begin

Times = list[tuple[tuple[tuple[str, float], ...], list[float]] | None]  # (kernels, seconds of each round)


class Pool:
    """Normal numbers on the device, of which operands are views, each taken behind the one before."""

    def __init__(self, device: torch.device, size: int) -> None:
        import torch

        generator = torch.Generator(device=device).manual_seed(1)
        self.items = torch.empty(size, dtype=torch.bfloat16, device=device)
        for part in self.items.split(1 << 28):
            part.normal_(generator=generator)
        self.at = 0

    def take(self, rows: int, columns: int) -> Tensor:
        if self.at + rows * columns > len(self.items):
            self.at = 0
        start, self.at = self.at, self.at + -(-rows * columns // ALIGNMENT) * ALIGNMENT
        return self.items[start : start + rows * columns].view(rows, columns)


def operands(pool: Pool, shape: Gemm) -> tuple[Tensor, Tensor]:
    """As they lie in memory (`kernels/matmul.py`)."""
    a = (shape.m, shape.k) if shape.layout[0] == "n" else (shape.k, shape.m)
    b = (shape.k, shape.n) if shape.layout[1] == "n" else (shape.n, shape.k)
    return pool.take(*a), pool.take(*b)


def batches(todo: Sequence[Drawn]) -> list[list[Drawn]]:
    """In order, each of BATCH_SECONDS at the slowest."""
    found: list[list[Drawn]] = []
    left = 0.0
    for one in todo:
        if left <= 0.0 or len(found[-1]) >= BATCH_MOST:
            found.append([])
            left = BATCH_SECONDS
        found[-1].append(one)
        left -= ROUNDS * one.shape.flops / SLOW_FLOPS
    return found


def timed(shapes: Sequence[Gemm], pool: Pool, read: Read) -> tuple[Times, Reading]:
    """The kernels of each product and the seconds of each round, None where the profiler lost records; and a reading
    while they ran."""
    import torch

    from flopcast.kernels.matmul import matmul_torch
    from flopcast.microbench.cupti import record, split_at_markers, summarise

    readings = []

    def run() -> None:
        mark: Callable[[int], None] = torch.cuda._sleep  # type: ignore[attr-defined]
        for _ in range(ROUNDS):
            for shape in shapes:
                a, b = operands(pool, shape)
                mark(1)
                matmul_torch(a, b, shape.layout)
                mark(1)
        readings.append(read())  # the host is ahead: the device is busy

    for shape in shapes:  # kernels are loaded and chosen when first run
        matmul_torch(*operands(pool, shape), shape.layout)
    groups = split_at_markers(record(run, pool.items.device), ROUNDS * len(shapes))
    if groups is None:
        return [None] * len(shapes), readings[0]
    found: Times = []
    for i in range(len(shapes)):
        rounds = groups[i :: len(shapes)]
        if not all(rounds):
            found.append(None)
            continue
        seconds = [sum(event.duration_ns for event in events) * 1e-9 for events in rounds]
        found.append((summarise(rounds).kernels, seconds))
    return found, readings[0]


def timed_by_wall(shapes: Sequence[Gemm], pool: Pool, read: Read) -> tuple[Times, Reading]:
    """As `timed` where there is no profiler, to see that the script runs."""
    from flopcast.kernels.matmul import matmul_torch

    found: Times = []
    for shape in shapes:
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            matmul_torch(*operands(pool, shape), shape.layout)
            seconds.append(time.perf_counter() - start)
        found.append(((("wall", median(seconds)),), seconds))
    return found, read()


def small(one: Drawn) -> Drawn:
    """The same product in small, unaligned as it was."""
    m, n, k = (max(8, side // 128) + side % 8 for side in (one.shape.m, one.shape.n, one.shape.k))
    return Drawn(Gemm(m=m, n=n, k=k, layout=one.shape.layout), one.role)


def main(arguments: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds, start of the process included")
    parser.add_argument("--draws", type=int, default=DRAWS, help="models, of some seven products each")
    parser.add_argument("--device")
    parser.add_argument("--smoke", action="store_true", help="some dozens, tiny, by the wall clock")
    given = parser.parse_args(arguments)

    import torch

    from flopcast.microbench import steps
    from flopcast.microbench.cases import Case, case_row
    from flopcast.microbench.device import describe, pick_device, telemetry
    from flopcast.microbench.records import Recorder
    from flopcast.roofline.models import make_config

    device = pick_device(given.device)
    wanted = [small(one) for one in products(5)] if given.smoke else products(given.draws)
    measure = timed_by_wall if given.smoke else timed
    read = telemetry(device)
    pool = Pool(device, (1 << 24) if given.smoke else POOL_BYTES // 2)
    with Recorder(given.out, describe(device)) as recorder:
        # a process that has trained, as those of the steps have (`microbench/bench.py`)
        steps.build(make_config(width=128, depth=2, vocab=512), device).run()
        todo = [one for one in wanted if not recorder.is_done(one.shape.key)]
        print(
            f"{len(todo)} of {len(wanted)} products to measure, {time.monotonic() - begun:.0f} s in",
            flush=True,
        )
        done = lost = 0
        for batch in batches(todo):
            if time.monotonic() - begun >= given.budget:
                break
            found, reading = measure([one.shape for one in batch], pool, read)
            for one, times in zip(batch, found, strict=True):
                if times is None:  # measured again by the next run
                    lost += 1
                    continue
                kernels, seconds = times
                fields: dict[str, Any] = {
                    "kernel_seconds": median(seconds), "kernels": [list(kernel) for kernel in kernels],
                    "samples": [float(f"{value:.6g}") for value in seconds], "n": len(seconds), "timer": "profiler",
                    "note": "not checked: cuBLAS, timed in turn with others", **reading.as_row(),
                }  # fmt: skip
                case = Case(shape=one.shape, backend="torch", cache="cold", role=one.role)
                recorder.append(case_row(case, SUITE, fields))
                done += 1
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > MOST_CACHED:
                torch.cuda.empty_cache()
    left = len(todo) - done - lost
    print(f"{done} measured, {lost} lost, {left} left; {time.monotonic() - begun:.0f} s in all", flush=True)
    return 1 if left or lost else 0


if __name__ == "__main__":
    sys.exit(main())
