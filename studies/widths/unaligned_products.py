"""Products of unaligned widths and losses over them, thousands in minutes, for `flopcast fit`. Needs a GPU.

    python -m studies.widths.unaligned_products OUT [--budget 180]
    python -m studies.widths.unaligned_products OUT --smoke                # no GPU: does the script run?

Which products: `studies/widths/draws.py`, in its order, so that whatever the budget allows is spread over all. Each is
a row in OUT as a suite's are, that a profile is fitted with; a run that stops is continued by the same command.

How. A batch of products runs in turn, ROUNDS times over, under CUDA's profiler, each between two markers; a row's
`kernel_seconds` is the median, its `samples` are the rounds. What a product finds in L2 is what the product before it
left, as in a step; its operands lie elsewhere in a large pool each time. No graphs, no flushes, no reference: a sweep
takes 60 ms a row, a kernel of 1 ms here some 8. What is left out matters little: of 6,311 unaligned products of over
50 us that sweeps timed twice, in graphs or by events and by the profiler, the two differ by 0.4% at the median.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flopcast.kernels.shapes import Call, Gemm
from studies.command import parser_of
from studies.widths.draws import DRAWS, log_softmax, losses, products

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flopcast.microbench.timing.telemetry import Reading

    Read = Callable[[], Reading]


SUITE = "widths"
ROUNDS = 5
BATCH_SECONDS, BATCH_MOST = 2.0, 250  # of a profiler session, which takes 0.3 s besides
SLOW_FLOPS, SLOW_BYTES = 1e14, 3e12  # per second, of the slowest kernels: how many fill a batch
BATCH_BYTES = 30 * 10**9  # of the losses' operands
POOL_BYTES = 12 << 30
MOST_CACHED = 32 << 30  # of the allocator, before what it holds is given back
ALIGNMENT = 256  # items: where an allocator's tensors begin

Wanted = tuple[Gemm | Call, str]  # and for what: "fit" or "holdout"
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


def bound(shape: Gemm | Call, pool: Pool) -> Callable[[], Any]:
    """A call of it: of a product each time on other operands."""
    from flopcast.kernels import aten
    from flopcast.kernels.matmul import matmul_torch

    if isinstance(shape, Call):
        return aten.prepare(shape, "torch", aten.operands(shape, pool.items.device))
    return lambda: matmul_torch(*operands(pool, shape), shape.layout)


def batches(todo: Sequence[Wanted]) -> list[list[Wanted]]:
    """In order, each of BATCH_SECONDS at the slowest, and of operands that the memory holds."""
    found: list[list[Wanted]] = []
    seconds = held = 0.0
    for one in todo:
        if not found or seconds >= BATCH_SECONDS or held >= BATCH_BYTES or len(found[-1]) >= BATCH_MOST:
            found.append([])
            seconds = held = 0.0
        found[-1].append(one)
        shape, _ = one
        seconds += ROUNDS * (shape.flops / SLOW_FLOPS + shape.bytes / SLOW_BYTES)
        held += shape.bytes if isinstance(shape, Call) else 0.0
    return found


def timed(shapes: Sequence[Gemm | Call], pool: Pool, read: Read) -> tuple[Times, Reading]:
    """The kernels of each and the seconds of each round, None where the profiler lost records; and a reading while they
    ran."""
    import torch

    from flopcast.microbench.timing.cupti import record, split_at_markers, summarise

    calls = [bound(shape, pool) for shape in shapes]
    readings = []

    def run() -> None:
        mark: Callable[[int], None] = torch.cuda._sleep
        for _ in range(ROUNDS):
            for call in calls:
                mark(1)
                call()
                mark(1)
        readings.append(read())  # the host is ahead: the device is busy

    for call in calls:  # kernels are loaded and chosen when first run
        call()
    groups = split_at_markers(record(run, pool.items.device), ROUNDS * len(calls))
    if groups is None:
        return [None] * len(calls), readings[0]
    found: Times = []
    for i in range(len(calls)):
        rounds = groups[i :: len(calls)]
        if not all(rounds):
            found.append(None)
            continue
        seconds = [sum(event.duration_ns for event in events) * 1e-9 for events in rounds]
        found.append((summarise(rounds).kernels, seconds))
    return found, readings[0]


def timed_by_wall(shapes: Sequence[Gemm | Call], pool: Pool, read: Read) -> tuple[Times, Reading]:
    """As `timed` where there is no profiler, to see that the script runs."""
    found: Times = []
    for shape in shapes:
        call, seconds = bound(shape, pool), []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        found.append(((("wall", median(seconds)),), seconds))
    return found, read()


def small(shape: Gemm) -> Gemm:
    """The same product in small, unaligned as it was."""
    m, n, k = (max(8, side // 128) + side % 8 for side in (shape.m, shape.n, shape.k))
    return Gemm(m=m, n=n, k=k, layout=shape.layout)


def chosen(draws: int, is_smoke: bool) -> list[Wanted]:
    """What is measured, in order."""
    calls, drawn = (log_softmax(8, 129), products(5)) if is_smoke else (losses(), products(draws))
    return [
        *((call, "fit") for call in calls),
        *((small(one.shape) if is_smoke else one.shape, one.role) for one in drawn),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds, start of the process included")
    parser.add_argument("--draws", type=int, default=DRAWS, help="models, of some seven products each")
    parser.add_argument("--device")
    parser.add_argument("--smoke", action="store_true", help="some dozens, tiny, by the wall clock")
    given = parser.parse_args(arguments)

    import torch

    from flopcast.microbench.recipe import training_step
    from flopcast.microbench.recipe.settings import Recipe
    from flopcast.microbench.records.recorder import Recorder
    from flopcast.microbench.sweep.cases import Case, case_row
    from flopcast.microbench.timing.device import describe, pick_device
    from flopcast.microbench.timing.telemetry import telemetry
    from flopcast.roofline.stream.model.models import make_config

    device = pick_device(given.device)
    wanted = chosen(given.draws, given.smoke)
    measure = timed_by_wall if given.smoke else timed
    read = telemetry(device)
    pool = Pool(device, (1 << 24) if given.smoke else POOL_BYTES // 2)
    with Recorder(given.out, describe(device)) as recorder:
        # a process that has trained, as those of the steps have (`microbench/sweep`)
        training_step.build(make_config(width=128, depth=2, vocab=512), device, Recipe()).run()
        todo = [one for one in wanted if not recorder.is_done(one[0].key)]
        print(f"{len(todo)} of {len(wanted)} to measure, {time.monotonic() - begun:.0f} s in", flush=True)
        done = lost = 0
        for batch in batches(todo):
            if time.monotonic() - begun >= given.budget:
                break
            found, reading = measure([shape for shape, _ in batch], pool, read)
            for (shape, role), times in zip(batch, found, strict=True):
                if times is None:  # measured again by the next run
                    lost += 1
                    continue
                kernels, seconds = times
                fields: dict[str, Any] = {
                    "kernel_seconds": median(seconds), "kernels": [list(kernel) for kernel in kernels],
                    "samples": [float(f"{value:.6g}") for value in seconds], "n": len(seconds), "timer": "profiler",
                    "note": "not checked; timed in turn with others", **reading.as_row(),
                }  # fmt: skip
                case = Case(shape=shape, backend="torch", cache="cold", role=role)
                recorder.append(case_row(case, SUITE, fields))
                done += 1
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > MOST_CACHED:
                torch.cuda.empty_cache()
    left = len(todo) - done - lost
    print(f"{done} measured, {lost} lost, {left} left; {time.monotonic() - begun:.0f} s in all", flush=True)
    return 1 if left or lost else 0


if __name__ == "__main__":
    sys.exit(main())
