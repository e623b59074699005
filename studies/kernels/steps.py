"""A Qwen3 on all Triton kernels beside torch's own, eager, compiled and captured, in one run: losses and medians.

    python -m studies.kernels.steps OUT [--config qwen3-0.6b] [--layers 28] [--compiled-layers 8] [--seconds 80]

A worker process per contender (torch, ours) and size compiles at the same time as the others; then one after the other
measures, alone on the machine: `torch.compile(mode="reduce-overhead")`, `torch.compile` and eager of the first
`--compiled-layers` layers, and eager of all `--layers`, ours once more with every product on the backend that the
profile says is faster. Every mode starts from the same weights and makes the same first steps, whose losses must agree
with torch's within 2% (exit 1 otherwise). fp32 weights, bf16 autocast, fused AdamW, one fixed batch. Writes
OUT/steps.csv: a row per mode with the median, the least and the greatest step, from start to end of the device's work.
"""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from studies.command import parser_of

SIZES = ((4, 256), (8, 1024))
TOLERANCE = 0.02  # of a loss: ten times bf16's rounding
MODES = {"compile-graphs": "reduce-overhead", "compile": "default", "eager": None}
CHECKED = 4  # first steps, whose losses are compared


@dataclass(frozen=True)
class Row:
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
    reason: str = ""


# --- a worker


def _step(config: dict[str, Any], layers: int, batch: int, seq: int, patched: str, mode: str) -> Callable[[], Any]:
    """Builds a model from the same weights every time; returns a training step that returns the loss."""
    import torch

    import flopcast
    from flopcast.kernels.patch import patch
    from flopcast.microbench.recipe.training_step import build

    step = build({**config, "num_hidden_layers": layers}, "cuda", batch=batch, seq=seq, optimizer="adamw-fused")
    if patched == "ours":
        patch(step.model)
    elif patched == "ours, best products":
        flopcast.patch(step.model)
    if (torch_mode := MODES[mode]) is not None:
        fullgraph = patched != "torch"
        compiled: Any = torch.compile(step.model, fullgraph=fullgraph, mode=torch_mode)
        step.model = compiled
    return step.run


def _losses(run: Callable[[], Any]) -> tuple[float, ...]:
    return tuple(float(run()) for _ in range(CHECKED))


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


def worker(task: dict[str, Any]) -> None:
    """Makes the compiled steps at once, waits for a line on standard input, measures; prints a JSON row per mode."""
    import gc

    import torch

    contender, batch, seq, shallow = task["contender"], task["batch"], task["seq"], task["compiled_layers"]
    ready: dict[str, tuple[Callable[[], Any], tuple[float, ...]]] = {}
    failed: dict[str, str] = {}

    def prepare(name: str, mode: str, layers: int) -> None:
        try:
            run = _step(task["config"], layers, batch, seq, name, mode)
            ready[f"{name}/{mode}"] = run, _losses(run)
        except Exception as error:  # a mode that fails is a row with a reason
            failed[f"{name}/{mode}"] = f"{type(error).__name__}: {str(error)[:600]}"

    def report(name: str, mode: str, layers: int) -> None:
        key = f"{name}/{mode}"
        run, losses = ready.pop(key, (None, ()))
        times = [] if run is None else _times(run, task["steps"])
        print(
            json.dumps(asdict(Row(
                name, mode, layers, batch, seq, statistics.median(times) if times else 0.0, min(times, default=0.0),
                max(times, default=0.0), len(times), losses, failed.get(key, ""),
            ))),
            flush=True,
        )  # fmt: skip
        del run
        gc.collect()
        torch.cuda.empty_cache()

    for mode in ("compile-graphs", "compile"):
        prepare(contender, mode, shallow)
    print("ready", flush=True)
    sys.stdin.readline()
    for mode in ("compile-graphs", "compile"):
        report(contender, mode, shallow)
    plan = [(contender, shallow), (contender, task["layers"])]
    plan += [("ours, best products", task["layers"])] if contender == "ours" else []
    for name, layers in plan:
        prepare(name, "eager", layers)
        report(name, "eager", layers)


# --- the run


def _start(task: dict[str, Any], out: Path) -> tuple[subprocess.Popen[str], IO[str]]:
    log = (out / f"{task['contender']}-{task['batch']}x{task['seq']}.log").open("w", encoding="utf-8")
    command = [sys.executable, "-m", "studies.kernels.steps", "--worker", json.dumps(task)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True), log


def _rows(process: subprocess.Popen[str]) -> Iterator[Row]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            fields_ = json.loads(line)
            yield Row(**{**fields_, "losses": tuple(fields_["losses"])})


def disagreements(rows: Sequence[Row]) -> Iterator[str]:
    """The modes whose first losses are not those of torch's eager step of as many layers, size and weights."""
    reference = {(x.layers, x.batch, x.seq): x.losses for x in rows if (x.contender, x.mode) == ("torch", "eager")}
    for row in rows:
        name = f"{row.contender}, {row.mode}, {row.layers} layers, {row.batch} x {row.seq}"
        if row.reason:
            yield f"{name}: {row.reason}"
            continue
        want = reference.get((row.layers, row.batch, row.seq), ())
        if any(abs(one - other) > TOLERANCE * abs(other) for one, other in zip(row.losses, want, strict=False)):
            yield f"{name}: losses {row.losses}, torch's {want}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--config", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--compiled-layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=80.0, help="after which workers are ended")
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
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    common = {
        "config": dict(load_config(options.config)), "layers": options.layers,
        "compiled_layers": options.compiled_layers,
        "steps": options.steps,
    }  # fmt: skip
    tasks = [{**common, "contender": who, "batch": b, "seq": s} for b, s in SIZES for who in ("torch", "ours")]
    started = [_start(task, options.out) for task in tasks]
    rows: list[Row] = []
    try:
        rows = _collect([process for process, _ in started], options.out / "steps.csv", end)
    finally:
        for process, log in started:
            process.kill()
            process.wait()
            log.close()
    wrong = list(disagreements(rows))
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def _collect(processes: Sequence[subprocess.Popen[str]], path: Path, end: float) -> list[Row]:
    """Waits until all workers have compiled, then lets one after the other measure; a timer ends them at `end`."""
    from threading import Timer

    def stop() -> None:
        for process in processes:
            process.kill()

    timer = Timer(max(1.0, end - time.monotonic()), stop)
    timer.daemon = True
    timer.start()
    rows: list[Row] = []
    for process in processes:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                break
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for process in processes:
            if process.poll() is not None or process.stdin is None:
                continue
            with suppress(BrokenPipeError):
                process.stdin.write("go\n")
                process.stdin.flush()
            for row in _rows(process):
                rows.append(row)
                writer.writerow(asdict(row))
                file.flush()
                print(
                    f"{row.contender:20} {row.mode:15} {row.layers:3} layers {row.batch} x {row.seq:4}: "
                    f"{row.median_seconds * 1e3:7.2f} ms  {row.reason[:200]}",
                    flush=True,
                )
    timer.cancel()
    return rows


if __name__ == "__main__":
    sys.exit(main())
