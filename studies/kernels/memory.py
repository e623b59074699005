"""The fused memory-bound kernels against eager torch, torch.compile and a copy of as many bytes, in one run.

    python -m studies.kernels.memory OUT [--only rmsnorm,swiglu] [--no-compile] [--budget 150]
    python -m studies.kernels.memory OUT --tune [--only ...] [--budget 100]
    python -m studies.kernels.memory OUT [--tune] --warm 0/8                # compiles each 8th case, times nothing
    TRITON_INTERPRET=1 python -m studies.kernels.memory OUT --smoke         # no GPU: does the script run?

Each backend is checked against the reference before it is timed; a wrong result of ours is a row without a time. Times
are the project's: cold, by graph replay over rotated operands or between events with a flushed L2. Backends of a case
are timed in shuffled order, next to a copy that moves as many bytes as the operation must (`shape.bytes`).

Writes OUT/memory_kernels.csv (one row a case and backend; --tune: memory_tuning.csv, one row a configuration) and
OUT/memory_kernels.json (device, software), and prints a summary. After --budget seconds torch.compile is left out of
the remaining cases, and the row says so; with --tune, further configurations are. Exit 1 when a result was wrong.

`--warm I/N` fills the disk caches of Triton and torch.compile for those that follow: N such processes at once, on
as many cores, take the minutes of compilation out of a short loan of a GPU.
"""

from __future__ import annotations

import csv
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopcast.kernels import adamw, cross_entropy, rmsnorm, rope, swiglu
from flopcast.kernels.references import BackendUnavailable
from flopcast.kernels.rowwise import capability
from flopcast.kernels.shapes import AdamW, CrossEntropy, Fused, RmsNorm, RopeQkNorm, SwiGlu
from flopcast.microbench.timing.device import describe, describe_stack
from flopcast.microbench.timing.make_timer import make_timer
from flopcast.microbench.timing.policy import CPU_QUICK, QUICK
from flopcast.microbench.timing.timer import Timer
from studies.command import parser_of

MODULES: dict[type[Fused], Any] = {
    RmsNorm: rmsnorm, RopeQkNorm: rope, SwiGlu: swiglu, CrossEntropy: cross_entropy, AdamW: adamw,
}  # fmt: skip
LARGE = 256 << 20  # bytes moved, from which the target of 0.9 of copy bandwidth holds
COLUMNS = (
    "kernel", "key", "backend", "bytes", "seconds", "gbytes_per_second", "copy_seconds", "copy_ratio",
    "eager_ratio", "compile_ratio", "error", "tolerance", "timer", "n", "clock_mhz", "status", "reason", "config",
)  # fmt: skip


def cases() -> list[Fused]:
    """Large ones first: 256 MB an operand; then those of a step of 1024 tokens."""
    both = ("fwd", "bwd")
    large: list[Fused] = [
        *(
            RmsNorm(rows=rows, n=n, residual=residual, direction=direction)
            for rows, n in ((131072, 1024), (32768, 4096), (26215, 5120))
            for residual in (False, True)
            for direction in both
        ),
        # as under autocast, whose residual stream is fp32
        *(RmsNorm(rows=65536, n=1024, residual=True, direction=d, dtype="fp32") for d in both),
        *(RopeQkNorm(batch=32, seq=2048, heads=16, kv_heads=8, head_dim=128, direction=d) for d in both),
        *(SwiGlu(numel=1 << 27, direction=d) for d in both),
        *(CrossEntropy(rows=8192, direction=d) for d in ("fwd", "bwd", "both")),
        AdamW(numel=1 << 26, tensors=20),
    ]
    small: list[Fused] = [
        *(CrossEntropy(rows=1024, direction=d) for d in ("fwd", "bwd", "both")),
        *(RmsNorm(rows=1024, n=1024, residual=True, direction=d) for d in both),
        *(RopeQkNorm(batch=4, seq=256, heads=16, kv_heads=8, head_dim=128, direction=d) for d in both),
        *(SwiGlu(numel=1024 * 3072, direction=d) for d in both),
        AdamW(numel=1 << 22, tensors=64),
    ]
    return large + small


