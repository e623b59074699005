"""Kernels on trial: checked on a GPU for the first time, and timed beside their peers in one run.

    python -m studies.kernels.trial OUT [--only bands,backward,fp8,adamw] [--budget 150]

- bands: attention with a sliding window or packed documents, beside cuDNN's with a mask of all pairs, flex_attention
  with a block mask, and our own whole triangle.
- backward: Hopper's causal backward at head_dim 128 by the table of tiles, and where that takes one pass also by
  the two kernels that are the same bit for bit in every run, beside cuDNN's; several heads, groups and lengths.
- fp8: scaled products of e4m3, every tile, beside torch._scaled_mm and the bf16 product.
- adamw: a step of AdamW over the parameters of three models, beside torch's fused one; clipping inside it beside
  clip_grad_norm_ before that. What is checked are parameters and first moments, against torch's.

Every way is checked against a reference in fp32 before it is timed; a wrong one is a row without a time, and exit 1.
The ways of a case are timed in turn, by events around as many calls as fill 2 ms, behind a kernel that keeps the device
busy until all are enqueued; the median of nine; `wall` is the
median by the host's clock, from an idle device to the end of these calls, enqueued as they come. L2 is as the call
before left it. OUT/trial.csv has a row per way as it
is done; `ratio` is the peer's time over the way's, of which the last lines say the geometric mean and the least.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopcast.kernels import attention as A
from flopcast.kernels import documents as packed
from flopcast.kernels import fp8_matmul
from flopcast.kernels.adamw import AdamW
from flopcast.kernels.attention_config import AttentionConfig, takes_one_pass
from flopcast.kernels.shapes import Attention
from studies.command import parser_of
from studies.kernels.pairs import geometric_mean

COLUMNS = ("kind", "case", "way", "seconds", "low", "wall", "ratio", "tflops", "error", "tolerance", "status")
ROUNDS = 9
KINDS = ("bands", "backward", "fp8", "adamw")
Way = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Ways to compute the same thing; `check` gives (error, tolerance) of a way's result, None where there is none."""

    kind: str
    name: str
    flops: float
    ways: Mapping[str, Callable[[], Way]]  # made when their turn comes: one may be refused
    check: Callable[[str, Any], tuple[float, float] | None]
    peer: str


# --- attention


def additive(shape: Attention, spans: Tensor | None, device: str) -> Tensor:
    """The mask of all pairs [1, 1, seq, seq], bf16, 0 where a query sees a key."""
    rows = torch.arange(shape.seq, device=device)
    seen = rows[None, :] <= rows[:, None]
    if shape.window:
        seen &= rows[None, :] > rows[:, None] - shape.window
    if spans is not None:
        seen &= rows[None, :] >= spans[0, 0][:, None]
    mask = torch.zeros(shape.seq, shape.seq, dtype=torch.bfloat16, device=device)
    return mask.masked_fill_(~seen, -math.inf)[None, None]


def by_cudnn(shape: Attention, operands: Sequence[Tensor], mask: Tensor | None) -> Way:
    """cuDNN's operators, by which SDPA runs a mask on Hopper; causal without one."""
    aten, scale, causal = torch.ops.aten, shape.head_dim**-0.5, mask is None
    q, k, v = operands[:3]

    def forward() -> Any:
        return aten._scaled_dot_product_cudnn_attention.default(q, k, v, mask, True, 0.0, causal, False, scale=scale)

    if shape.direction == "fwd":
        return lambda: forward()[0]
    o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()
    saved = (o, lse, seed, offset, mask, cum_q, cum_k, max_q, max_k)
    return lambda: tuple(
        aten._scaled_dot_product_cudnn_attention_backward.default(
            operands[3], q, k, v, *saved, 0.0, causal, scale=scale
        )[:3]
    )


def by_flex(shape: Attention, operands: Sequence[Tensor], ids: Tensor | None) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Any, h: Any, row: Any, column: Any) -> Any:
        inside = row >= column
        if shape.window:
            inside = inside & (row - column < shape.window)
        return inside if ids is None else inside & (ids[row] == ids[column])

    blocks = create_block_mask(seen, None, None, shape.seq, shape.seq, device=operands[0].device)
    call = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.detach().requires_grad_(shape.direction == "bwd") for x in operands[:3])
    if shape.direction == "fwd":
        return lambda: call(q, k, v, block_mask=blocks, enable_gqa=True)
    o: Any = call(q, k, v, block_mask=blocks, enable_gqa=True)
    return lambda: torch.autograd.grad(o, (q, k, v), operands[3], retain_graph=True)


