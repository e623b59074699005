"""Records compiled training steps on a GPU: generated code, launches in order, times and memory.

    python -m studies.compiled.record OUT                all cases, each in fresh processes
    python -m studies.compiled.record OUT --only mlp     one of them

The recipe is the usual one: `model = torch.compile(model)` (or `mode="reduce-overhead"`, which captures CUDA graphs),
autocast to bf16 around the call, the loss inside the model, backward and optimizer outside. Cases are compiled first,
several at once, which fills inductor's cache and keeps the code; then each is timed alone. OUT gets CASE.json.gz, the
record of `_record`, and CASE.code.gz, the text of every graph that inductor generated, forward and backward.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from studies.command import parser_of

MODES = ("compile", "compile-graphs")
AT_ONCE = 5  # compilations; each keeps some processors busy


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


CASES = (
    Case("qwen3-0.6b-l2", "qwen3-0.6b", layers=2),
    Case("qwen3-0.6b-l3", "qwen3-0.6b", layers=3),
    Case("qwen3-0.6b-l2-4x256", "qwen3-0.6b", layers=2, batch=4, seq=256, optimizer="adamw"),
    Case("qwen3-1.7b-l2", "qwen3-1.7b", layers=2),
    Case("qwen3-4b-l2", "qwen3-4b", layers=2),
    Case("llama-3.2-1b-l2", "llama-3.2-1b", layers=2, batch=4, seq=2048),
    Case("gpt2-l2", "gpt2", layers=2),
    Case("qwen3-moe-l2", "qwen3-moe", layers=2, batch=4, seq=512),
    Case("vit-b16", module="flopcast.microbench.zoo:vit_b16", batch=32),
    Case("resnet50", module="flopcast.microbench.zoo:resnet50", batch=32),
    Case("mlp", module="flopcast.microbench.zoo:mlp", batch=4096),
    Case("qwen3-0.6b-4x256", "qwen3-0.6b", batch=4, seq=256),
    Case("qwen3-0.6b-8x1024", "qwen3-0.6b"),
)


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, help="folder for the records")
    parser.add_argument("--only", help="the name of one case")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many seconds")
    parser.add_argument("--stage", choices=("compile", "measure"), help="what a child process does with its case")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [case for case in CASES if options.only in (None, case.name)]
    if not wanted:
        parser.error(f"--only {options.only!r}: valid are {', '.join(case.name for case in CASES)}")
    if options.stage == "compile":
        _compile(wanted[0], options.out)
    elif options.stage == "measure":
        _measure(wanted[0], options.out)
    else:
        _all(wanted, options.out, time.monotonic() + options.seconds)


def _all(cases: list[Case], out: Path, end: float) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda case: _child(case, "compile", out, end), cases))
    for case in sorted(cases, key=lambda case: case.layers is not None):  # whole models first, while there is time
        _child(case, "measure", out, end)


def _child(case: Case, stage: str, out: Path, end: float) -> None:
    """Runs a stage of a case in a process of its own, whose failure is told and ends nothing else."""
    left = end - time.monotonic()
    if left < 5.0:
        print(f"{case.name}: {stage} not begun, no time left", flush=True)
        return
    started = time.monotonic()
    command = [sys.executable, "-m", "studies.compiled.record", str(out), "--only", case.name, "--stage", stage]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "compiled-steps")}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left)
        told = done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip()[-1500:]}"
    except subprocess.TimeoutExpired:
        told = "out of time"
    print(f"{case.name}: {stage} {time.monotonic() - started:.0f} s: {told}", flush=True)


def _compile(case: Case, out: Path) -> None:
    """Compiles the step, runs it once, and keeps the code of every graph."""
    import torch
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    GraphLowering.save_output_code = staticmethod(found.append)
    step = _build(case, "compile")
    step.run()
    torch.cuda.synchronize()
    text = "\n".join(f"# ---- graph {number}\n{code}" for number, code in enumerate(found))
    text = re.sub(r"^# kernel path: .*\n", "", text, flags=re.MULTILINE)  # a path of that machine
    (out / f"{case.name}.code.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{len(found)} graphs")


def _measure(case: Case, out: Path) -> None:
    """Times the step in each mode; the profiler comes last, since it slows every launch after it."""
    import torch

    from flopcast.microbench.steps import measure

    timed, built = {}, {}
    for mode in MODES:
        torch._dynamo.reset()
        started = time.monotonic()
        built[mode] = step = _build(case, mode)
        step.run()
        torch.cuda.synchronize()
        compiling = time.monotonic() - started
        timed[mode] = asdict(measure.time_step(step, warm_up=4)) | {"compile_seconds": compiling}
    kernels = {}
    for mode, step in built.items():
        runs = [measure.profile_kernels(step) for _ in range(3)]
        kernels[mode] = [[kernel.name, kernel.seconds] for kernel in runs[-1]]
        timed[mode]["device_seconds"] = [sum(kernel.seconds for kernel in run) for run in runs]
    record = _record(case, timed, kernels)
    (out / f"{case.name}.json.gz").write_bytes(gzip.compress(json.dumps(record).encode(), 9, mtime=0))
    shown = {
        mode: f"{min(t['step_seconds']) * 1e3:.1f} ms, {t['device_seconds'][-1] * 1e3:.1f} in {len(kernels[mode])}"
        for mode, t in timed.items()
    }
    print(shown)


def _record(case: Case, timed: dict[str, Any], kernels: dict[str, Any]) -> dict[str, Any]:
    """The case, the stack and device, and by mode the times of `StepTiming`, device seconds of three profiled steps,
    and [name, seconds] of the last one's kernels in launch order."""
    import torch
    import transformers

    device = torch.cuda.get_device_properties(0)
    stack = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    return {
        "schema": 1, "case": asdict(case), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "stack": stack,
        "device": device.name, "timed": timed, "kernels": kernels,
    }  # fmt: skip


def _build(case: Case, mode: str) -> Any:
    """The training step on the GPU, its model compiled."""
    import importlib

    import torch

    from flopcast.microbench.recipe.training_step import build, build_module
    from flopcast.roofline.stream.model.models import load_config, with_depth

    torch.manual_seed(0)
    if case.config:
        config = load_config(case.config)
        if case.layers is not None:
            config = with_depth(config, case.layers)
        step = build(config, "cuda", batch=case.batch, seq=case.seq, optimizer=case.optimizer)
    else:
        module, _, name = case.module.partition(":")
        model, batch = getattr(importlib.import_module(module), name)(batch=case.batch)
        step = build_module(model, batch, "cuda", optimizer=case.optimizer)
    compiled: Any = torch.compile(step.model, mode="reduce-overhead" if mode == "compile-graphs" else None)
    step.model = compiled
    return step


if __name__ == "__main__":
    main()
