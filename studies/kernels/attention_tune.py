"""Every candidate tile of the Triton attention: checked, then timed beside cuDNN's and flash attention, on one GPU.

    python -m studies.kernels.attention_tune OUT [--only 128,causal] [--jobs 14] [--budget 240] [--ptxas FILE]
        [--table FILE]

1. Each candidate compiles and is checked in a process of its own, --jobs at once: forward, or gradients, by the
   FlashAttention criterion on small odd shapes, and its determinism. A crash or a hang costs that candidate alone.
2. Those that were right are checked again at each shape and timed there: graph replay after a flush of L2,
   candidates and peers in shuffled order, round after round. One process a (head_dim, masking), for the same reason.

Writes OUT/attention_tune.jsonl as it goes: one line a check, one line a (shape, candidate). TFLOP/s count causal
attention halved and the backward as five products. `--ptxas` names another ptxas than Triton's; lines say which.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopcast.kernels import attention as A
from flopcast.kernels.attention_config import AttentionConfig, Tile, from_key, place_of, rule
from flopcast.kernels.shapes import Attention
from studies.command import parser_of
from studies.kernels.attention_table import summary, table_from

TOKENS = 16384
SEQS = {"causal": (256, 512, 1024, 2048, 4096, 8192, 16384), "full": (512, 2048, 8192)}
PEERS = ("sdpa-cudnn", "sdpa-flash")
CHECKED = (  # batch, heads, kv_heads, seq
    (2, 4, 2, 256), (1, 6, 2, 1), (3, 2, 2, 129), (1, 8, 1, 1000), (1, 4, 2, 321), (2, 16, 8, 2048),
)  # fmt: skip


def hopper(*sizes: Any, **flags: Any) -> Tile:
    return Tile(*sizes, **{"kind": "hopper", **flags})


def candidates(head_dim: int) -> dict[str, list[Tile]]:
    """By kernel. A first run held every tile that compiles without spills in its loop, and one program a tile instead
    of persistent ones (4-30% slower, most at short sequences); these are what came within 5% of the best somewhere."""
    stages = 2 if head_dim == 128 else 3
    l2 = [{"l2_mib": mib} for mib in (0, 8, 16, 32)]
    turns = ({"pingpong": False}, {"pingpong": True})
    return {
        "forward": [hopper(128, 128, 4, stages, **f, **m) for f in turns for m in l2]
        + [hopper(128, 128, 4, stages, pack=True, **f, **m) for f in turns for m in l2[1:3]]
        + [hopper(128, 64, 4, 4, pack=True, **l2[2])],
        "dkdv": [hopper(64, 128, 4, n, **m) for n in (2, 3) for m in (l2 if head_dim == 128 else l2[2:3])]
        + [hopper(128, 128, 4, 2, **m) for m in l2 if head_dim == 64],
        "dq": [hopper(128, 128, 4, 2, **m) for m in l2] + [hopper(128, 64, 4, 3, **l2[2])],
    }


def config_of(kernel: str, tile: Tile, head_dim: int) -> AttentionConfig:
    shape = Attention(batch=1, heads=2, kv_heads=1, seq=1024, head_dim=head_dim)
    return replace(rule(shape, tma=True), **{kernel: tile})


def backward_of(
    kernel: str, operands: tuple[Tensor, ...], o: Tensor, lse: Tensor, causal: bool, config: AttentionConfig | None
) -> Callable[[], tuple[Tensor, ...]]:
    """A call of one kernel of the backward alone; it returns (dq, dk, dv), those it does not write uninitialised.

    "prepare" is the one that makes lse in base 2 and delta.
    """
    from flopcast.kernels import triton_attention_launch as launch

    q, k, v, do = operands
    if kernel == "prepare":
        return lambda: launch._prepare(o, do, lse)
    assert config is not None
    lse2, delta = launch._prepare(o, do, lse)
    dq, dk, dv = outs = A._output_like(q), A._output_like(k), A._output_like(v)
    scale = q.shape[-1] ** -0.5

    def run() -> tuple[Tensor, ...]:
        if kernel == "dq":
            launch._launch_dq(do, q, k, v, lse2, delta, dq, causal, scale, config.dq)
        else:
            launch._launch_dkdv(do, q, k, v, lse2, delta, dk, dv, causal, scale, config.dkdv)
        return outs

    return run


def gradients_of(kernel: str) -> tuple[int, ...]:
    """Which of dq, dk, dv a kernel writes."""
    return {"dq": (0,), "dkdv": (1, 2)}.get(kernel, (0, 1, 2))


class Judge:
    """The reference of one shape, computed once, and the criterion of `attention.check`."""

    def __init__(self, shape: Attention, operands: tuple[Tensor, ...]) -> None:
        self.refs = self._tuple(A._by_definition(operands, shape, None, torch.float32))
        rounded = self._tuple(A._by_definition(operands, shape, None, operands[0].dtype))
        self.scale = max(float(ref.abs().max()) for ref in self.refs) or 1.0
        eps = torch.finfo(operands[0].dtype).eps
        self.tolerances = [
            2 * float((same.float() - ref).abs().max()) / self.scale + eps
            for same, ref in zip(rounded, self.refs, strict=True)
        ]

    @staticmethod
    def _tuple(x: Any) -> tuple[Tensor, ...]:
        return x if isinstance(x, tuple) else (x,)

    def ratio(self, outs: Any, which: tuple[int, ...]) -> float:
        """Worst error over its tolerance; infinite for a NaN."""
        worst = 0.0
        for i in which:
            out = self._tuple(outs)[i].float()
            error = float((out - self.refs[i]).abs().max()) / self.scale
            worst = max(worst, error / self.tolerances[i] if error == error else float("inf"))
        return worst


def check_candidate(kernel: str, key: str, head_dim: int, masking: str) -> dict[str, Any]:
    """In a process of its own: the worst error over all small shapes, relative to the tolerance."""
    config, causal = config_of(kernel, from_key(key), head_dim), masking == "causal"
    began, worst, where, repeats = time.perf_counter(), 0.0, "", True
    first = 0.0
    for batch, heads, kv_heads, seq in CHECKED:
        if from_key(key).pack and heads // kv_heads % 2:
            continue
        direction = "fwd" if kernel == "forward" else "bwd"
        shape = Attention(batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=head_dim, causal=causal)
        shape = replace(shape, direction=direction)
        operands = A.operands(shape, "cuda", seed=seq)
        judge = Judge(shape, operands)
        q, k, v = operands[:3]
        o, lse = reference_forward(q, k, v, causal)
        if kernel == "forward":
            run: Callable[[], Any] = lambda: A.forward(q, k, v, causal, config=config)[0]  # noqa: B023, E731
            which: tuple[int, ...] = (0,)
            off = (A.forward(q, k, v, causal, config=config)[1] - lse).abs().max()
            worst = max(worst, float(off) / 1e-3 if off == off else float("inf"))
        else:
            run = backward_of(kernel, operands, o, lse, causal, config)
            which = gradients_of(kernel)
        out = run()
        torch.cuda.synchronize()
        first = first or time.perf_counter() - began
        ratio = judge.ratio(out, which)
        if ratio > worst:
            worst, where = ratio, shape.key
        for _ in range(2):
            again, got = Judge._tuple(run()), Judge._tuple(out)
            repeats &= all(torch.equal(again[i], got[i]) for i in which)
    return {"error_over_tolerance": worst, "where": where, "deterministic": repeats, "compile_seconds": first}


def reference_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """o and lse from torch alone, so that a backward is judged by itself."""
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return o, lse.contiguous()


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure(graphs: dict[Any, torch.cuda.CUDAGraph], rounds: int, budget: float) -> dict[Any, list[float]]:
    """Seconds of each graph's replay after a flush of L2: `rounds` of all, shuffled, the first thrown away."""
    began = time.perf_counter()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    samples: dict[Any, list[float]] = {name: [] for name in graphs}
    order = list(graphs)
    for turn in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if turn:
                samples[name].append(begin.elapsed_time(end) / 1e3)
        if time.perf_counter() - began > budget and turn > 2:
            break
    return samples


