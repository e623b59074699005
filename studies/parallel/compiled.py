"""Records the graphs that each rank of a compiled step calls, and compares them with those compiled without a GPU.

    torchrun --nproc-per-node 2 -m studies.parallel.compiled record OUT [--device cpu] [--only ddp,fsdp]
    python -m studies.parallel.compiled compare OUT

OUT gets CASE.rankN.json.gz: the text of each graph, the numbers of those that a steady step calls, and on GPUs the peak
of its memory. `compare` compiles each case for the GPU with the torch that is installed, which should be the one that
recorded, and says where the launches of two calls differ and how many launches and bytes there are; exits with 1 where
any differ. `compare` takes what GPUs recorded: the kernels of processors are others.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flopcast.microbench.recipe.compiling import forget
from flopcast.microbench.recipe.parallel_step import build_parallel, mesh_of
from flopcast.roofline.stream.compiled.launches import Graph
from flopcast.roofline.stream.compiled.layers import alike
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.tracer.compiler.apart import output_code
from flopcast.roofline.stream.tracer.compiler.asked import Asked
from studies.command import parser_of
from studies.parallel.cases import CASES, Case
from studies.parallel.record import group_of

KINDS = ("ddp", "ddp-accumulate", "fsdp", "fsdp-accumulate", "zero1", "zero2", "hsdp")
MODE = "compile"


def record(case: Case, device: str) -> dict[str, Any]:
    """Runs this rank's step; the graphs that a steady one calls."""
    from torch._inductor.output_code import CompiledFxGraph

    forget(MODE)
    layout, traced = case.layout_of(dist.get_world_size()), case.traced(device)
    torch.manual_seed(0)
    step: Any = build_parallel(case.config, layout, mesh_of(layout, device), device, replace(traced, mode=MODE))
    step.warm_up()
    peak = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    graphs: list[str] = []
    numbers: dict[str, int] = {}
    calls: list[int] = []
    run = CompiledFxGraph.__call__

    def noted(self: Any, inputs: Any) -> Any:
        code = self.source_code
        if code not in numbers:
            numbers[code] = len(graphs)
            graphs.append(code)
        calls.append(numbers[code])
        return run(self, inputs)

    CompiledFxGraph.__call__ = noted  # type: ignore[method-assign]
    try:
        step.run()
    finally:
        CompiledFxGraph.__call__ = run  # type: ignore[method-assign]
    how = {**traced.settings, "mode": MODE, "parallel": str(layout), "cache": Asked.cache}
    asked = Asked(config=case.config, rank=dist.get_rank(), **how)
    return {
        "asked": asdict(asked), "graphs": graphs, "calls": calls, "peak_bytes": peak, "torch": torch.__version__,
        "device": device,
    }  # fmt: skip


def launched(graphs: list[str], calls: list[int]) -> list[Graph]:
    read = read_output_code("\n".join(f"# ---- graph {number}\n{code}" for number, code in enumerate(graphs)))
    return [read[number] for number in calls]


def differences(recorded: list[Graph], made: list[Graph]) -> list[str]:
    """Where the calls of two steps differ, a line each."""
    if len(recorded) != len(made):
        return [f"{len(recorded)} calls of graphs recorded, {len(made)} compiled"]
    found = []
    for number, (one, other) in enumerate(zip(recorded, made, strict=True)):
        ours, theirs = ([alike(launch) for launch in graph.launches] for graph in (one, other))
        if ours != theirs:
            where = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
            found.append(f"call {number}: {len(ours)} launches recorded, {len(theirs)} compiled, first other {where}")
    return found


def amounts(graphs: list[Graph]) -> tuple[int, int]:
    """The launches of a step's calls, and the bytes that they read and write."""
    launches = [launch for graph in graphs for launch in graph.launches]
    return len(launches), sum(launch.bytes_read + launch.bytes_written for launch in launches)


def both(path: Path) -> tuple[dict[str, Any], list[Graph], list[Graph]]:
    """What a rank recorded on a GPU, the graphs that it called, and those that are compiled for it now."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    code = output_code(Asked(**found["asked"]))
    made = launched(list(code.graphs), list(code.calls))
    return {**found, "compiled_by": code.torch}, launched(found["graphs"], found["calls"]), made


def compare(folder: Path) -> int:
    """Returns how many recorded ranks differ from what is compiled for them."""
    failed = 0
    for path in sorted(folder.glob("*.rank*.json.gz")):
        found, recorded, made = both(path)
        told = differences(recorded, made)
        failed += bool(told)
        (launches, moved), (compiled, compiled_bytes) = amounts(recorded), amounts(made)
        print(
            f"{path.name}: {len(recorded)} calls, torch {found['torch']}, {found['compiled_by']}: {len(told)} differ; "
            f"{launches} launches of {moved} bytes recorded, {compiled} of {compiled_bytes} compiled "
            f"({compiled / launches - 1:+.2%}, {compiled_bytes / moved - 1:+.2%})",
            flush=True,
        )
        print("\n".join(f"  {line}" for line in told[:5]))
    return failed


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default=",".join(KINDS))
    options = parser.parse_args()
    if options.what == "compare":
        sys.exit(1 if compare(options.out) else 0)
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with group_of(options.device):
        for case in (case for case in CASES if case.name in options.only.split(",")):
            try:
                found = record(case, options.device)
            except Exception as fault:  # the others are worth it
                failed += 1
                print(f"{case.name}: {type(fault).__name__}: {' '.join(str(fault).split())[:300]}", flush=True)
                continue
            path = options.out / f"{case.name}.rank{dist.get_rank()}.json.gz"
            path.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
            print(f"{case.name}: {len(found['calls'])} calls of {len(found['graphs'])} graphs", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
