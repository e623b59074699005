"""`sweep` and `kernels`: tables in, tables out."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopcast.roofline.step.questions.sweep import SWEEP_OUT

H200 = "nvidia-h200"
Command = Callable[..., Any]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# The fields of a forecast that are numbers or words; and what rows have beside.
SCALARS = [
    "bound", "depth", "device_seconds", "device_seconds_low", "device_seconds_high", "fits",
    "flops_6n", "flops_counted", "flops_per_usd", "gpu", "host",
    "host_seconds", "mfu", "mfu_6n", "mode", "n_params", "peak_bytes", "peak_flops_per_second", "profile_basis",
    "step_seconds", "step_seconds_high", "step_seconds_low", "tokens_per_second", "usd_per_step",
    "price_usd_per_hour", "price_provider", "price_date", "price_age_days", "reason", "warnings",
]  # fmt: skip


def test_a_sweep_answers_each_row_as_predict_does(flopcast: Command, tmp_path: Path) -> None:
    source, out = tmp_path / "steps.csv", tmp_path / "new" / "out.csv"
    source.write_text(
        "name,config,width,depth,batch,seq,optimizer,tied\n"
        "small,,512,,4,256,adamw,true\n"
        "config,qwen3-0.6b,,3,8,1024,adamw-fused,\n"
        "wide,,0,,,,,\n"
        "shapeless,,,,,,,\n"
    )
    result = flopcast("sweep", "--gpu", H200, "--from", source, "--out", out, "--json")
    assert result.document == {"out": str(out), "rows": 4, "forecast": 2, "failed": 2}
    rows = rows_of(out)
    assert set(rows[0]) == {"name", "config", "width", "batch", "seq", "optimizer", "tied", *SCALARS}
    assert [row["name"] for row in rows] == ["small", "config", "wide", "shapeless"]
    single = flopcast("predict", "--gpu", H200, "--width", 512, "--json").document
    for name in SCALARS:
        if isinstance(single.get(name), float):
            assert float(rows[0][name]) == pytest.approx(single[name], rel=1e-6)
    assert rows[0]["fits"] == "true"
    assert rows[0]["tied"] == "true"
    assert rows[0]["n_params"] == str(single["n_params"])
    assert {name: str(value) for name, value in single["price"].items()} == {
        name: rows[0][f"price_{name}"] for name in single["price"]
    }
    for row in rows[:2]:
        for name in ("step_seconds", "device_seconds"):
            assert float(row[f"{name}_low"]) < float(row[name]) < float(row[f"{name}_high"])
    assert (rows[1]["depth"], rows[1]["mode"], rows[1]["reason"]) == ("3", "eager", "")
    assert "width is 0" in rows[2]["reason"]
    assert "no model" in rows[3]["reason"]
    for row in rows[2:]:
        assert all(row[name] == "" for name in SWEEP_OUT if name != "reason")


def test_a_module_is_swept_over_batches_and_gpus(
    flopcast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import torch\ndef pair(batch=4):\n    return torch.nn.Linear(64, 8), torch.randn(batch, 64)\n"
        "def fixed():\n    return pair(4)\n"
    )
    swept = ("sweep", "--gpus", "h200,l4", "--module", "mine.py:pair", "--batches", "4,8..10")
    rows = flopcast(*swept, "--json").document
    assert [(row["batch"], row["gpu"]) for row in rows[:3]] == [("4", H200), ("4", "nvidia-l4"), ("8", H200)]
    assert len(rows) == 8
    shown = flopcast(*swept).out
    for part in ("samples/s", "$/M samples", "batch", "l4"):
        assert part in shown
    result = flopcast(*swept, "--optimizer", "adamw-fused", "--out", "out.csv", "--json")
    assert result.document == {"out": "out.csv", "rows": 8, "forecast": 8, "failed": 0}
    assert [(row["batch"], row["optimizer"]) for row in rows_of(Path("out.csv"))][6:] == [("10", "adamw-fused")] * 2
    refused = flopcast("sweep", "--gpu", H200, "--module", "mine.py:fixed", "--batches", "4..5", "--json").document
    assert all("no parameter 'batch'" in row["reason"] for row in refused)
    Path("steps.csv").write_text("name,batch,accumulate\nsmall,2,1\nodd,two,1\n")
    one, odd = flopcast("sweep", "--gpu", H200, "--module", "mine.py:pair", "--from", "steps.csv", "--json").document
    assert (one["name"], one["reason"]) == ("small", None)
    assert "batch is 'two'" in odd["reason"]


def test_options_hold_for_every_row_of_a_table(flopcast: Command, tmp_path: Path) -> None:
    source = tmp_path / "steps.csv"
    source.write_text("width\n512\n1024\n")
    rows = flopcast("sweep", "--gpu", "H200", "--from", source, "--optimizer", "adamw-fused", "--json").document
    alone = flopcast("predict", "--gpu", "H200", "--width", 512, "--optimizer", "adamw-fused", "--json").document
    assert rows[0]["step_seconds"] == alone["step_seconds"]
    assert [row["optimizer"] for row in rows] == ["adamw-fused"] * 2


def test_a_sweep_without_json_reports_on_stderr(
    flopcast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("steps.csv").write_text("width\n512\n")
    result = flopcast(
        "sweep", "--gpu", H200, "--from", "steps.csv", "--out", "out.csv", "--host", "none", "--price", f"{H200}=2"
    )
    assert (result.code, result.out) == (0, "")
    assert "1 of 1 steps forecast for nvidia-h200 (measured) -> out.csv" in result.err
    row = rows_of(Path("out.csv"))[0]
    assert (row["host"], row["host_seconds"], row["price_usd_per_hour"]) == ("none", "0", "2")


def test_kernels_are_timed_alone(flopcast: Command, tmp_path: Path) -> None:
    source, out = tmp_path / "shapes.csv", tmp_path / "out.csv"
    source.write_text(
        "name,op,m,n,k,layout,batch,heads,kv_heads,seq,head_dim,causal,direction,dtype,backend,cache\n"
        "big,gemm,8192,8192,8192,nt,,,,,,,,bf16,torch,cold\n"
        "tiny,gemm,16,16,16,nn,,,,,,,,bf16,torch,hot\n"
        "row,gemm,1,8192,8192,nt,,,,,,,,bf16,,\n"
        "own,gemm,1024,1024,1024,tn,,,,,,,,bf16,triton,\n"
        "att,attention,,,,,4,16,8,1024,128,true,fwd,bf16,sdpa,cold\n"
        "back,attention,,,,,4,16,8,1024,128,true,bwd,bf16,sdpa-flash,cold\n"
        "heads,attention,,,,,4,6,4,1024,128,true,fwd,bf16,sdpa,cold\n"
        "cell,gemm,64,64,big,nt,,,,,,,,bf16,torch,cold\n"
        "zero,gemm,64,0,64,nt,,,,,,,,bf16,torch,cold\n"
        "none,gemm,64,64,,nt,,,,,,,,bf16,torch,cold\n"
        "conv,conv,64,64,64,nt,,,,,,,,bf16,torch,cold\n"
        "layout,gemm,64,64,64,tt,,,,,,,,bf16,torch,cold\n"
        "dtype,gemm,64,64,64,nt,,,,,,,,fp8,torch,cold\n"
        "backend,gemm,64,64,64,nt,,,,,,,,bf16,sdpa,cold\n"
        "cache,gemm,64,64,64,nt,,,,,,,,bf16,torch,warm\n"
        "causal,attention,,,,,4,16,8,1024,128,perhaps,fwd,bf16,sdpa,cold\n"
    )
    result = flopcast("kernels", "--gpu", H200, "--from", source, "--out", out, "--json")
    assert result.document == {"out": str(out), "rows": 16, "timed": 6, "failed": 10}
    rows = {row["name"]: row for row in rows_of(out)}
    assert list(rows)[:3] == ["big", "tiny", "row"]
    assert {"seconds", "seconds_low", "seconds_high", "tflops", "bound", "basis", "reason"} <= set(rows["big"])
    for name in ("big", "tiny", "row", "own", "att", "back"):
        row = rows[name]
        assert 0 < float(row["seconds_low"]) <= float(row["seconds"]) <= float(row["seconds_high"])
        assert row["basis"] in ("measured", "interpolated", "extrapolated")
        assert row["reason"] == ""
    assert float(rows["big"]["tflops"]) == pytest.approx(2 * 8192**3 / float(rows["big"]["seconds"]) / 1e12)
    assert [rows[name]["bound"] for name in ("big", "tiny", "row")] == ["matrix", "launch", "memory"]
    said = {"heads": "kv_heads 4", "cell": "k is 'big'", "zero": "n is 0", "none": "k is missing", "conv": "'conv'",
            "layout": "nt, nn, tn", "dtype": "'fp8'", "backend": "torch, triton", "cache": "cold, hot",
            "causal": "true and false"}  # fmt: skip
    for name, part in said.items():
        assert part in rows[name]["reason"]
        assert rows[name]["seconds"] == rows[name]["tflops"] == rows[name]["bound"] == ""


def test_ten_thousand_operations_are_answered(flopcast: Command, tmp_path: Path) -> None:
    source, out = tmp_path / "shapes.csv", tmp_path / "out.csv"
    shapes = [(64 * (i % 97 + 1), 64 * (i % 89 + 1), 32 * (i % 83 + 1)) for i in range(10_000)]
    layouts = ("nt", "nn", "tn")
    lines = (f"{m},{n},{k},{layouts[i % 3]}" for i, (m, n, k) in enumerate(shapes))
    source.write_text("m,n,k,layout\n" + "\n".join(lines) + "\n")
    assert flopcast("kernels", "--gpu", H200, "--from", source, "--out", out).code == 0
    rows = rows_of(out)
    assert [(int(row["m"]), int(row["n"]), int(row["k"])) for row in rows] == shapes
    assert all(math.isfinite(float(row["seconds"])) and float(row["seconds"]) > 0 for row in rows)


def test_attention_over_millions_of_tokens_is_timed_or_refused(flopcast: Command, tmp_path: Path) -> None:
    """Late in a long schedule its clock rounds by more than a block's rest: the dealing must end all the same."""
    source, out = tmp_path / "shapes.csv", tmp_path / "out.csv"
    lengths = (2**21, 2**22, 2**24 + 1)
    rows = "".join(f"attention,4,16,{seq},128,sdpa-flash\n" for seq in lengths)
    source.write_text("op,batch,heads,seq,head_dim,backend\n" + rows)
    assert flopcast("kernels", "--gpu", H200, "--from", source, "--out", out).code == 0
    half, whole, beyond = rows_of(out)
    assert float(whole["seconds"]) == pytest.approx(4 * float(half["seconds"]), rel=0.05)
    assert "at most 16777216" in beyond["reason"]
