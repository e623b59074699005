"""A model on all Triton kernels beside torch's own, eager, compiled and captured, in one run: losses, medians, kernels.

    python -m studies.kernels.steps OUT [--case qwen3-0.6b:28:8:1024 ...] [--compiled-layers 28] [--seconds 200]

A case is a model, its layers, the batch and the tokens per row. Each has a worker process per contender (torch, ours),
which builds a step of a mode, makes its first steps and waits to be let measure: eager, `torch.compile`, and
`torch.compile(mode="reduce-overhead")`, the last two of the first `--compiled-layers` layers. Whoever is ready measures
while all others are stopped (SIGSTOP), so that a time is taken alone on the machine while nobody waits for the slowest
compilation; workers of the next case start when one ends. Every mode starts from the same weights and makes the same
first steps, whose losses must agree with torch's within 2% (exit 1 otherwise). fp32 weights, bf16 autocast, fused
AdamW, one fixed batch.

Writes OUT/steps.csv, a row per mode as it is done: the median, the least and the greatest step, from start to end of
the device's work; of one more step, which torch's profiler records, the milliseconds of all kernels and by class.
"""

from __future__ import annotations

import csv
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from studies.command import parser_of

CASES = (
    "qwen3-0.6b:28:8:1024", "qwen3-0.6b:28:4:256", "qwen3-1.7b:28:8:1024", "qwen3-1.7b:28:4:256",
    "llama-3.2-1b:16:4:2048",
)  # fmt: skip
CONTENDERS = ("torch", "ours")
TOLERANCE = 0.02  # of a loss: ten times bf16's rounding
MODES = {"eager": None, "compile": "default", "compile-graphs": "reduce-overhead"}
CHECKED = 4  # first steps, whose losses are compared

# The class of a kernel is the first whose pattern its name has.
CLASSES = (
    ("products", r"nvjet|gemm|xmma|cublas|cutlass_(?!.*fmha)|splitK|matmul"),
    ("attention", r"flash|fmha|cudnn|attention|(dkdv|dq|onepass|dq_scale)_kernel|^(forward|prepare|delta)_kernel"),
    ("optimizer", r"multi_tensor_apply|adamw"),
    ("compiled", r"^triton_"),
    ("norms, rope, activation", r"rms_norm|rope_|share_sum|column_sum|swiglu"),
    ("loss", r"both_kernel|split_kernel|count_kernel|mean_kernel|scale_kernel|backward_kernel|softmax|nll"),
    ("copies", r"[Mm]em(cpy|set)|copy"),
    ("reductions", r"reduce"),
    ("others", r""),
)


@dataclass(frozen=True)
class Row:
    config: str
    contender: str
    mode: str
    layers: int
    batch: int
    seq: int
    median_seconds: float
    least_seconds: float
    greatest_seconds: float
    steps: int
    losses: tuple[float, ...]
    kernel_ms: float = 0.0
    kernels: int = 0
    by_class: str = ""  # JSON: class -> [milliseconds, kernels]
    reason: str = ""


def class_of(kernel: str) -> str:
    return next(name for name, pattern in CLASSES if re.search(pattern, kernel))


# --- a worker


def _step(config: dict[str, Any], layers: int, batch: int, seq: int, contender: str, mode: str) -> Callable[[], Any]:
    """Builds a model from the same weights every time; returns a training step that returns the loss."""
    import torch

    from flopcast.kernels.patch import patch
    from flopcast.microbench.recipe.settings import Recipe
    from flopcast.microbench.recipe.training_step import build

    step = build({**config, "num_hidden_layers": layers}, "cuda", Recipe(batch=batch, seq=seq, optimizer="adamw-fused"))
    if contender == "ours":
        patch(step.model)
    if (torch_mode := MODES[mode]) is not None:
        torch._dynamo.reset()
        compiled: Any = torch.compile(step.model, fullgraph=contender != "torch", mode=torch_mode)
        step.model = compiled
    return step.run


def _times(run: Callable[[], Any], steps: int) -> list[float]:
    import torch

    found = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


def _kernels(run: Callable[[], Any]) -> tuple[float, int, str]:
    """(milliseconds of all kernels of a step, their number, both by class as JSON)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    milliseconds, numbers = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if str(event.device_type).endswith("CUDA"):
            name = class_of(event.name)
            milliseconds[name] += event.time_range.elapsed_us() / 1e3
            numbers[name] += 1
    told = {name: [round(milliseconds[name], 3), numbers[name]] for name in numbers}
    return sum(milliseconds.values()), sum(numbers.values()), json.dumps(told)


def worker(task: dict[str, Any]) -> None:
    """Prepares a mode, says so, waits for a line on standard input, measures and prints a JSON row; all modes."""
    import gc

    import torch

    name, batch, seq = task["contender"], task["batch"], task["seq"]
    for mode in task["modes"]:
        layers = task["layers"] if mode == "eager" else min(task["layers"], task["compiled_layers"])
        losses: tuple[float, ...] = ()
        times: list[float] = []
        kernels, reason = (0.0, 0, ""), ""
        run: Callable[[], Any] | None = None
        try:
            run = _step(task["model"], layers, batch, seq, name, mode)
            losses = tuple(float(run()) for _ in range(CHECKED))
            print("ready", flush=True)
            sys.stdin.readline()
            times = _times(run, task["steps"])
            kernels = _kernels(run)
        except Exception as error:  # a mode that fails is a row with a reason
            reason = f"{type(error).__name__}: {str(error)[:600]}"
        row = Row(
            task["config"], name, mode, layers, batch, seq, statistics.median(times) if times else 0.0,
            min(times, default=0.0), max(times, default=0.0), len(times), losses, *kernels, reason,
        )  # fmt: skip
        print(json.dumps(asdict(row)), flush=True)
        del run
        gc.collect()
        torch.cuda.empty_cache()


# --- the run


@dataclass
class Worker:
    process: subprocess.Popen[str]
    log: IO[str]

    def signal(self, number: int) -> None:
        """To the worker and the processes that compile for it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def _start(task: dict[str, Any], out: Path, told: queue.Queue[tuple[Worker, str]]) -> Worker:
    log = (out / f"{task['config']}-{task['batch']}x{task['seq']}-{task['contender']}.log").open("w", encoding="utf-8")
    command = [sys.executable, "-m", "studies.kernels.steps", "--worker", json.dumps(task)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        env={**os.environ, "TEARDOWN_CUPTI": "1"},  # else what the profiler leaves behind costs later launches
    )  # fmt: skip
    made = Worker(process, log)

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told.put((made, line))
        told.put((made, ""))

    threading.Thread(target=listen, daemon=True).start()
    return made


