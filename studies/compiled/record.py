"""Records compiled training steps on a GPU: generated code, launches in order, times and memory.

    python -m studies.compiled.record OUT                    all cases
    python -m studies.compiled.record OUT --only mlp,vit-b16 some of them
    python -m studies.compiled.record OUT --seconds 190      what can be had in so many seconds

The recipe is the usual one: `model = torch.compile(model)` (or `mode="reduce-overhead"`, which captures CUDA graphs),
autocast to bf16 around the call, the loss inside the model, backward and optimizer outside. A case has two stages,
each in a process of its own. `kernels` compiles, keeps the code of every graph and profiles three steps; as many cases
are compiled at once as the GPU's memory holds, while one at a time runs anything on the GPU, so that neither Triton's
choice among configurations nor the kernels' times suffer. `times` comes when all that is done, since compiling keeps
the host busy and since the profiler slows every launch after it: the step in both modes, from inductor's cache.

OUT gets CASE.code.gz, the text of every graph that inductor generated, forward and backward, and CASE.json.gz, the
record of `keep`, which is written anew after every stage.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from studies.command import parser_of

MODES = ("compile", "compile-graphs")
STAGES = ("kernels", "times")
# Of a GPU of 141 GB. What is needed is the forecast of the eager step less a quarter: compiling saves about a third.
GIGABYTES = {"kernels": 128, "times": 128}
AT_ONCE = {"kernels": 13, "times": 4}  # timed steps want an idle host
COMPILE_THREADS = 4  # of each process; all 13 together on 16 cores
LEAST_SECONDS = {"kernels": 30.0, "times": 15.0}  # a stage that has less is not begun


@dataclass(frozen=True)
class Case:
    """A step. `config`: a shipped one; `layers` replaces its depth. Without it `module` names a factory."""

    name: str
    config: str = ""
    module: str = ""
    batch: int = 8
    seq: int = 1024
    layers: int | None = None
    optimizer: str = "adamw-fused"
    gigabytes: int = 8


CASES = (  # the longest to compile first
    Case("qwen3-0.6b-8x1024", "qwen3-0.6b", gigabytes=33),
    Case("qwen3-0.6b-4x256", "qwen3-0.6b", batch=4, seq=256, gigabytes=11),
    Case("resnet50", module="flopcast.microbench.zoo:resnet50", batch=32),
    Case("vit-b16", module="flopcast.microbench.zoo:vit_b16", batch=32),
    Case("qwen3-0.6b-l3", "qwen3-0.6b", layers=3, gigabytes=16),
    Case("qwen3-0.6b-l2", "qwen3-0.6b", layers=2, gigabytes=15),
    Case("gpt2-l2", "gpt2", layers=2),
    Case("mlp", module="flopcast.microbench.zoo:mlp", batch=4096),
    Case("qwen3-0.6b-l2-4x256", "qwen3-0.6b", layers=2, batch=4, seq=256, optimizer="adamw"),
    Case("qwen3-moe-l2", "qwen3-moe", layers=2, batch=4, seq=512),
    Case("llama-3.2-1b-l2", "llama-3.2-1b", layers=2, batch=4, seq=2048, gigabytes=16),
    Case("qwen3-1.7b-l2", "qwen3-1.7b", layers=2, gigabytes=18),
    Case("qwen3-4b-l2", "qwen3-4b", layers=2, gigabytes=21),
)

Run = Callable[[Case, str], None]


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, help="folder for the records")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many seconds")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries this script")
    parser.add_argument("--stage", choices=STAGES, help="what a child process does with its case")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [case.name for case in CASES]
    if unknown := set(names) - {case.name for case in CASES}:
        parser.error(f"--only {', '.join(sorted(unknown))}: valid are {', '.join(case.name for case in CASES)}")
    wanted = [case for case in CASES if case.name in names]
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage == "kernels":
        _kernels(wanted[0], options.out, options.device)
    elif options.stage == "times":
        _times(wanted[0], options.out, options.device)
    else:
        end = time.monotonic() + options.seconds
        for stage in STAGES:
            in_parallel(wanted, stage, lambda case, stage: _child(case, stage, options.out, options.device, end))


def in_parallel(cases: Sequence[Case], stage: str, run: Run) -> None:
    """Runs a stage of every case, in order, as many at once as `AT_ONCE` and the GPU's memory admit."""
    admitted = threading.Condition()
    free = GIGABYTES[stage]

    def admit(gigabytes: int) -> None:
        nonlocal free
        with admitted:
            free += gigabytes
            admitted.notify_all()

    def begin(case: Case) -> None:
        nonlocal free
        with admitted:
            admitted.wait_for(lambda: free >= case.gigabytes)
            free -= case.gigabytes
        try:
            run(case, stage)
        finally:
            admit(case.gigabytes)

    with ThreadPoolExecutor(AT_ONCE[stage]) as pool:
        list(pool.map(begin, cases))


