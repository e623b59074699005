"""Measures real steps on the GPUs of a host, by which forecasts of parallel steps are judged.

    torchrun --nproc-per-node 2 -m studies.parallel.steps OUT               the first ones
    ... --steps larger                                                      those that the device bounds
    ... --steps compiled                                                    compiled ones
    ... --steps compiled-larger                                             compiled ones that the device bounds
    torchrun --nproc-per-node 4 -m studies.parallel.steps OUT --steps four  those over four GPUs
    ... --steps four-balanced                                                   where host and device take as long
    torchrun --nproc-per-node 2 -m studies.parallel.steps OUT --steps balanced  the same over two
    ... --steps compiled-four                                               compiled ones over four GPUs
    ... --steps trained                                                     clipped, fine-tuned, by other optimizers
    ... --steps host-bound                                                  those whose host bounds them
    ... --only ddp,tp                                                       steps whose layout is one of these kinds
    ... --stages times                                                      without their kernels

All steps are timed first, since a process that has used the profiler launches slower ever after; then each is built
again and profiled. OUT gets NAME.rankN.json.gz per step and rank, of the fields of `Measured`, written anew as each
stage ends; a step that is there whole is not run again.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flopcast.errors import FlopcastError
from flopcast.microbench.ranks.measure import Kernel, profile_rank, time_rank
from flopcast.microbench.recipe.compiling import forget
from flopcast.microbench.recipe.layout import Layout
from flopcast.microbench.recipe.parallel_step import ParallelStep, build_parallel, mesh_of
from flopcast.microbench.recipe.pipeline_step import PipelineStep
from flopcast.microbench.recipe.settings import Recipe
from flopcast.roofline.stream.model.models import Config, load_config, make_config
from studies.command import parser_of
from studies.parallel.record import group_of

ROUNDS = 3
STAGES = ("times", "kernels")


@dataclass(frozen=True)
class Step:
    """A step; `layout` with {n} in place of the ranks. `batch` is a rank's."""

    model: str
    layout: str
    batch: int
    seq: int
    optimizer: str = "adamw-fused"
    accumulate: int = 1
    mode: str = "eager"
    clip: float = 0.0
    finetune: str = "full"

    @property
    def name(self) -> str:
        layout = self.layout.replace("={n}", "").replace(":", "-")
        micro = f"-x{self.accumulate}" if self.accumulate > 1 else ""
        words = (self.mode, "clip" * (self.clip > 0), self.finetune)
        more = "".join(f"-{word}" for word in words if word not in ("eager", "", "full"))
        return f"{self.model}-{layout}-{self.batch}x{self.seq}{micro}-{self.optimizer}{more}"

    @property
    def settings(self) -> dict[str, Any]:
        """What a `Recipe` says of it, but for its layout."""
        return {name: value for name, value in asdict(self).items() if name not in ("model", "layout")}


@dataclass(frozen=True)
class Measured:
    """One rank's step: what `RankTimes` says, and `kernels` of each profiled step."""

    step: dict[str, Any]
    config: Config
    rank: int
    ranks: int
    gpu: str
    torch: str
    nccl: str
    step_seconds: list[float]
    host_seconds: list[float]
    peak_bytes: int
    reserved_bytes: int
    used_bytes: int
    kernels: list[list[Kernel]] = field(default_factory=list)


MODELS: dict[str, Config] = {
    "w640-d6": make_config(width=640, depth=6, heads=10, kv_heads=10, head_dim=64),
    "w2048-d3-v32000": make_config(width=2048, depth=3, vocab=32_000),
    "w3584-d2": make_config(width=3584, depth=2),
    "qwen3-8b-d6": {**load_config("qwen3-8b"), "num_hidden_layers": 6},
    **{
        name: load_config(name)
        for name in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "llama-3.2-1b", "gpt2", "qwen3-moe")
    },
}

