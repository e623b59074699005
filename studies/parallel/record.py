"""Records what each rank of a step on several GPUs launches: operations, CUDA streams, waits, collectives.

    torchrun --nproc-per-node 2 -m studies.parallel.record OUT                  all cases, on this host's GPUs
    torchrun --nproc-per-node 2 -m studies.parallel.record OUT --device cpu     on processors, over gloo
    ... --only ddp,fsdp                                                         some of them

OUT gets CASE.rankN.json.gz per case and rank, an op stream as a trace makes it. On GPUs its meta also holds the peak
of the memory of a steady step and the seconds of ten. `python -m studies.parallel.gate OUT` compares them with traces.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flopcast.errors import FlopcastError
from flopcast.microbench.recipe.parallel_step import build_parallel, mesh_of
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.tracer.lanes import Lanes
from flopcast.roofline.stream.tracer.parallel.world import real_streams
from flopcast.roofline.stream.tracer.record_step import record_step
from flopcast.roofline.stream.tracer.unmodelled import Topic, modelled
from studies.command import parser_of
from studies.parallel.cases import CASES, Case

TIMED_STEPS = 10


def record(case: Case, device: str) -> streams.Stream:
    """Runs the step of this rank and returns what it launched."""
    layout, traced = case.layout_of(dist.get_world_size()), case.traced(device)
    torch.manual_seed(0)
    step = build_parallel(case.config, layout, mesh_of(layout, device), device, traced)
    step.warm_up()
    measured = _measured(step) if device == "cuda" else {}
    meta: dict[str, Any] = {
        "batch": traced.batch, "seq": traced.seq, "precision": traced.precision, "optimizer": traced.optimizer,
        "accumulate": traced.accumulate, "checkpoint": "none", "clip": traced.clip, "finetune": traced.finetune,
        "base_dtype": traced.base_dtype, "device": device, "config": case.config,
        "parallel": {"layout": str(layout), "rank": dist.get_rank()}, **measured,
    }  # fmt: skip
    with modelled(Topic.SEVERAL_GPUS), _streams(device) as lanes:
        return record_step(step, meta, lanes=lanes)


def _streams(device: str) -> contextlib.AbstractContextManager[Lanes | None]:
    return real_streams() if device == "cuda" else contextlib.nullcontext()


def _measured(step: Any) -> dict[str, Any]:
    """The peak of the memory of a steady step, and the seconds of several in a row, before anything is recorded."""
    step.run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step.run()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / TIMED_STEPS
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(), "step_seconds": seconds,
        "gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }  # fmt: skip


@contextlib.contextmanager
def group_of(device: str) -> Iterator[None]:
    """The process group of this launcher's processes, each on a GPU of its own."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [case.name for case in CASES]
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with group_of(options.device):
        for case in (case for case in CASES if case.name in wanted):
            start = time.perf_counter()
            try:
                stream = record(case, options.device)
            except (FlopcastError, RuntimeError, ValueError, NotImplementedError) as fault:  # the others are worth it
                failed += 1
                print(f"{case.name}: {type(fault).__name__}: {' '.join(str(fault).split())[:300]}", flush=True)
                continue
            streams.save(stream, options.out / f"{case.name}.rank{dist.get_rank()}.json.gz")
            if dist.get_rank() == 0:
                print(f"{case.name}: {len(stream.ops)} ops, {time.perf_counter() - start:.1f} s", flush=True)
            gc.collect()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
