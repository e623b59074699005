"""Published training steps against projected profiles: MPT on A100s, up to one node of 8, without recomputation.

llm-foundry's table gives tokens/s and MFU (6N + 12 L d S FLOPs a token of 312 TFLOP/s); only the step's seconds are
used. What is forecast: GPT-2's modules at MPT's sizes (no dropout, GELU in one kernel), one micro-batch in bf16 - FSDP
keeps and gathers bf16 weights under both of the table's precisions - times the accumulation, without the sums of
gradients over tokens that biases need and MPT has not, and AdamW over the shard of one GPU. The runs took attention
from FlashAttention's first version in Triton on torch 1.13 (`attn_impl: triton` in their submit_benchmarks.py), which
the second version's paper (arXiv 2307.08691) finds 1.3 to 2.5 times as slow as what torch runs now: attention's time
is multiplied by the geometric mean, 1.8. The last column leaves that out. It was looked up after steps with much
attention were found to be forecast too fast.

Not modelled: communication (FSDP's gathers and scatters, which overlap in part, most of all for 7B and 13B, whose
micro-batches are small), clipping of gradients, the loader, the host (micro-batches are sized to fill the GPU). Each
makes the published step longer than the forecast: errors are signed, negative where the forecast is too fast. The
profiles are those that ship (refined by published products on the A100 80 GB SXM, by the ratios of the same chip on
the 40 GB one), and zero-shot. No step was fitted.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.gpu.library.profiles import find_profile, projection
from flopcast.roofline.gpu.profile.host import NO_HOST
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.model.models import load_config
from flopcast.roofline.stream.model.run import Run

TABLE = "training_tables_a100.csv"
GPUS = {"A100-80GB-SXM": "nvidia-a100-80gb-sxm", "A100-40GB-SXM": "nvidia-a100-40gb-sxm"}
NODE = 8
OLDER_ATTENTION = 1.8
COLUMNS = (
    "gpu", "stage", "model", "seq", "micro_batch", "accumulate", "gpus", "precision", "seconds", "forecast", "low",
    "high", "error", "error_torch_flash", "published_mfu", "profile_basis",
)  # fmt: skip
FP32_TABLE = "model_steps_fp32_l4_a100.csv"
FP32_GPUS = {"NVIDIA A100 80GB PCIe": "nvidia-a100-80gb-pcie", "NVIDIA L4": "nvidia-l4"}
FP32_MODELS = {
    "gpt2_large": (1280, 36, 20, 50257),
    "gpt3_xl": (2048, 24, 16, 50257),
    "gpt3_27": (2560, 32, 32, 50257),
    "opt_13": (2048, 24, 32, 50272),
}
FP32_COLUMNS = ("gpu", "model", "seq", "batch", "seconds", "forecast", "error", "neusight_error")
NUMBERS = ("seconds", "forecast", "low", "high", "error", "error_torch_flash", "published_mfu", "neusight_error")


def rows_of(path: Path) -> list[dict[str, str]]:
    """MPT's rows without recomputation, on at most one node."""
    return [
        row
        for row in read_rows(path)
        if row["model"].startswith("MPT")
        and row["recompute"] == "none"
        and int(row["gpus"]) <= NODE
        and row["gpu_type"] in GPUS
    ]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def config_of(row: Mapping[str, str]) -> dict[str, Any]:
    sizes = {"n_embd": int(row["d_model"]), "n_layer": int(row["n_layers"]), "n_head": int(row["n_heads"])}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    seq = int(row["seq_len"])
    plain = {"vocab_size": int(row["vocab"]), "n_positions": seq, "n_ctx": seq, "activation_function": "gelu"}
    return {**load_config("gpt2"), **sizes, **dropout, **plain}