STEPS = (
    Step("qwen3-0.6b", "ddp={n}", 4, 1024),
    Step("qwen3-0.6b", "fsdp={n}", 4, 1024),
    Step("qwen3-0.6b", "tp={n}", 4, 1024),
    Step("qwen3-0.6b", "zero1={n}", 4, 1024),
    Step("qwen3-0.6b", "zero2={n}", 4, 1024),
    Step("qwen3-0.6b", "ddp={n}", 4, 256),
    Step("qwen3-0.6b", "fsdp={n}", 4, 256),
    Step("w640-d6", "ddp={n}", 4, 256, "adamw"),
    Step("w640-d6", "fsdp={n}", 8, 1024),
    Step("w640-d6", "tp={n}", 8, 1024),
    Step("w2048-d3-v32000", "ddp={n}", 8, 1024),
    Step("w2048-d3-v32000", "fsdp={n}", 8, 1024, "adamw"),
    Step("w3584-d2", "ddp={n}", 4, 512),
    Step("w3584-d2", "zero2={n}", 4, 1024),
    Step("w3584-d2", "tp={n}", 4, 1024),
    Step("qwen3-0.6b", "ddp={n}", 2, 1024, accumulate=4),
    Step("qwen3-0.6b", "fsdp={n}", 2, 1024, accumulate=4),
    Step("gpt2", "ddp={n}", 8, 1024),
    Step("gpt2", "fsdp={n}", 8, 1024),
    Step("llama-3.2-1b", "ddp={n}", 4, 1024),
    Step("llama-3.2-1b", "fsdp={n}", 4, 2048),
    Step("llama-3.2-1b", "tp={n}", 4, 1024),
    Step("qwen3-1.7b", "ddp={n}", 2, 1024),
    Step("qwen3-1.7b", "fsdp={n}", 8, 1024),
    Step("qwen3-1.7b", "zero1={n}", 4, 1024),
    Step("qwen3-1.7b", "zero2={n}", 4, 2048),
    Step("qwen3-1.7b", "tp={n}", 8, 1024),
    Step("qwen3-4b", "fsdp={n}", 2, 1024),
    Step("qwen3-4b", "tp={n}", 2, 2048),
    Step("qwen3-0.6b", "pp={n}", 4, 1024, accumulate=4),
    Step("llama-3.2-1b", "pp={n}", 2, 2048, accumulate=4),
    Step("qwen3-0.6b", "pp={n}:gpipe", 4, 1024, accumulate=4),
    Step("llama-3.2-1b", "cp={n}", 2, 4096),
    Step("qwen3-moe", "ep={n}", 4, 1024),
    Step("qwen3-1.7b", "pp={n}", 2, 1024, accumulate=8),
    Step("qwen3-1.7b", "cp={n},fsdp=1", 2, 4096),
    Step("qwen3-0.6b", "cp={n}", 4, 1024),
    Step("qwen3-0.6b", "pp={n}", 2, 512, accumulate=2),
    Step("qwen3-moe", "ep={n}", 8, 1024, accumulate=2),
)

# Steps that the device bounds, chosen before any of them was forecast.
LARGER = (
    Step("qwen3-0.6b", "ddp={n}", 8, 1024),
    Step("qwen3-0.6b", "zero1={n}", 8, 1024),
    Step("gpt2", "zero2={n}", 16, 1024),
    Step("llama-3.2-1b", "tp={n}", 8, 2048),
    Step("llama-3.2-1b", "zero1={n}", 8, 1024),
    Step("llama-3.2-1b", "ddp={n}", 4, 2048, accumulate=2),
    Step("qwen3-8b-d6", "tp={n}", 4, 2048),
    Step("qwen3-8b-d6", "fsdp={n}", 4, 2048),
    Step("qwen3-8b-d6", "pp={n}", 2, 2048, accumulate=4),
    Step("qwen3-0.6b", "fsdp={n}", 16, 1024),
    Step("gpt2", "fsdp={n}", 32, 1024),
    Step("llama-3.2-1b", "zero2={n}", 8, 1024, accumulate=2),
    Step("llama-3.2-1b", "pp={n}:gpipe", 4, 1024, accumulate=4),
    Step("llama-3.2-1b", "cp={n}", 2, 8192),
    Step("qwen3-moe", "ep={n}", 8, 2048),
    Step("qwen3-0.6b", "cp={n},fsdp=1", 8, 2048),
    Step("qwen3-1.7b", "ddp={n}", 4, 2048),
    Step("qwen3-1.7b", "fsdp={n}", 4, 2048, accumulate=2),
    Step("gpt2", "ddp={n}", 16, 1024, accumulate=2),
    Step("llama-3.2-1b", "pp={n}", 4, 2048, accumulate=8),
)

