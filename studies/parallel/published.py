"""Judges forecasts of FSDP and of tensor parallel by steps that others published: MPT models on A100s (llm-foundry's
benchmark tables), and GPTs by Megatron-DeepSpeed on a host of A100s (vTrain's).

    python -m studies.parallel.published DATA [--most 12] [--out reports/parallel/published.md]

DATA holds training_tables_a100.csv and training_steps_a100_single_node.csv, which are not ours to ship: the page has
errors over rows alone. Their steps are not ours in all: FSDP of an earlier kind, attention by other kernels with ALiBi,
another optimizer; the model is a GPT-2 of the same sizes, of tensor parallel a GPT-NeoX. Rows of at most MICRO
micro-batches and SEQ tokens are taken, spread over models and lengths.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import NO_HOST, HostCosts
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.model.run import Run
from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table

DIVIDED = "training_steps_a100_single_node.csv"
TABLE, GPU, OUT = "training_tables_a100.csv", "nvidia-a100-80gb-sxm", ROOT / "reports" / "parallel" / "published.md"
MICRO, SEQ = 4, 8192
MEGATRON_VOCAB = 50304


@dataclass(frozen=True)
class Judged:
    """A published step of a `kind` and its forecast; `tokens_per_second`: of all GPUs."""

    kind: str
    tokens_per_second: float
    forecast: Forecast

    @property
    def error(self) -> float:
        """Of the step's time, forecast over measured less 1."""
        return self.tokens_per_second / self.forecast.tokens_per_second - 1

    @property
    def is_within(self) -> bool:
        tokens = self.forecast.tokens_per_second * self.forecast.step_seconds
        measured = tokens / self.tokens_per_second
        return self.forecast.step_seconds_low <= measured <= self.forecast.step_seconds_high


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


def judged(row: dict[str, str]) -> Judged:
    """Raises UsageError for a step that cannot be forecast."""
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
    each = float(row["tokens_per_s_per_gpu"])
    kind = "FSDP on one host of 8" if number["gpus"] <= 8 else "FSDP on several hosts"
    return Judged(kind, each * number["gpus"], forecast(config, run, find_profile(GPU)))


def divided_rows(folder: Path, most: int) -> list[dict[str, str]]:
    """Rows of tensor parallel alone, spread evenly."""
    with (folder / DIVIDED).open(newline="", encoding="utf-8") as file:
        found = [
            row
            for row in csv.DictReader(file)
            if int(row["tp"]) > 1 and row["dp"] == row["pp"] == "1"
            and int(row["global_batch"]) <= MICRO * int(row["micro_batch"])
        ]  # fmt: skip
    return _spread(found, most)


def judged_divided(row: dict[str, str], host: HostCosts | None = None) -> Judged:
    """As `judged`, of tensor parallel, whose steps recompute all activations. `host`: None for the shipped one."""
    names = ("hidden", "layers", "heads", "seqlen", "tp", "micro_batch", "global_batch")
    number = {name: int(row[name]) for name in names}
    config: dict[str, Any] = {
        "model_type": "gpt_neox", "hidden_size": number["hidden"], "num_hidden_layers": number["layers"],
        "num_attention_heads": number["heads"], "intermediate_size": 4 * number["hidden"],
        "vocab_size": MEGATRON_VOCAB, "max_position_embeddings": number["seqlen"], "hidden_act": "gelu",
        "use_parallel_residual": False, "tie_word_embeddings": True,
    }  # fmt: skip
    run = Run(
        batch=number["micro_batch"], seq=number["seqlen"], optimizer="adamw-fused", parallel=f"tp={number['tp']}",
        accumulate=number["global_batch"] // number["micro_batch"], checkpoint="full",
    )  # fmt: skip
    tokens = number["global_batch"] * number["seqlen"]
    seconds = float(row["latency_ms"]) / 1e3
    kind = "tensor parallel on one host" + ("" if host is None else ", the device alone")
    return Judged(kind, tokens / seconds, forecast(config, run, find_profile(GPU), host=host))


def judged_alone(row: dict[str, str]) -> Judged:
    """As `judged_divided`, without the host, whose Python for DTensor those steps did not run."""
    return judged_divided(row, NO_HOST)


def page(found: Sequence[Judged]) -> str:
    rows = []
    for name in dict.fromkeys(one.kind for one in found):
        some = [one for one in found if one.kind == name]
        errors = [one.error for one in some]
        rows.append([
            name, str(len(some)), f"{median(map(abs, errors)):.1%}", f"{max(map(abs, errors)):.1%}",
            f"{median(errors):+.1%}", f"{sum(one.is_within for one in some)} of {len(some)}",
        ])  # fmt: skip
    columns = ["steps", "rows", "error, median", "worst", "signed, median", "inside 90%"]
    return f"# Published steps on several GPUs beside their forecasts\n\n{_WORDS}\n\n{table(columns, rows)}\n"


_WORDS = """`python -m studies.parallel.published DATA`. Step times of MPT models on A100 80GB SXM by llm-foundry's
benchmark tables (mosaicml/llm-foundry, scripts/train/benchmarking), forecast by a projected profile, a projected link
and the shipped host. Nothing was fitted to them. Their attention kernels (ALiBi), FSDP and optimizer are not those
forecast: a GPT-2 of the same sizes under FSDP2 and fused AdamW; on several hosts they reduced gradients in bf16 over
200 Gbit/s per GPU, the forecast in fp32 over the 400 that it takes for granted. Tensor parallel: Megatron-DeepSpeed's
GPTs of 1024 to 2048 wide, all activations recomputed (VIA-Research/vTrain, data/ground_truth_single.csv), by fused
kernels and half-precision weights of its own; forecast: a GPT-NeoX of the same sizes by DTensor under autocast, a
vocabulary of 50,304, whose host spends 3.7 and 2.9 calls around each that it divides, where Megatron's calls NCCL
itself: the device alone stands beside. Error: forecast over measured less 1, of the step's time."""


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--most", type=int, default=12)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    found = []
    for row, judge in [
        *((row, judge) for judge in (judged_divided, judged_alone) for row in divided_rows(options.data, options.most)),
        *((row, judged) for row in rows_of(options.data, options.most)),
    ]:
        told = " ".join(row.get(name, "") for name in ("model", "hidden", "layers", "seq_len", "gpus", "n_gpus"))
        told = f"{' '.join(told.split())}, {row['micro_batch']} of {row['global_batch']}"
        try:
            one = judge(row)
        except UsageError as fault:
            print(f"{told}: {fault}", flush=True)
            continue
        found.append(one)
        step = one.forecast
        print(
            f"{told}: {one.error:+.1%}, {step.bound}, device {step.device_seconds:.3f} s of {step.step_seconds:.3f}, "
            f"exposed {step.exposed_communication_seconds:.3f}, inside {one.is_within}", flush=True,
        )  # fmt: skip
    options.out.write_text(page(found), encoding="utf-8")
    print(page(found))


if __name__ == "__main__":
    main()