def run(tasks: Sequence[dict[str, Any]], out: Path, at_once: int, end: float) -> Iterator[Row]:
    """The rows of all tasks, `at_once` of them prepared at a time, until `end`."""
    told: queue.Queue[tuple[Worker, str]] = queue.Queue()
    waiting, ready, alive = list(tasks), list[Worker](), list[Worker]()
    measuring: Worker | None = None
    try:
        while (waiting or alive) and time.monotonic() < end:
            while waiting and len(alive) < at_once and measuring is None:
                alive.append(_start(waiting.pop(0), out, told))
            if measuring is None and ready:
                measuring = ready.pop(0)
                for other in alive:
                    if other is not measuring:
                        other.signal(signal.SIGSTOP)
                assert measuring.process.stdin is not None
                measuring.process.stdin.write("go\n")
                measuring.process.stdin.flush()
            try:
                who, line = told.get(timeout=max(0.1, min(5.0, end - time.monotonic())))
            except queue.Empty:
                continue
            if line.startswith("ready"):
                ready.append(who)
                continue
            if line.startswith("{"):
                found = json.loads(line)
                yield Row(**{**found, "losses": tuple(found["losses"])})
            if line == "":
                alive.remove(who)
            elif not line.startswith("{"):
                continue
            if who is measuring:
                measuring = None
                for other in alive:
                    other.signal(signal.SIGCONT)
    finally:
        for one in alive:
            one.signal(signal.SIGKILL)
            one.process.wait()
            one.log.close()


def disagreements(rows: Sequence[Row]) -> Iterator[str]:
    """The modes whose first losses are not those of torch's eager step, or else of its compiled one, of as many layers,
    size and weights."""
    reference: dict[tuple[Any, ...], tuple[float, ...]] = {}
    for mode in reversed(MODES):
        reference |= {
            (x.config, x.layers, x.batch, x.seq): x.losses
            for x in rows
            if (x.contender, x.mode) == ("torch", mode) and x.losses
        }
    for row in rows:
        name = f"{row.config}, {row.contender}, {row.mode}, {row.layers} layers, {row.batch} x {row.seq}"
        if row.reason:
            yield f"{name}: {row.reason}"
            continue
        want = reference.get((row.config, row.layers, row.batch, row.seq), ())
        if any(abs(one - other) > TOLERANCE * abs(other) for one, other in zip(row.losses, want, strict=False)):
            yield f"{name}: losses {row.losses}, torch's {want}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--case", action="append", help="config:layers:batch:seq; without it five cases")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="without it all")
    parser.add_argument("--compiled-layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--at-once", type=int, default=4, help="workers that compile side by side")
    parser.add_argument("--seconds", type=float, default=200.0, help="after which workers are ended")
    parser.add_argument("--worker", type=json.loads)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker)
        return 0
    import torch

    from flopcast.roofline.stream.model.models import load_config

    if options.out is None or not torch.cuda.is_available():
        print("steps writes to the folder OUT and needs a GPU", file=sys.stderr)
        return 1
    end = time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the workers, who may be stopped, end with us
    options.out.mkdir(parents=True, exist_ok=True)
    tasks = []
    for case in options.case or CASES:
        name, layers, batch, seq = case.split(":")
        sizes = {"layers": int(layers), "batch": int(batch), "seq": int(seq), "steps": options.steps}
        of_case = {
            "config": name, "model": dict(load_config(name)), "modes": options.mode or list(MODES),
            "compiled_layers": options.compiled_layers, **sizes,
        }  # fmt: skip
        tasks += [{**of_case, "contender": who} for who in CONTENDERS]
    rows: list[Row] = []
    with (options.out / "steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in run(tasks, options.out, options.at_once, end):
            rows.append(row)
            writer.writerow(asdict(row))
            file.flush()
            print(
                f"{row.config:13} {row.contender:6} {row.mode:15} {row.layers:3} layers {row.batch} x {row.seq:4}: "
                f"{row.median_seconds * 1e3:7.2f} ms, kernels {row.kernel_ms:7.2f} ms {row.kernels:5}  "
                f"{row.by_class or row.reason[:300]}",
                flush=True,
            )
    wrong = list(disagreements(rows))
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