COMPILED = (
    *(Step("qwen3-0.6b", f"{kind}={{n}}", 4, 1024, mode="compile") for kind in ("ddp", "fsdp", "zero1", "zero2")),
    Step("w2048-d3-v32000", "ddp={n}", 8, 1024, mode="compile"),
    Step("w2048-d3-v32000", "fsdp={n}", 8, 1024, "adamw", mode="compile"),
    Step("llama-3.2-1b", "ddp={n}", 4, 1024, mode="compile"),
    Step("llama-3.2-1b", "fsdp={n}", 4, 2048, mode="compile"),
    Step("qwen3-0.6b", "ddp={n}", 4, 256, mode="compile"),
    Step("qwen3-0.6b", "fsdp={n}", 4, 256, mode="compile"),
    Step("qwen3-0.6b", "ddp={n}", 2, 1024, accumulate=4, mode="compile"),
    Step("qwen3-1.7b", "fsdp={n}", 8, 1024, mode="compile"),
)

# Compiled steps that the device bounds, chosen before any of them was forecast.
COMPILED_LARGER = (
    Step("qwen3-0.6b", "ddp={n}", 16, 1024, mode="compile"),
    Step("qwen3-0.6b", "fsdp={n}", 16, 1024, mode="compile"),
    Step("llama-3.2-1b", "ddp={n}", 8, 2048, mode="compile"),
    Step("llama-3.2-1b", "zero2={n}", 8, 2048, mode="compile"),
    Step("llama-3.2-1b", "zero1={n}", 8, 1024, mode="compile"),
    Step("qwen3-1.7b", "ddp={n}", 4, 2048, mode="compile"),
    Step("qwen3-1.7b", "fsdp={n}", 8, 2048, mode="compile"),
    Step("llama-3.2-1b", "fsdp={n}", 4, 2048, accumulate=2, mode="compile"),
    Step("gpt2", "fsdp={n}", 32, 1024, mode="compile"),
)

# Over four GPUs, chosen before any of them was forecast.
FOUR = (
    Step("qwen3-0.6b", "ddp=4", 8, 1024),
    Step("qwen3-0.6b", "fsdp=4", 16, 1024),
    Step("llama-3.2-1b", "zero1=4", 8, 1024),
    Step("gpt2", "zero2=4", 16, 1024),
    Step("qwen3-8b-d6", "fsdp=4", 4, 2048),
    Step("qwen3-1.7b", "ddp=4", 4, 2048),
    Step("llama-3.2-1b", "fsdp=4", 4, 2048, accumulate=2),
    Step("qwen3-0.6b", "ddp=4", 4, 1024),
    Step("qwen3-0.6b", "fsdp=4", 4, 1024),
    Step("gpt2", "ddp=4", 16, 1024, accumulate=2),
    Step("qwen3-8b-d6", "tp=4", 8, 2048),
    Step("llama-3.2-1b", "hsdp=2x2", 8, 2048),
    Step("llama-3.2-1b", "pp=4", 2, 2048, accumulate=8),
    Step("qwen3-8b-d6", "tp=2,fsdp=2", 8, 2048),
    Step("qwen3-moe", "ep=4", 8, 2048),
    Step("llama-3.2-1b", "cp=4", 2, 8192),
    Step("qwen3-1.7b", "pp=2,fsdp=2", 4, 1024, accumulate=4),
)

# Over four GPUs, where host and device take about as long, chosen before any of them was forecast.
FOUR_BALANCED = (
    Step("qwen3-0.6b", "fsdp=4", 8, 1024),
    Step("llama-3.2-1b", "fsdp=4", 4, 1024),
    Step("gpt2", "ddp=4", 4, 1024),
    Step("qwen3-1.7b", "zero2=4", 4, 1024),
    Step("llama-3.2-1b", "tp=4", 4, 1024),
    Step("qwen3-0.6b", "hsdp=2x2", 8, 1024),
    Step("gpt2", "zero1=4", 8, 1024),
    Step("llama-3.2-1b", "tp=2,fsdp=2", 8, 1024),
    Step("qwen3-1.7b", "fsdp=4", 8, 1024),
    Step("llama-3.2-1b", "ddp=4", 2, 1024),
    Step("qwen3-0.6b", "zero2=4", 16, 1024),
    Step("gpt2", "fsdp=4", 16, 1024),
)