def step_of(found: Forecast, accumulate: int, gpus: int, attention: float = OLDER_ATTENTION) -> tuple[float, float]:
    """(seconds, upper end of the 90% interval over it) of a step as the table's, attention so many times as long."""
    by_class = {share.op_class: share.seconds for share in found.breakdown}
    optimizer = by_class.get("optimizer", 0.0)
    micro = found.step_seconds - optimizer - by_class.get("reduction", 0.0)
    micro += (attention - 1.0) * by_class.get("attention", 0.0)
    return accumulate * micro + optimizer / gpus, found.step_seconds_high / found.step_seconds


def forecast_rows(data: Path) -> Iterable[dict[str, Any]]:
    profiles = {gpu: (("zero-shot", projection(gpu)), ("shipped", find_profile(gpu))) for gpu in GPUS.values()}
    for row in rows_of(data / TABLE):
        gpu, gpus = GPUS[row["gpu_type"]], int(row["gpus"])
        run = Run(batch=int(row["micro_batch"]), seq=int(row["seq_len"]), precision="bf16")
        accumulate = round(int(row["global_batch"]) / (gpus * run.batch))
        for stage, profile in profiles[gpu]:
            found = forecast(config_of(row), run, profile, host=NO_HOST)
            seconds, wide = step_of(found, accumulate, gpus)
            as_torch, _ = step_of(found, accumulate, gpus, attention=1.0)
            actual = float(row["step_time_s"])
            yield {
                "gpu": gpu, "stage": stage, "model": row["model"], "seq": run.seq, "micro_batch": run.batch,
                "accumulate": accumulate, "gpus": gpus, "precision": row["precision"], "seconds": actual,
                "forecast": seconds, "low": seconds / wide, "high": seconds * wide, "error": seconds / actual - 1,
                "error_torch_flash": as_torch / actual - 1, "published_mfu": float(row["mfu"]),
                "profile_basis": profile.basis,
            }  # fmt: skip


def fp32_rows(data: Path) -> Iterable[dict[str, Any]]:
    """NeuSight's training rows (forward and backward) of models that GPT-2's modules stand for, zero-shot.

    Not like for like: they ran TF32 off and attention as products, softmax and masks over all pairs of tokens, which
    move many times the bytes of the fused attention that is forecast; heads of GPT-3 XL are not stated (16 here)."""
    profiles = {name: projection(gpu) for name, gpu in FP32_GPUS.items()}
    for row in read_rows(data / FP32_TABLE):
        if row["model"] not in FP32_MODELS or row["mode"] != "train" or row["option"] or row["gpu"] not in profiles:
            continue
        width, depth, heads, vocab = FP32_MODELS[row["model"]]
        sizes = {"d_model": width, "n_layers": depth, "n_heads": heads, "vocab": vocab, "seq_len": row["seqlen"]}
        run = Run(batch=int(row["batch"]), seq=int(row["seqlen"]), precision="fp32")
        config = config_of({name: str(value) for name, value in sizes.items()})
        found = forecast(config, run, profiles[row["gpu"]], host=NO_HOST)
        optimizer = sum(share.seconds for share in found.breakdown if share.op_class == "optimizer")
        actual, seconds = float(row["meas_total_ms"]) * 1e-3, found.step_seconds - optimizer
        yield {
            "gpu": found.gpu, "model": row["model"], "seq": run.seq, "batch": run.batch, "seconds": actual,
            "forecast": seconds, "error": seconds / actual - 1,
            "neusight_error": float(row["neusight_total_ms"]) * 1e-3 / actual - 1,
        }  # fmt: skip


def write(data: Path, path: Path) -> None:
    """steps.csv, and beside it steps_fp32.csv."""
    write_rows(path, COLUMNS, forecast_rows(data))
    write_rows(path.with_name("steps_fp32.csv"), FP32_COLUMNS, fp32_rows(data))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of steps.csv, numbers as numbers; none where the file is not there."""
    if not path.is_file():
        return []
    return [
        {name: float(value) if name in NUMBERS else value for name, value in row.items()} for row in read_rows(path)
    ]
