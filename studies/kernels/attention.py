"""The Triton attention as a call gets it, beside cuDNN's and flash attention, in one run on one GPU.

    python -m studies.kernels.attention OUT [--budget 120]

Causal, 16 query and 8 key-value heads, bf16, 16,384 tokens, head_dim 128 and 64, both directions; all kernels of a
backward count, and so do the buffers that it clears. Each result is checked against the reference before it is timed.
Times are graph replays after a flush of L2, backends shuffled. Writes OUT/attention.csv and prints the geometric means
of the ratios from 1024 tokens a sequence on.
"""

from __future__ import annotations

import csv
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flopcast.kernels import attention as A
from flopcast.kernels.shapes import Attention
from studies.command import parser_of
from studies.kernels.attention_tune import PEERS, SEQS, TOKENS, Judge, captured, measure

COLUMNS = (
    "backend", "batch", "heads", "kv_heads", "seq", "head_dim", "causal", "direction", "seconds", "low", "n",
    "tflops", "cudnn_ratio", "flash_ratio", "error_over_tolerance",
)  # fmt: skip


def time_shape(shape: Attention, budget: float) -> list[dict[str, Any]]:
    """A row per backend; ratios of speed, above 1 where the backend is faster than the peer."""
    operands = A.operands(shape, "cuda", seed=shape.seq)
    judge = Judge(shape, operands)
    runs: dict[str, Callable[[], Any]] = {name: A.prepare(shape, name, operands) for name in ("triton", *PEERS)}
    which = (0,) if shape.direction == "fwd" else (0, 1, 2)
    errors = {name: judge.ratio(run(), which) for name, run in runs.items()}
    seconds = measure({name: captured(run) for name, run in runs.items()}, 20, budget)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "backend": name, "batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads,
            "seq": shape.seq, "head_dim": shape.head_dim, "causal": str(shape.causal).lower(),
            "direction": shape.direction, "seconds": median[name], "low": min(seconds[name]),
            "n": len(seconds[name]), "tflops": shape.flops / median[name] / 1e12,
            "cudnn_ratio": median["sdpa-cudnn"] / median[name],
            "flash_ratio": median["sdpa-flash"] / median[name], "error_over_tolerance": errors[name],
        }
        for name in runs
    ]  # fmt: skip


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=120.0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began, rows = time.perf_counter(), []
    with (arguments.out / "attention.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for head_dim in (128, 64):
            for seq in SEQS["causal"]:
                for direction in ("fwd", "bwd"):
                    left = arguments.budget - (time.perf_counter() - began)
                    if left < 0:
                        print(f"out of budget before head_dim {head_dim} seq {seq} {direction}")
                        continue
                    shape = Attention(
                        batch=TOKENS // seq, heads=16, kv_heads=8, seq=seq, head_dim=head_dim, direction=direction
                    )
                    found = time_shape(shape, left / 4)
                    torch.cuda.empty_cache()
                    writer.writerows(found)
                    file.flush()
                    rows += found
                    print(
                        f"d{head_dim} {seq} {direction}: "
                        + ", ".join(
                            f"{x['backend']} {x['tflops']:.0f} ({x['cudnn_ratio']:.2f} {x['flash_ratio']:.2f}"
                            + (")" if x["error_over_tolerance"] <= 1 else " WRONG)")
                            for x in found
                        ),
                        flush=True,
                    )
    for head_dim in (128, 64):
        for direction in ("fwd", "bwd"):
            of = [
                x for x in rows
                if x["backend"] == "triton" and x["head_dim"] == head_dim and x["direction"] == direction
                and x["seq"] >= 1024 and x["error_over_tolerance"] <= 1
            ]  # fmt: skip
            if of:
                cudnn = geometric_mean([x["cudnn_ratio"] for x in of])
                flash = geometric_mean([x["flash_ratio"] for x in of])
                print(f"triton d{head_dim} {direction}: {cudnn:.3f} of cuDNN, {flash:.3f} of flash")


if __name__ == "__main__":
    main()