# The same over two, chosen after the law of the slowest host was fixed and before any of them was forecast.
BALANCED = (
    Step("qwen3-0.6b", "fsdp={n}", 8, 1024),
    Step("llama-3.2-1b", "fsdp={n}", 2, 1024),
    Step("gpt2", "zero2={n}", 8, 1024),
    Step("qwen3-1.7b", "zero2={n}", 2, 1024),
    Step("llama-3.2-1b", "tp={n}", 2, 2048),
    Step("qwen3-0.6b", "zero1={n}", 4, 512),
    Step("gpt2", "fsdp={n}", 16, 1024),
    Step("qwen3-1.7b", "fsdp={n}", 4, 1024),
    Step("llama-3.2-1b", "ddp={n}", 2, 1024),
    Step("qwen3-0.6b", "ddp={n}", 4, 512),
)

# Compiled, over four GPUs, chosen before any of them was forecast.
COMPILED_FOUR = (
    Step("qwen3-0.6b", "ddp=4", 16, 1024, mode="compile"),
    Step("llama-3.2-1b", "ddp=4", 8, 1024, mode="compile"),
    Step("gpt2", "ddp=4", 32, 1024, mode="compile"),
    Step("qwen3-1.7b", "fsdp=4", 8, 2048, mode="compile"),
    Step("qwen3-8b-d6", "fsdp=4", 4, 2048, mode="compile"),
    Step("llama-3.2-1b", "zero2=4", 8, 2048, mode="compile"),
    Step("llama-3.2-1b", "hsdp=2x2", 8, 2048, mode="compile"),
    Step("qwen3-1.7b", "zero1=4", 8, 1024, mode="compile"),
    Step("qwen3-0.6b", "ddp=4", 4, 1024, mode="compile"),
    Step("qwen3-0.6b", "fsdp=4", 8, 1024, accumulate=2, mode="compile"),
)

# Clipped, fine-tuned, by optimizers of one GPU, chosen before any of them was forecast.
TRAINED = (
    Step("qwen3-0.6b", "ddp={n}", 8, 1024, clip=1.0),
    Step("llama-3.2-1b", "zero1={n}", 8, 1024, clip=1.0),
    Step("qwen3-1.7b", "fsdp={n}", 8, 1024, clip=1.0),
    Step("gpt2", "zero2={n}", 16, 1024, accumulate=2, clip=1.0),
    Step("qwen3-1.7b", "ddp={n}", 8, 1024, finetune="lora"),
    Step("qwen3-4b", "fsdp={n}", 4, 2048, clip=1.0, finetune="lora"),
    Step("llama-3.2-1b", "ddp={n}", 4, 1024, accumulate=2, finetune="lora"),
    Step("llama-3.2-1b", "ddp={n}", 8, 1024, finetune="last=8"),
    Step("qwen3-1.7b", "fsdp={n}", 8, 1024, finetune="last=4"),
    Step("qwen3-0.6b", "ddp={n}", 8, 1024, "muon"),
    Step("llama-3.2-1b", "ddp={n}", 4, 2048, "adafactor-foreach", clip=1.0),
    Step("qwen3-0.6b", "fsdp={n}", 4, 256, clip=1.0, finetune="lora"),
    Step("qwen3-0.6b", "ddp={n}", 16, 1024, mode="compile", clip=1.0),
    Step("llama-3.2-1b", "fsdp={n}", 8, 2048, mode="compile", clip=1.0),
    Step("qwen3-1.7b", "ddp={n}", 8, 1024, mode="compile", finetune="lora"),
    Step("qwen3-1.7b", "fsdp={n}", 8, 2048, mode="compile", finetune="lora"),
)