def time_shape(shape: Attention, right: dict[str, list[str]], rounds: int, budget: float) -> Iterator[dict[str, Any]]:
    """Lines for the peers and for each candidate that `right` names, of one direction."""
    began, causal = time.perf_counter(), shape.causal
    operands = A.operands(shape, "cuda", seed=shape.seq)
    judge = Judge(shape, operands)
    q, k, v = operands[:3]
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for peer in PEERS:
        runs["peer", peer] = A.prepare(shape, peer, operands)
    if shape.direction == "bwd":
        o, lse = reference_forward(q, k, v, causal)
    for kernel in ("forward",) if shape.direction == "fwd" else ("dkdv", "dq"):
        for key in right.get(kernel, []):
            config = config_of(kernel, from_key(key), shape.head_dim)
            if kernel == "forward":
                runs[kernel, key] = lambda c=config: A.forward(q, k, v, causal, config=c)[0]  # type: ignore[misc]
            else:
                runs[kernel, key] = backward_of(kernel, operands, o, lse, causal, config)
    graphs, wrong = {}, {}
    for (kernel, key), run in list(runs.items()):
        which = (0,) if shape.direction == "fwd" else gradients_of(kernel)
        wrong[kernel, key] = judge.ratio(run(), which)
        graphs[kernel, key] = captured(run)
    if shape.direction == "bwd":
        graphs["prepare", ""] = captured(backward_of("prepare", operands, o, lse, causal, None))
        wrong["prepare", ""] = 0.0
    samples = measure(graphs, rounds, budget - (time.perf_counter() - began))
    for (kernel, key), times in samples.items():
        seconds = statistics.median(times)
        yield {
            "what": "time", "kernel": kernel, "tile": key, "head_dim": shape.head_dim, "seq": shape.seq,
            "batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads, "causal": causal,
            "direction": shape.direction, "seconds": seconds, "n": len(times), "low": min(times),
            "tflops": shape.flops / seconds / 1e12, "error_over_tolerance": wrong[kernel, key],
        }  # fmt: skip