def by_triton(
    shape: Attention, operands: Sequence[Tensor], spans: Tensor | None, config: AttentionConfig | None = None
) -> Way:
    q, k, v = operands[:3]
    how = (shape.causal, None, shape.window, spans)
    if shape.direction == "fwd":
        return lambda: A.forward(q, k, v, *how, config=config)[0]
    o, lse = A.forward(q, k, v, *how)
    return lambda: A.backward(operands[3], q, k, v, o, lse, *how, config=config)


def attention_check(
    shape: Attention, operands: Sequence[Tensor], spans: Tensor | None, unchecked: Sequence[str] = ()
) -> Callable[[str, Any], tuple[float, float] | None]:
    reference = A.reference(operands, shape, spans)

    def check(way: str, out: Any) -> tuple[float, float] | None:
        return None if way in unchecked else A.check(out, reference, operands, shape, spans)

    return check


def lengths_of(seq: int, mean: int) -> list[int]:
    """Lengths of documents, drawn evenly from 1 to twice the mean, that fill a row."""
    generator, found = torch.Generator().manual_seed(seq), list[int]()
    while sum(found) < seq:
        found.append(int(torch.randint(1, 2 * mean, (1,), generator=generator)))
    found[-1] -= sum(found) - seq
    return found


def pairs_seen(shape: Attention, spans: Tensor | None) -> int:
    """How many keys all queries of a row see."""
    rows = torch.arange(shape.seq)
    first = rows * 0 if spans is None else spans[0, 0].cpu()
    low = first if not shape.window else torch.maximum(first, rows + 1 - shape.window)
    return int((rows + 1 - low).sum())