# Small ones, which the host bounds, chosen before any of them was forecast.
HOST_BOUND = (
    Step("qwen3-0.6b", "fsdp={n}", 4, 512),
    Step("gpt2", "fsdp={n}", 4, 512),
    Step("llama-3.2-1b", "zero2={n}", 2, 512),
    Step("qwen3-1.7b", "tp={n}", 2, 1024),
    Step("gpt2", "ddp={n}", 4, 256),
    Step("qwen3-0.6b", "tp={n}", 8, 512),
    Step("llama-3.2-1b", "zero1={n}", 2, 256),
    Step("qwen3-0.6b", "zero2={n}", 2, 1024, accumulate=2),
    Step("qwen3-1.7b", "pp={n}", 2, 256, accumulate=4),
    Step("qwen3-0.6b", "ddp={n}", 2, 512, mode="compile"),
    Step("gpt2", "fsdp={n}", 4, 512, mode="compile"),
    Step("llama-3.2-1b", "fsdp={n}", 2, 512, mode="compile"),
)

GROUPS = {
    "first": STEPS, "larger": LARGER, "compiled": COMPILED, "compiled-larger": COMPILED_LARGER, "four": FOUR,
    "four-balanced": FOUR_BALANCED, "balanced": BALANCED, "compiled-four": COMPILED_FOUR, "trained": TRAINED,
    "host-bound": HOST_BOUND,
}  # fmt: skip
ALL = tuple(step for steps in GROUPS.values() for step in steps)


def built(step: Step) -> ParallelStep | PipelineStep:
    layout = Layout.parse(step.layout.format(n=dist.get_world_size()))
    forget(step.mode)
    torch.manual_seed(dist.get_rank() if layout.world == layout.data else 0)
    made = build_parallel(MODELS[step.model], layout, mesh_of(layout, "cuda"), "cuda", Recipe(**step.settings))
    made.warm_up()
    return made


def timed(step: Step) -> Measured:
    times = time_rank(built(step), rounds=ROUNDS)
    return Measured(
        step=asdict(step), config=MODELS[step.model], rank=dist.get_rank(), ranks=dist.get_world_size(),
        gpu=torch.cuda.get_device_name(), torch=torch.__version__, nccl=".".join(map(str, torch.cuda.nccl.version())),
        **asdict(times),
    )  # fmt: skip


def save(measured: Measured, path: Path) -> None:
    path.write_bytes(gzip.compress(json.dumps(asdict(measured)).encode(), mtime=0))


def load(path: Path) -> Measured:
    read = json.loads(gzip.decompress(path.read_bytes()))
    kernels = [[Kernel(**kernel) for kernel in step] for step in read["kernels"]]
    return Measured(**{**read, "kernels": kernels})


def _attempt(step: Step, path: Path, stage: str) -> None:
    known = load(path) if path.is_file() else None
    if stage == "times" and known is None:
        save(timed(step), path)
    elif stage == "kernels" and known is not None and not known.kernels:
        save(replace(known, kernels=profile_rank(built(step))), path)


def run_all(out: Path, steps: list[Step], stages: Sequence[str] = STAGES) -> int:
    """Returns how many failed; a failure is told and ends no other step."""
    failed = 0
    for stage in stages:
        for step in steps:
            start = time.perf_counter()
            try:
                _attempt(step, out / f"{step.name}.rank{dist.get_rank()}.json.gz", stage)
                told = "done"
            except (FlopcastError, RuntimeError, ValueError, NotImplementedError) as fault:
                failed += 1
                told = f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
            gc.collect()
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(f"{step.name} {stage}: {told}, {time.perf_counter() - start:.1f} s", flush=True)
    return failed


def options_of(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Step]]:
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="kinds of layout, with commas between")
    parser.add_argument("--steps", choices=tuple(GROUPS), default="first")
    options = parser.parse_args()
    steps = GROUPS[options.steps]
    wanted = options.only.split(",") if options.only else []
    return options, [step for step in steps if not wanted or step.layout.partition("=")[0] in wanted]


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    options, steps = options_of(parser)
    options.out.mkdir(parents=True, exist_ok=True)
    with group_of("cuda"):
        failed = run_all(options.out, steps, options.stages)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
