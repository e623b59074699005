"""Judges forecasts of FSDP by steps that others published: MPT models on A100s (llm-foundry's benchmark tables).

    python -m studies.parallel.published DATA [--most 12] [--out reports/parallel/published.md]

DATA holds training_tables_a100.csv, which is not ours to ship: the page has errors over rows alone. Their steps
are not ours in all: FSDP of an earlier kind, attention by other kernels with ALiBi, another optimizer; the model is a
GPT-2 of the same sizes. Rows of at most MICRO micro-batches and SEQ tokens are taken, spread over models and lengths.
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
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.model.run import Run
from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table

TABLE, GPU, OUT = "training_tables_a100.csv", "nvidia-a100-80gb-sxm", ROOT / "reports" / "parallel" / "published.md"
MICRO, SEQ = 4, 8192


@dataclass(frozen=True)
class Judged:
    """A published step and its forecast; `tokens_per_second`: of all GPUs."""

    gpus: int
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
    }  # fmt: skip
    run = Run(
        batch=number["micro_batch"], seq=number["seq_len"], optimizer="adamw-fused", parallel=f"fsdp={number['gpus']}",
        accumulate=number["global_batch"] // number["micro_batch"] // number["gpus"],
        checkpoint="full" if row["recompute"] == "full" else "none",
    )  # fmt: skip
    each = float(row["tokens_per_s_per_gpu"])
    return Judged(number["gpus"], each * number["gpus"], forecast(config, run, find_profile(GPU)))


def page(found: Sequence[Judged]) -> str:
    rows = []
    for name, some in (
        ("FSDP on one host of 8", [one for one in found if one.gpus <= 8]),
        ("FSDP on several hosts", [one for one in found if one.gpus > 8]),
    ):
        if some:
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
200 Gbit/s per GPU, the forecast in fp32 over the 400 that it takes for granted. Error: forecast over measured less 1,
of the step's time."""


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--most", type=int, default=12)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    found = []
    for row in rows_of(options.data, options.most):
        try:
            one = judged(row)
        except UsageError as fault:
            print(f"{row['model']} {row['seq_len']}: {fault}", flush=True)
            continue
        found.append(one)
        print(f"{row['model']} {row['seq_len']} x {row['micro_batch']} on {row['gpus']}: {one.error:+.1%}", flush=True)
        options.out.write_text(page(found), encoding="utf-8")
    print(page(found))


if __name__ == "__main__":
    main()