def bands(device: str, tokens: int = 16384, kv_heads: int = 8) -> Iterator[Case]:
    settings: list[tuple[int, int, bool]] = [  # window, mean length of documents (0: one), whether flex is compiled
        (tokens // 16, 0, True), (tokens // 4, 0, False), (0, tokens // 16, True), (tokens // 16, tokens // 8, False),
    ]  # fmt: skip
    for window, mean, flex in settings:
        ids = None
        if mean:
            lengths = torch.tensor(lengths_of(tokens, mean))
            ids = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
        spans = None if ids is None else packed.from_ids(ids[None])
        for direction in ("fwd", "bwd"):
            shape = Attention(
                batch=1, heads=2 * kv_heads, kv_heads=kv_heads, seq=tokens, head_dim=128, window=window,
                direction=direction, dtype="bf16" if device == "cuda" else "fp16",
            )  # fmt: skip
            operands = A.operands(shape, device)
            whole = "triton, whole triangle"
            ways: dict[str, Callable[[], Way]] = {
                "triton": partial(by_triton, shape, operands, spans),
                whole: partial(by_triton, replace(shape, window=0), operands, None),
            }
            if device == "cuda":
                ways["sdpa-cudnn, mask"] = partial(by_cudnn, shape, operands, additive(shape, spans, device))
            if device == "cuda" and flex:
                ways["flex"] = partial(by_flex, shape, operands, ids)
            flops = 4.0 * shape.heads * shape.head_dim * pairs_seen(shape, spans) * (1.0 if direction == "fwd" else 2.5)
            name = f"{shape.key}/documents~{mean}" if mean else shape.key
            check = attention_check(shape, operands, spans, (whole,))
            yield Case("bands", name, flops, ways, check, "sdpa-cudnn, mask")


def backward(device: str, tokens: int = 16384) -> Iterator[Case]:
    lengths = (1024, 2048, 4096, 8192, 16384)
    settings = [(*heads, seq) for heads in ((16, 8), (32, 8), (16, 16), (14, 2)) for seq in lengths]
    settings += [(16, 8, seq) for seq in (256, 512, 1000, 3000)]
    settings += [(24, 8, 6144), (40, 8, 3000), (64, 8, 4096), (32, 2, 4096), (32, 8, 32768)]
    for heads, kv_heads, seq in settings:
        shape = Attention(
            batch=max(1, tokens // seq), heads=heads, kv_heads=kv_heads, seq=seq, head_dim=128, direction="bwd"
        )
        operands = A.operands(shape, device)
        ways: dict[str, Callable[[], Way]] = {"triton": partial(by_triton, shape, operands, None)}
        if takes_one_pass(shape, torch.cuda.get_device_name() if device == "cuda" else ""):
            two = A._config_of(operands[0], operands[1], True, 1.0, False, None, True)
            ways["triton, deterministic"] = partial(by_triton, shape, operands, None, two)
        ways["sdpa-cudnn"] = partial(by_cudnn, shape, operands, None)
        yield Case("backward", shape.key, shape.flops, ways, attention_check(shape, operands, None), "sdpa-cudnn")


# --- fp8


def by_tile(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, config: fp8_matmul.Fp8Config) -> Way:
    return lambda: fp8_matmul.forward(a, b, scale_a, scale_b, config=config)


def in_bf16(a: Tensor, b: Tensor) -> Way:
    a, b = a.bfloat16(), b.bfloat16()
    return lambda: torch.mm(a, b.T)


def fp8_check(reference: Tensor, k: int, fast: bool, way: str, out: Tensor) -> tuple[float, float] | None:
    return None if way == "torch, bf16" else fp8_matmul.check(out, reference, k, fast)


def fp8(device: str) -> Iterator[Case]:
    sizes = ((8192, 3072, 1024), (8192, 4096, 4096), (8192, 14336, 4096), (1024, 4096, 4096), (8192, 8192, 8192))
    for m, n, k in sizes:
        a, b = (torch.randn(size, device=device) for size in ((m, k), (n, k)))
        for per_row in (False, True):
            (a8, scale_a), (b8, scale_b) = (fp8_matmul.quantised(x, per_row) for x in (a, b))
            reference = fp8_matmul.reference(a8, b8, scale_a, scale_b)
            for fast in (False, True):
                check = partial(fp8_check, reference, k, fast)
                ways: dict[str, Callable[[], Way]] = {
                    name: partial(fp8_matmul.prepare, name, a8, b8, scale_a, scale_b, fast)
                    for name in fp8_matmul.BACKENDS
                }
                for config in (replace(tile, fast=fast) for tile in fp8_matmul.TILES):
                    ways[f"triton {config.key}"] = partial(by_tile, a8, b8, scale_a, scale_b, config)
                ways["torch, bf16"] = partial(in_bf16, a, b)
                how = ("rows" if per_row else "tensor") + "/fast" * fast
                yield Case("fp8", f"fp8/nt/{how}/{m}x{n}x{k}", 2.0 * m * n * k, ways, check, "torch")


# --- AdamW with clipping

MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b")
MAX_NORM = 1.0
AGREEMENT = 1e-4  # of first moments, and of parameters over the length of a step


def sizes_of(config: str) -> list[torch.Size]:
    from flopcast.microbench.recipe.training_step import build_model
    from flopcast.roofline.stream.model.models import load_config

    with torch.device("meta"):
        return [parameter.shape for parameter in build_model(load_config(config)).parameters()]


def stepped(sizes: Sequence[torch.Size], by: str, max_norm: float, device: str) -> Way:
    """A step over normal parameters of these sizes, the same by every way; it returns the optimizer."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = [torch.randn(size, generator=generator, device=device).mul_(0.02).requires_grad_() for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=device)
    if by == "triton":
        own = AdamW(parameters, max_norm=max_norm)
        return lambda: (own.step(), own)[1]
    fused = torch.optim.AdamW(parameters, fused=True)

    def step() -> torch.optim.Optimizer:
        if max_norm:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        fused.step()
        return fused

    return step


def disagreement(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> float:
    """The worst relative difference of first moments, and of parameters over the learning rate, which is the length of
    a step of each element."""
    worst = 0.0
    (mine,), (theirs,) = one.param_groups, other.param_groups
    for a, b in zip(mine["params"], theirs["params"], strict=True):
        first, second = one.state[a]["exp_avg"], other.state[b]["exp_avg"]
        step = mine["lr"] * math.sqrt(a.numel())
        errors = float((first - second).norm() / second.norm()), float((a - b).detach().norm()) / step
        worst = max(worst, *(error if error == error else math.inf for error in errors))
    return worst


def against_torch() -> Callable[[str, torch.optim.Optimizer], tuple[float, float] | None]:
    """A check against the way that is checked first, when both have made one step."""
    first: list[torch.optim.Optimizer] = []

    def check(way: str, optimizer: torch.optim.Optimizer) -> tuple[float, float] | None:
        first.append(optimizer)
        return None if optimizer is first[0] else (disagreement(optimizer, first[0]), AGREEMENT)

    return check


def steps_of_adamw(device: str, models: Sequence[str] = MODELS) -> Iterator[Case]:
    for model in models:
        sizes = sizes_of(model)
        for max_norm in (MAX_NORM, 0.0):
            ways = {by: partial(stepped, sizes, by, max_norm, device) for by in ("torch", "triton")}
            kind = "adamw, clipping" if max_norm else "adamw"
            yield Case(kind, model, 0.0, ways, against_torch(), "torch")


# --- checked and timed


def sound(case: Case) -> tuple[dict[str, Way], list[dict[str, Any]]]:
    """The ways whose results are right, and a row for each way, with its error."""
    ways, rows = {}, []
    for name, make in case.ways.items():
        row: dict[str, Any] = {"kind": case.kind, "case": case.name, "way": name, "status": "ok"}
        try:
            call = make()
            found = case.check(name, call())
            if found is not None:
                row["error"], row["tolerance"] = found
            if found is None or found[0] <= found[1]:
                ways[name] = call
            else:
                row["status"] = "incorrect"
        except Exception as error:
            row["status"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]
        rows.append(row)
    return ways, rows


def repeated(call: Way, count: int) -> None:
    for _ in range(count):
        call()


def timed(ways: Mapping[str, Way], timer: Any) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds per call of each way on the device, and by the host's clock; ways take turns."""
    from flopcast.microbench.timing.cuda_timer import LEAD_SECONDS, between_events, seconds_between

    counts, found, wall = {}, {name: list[float]() for name in ways}, {name: list[float]() for name in ways}
    for name, call in ways.items():
        repeated(call, 2)
        counts[name] = max(1, min(50, math.ceil(2e-3 / max(timer.estimate(call), 1e-6))))
    for _ in range(ROUNDS):
        for name, call in ways.items():
            began = time.perf_counter()
            repeated(call, counts[name])
            host = time.perf_counter() - began
            torch.cuda.synchronize()
            wall[name].append((time.perf_counter() - began) / counts[name])
            timer.spin(1.5 * host + LEAD_SECONDS)
            pair = between_events(partial(repeated, call, counts[name]))
            torch.cuda.synchronize()
            found[name].append(seconds_between(pair) / counts[name])
    return found, wall


def finished(
    case: Case, rows: Sequence[dict[str, Any]], seconds: Mapping[str, list[float]], wall: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    """The rows with their times."""
    median = {name: statistics.median(readings) for name, readings in seconds.items()}
    for row in rows:
        if (taken := median.get(row["way"])) is not None:
            row |= {"seconds": taken, "low": min(seconds[row["way"]]), "tflops": case.flops / taken / 1e12}
            row["wall"] = statistics.median(wall[row["way"]])
            if case.peer in median:
                row["ratio"] = median[case.peer] / taken
    return list(rows)


def said(row: Mapping[str, Any]) -> str:
    time_of = f"{'':26}"
    if "seconds" in row:
        rate = f"{row['tflops']:7.1f} TFLOP/s" if row["tflops"] else f"{1e6 * row['wall']:9.1f} wall  "
        time_of = f"{1e6 * row['seconds']:9.1f} us {rate}"
    ratio = f"{row['ratio']:6.3f}" if "ratio" in row else " " * 6
    error = f"error {row['error']:.1e} of {row['tolerance']:.1e}" if "error" in row else ""
    return (
        f"{row['case']:58} {row['way']:32} {time_of} {ratio} {error} {row['status'] if row['status'] != 'ok' else ''}"
    )


def summary(rows: Sequence[Mapping[str, Any]], least_tokens: int = 1000) -> Iterator[str]:
    """Of each kind and way the geometric mean and the least of its ratios; of backwards those of so many tokens."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        seq = re.search(r"s(\d+)d\d+$", row["case"])
        if "ratio" in row and not (row["kind"] == "backward" and seq and int(seq[1]) < least_tokens):
            ratios.setdefault((row["kind"], row["way"]), []).append(row["ratio"])
    for (kind, way), found in ratios.items():
        yield f"{kind:15} {way:32} {geometric_mean(found):6.3f} of the peer, least {min(found):.3f}, {len(found)} cases"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds")
    options = parser.parse_args(arguments)
    wanted = [kind for kind in options.only.split(",") if kind]
    if unknown := set(wanted) - set(KINDS):
        parser.error(f"--only {', '.join(sorted(unknown))}: valid are {', '.join(KINDS)}")
    if not torch.cuda.is_available():
        print("trial times kernels on a GPU: none is here", file=sys.stderr)
        return 1
    from flopcast.microbench.timing.cuda_timer import CudaTimer
    from flopcast.microbench.timing.policy import QUICK

    began, wrong, done = time.monotonic(), 0, list[dict[str, Any]]()
    timer = CudaTimer(torch.device("cuda", torch.cuda.current_device()), replace(QUICK, warm_up_seconds=1.0))
    timer.warm_up()
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "trial.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for kind in wanted:
            for case in {"bands": bands, "backward": backward, "fp8": fp8, "adamw": steps_of_adamw}[kind]("cuda"):
                if time.monotonic() - began > options.budget:
                    print(f"the budget is used up before {case.name}", file=sys.stderr)
                    break
                torch.cuda.synchronize()  # the operands were made on another stream
                with torch.cuda.stream(timer.stream):
                    ways, rows = sound(case)
                    rows = finished(case, rows, *timed(ways, timer))
                ways.clear()  # with their operands, before the next case makes its own
                writer.writerows(rows)
                file.flush()
                done += rows
                wrong += sum(row["status"] == "incorrect" for row in rows)
                print(*map(said, rows), sep="\n", flush=True)
                torch.cuda.empty_cache()
    print(*summary(done), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