def time_all(head_dim: int, masking: str, right: dict[str, list[str]], budget: float, out: Path) -> None:
    """In a process of its own: appends to `out`."""
    began = time.perf_counter()
    shapes = [
        Attention(
            batch=max(1, TOKENS // seq), heads=16, kv_heads=8, seq=seq, head_dim=head_dim,
            causal=masking == "causal", direction=direction,
        )
        for seq in SEQS[masking]
        for direction in ("fwd", "bwd")
    ]  # fmt: skip
    for shape in shapes:
        left = budget - (time.perf_counter() - began)
        if left < 1:
            append(out, {"what": "skipped", "key": shape.key, "reason": "budget"})
            continue
        try:
            for line in time_shape(shape, right, rounds=12, budget=left / 2):
                append(out, line)
        except Exception as error:
            append(out, {"what": "failed", "key": shape.key, "reason": repr(error)[:500]})
            if "CUDA error" in repr(error) or "illegal" in repr(error):
                raise
        torch.cuda.empty_cache()


def append(path: Path, line: dict[str, Any]) -> None:
    line = {"ptxas": os.environ.get("TRITON_PTXAS_PATH", "bundled"), **line}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def child(arguments: list[str], timeout: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "studies.kernels.attention_tune", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {timeout:.0f} s"
    return done.returncode, (done.stdout + done.stderr)[-1500:]


def drive(out: Path, only: str, jobs: int, budget: float) -> None:
    began = time.perf_counter()
    places = [(d, m) for d in (128, 64) for m in ("causal", "full") if not only or only == f"{d},{m}"]
    todo = [
        (kernel, tile.key, d, masking)
        for d, masking in places
        for kernel, tiles in candidates(d).items()
        for tile in tiles
        if masking == "causal" or tile.l2_mib in (0, 16)
    ]

    hung: dict[str, int] = {}

    def check(one: tuple[str, str, int, str]) -> dict[str, Any]:
        kernel, key, d, masking = one
        if hung.get(kernel, 0) >= 3:
            code, text = 125, "not tried: three of this kernel hung"
        else:
            code, text = child(["--check", json.dumps(one)], 60)
        hung[kernel] = hung.get(kernel, 0) + (code == 124)
        line: dict[str, Any] = {"what": "check", "place": place_of(kernel, d, masking == "causal"), "tile": key}
        last = text.strip().splitlines()[-1:] or [""]
        if code == 0 and last[0].startswith("{"):
            line |= json.loads(last[0])
        else:
            line |= {"error_over_tolerance": None, "reason": f"exit {code}: {text[-900:]}"}
        append(out, line)
        return {"one": one, **line}

    with ThreadPoolExecutor(jobs) as pool:
        checked = list(pool.map(check, todo))
    print(f"{len(checked)} candidates checked after {time.perf_counter() - began:.0f} s", flush=True)
    for d, masking in places:
        right: dict[str, list[str]] = {}
        for line in checked:
            kernel, key, *place = line["one"]
            if place == [d, masking] and (line["error_over_tolerance"] or 9.0) <= 1.0:
                right.setdefault(kernel, []).append(key)
        counts = {kernel: len(keys) for kernel, keys in right.items()}
        left = budget - (time.perf_counter() - began)
        code, text = child(["--time", json.dumps([d, masking, right, left * 0.6, str(out)])], max(left, 30.0) + 30)
        print(f"{d} {masking}: {counts} timed, exit {code} {text[-600:] if code else ''}", flush=True)
    print(summary(out))


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--budget", type=float, default=240.0)
    parser.add_argument("--ptxas", default="")
    parser.add_argument("--table", type=Path, help="write the table of the fastest tiles here")
    parser.add_argument("--check")
    parser.add_argument("--time")
    arguments = parser.parse_args()
    if arguments.check:
        kernel, key, d, masking = json.loads(arguments.check)
        print(json.dumps(check_candidate(kernel, key, d, masking)))
    elif arguments.time:
        d, masking, right, budget, out = json.loads(arguments.time)
        time_all(d, masking, right, budget, Path(out))
    else:
        if arguments.ptxas:
            os.environ["TRITON_PTXAS_PATH"] = arguments.ptxas
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = "attention_tune.jsonl" if not arguments.ptxas else "attention_tune_ptxas.jsonl"
        drive(arguments.out / name, arguments.only, arguments.jobs, arguments.budget)
        if arguments.table:
            from flopcast.kernels.triton_attention_launch import VERSION

            device = torch.cuda.get_device_name()
            shapes = f"bf16, 16 query and 8 key-value heads, {TOKENS} tokens"
            document = json.dumps(table_from(arguments.out / name, device, VERSION, shapes), indent=1) + "\n"
            arguments.table.parent.mkdir(parents=True, exist_ok=True)
            arguments.table.write_text(document)


if __name__ == "__main__":
    main()
