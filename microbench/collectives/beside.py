"""Times kernels beside a long collective on another stream, each by itself too; and copies between host and device.

NCCL's kernel holds as many multiprocessors as it has channels (`nccl_log`: the regime's row of the same collective and
size has them), so that a product of as many blocks as there are multiprocessors takes a second wave; kernels that
memory bounds share its bandwidth. Both are measured to the end: for the kernel's time the collective runs longer than
it, for the collective's the kernels do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from statistics import median
from typing import Any

import torch

from flopcast.microbench.collectives.cases import Case, Members
from flopcast.microbench.collectives.clock import Call
from flopcast.microbench.collectives.measure import Buffers
from flopcast.microbench.collectives.operations import Group, operation
from flopcast.microbench.collectives.session import Session
from flopcast.microbench.records.rows import BesideRow, CopyRow, rounded
from flopcast.microbench.timing.cuda_timer import CudaTimer, between_events, seconds_between

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
COLLECTIVE_BYTES = 256 * 1024**2
STRETCH_SECONDS = 5e-3  # of what is timed; the other one takes three times as long
LONGER = 3.0
REPEATS = 5
COPY_BYTES = (1024**2, 16 * 1024**2, 256 * 1024**2)


def works(device: torch.device, sm_count: int) -> dict[str, Callable[[], Call]]:
    """Makers of the kernels to run beside, by name: products of many waves and of one to three (`sm_count` tiles of 128
    x 256 each), attention, and what memory bounds."""

    def product(m: int, n: int, k: int) -> Callable[[], Call]:
        def make() -> Call:
            a, b = (torch.randn(size, dtype=torch.bfloat16, device=device) for size in ((m, k), (k, n)))
            out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
            return lambda: torch.mm(a, b, out=out)

        return make

    def attention() -> Call:
        q, k, v = (torch.randn(4, 16, 2048, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return lambda: sdpa(q, k, v, is_causal=True)

    def copy() -> Call:
        a = torch.randn(2**27, dtype=torch.bfloat16, device=device)
        b = torch.empty_like(a)
        return lambda: b.copy_(a)

    def add() -> Call:
        a = torch.randn(2**26, dtype=torch.float32, device=device)
        out = torch.empty_like(a)
        return lambda: torch.add(a, a, out=out)

    wave = 128 * sm_count
    sizes = ((4096, 4096, 4096), (8192, 8192, 1024), *((wave, 256 * waves, 4096) for waves in (1, 2, 3)))
    found: dict[str, Callable[[], Call]] = {f"product-{m}x{n}x{k}": product(m, n, k) for m, n, k in sizes}
    return {**found, "attention-4x16x2048x128": attention, "copy-256MiB": copy, "add-fp32-256MiB": add}


def run_beside(session: Session, members: Members, buffers: Buffers, timer: CudaTimer) -> None:
    """Times each kernel beside each kind of collective among `members`."""
    made = works(session.device, torch.cuda.get_device_properties(session.device).multi_processor_count)
    wanted = [(work, kind) for work in made for kind in KINDS]
    keys = [f"beside/{work}/{kind}/{members}" for work, kind in wanted]
    for index in session.each("kernels beside collectives", keys):
        work, kind = wanted[index]
        group = session.group(members)
        if group is None:
            continue
        size = min(COLLECTIVE_BYTES, buffers.most)
        done = operation(Case(kind, "bf16", members, size), group, buffers.first, buffers.second)
        with torch.cuda.stream(timer.stream):
            fields = _beside(timer, made[work](), done.call, buffers.random(done), group)
        session.record(BesideRow, keys[index], members, {"collective_bytes": size, **fields})


def _beside(timer: CudaTimer, work: Call, collective: Call, again: Call, group: Group) -> dict[str, Any]:
    make: Any = torch.cuda.Stream
    other: torch.cuda.Stream = make(timer.device)

    def row_of(call: Call, count: int) -> Call:
        def run() -> None:
            for _ in range(count):
                call()

        return run

    def alone(call: Call, count: int, stream: torch.cuda.Stream) -> float:
        return _together(timer, row_of(call, count), stream, None, None, again, group, count) / count

    for call, stream in ((work, timer.stream), (collective, other)):
        with torch.cuda.stream(stream):
            call()
    torch.cuda.synchronize(timer.device)
    work_once = group.longest(alone(work, 3, timer.stream))
    collective_once = group.longest(alone(collective, 3, other))
    works_, collectives = ceil(STRETCH_SECONDS / work_once), ceil(STRETCH_SECONDS / collective_once)
    long_works = ceil(LONGER * collectives * collective_once / work_once)
    long_collectives = ceil(LONGER * works_ * work_once / collective_once)
    samples: dict[str, list[float]] = {"alone": [], "beside": [], "collective": [], "collective_beside": []}
    for _ in range(REPEATS):
        samples["alone"].append(alone(work, works_, timer.stream))
        samples["collective"].append(alone(collective, collectives, other))
        samples["beside"].append(
            _together(timer, row_of(work, works_), timer.stream, row_of(collective, long_collectives), other, again,
                      group, works_ + long_collectives) / works_
        )  # fmt: skip
        samples["collective_beside"].append(
            _together(timer, row_of(collective, collectives), other, row_of(work, long_works), timer.stream, again,
                      group, collectives + long_works) / collectives
        )  # fmt: skip
    slowest = {name: group.longest(median(found)) for name, found in samples.items()}
    return {
        "value": slowest["beside"], "seconds": slowest["beside"], "unit": "seconds",
        "samples": rounded(samples["beside"]), "n": REPEATS, "timer": "events", "alone_seconds": slowest["alone"],
        "collective_alone_seconds": slowest["collective"],
        "collective_beside_seconds": slowest["collective_beside"], **timer.read().as_row(),
    }  # fmt: skip


def _together(
    timer: CudaTimer, timed: Call, on: torch.cuda.Stream, beside: Call | None, on_other: torch.cuda.Stream | None,
    again: Call, group: Group, launches: int,
) -> float:  # fmt: skip
    """Seconds of what `timed` enqueues on its stream, while what `beside` enqueues on the other has begun before."""
    again()
    torch.cuda.synchronize(timer.device)
    group.longest(0.0)
    ready = torch.cuda.Event()
    timer.spin(1e-3 + 100e-6 * launches)  # until all is enqueued
    ready.record()
    if beside is not None and on_other is not None:
        with torch.cuda.stream(on_other):
            on_other.wait_event(ready)
            beside()
    with torch.cuda.stream(on):
        on.wait_event(ready)
        pair = between_events(timed)
    torch.cuda.synchronize(timer.device)
    return seconds_between(pair)


# --- copies


def run_copies(session: Session, members: list[Members]) -> None:
    """Times copies between host and device, from pinned and from pageable memory, by one GPU and by several at once."""
    wanted = [
        (some, direction, memory, size)
        for some in members
        for direction in ("to_device", "to_host")
        for memory in ("pinned", "pageable")
        for size in COPY_BYTES
    ]
    keys = [f"copy/{direction}/{memory}/{some}/{size}" for some, direction, memory, size in wanted]
    for index in session.each("copies between host and device", keys):
        some, direction, memory, size = wanted[index]
        is_alone = some.gpus == 1
        group = None if is_alone else session.group(some)
        if group is not None or (is_alone and session.rank == 0):
            fields = _copy(session.device, direction, memory, size, group)
            session.record(CopyRow, keys[index], some, {"bytes": size, **fields})


def _copy(device: torch.device, direction: str, memory: str, size: int, group: Group | None) -> dict[str, Any]:
    here = torch.empty(size, dtype=torch.uint8, pin_memory=memory == "pinned")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here.fill_(1)
    there.fill_(1)
    target, source = (there, here) if direction == "to_device" else (here, there)
    samples = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize(device)
        if group is not None:
            group.longest(0.0)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - begin)
    seconds = median(samples[1:])
    slowest = seconds if group is None else group.longest(seconds)
    return {"value": slowest, "seconds": slowest, "unit": "seconds", "samples": rounded(samples[1:]), "n": REPEATS,
            "timer": "wall"}  # fmt: skip