def _child(case: Case, stage: str, out: Path, device: str, end: float) -> None:
    """Runs a stage of a case in a process of its own, whose failure is told and ends nothing else."""
    left = end - time.monotonic()
    if left < LEAST_SECONDS[stage]:
        print(f"{case.name}: {stage} not begun, {left:.0f} s left", flush=True)
        return
    started = time.monotonic()
    command = [sys.executable, "-m", "studies.compiled.record", str(out), "--only", case.name, "--stage", stage]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "compiled-steps"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS),
    }
    try:
        done = subprocess.run(
            [*command, "--device", device], env=environment, capture_output=True, text=True, timeout=left
        )
        told = done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip()[-1500:]}"
    except subprocess.TimeoutExpired as late:
        told = f"out of time: {(late.stdout or b'').decode().strip()}"
    print(f"{case.name}: {stage} {time.monotonic() - started:.0f} s: {told}", flush=True)


def first_run(step: Any, device: str) -> float:
    """Compiles and runs the step, each of its graphs with the GPU for itself. Returns seconds."""
    from flopcast.microbench.steps.gpu_alone import graphs_alone

    started = time.monotonic()
    with graphs_alone(device):
        step.run()
    return time.monotonic() - started


def _kernels(case: Case, out: Path, device: str) -> None:
    """Compiles the step, keeps the code of every graph, and profiles three steps."""
    from torch._inductor.graph import GraphLowering

    from flopcast.microbench.steps import measure
    from flopcast.microbench.steps.gpu_alone import gpu_alone

    found: list[str] = []
    GraphLowering.save_output_code = staticmethod(found.append)
    step = _build(case, "compile", device)
    compiling = first_run(step, device)
    if not found:
        raise SystemExit(f"no code was generated: delete {os.environ.get('TORCHINDUCTOR_CACHE_DIR', 'inductor cache')}")
    keep_code(case, out, found)
    print(f"{len(found)} graphs in {compiling:.0f} s", flush=True)
    with gpu_alone(device):
        for _ in range(3):
            step.run()
        runs = [measure.profile_kernels(step) for _ in range(3)]
    kernels = steady([[(kernel.name, kernel.seconds) for kernel in run] for run in runs])
    sums = [sum(kernel.seconds for kernel in run) for run in runs]
    keep(case, out, {"compile": {"device_seconds": sums}}, {"compile": kernels})
    print(f"{median(sums) * 1e3:.2f} ms in {len(kernels)} kernels", flush=True)


def keep_code(case: Case, out: Path, codes: Sequence[str]) -> None:
    """Writes the text of every graph, without the paths of that machine."""
    text = "\n".join(f"# ---- graph {number}\n{code}" for number, code in enumerate(codes))
    text = re.sub(r"^# kernel path: .*\n", "", text, flags=re.MULTILINE)
    (out / f"{case.name}.code.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def steady(runs: Sequence[Sequence[tuple[str, float]]]) -> list[list[Any]]:
    """[name, median of its seconds] of the kernels of steps that launch the same; of the last step if they differ."""
    names = [[name for name, _ in run] for run in runs]
    if any(other != names[-1] for other in names):
        return [[name, seconds] for name, seconds in runs[-1]]
    return [[name, median(run[place][1] for run in runs)] for place, name in enumerate(names[-1])]


def _times(case: Case, out: Path, device: str) -> None:
    """Times the step in each mode."""
    import torch

    from flopcast.microbench.steps import measure
    from flopcast.microbench.steps.gpu_alone import gpu_alone

    for mode in MODES:
        torch._dynamo.reset()
        step = _build(case, mode, device)
        compiling = first_run(step, device)
        with gpu_alone(device):
            timing = measure.time_step(step, warm_up=4)
        keep(case, out, {mode: asdict(timing) | {"compile_seconds": compiling}}, {})
        print(f"{mode} {median(timing.step_seconds) * 1e3:.2f} ms", flush=True)
        del step


def keep(case: Case, out: Path, timed: Mapping[str, Any], kernels: Mapping[str, Any]) -> None:
    """Adds to the record: the case, the stack and device, by mode the times of `StepTiming` and the device seconds of
    three profiled steps, and [name, median of its seconds in them] of the kernels in launch order."""
    import torch
    import transformers

    path = out / f"{case.name}.json.gz"
    known = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {"timed": {}, "kernels": {}}
    device = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "cpu"
    stack = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    record = {
        "schema": 1, "case": asdict(case), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "stack": stack,
        "device": device,
        "timed": known["timed"] | {mode: known["timed"].get(mode, {}) | times for mode, times in timed.items()},
        "kernels": known["kernels"] | dict(kernels),
    }  # fmt: skip
    path.write_bytes(gzip.compress(json.dumps(record).encode(), 9, mtime=0))


def _build(case: Case, mode: str, device: str) -> Any:
    """The training step on the device, its model compiled."""
    import importlib

    import torch

    from flopcast.microbench.recipe.settings import Recipe
    from flopcast.microbench.recipe.training_step import build, build_module
    from flopcast.roofline.stream.model.models import load_config, with_depth

    torch.manual_seed(0)
    if case.config:
        config = load_config(case.config)
        if case.layers is not None:
            config = with_depth(config, case.layers)
        step = build(config, device, Recipe(batch=case.batch, seq=case.seq, optimizer=case.optimizer))
    else:
        module, _, name = case.module.partition(":")
        model, batch = getattr(importlib.import_module(module), name)(batch=case.batch)
        step = build_module(model, batch, device, Recipe(optimizer=case.optimizer))
    compiled: Any = torch.compile(step.model, mode="reduce-overhead" if mode == "compile-graphs" else None)
    step.model = compiled
    return step


if __name__ == "__main__":
    main()