def tuning_cases() -> list[Fused]:
    return [
        *(
            RmsNorm(rows=(1 << 27) // n, n=n, residual=True, direction=d)
            for n in (1024, 4096, 8192)
            for d in ("fwd", "bwd")
        ),
        *(RmsNorm(rows=26215, n=5120, direction=d) for d in ("fwd", "bwd")),
        RmsNorm(rows=26215, n=5120, residual=True),
        *(case for case in cases() if not isinstance(case, RmsNorm) or case.rows == 1024),
    ]


def smoke_cases() -> list[Fused]:
    return [
        RmsNorm(rows=9, n=40, residual=True, direction="bwd", dtype="fp32"),
        RopeQkNorm(batch=1, seq=5, heads=2, kv_heads=1, head_dim=16, dtype="fp32"),
        SwiGlu(numel=99, dtype="fp32"),
        CrossEntropy(rows=4, vocab=50, dtype="fp32"),
        AdamW(numel=99, tensors=2),
    ]


def name_of(shape: Fused) -> str:
    return shape.key.split("/")[0]


def candidates(shape: Fused) -> list[Any]:
    module = MODULES[type(shape)]
    if isinstance(shape, AdamW):
        return list(module.candidates())
    extra = {RmsNorm: "n", RopeQkNorm: "head_dim"}.get(type(shape))
    return list(module.candidates(shape.direction, *((getattr(shape, extra),) if extra else ())))


def default_config(shape: Fused, device: torch.device) -> Any:
    if isinstance(shape, RmsNorm):
        operands = (2, 2, 2) if shape.residual else (2, 2)
        part = capability(device)
        return rmsnorm.config_for(shape.n, shape.direction, operands, part, residual=shape.residual)
    if isinstance(shape, RopeQkNorm):
        return rope.config_for(shape.head_dim, shape.direction)
    if isinstance(shape, AdamW):
        return adamw.DEFAULT
    return MODULES[type(shape)].config_for(shape.direction)


def tried(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the action gives, or why it gave nothing."""
    try:
        return action()
    except (BackendUnavailable, NotImplementedError) as error:
        return {"status": "unsupported", "reason": str(error)[:200]}
    except torch.OutOfMemoryError:
        return {"status": "out_of_memory"}
    except Exception as error:  # a compiler's or a launch's: the row says so and the run goes on
        return {
            "status": "error",
            "reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200],
        }


def checked(shape: Fused, prepare: Callable[[Sequence[Tensor]], Any], operands: Any, ref: Any) -> dict[str, Any]:
    """Whether the call that `prepare` makes is right, on copies: AdamW works in place."""
    out = prepare([x.clone() for x in operands] if isinstance(shape, AdamW) else operands)()
    error, tolerance = MODULES[type(shape)].check(out, ref, operands, shape)
    return {"error": error, "tolerance": tolerance, "status": "ok" if error <= tolerance else "incorrect"}


def timed(timer: Timer, prepare: Callable[[Sequence[Tensor]], Any], operands: Any) -> dict[str, Any]:
    timing = timer.time(prepare, operands, "cold")
    return {
        "seconds": timing.seconds,
        "timer": timing.timer,
        "n": len(timing.samples),
        "clock_mhz": timing.reading.clock_mhz,
    }


def copy_seconds(timer: Timer, shape: Fused) -> float:
    """A copy that reads and writes as many bytes as the operation, all told: the faster of torch's copy and of a
    negation. In a graph the copy is the driver's, which took 1.5 times as long on an H200."""
    source = torch.randn(max(1, shape.bytes // 8), device=timer.device)
    target = torch.empty_like(source)
    calls: tuple[Callable[[Sequence[Tensor]], Any], ...] = (
        lambda x: lambda: x[1].copy_(x[0]),
        lambda x: lambda: torch.neg(x[0], out=x[1]),
    )
    return min(timer.time(call, (source, target), "cold").seconds for call in calls)


def run_case(shape: Fused, timer: Timer, backends: Sequence[str], skipped: dict[str, str]) -> list[dict[str, Any]]:
    """A row a backend: all are checked, then timed in shuffled order."""
    module = MODULES[type(shape)]
    operands = module.operands(shape, timer.device)

    def prepared(backend: str) -> Callable[[Sequence[Tensor]], Any]:
        return lambda x: module.prepare(shape, backend, x)

    rows: dict[str, dict[str, Any]] = {
        backend: {"status": "skipped", "reason": reason} for backend, reason in skipped.items()
    }
    ref = module.reference(operands, shape)
    for backend in backends:
        rows[backend] = tried(lambda b=backend: checked(shape, prepared(b), operands, ref))  # type: ignore[misc]
    # A peer is timed all the same: torch's fused AdamW takes its bias correction in fp32, 3e-6 off on an H200.
    order = [b for b in backends if rows[b]["status"] == "ok" or (b != "triton" and "error" in rows[b])]
    random.shuffle(order)
    for backend in order:
        rows[backend] |= tried(lambda b=backend: timed(timer, prepared(b), operands))  # type: ignore[misc]
    copy = copy_seconds(timer, shape)
    for row in rows.values():
        if "seconds" in row:
            row["copy_seconds"], row["copy_ratio"] = copy, copy / row["seconds"]
            row["gbytes_per_second"] = shape.bytes / row["seconds"] / 1e9
            for column, peer in (("eager_ratio", "torch"), ("compile_ratio", "compile")):
                if "seconds" in rows.get(peer, {}):
                    row[column] = rows[peer]["seconds"] / row["seconds"]
    return [
        {"kernel": name_of(shape), "key": shape.key, "backend": backend, "bytes": shape.bytes, **row}
        for backend, row in rows.items()
    ]


def warm_case(shape: Fused, device: torch.device, tune: bool) -> None:
    """Runs what `run_case` or `tune_case` will time, once."""
    module = MODULES[type(shape)]
    operands = module.operands(shape, device)
    calls: list[Callable[[], Any]] = (
        [lambda c=c: module.triton_call(shape, operands, c)() for c in candidates(shape)]  # type: ignore[misc]
        if tune
        else [lambda b=b: module.prepare(shape, b, operands)() for b in ("triton", "compile")]  # type: ignore[misc]
    )
    for call in calls:
        failed = tried(lambda: (call(), {})[1])  # noqa: B023 (called at once)
        if failed:
            print(f"{shape.key}: {failed}", file=sys.stderr)


def tune_case(shape: Fused, timer: Timer, until: float) -> list[dict[str, Any]]:
    """A row a configuration of the Triton kernel, the default first; those not reached by `until` say so."""
    module = MODULES[type(shape)]
    operands = module.operands(shape, timer.device)
    ref = module.reference(operands, shape)
    rows: list[dict[str, Any]] = []
    copy = copy_seconds(timer, shape)
    default = default_config(shape, timer.device)
    for config in dict.fromkeys([default, *candidates(shape)]):

        def prepare(x: Sequence[Tensor], config: Any = config) -> Any:
            return module.triton_call(shape, x, config)

        if rows and time.monotonic() > until:
            rows.append({"kernel": name_of(shape), "key": shape.key, "backend": "triton", "bytes": shape.bytes,
                         "config": repr(config), "status": "skipped", "reason": "time budget"})  # fmt: skip
            continue
        row = tried(lambda: checked(shape, prepare, operands, ref))
        if row["status"] == "ok":
            row |= tried(lambda: timed(timer, prepare, operands))
        if "seconds" in row:
            row |= {"copy_seconds": copy, "copy_ratio": copy / row["seconds"]}
            row["gbytes_per_second"] = shape.bytes / row["seconds"] / 1e9
        label = "triton default" if config == default else "triton"
        rows.append({"kernel": name_of(shape), "key": shape.key, "backend": label, "bytes": shape.bytes,
                     "config": repr(config), **row})  # fmt: skip
    done = sorted((r for r in rows if "seconds" in r), key=lambda r: r["seconds"])
    if done:
        first = next((r for r in done if r["backend"] == "triton default"), done[-1])
        print(f"{shape.key}: default {first['copy_ratio']:.3f} of copy; best")
        for row in done[:3]:
            print(f"    {row['copy_ratio']:.3f}  {row['config']}")
    return rows


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summarise(rows: Sequence[dict[str, Any]]) -> None:
    ours = [row for row in rows if row["backend"] == "triton"]
    print(f"{'case':64} {'us':>9} {'GB/s':>6} {'copy':>6} {'eager':>6} {'compile':>7}  status")
    for row in ours:
        numbers = [row.get(x) for x in ("copy_ratio", "eager_ratio", "compile_ratio")]
        shown = " ".join(f"{x:6.3f}" if x else "     -" for x in numbers)
        seconds, rate = row.get("seconds", math.nan) * 1e6, row.get("gbytes_per_second", math.nan)
        print(f"{row['key']:64} {seconds:9.1f} {rate:6.0f} {shown}  {row['status']} {row.get('reason', '')}")
    large = [row["copy_ratio"] for row in ours if "copy_ratio" in row and row["bytes"] >= LARGE]
    against = [row["compile_ratio"] for row in ours if "compile_ratio" in row]
    for label, ratios, wanted in (
        ("copy's time over ours, 256 MB and more", large, 0.9),
        ("torch.compile's time over ours", against, 0.98),
    ):
        if ratios:
            mean = geometric_mean(ratios)
            print(f"{label}: geometric mean {mean:.3f}, least {min(ratios):.3f} (to reach: {wanted})")


def main() -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--only", default="", help="parts of keys, comma-separated: rmsnorm, cross_entropy/both, 1024x1024, ..."
    )
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--budget", type=float, default=150.0)
    parser.add_argument("--warm", default="", metavar="I/N")
    arguments = parser.parse_args()
    start = time.monotonic()
    device = torch.device("cpu") if arguments.smoke else torch.device("cuda", 0)
    policy = CPU_QUICK if arguments.smoke else replace(QUICK, timeout_seconds=0.08, warm_up_seconds=2.0)
    timer = make_timer(device, policy)
    shapes = smoke_cases() if arguments.smoke else tuning_cases() if arguments.tune else cases()
    wanted = set(filter(None, arguments.only.split(",")))
    shapes = [shape for shape in shapes if not wanted or any(part in shape.key for part in wanted)]
    if arguments.warm:
        first, _, count = arguments.warm.partition("/")
        for shape in shapes[int(first) :: int(count)]:
            warm_case(shape, device, arguments.tune)
            torch.compiler.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        print(f"{arguments.warm}: {time.monotonic() - start:.0f} s")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    stream = torch.cuda.stream(timer.stream) if device.type == "cuda" else nullcontext()  # type: ignore[attr-defined]
    name = "memory_tuning.csv" if arguments.tune else "memory_kernels.csv"
    with open(arguments.out / name, "w", newline="") as file, stream:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        timer.warm_up()
        begun = time.monotonic()
        for shape in shapes:
            if arguments.tune:
                until = begun + arguments.budget * (shapes.index(shape) + 1) / len(shapes)
                new = tried_rows(shape, lambda: tune_case(shape, timer, until))  # noqa: B023 (called at once)
            else:
                late = time.monotonic() - start > arguments.budget
                skip = (
                    {"compile": "time budget"} if late else {"compile": "--no-compile"} if arguments.no_compile else {}
                )
                backends = [backend for backend in ("triton", "torch", "compile") if backend not in skip]
                new = tried_rows(shape, lambda: run_case(shape, timer, backends, skip))  # noqa: B023
                torch.compiler.reset()  # one shape a case: no recompilation limit, no guards to walk
            rows += new
            writer.writerows(new)
            file.flush()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    facts = {"device": describe(device), "stack": describe_stack(), "seconds": time.monotonic() - start}
    (arguments.out / "memory_kernels.json").write_text(json.dumps(facts, indent=1, default=str) + "\n")
    if not arguments.tune:
        summarise(rows)
    print(f"{len(rows)} rows in {time.monotonic() - start:.0f} s: {arguments.out / name}")
    return 1 if any(row["status"] == "incorrect" and row["backend"].startswith("triton") for row in rows) else 0


def tried_rows(shape: Fused, action: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of a case, or one that says why there are none."""
    rows: list[dict[str, Any]] = []

    def run() -> dict[str, Any]:
        rows.extend(action())
        return {}

    failed = tried(run)
    if failed:
        print(f"{shape.key}: {failed}", file=sys.stderr)
        rows.append({"kernel": name_of(shape), "key": shape.key, "backend": "all", "bytes": shape.bytes, **failed})
    return rows


if __name__ == "__main__":
    sys.exit(main())
