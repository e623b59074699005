"""What a call costs the host: each Triton operation beside torch's own of that kind, forward and backward.

    python -m studies.kernels.launch_cost OUT [--rounds 40] [--calls 10]          on a GPU, about 20 seconds

Operands are tiny, so that the device is never what is waited for: `calls` calls are enqueued and timed by the host's
clock, then the device is waited for, outside of the time. Ours and torch's take turns within one run, and the median
of all rounds counts. Forwards are made with gradients on; a backward is `torch.autograd.grad` of one forward's results,
the engine's own cost included in both. Writes OUT/launch_cost.csv: microseconds per call and their ratio.

Rotary embedding with per-head norms has no operation of torch's own: the row beside it is transformers' composition.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopcast.kernels import adamw, attention, cross_entropy, matmul, matmul_chosen, rmsnorm, rope, swiglu
from studies.command import parser_of

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Pair:
    """One operation: ours and torch's, both of the same operands, of which those of floating point get gradients."""

    operation: str
    ours: Function
    torch: Function
    operands: Sequence[Tensor]


@dataclass(frozen=True)
class Row:
    """Medians over all rounds, per call."""

    operation: str
    direction: str
    ours_us: float
    torch_us: float
    ratio: float


def pairs(device: str, dtype: torch.dtype) -> Iterator[Pair]:
    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    x, y, weight = normal(4, 128), normal(4, 128), normal(128)
    yield Pair(
        "rms_norm", lambda x, w: rmsnorm.rms_norm(x, w), lambda x, w: F.rms_norm(x, (128,), w, 1e-6), (x, weight)
    )
    yield Pair(
        "add_rms_norm",
        rmsnorm.add_rms_norm,
        lambda x, r, w: (F.rms_norm(total := x + r, (128,), w, 1e-6), total),
        (x, y, weight),
    )
    yield Pair("swiglu", swiglu.swiglu, lambda gate, up: F.silu(gate) * up, (x, y))
    tables = rope.tables(16, 64, device)
    heads = (normal(1, 16, 4, 64), normal(1, 16, 2, 64), normal(64), normal(64))
    yield Pair(
        "rope_qk_norm",
        lambda q, k, of_q, of_k: rope.rope_qk_norm(q, k, of_q, of_k, *tables),
        lambda q, k, of_q, of_k: rope.rope_qk_norm_torch(q, k, of_q, of_k, *tables),
        heads,
    )
    target = torch.randint(0, 512, (8,), device=device)
    yield Pair(
        "cross_entropy",
        lambda logits: cross_entropy.cross_entropy(logits, target, gradient_at_forward=False),
        lambda logits: F.cross_entropy(logits, target),
        (normal(8, 512),),
    )
    yield Pair(
        "attention",
        attention.attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        tuple(normal(1, 128, n, 64).transpose(1, 2) for n in (4, 2, 2)),
    )
    square = (normal(128, 128), normal(128, 128))
    yield Pair("matmul", lambda a, b: matmul.triton_matmul(a, b, "nt"), F.linear, square)
    yield Pair(
        "chosen_matmul, torch's", lambda a, b: matmul_chosen.chosen_matmul(a, b, "nt", "torch"), F.linear, square
    )


def calls_of(pair: Pair, function: Function) -> dict[str, Callable[[], Any]]:
    """The calls to time, by direction."""
    leaves = [x.detach().requires_grad_() for x in pair.operands]
    results = function(*leaves)
    outputs = results if isinstance(results, tuple) else (results,)
    gradients = [torch.ones_like(x) for x in outputs]
    return {
        "forward": lambda: function(*leaves),
        "backward": lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True),
    }


def optimizer_calls(device: str, max_norm: float = 0.0) -> dict[str, Callable[[], Any]]:
    """A step of AdamW over 16 parameters, by who makes it; with a norm above 0 the gradients are clipped to it."""

    def parameters() -> list[Tensor]:
        made = [torch.randn(64, device=device).requires_grad_() for _ in range(16)]
        for parameter in made:
            parameter.grad = torch.randn_like(parameter)
        return made

    ours, given = adamw.AdamW(parameters(), max_norm=max_norm), parameters()
    torchs = torch.optim.AdamW(given, fused=True)

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(given, max_norm)
        torchs.step()

    return {"ours": ours.step, "torch": clipped if max_norm else torchs.step}


def medians(
    contenders: Sequence[Callable[[], Any]], rounds: int, calls: int, wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:  # fmt: skip
    """Seconds per call of each contender, which take turns: the median of `rounds` times `calls` calls in a row."""
    readings: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for call, found in zip(contenders, readings, strict=True):
            start = clock()
            for _ in range(calls):
                call()
            found.append((clock() - start) / calls)
            wait()
    return [statistics.median(found) for found in readings]


def row(operation: str, direction: str, both: Sequence[Callable[[], Any]], **how: Any) -> Row:
    for call in both:  # compiles, and fills what is cached
        call()
    ours, theirs = medians(both, **how)
    return Row(operation, direction, ours * 1e6, theirs * 1e6, ours / theirs)


def run(device: str, dtype: torch.dtype, rounds: int, calls: int) -> Iterator[Row]:
    how = {"rounds": rounds, "calls": calls, "wait": torch.cuda.synchronize if device == "cuda" else lambda: None}
    for pair in pairs(device, dtype):
        ours, theirs = (calls_of(pair, function) for function in (pair.ours, pair.torch))
        for direction in ours:
            yield row(pair.operation, direction, (ours[direction], theirs[direction]), **how)
    for operation, max_norm in (("adamw, 16 parameters", 0.0), ("adamw with clipping, 16 parameters", 1.0)):
        steps = optimizer_calls(device, max_norm)
        yield row(operation, "step", (steps["ours"], steps["torch"]), **how)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("launch_cost times launches on a GPU: none is here", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "launch_cost.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for found in run("cuda", torch.bfloat16, options.rounds, options.calls):
            writer.writerow(asdict(found))
            file.flush()
            print(
                f"{found.operation:34} {found.direction:9} ours {found.ours_us:7.1f} us  torch {found.torch_us:7.1f} us"
                f"  {found.ratio:5.2f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
