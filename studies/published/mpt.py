"""FSDP steps of MPT models on A100s, by llm-foundry's benchmark tables (mosaicml/llm-foundry,
scripts/train/benchmarking): a GPT-2 of the same sizes under FSDP2 and fused AdamW.

Their FSDP was of an earlier kind and the optimizer another; on several hosts they reduced gradients in bf16 over 200
Gbit/s per GPU, the forecast in fp32 over the 400 that it takes for granted. Attention was FlashAttention's first
version in Triton with ALiBi, which takes `OLDER_ATTENTION` times as long as what torch runs now. Rows of at most MICRO
micro-batches and SEQ tokens are taken, spread over models and lengths. The table does not ship.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.model.run import Run
from studies.projection.steps import OLDER_ATTENTION
from studies.published.judged import Judged, attention_seconds

TABLE, GPU = "training_tables_a100.csv", "nvidia-a100-80gb-sxm"
MICRO, SEQ = 4, 8192


def rows_of(folder: Path, most: int) -> list[dict[str, str]]:
    """Rows of FSDP that can be run as we run it, spread evenly: of one host first."""
    with (folder / TABLE).open(newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if _is_ours(row)]
    one = [row for row in found if int(row["gpus"]) <= 8]
    several = [row for row in found if int(row["gpus"]) > 8]
    return [*_spread(one, most), *_spread(several, most // 2)]


def _is_ours(row: dict[str, str]) -> bool:
    sharded = "FSDP FULL_SHARD; MP DEFAULT" if int(row["gpus"]) <= 8 else "FSDP FULL_SHARD; MP PURE"
    if not row["parallelism"].startswith(sharded) or row["gpu_type"] != "A100-80GB-SXM":
        return False
    micro = int(row["global_batch"]) / int(row["micro_batch"]) / int(row["gpus"])
    return micro.is_integer() and micro <= MICRO and int(row["seq_len"]) <= SEQ and row["confidence"] == "high"


def _spread(rows: Sequence[dict[str, str]], most: int) -> list[dict[str, str]]:
    step = max(len(rows) / most, 1.0) if most else 1.0
    return [rows[int(place * step)] for place in range(min(most, len(rows)))]


def judged(folder: Path, most: int) -> Iterator[Judged]:
    """At most so many rows of one host, and half as many of several."""
    for row in rows_of(folder, most):
        yield _judged(row)


def _judged(row: dict[str, str]) -> Judged:
    number = {name: int(row[name]) for name in ("n_layers", "d_model", "n_heads", "d_ff", "vocab", "seq_len",
                                                "micro_batch", "global_batch", "gpus")}  # fmt: skip
    config: dict[str, Any] = {
        "model_type": "gpt2", "n_embd": number["d_model"], "n_layer": number["n_layers"], "n_head": number["n_heads"],
        "n_inner": number["d_ff"], "vocab_size": number["vocab"], "n_positions": number["seq_len"],
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "activation_function": "gelu",  # MPT's: one kernel, where GPT-2's own is eight
    }  # fmt: skip
    run = Run(
        batch=number["micro_batch"], seq=number["seq_len"], optimizer="adamw-fused", parallel=f"fsdp={number['gpus']}",
        accumulate=number["global_batch"] // number["micro_batch"] // number["gpus"],
        checkpoint="full" if row["recompute"] == "full" else "none",
    )  # fmt: skip
    found = forecast(config, run, find_profile(GPU))
    name = f"{row['model']}, {number['seq_len']} tokens, {run.accumulate} x {run.batch} on {number['gpus']} GPUs"
    tokens = number["global_batch"] * number["seq_len"] / number["gpus"]
    return Judged(
        f"FSDP on {'one host' if number['gpus'] <= 8 else 'several hosts'} of 8 A100s", name,
        tokens / float(row["tokens_per_s_per_gpu"]), found, (OLDER_ATTENTION - 1) * attention_seconds(found),
    )  # fmt: skip
