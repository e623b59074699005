"""Measures compiled steps in a row: their seconds, clock and power, and that they compute numbers.

    python -m studies.power.steps OUT NAME,...       OUT/NAME.json, on a GPU; a process for each, which take turns on it

Their shapes are none that a law is fitted to or that anything else is judged by.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.steps.build import build_plan
from flopcast.microbench.steps.gpu_alone import first_steps, gpu_alone
from flopcast.microbench.steps.measure import rest
from studies.command import parser_of
from studies.power.watch import Watch

SECONDS = 1.5


def _qwen3(
    width: int, depth: int, heads: int, kv_heads: int, head_dim: int = 128, vocab: int = 32000
) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 3 * width,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "tie_word_embeddings": True,
    }  # fmt: skip


def _plan(name: str, config: dict[str, Any], batch: int, seq: int) -> StepPlan:
    return StepPlan(name=name, config=config, batch=batch, seq=seq, optimizer="adamw-fused", mode="compile")


PLANS = {
    plan.name: plan
    for plan in (
        _plan("w2048-d2", _qwen3(2048, 2, 16, 8), 4, 1024),
        _plan("w1024-d3-long", _qwen3(1024, 3, 16, 8), 1, 8192),
        _plan("w1024-d3-h64", _qwen3(1024, 3, 16, 8, head_dim=64), 2, 4096),
        _plan("w4096-d1", _qwen3(4096, 1, 32, 8), 3, 1024),
        _plan("w512-d8-h64", _qwen3(512, 8, 8, 4, head_dim=64, vocab=151936), 12, 2048),
        _plan("w768-d6-h64", _qwen3(768, 6, 12, 12, head_dim=64, vocab=50304), 12, 1024),
        _plan("w1024-d8-h64", _qwen3(1024, 8, 16, 8, head_dim=64), 16, 512),
        _plan("w1280-d3", _qwen3(1280, 3, 10, 5, vocab=151936), 6, 2048),
        _plan("w1536-d3-long", _qwen3(1536, 3, 12, 4), 1, 12288),
        _plan("w1792-d4", _qwen3(1792, 4, 14, 7, vocab=100352), 20, 768),
        _plan("w2048-d4-h64", _qwen3(2048, 4, 32, 8, head_dim=64, vocab=128256), 8, 768),
        _plan("w2304-d2", _qwen3(2304, 2, 18, 6, vocab=128256), 10, 1536),
        _plan("w2560-d3", _qwen3(2560, 3, 20, 4), 10, 1024),
        _plan("w3072-d2", _qwen3(3072, 2, 24, 8, vocab=100352), 3, 2048),
        _plan("w4096-d2", _qwen3(4096, 2, 32, 8, vocab=151936), 2, 2048),
    )
}


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="?", default=",".join(PLANS), help="with commas between (default: %(default)s)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    names = given.names.split(",")
    if unknown := set(names) - {*PLANS}:
        parser.error(f"{', '.join(sorted(unknown))}: valid are {', '.join(PLANS)}")
    if len(names) > 1:
        command = [sys.executable, "-m", "studies.power.steps", str(given.out)]
        for running in [subprocess.Popen([*command, name]) for name in names]:
            running.wait()
        return
    (given.out / f"{names[0]}.json").write_text(json.dumps(measured(PLANS[names[0]]), indent=1) + "\n")


def measured(plan: StepPlan) -> dict[str, Any]:
    step = build_plan(plan, torch.device("cuda"))
    first_steps(step, 3)
    first = float(step.run())
    with gpu_alone("cuda"):
        watch = Watch()
        rest()
        rested = watch.profiled(step.run)
        row = {"name": plan.name, "batch": plan.batch, "seq": plan.seq, "rested": rested._asdict()}
        row["in_a_row"] = asdict(watch.in_a_row(step.run, SECONDS))
        row["in_a_row_kernels"] = watch.profiled(lambda: [step.run() for _ in range(3)])._asdict()
        row["losses"] = [first, float(step.run())]
    print(plan.name, row["in_a_row"], row["losses"], flush=True)
    return row


if __name__ == "__main__":
    main()
