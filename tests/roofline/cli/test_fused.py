"""`--fused` on the command line: a forecast of its own, refused where there is nothing to patch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopcast.roofline.stream.model.models import make_config

Command = Callable[..., Any]


def test_fused_kernels_are_composed_into_the_step(flopcast: Command, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(make_config(width=64, depth=3, heads=4, kv_heads=2, head_dim=16, vocab=512)))
    step = ("predict", "--gpu", "nvidia-h200", "--config", path, "--batch", 2, "--seq", 32, "--json")
    ways: tuple[tuple[str, ...], ...] = ((), ("--fused", "triton"), ("--fused", "patch", "--attention", "triton"))
    plain, fused, patched = (flopcast(*step, *more).document for more in ways)
    assert patched["kernels"] < 0.75 * fused["kernels"]
    assert patched["step_seconds"] < fused["step_seconds"]
    classes = {share["class"] for share in fused["breakdown"]}
    assert "fused" in classes
    assert "softmax" not in classes
    assert "fused" not in {share["class"] for share in plain["breakdown"]}
    assert fused["kernels"] < plain["kernels"]
    assert fused["device_seconds"] < plain["device_seconds"]
    assert fused["n_params"] == plain["n_params"]
    rows = tmp_path / "rows.csv"
    rows.write_text(f"config,batch,seq,fused\n{path},2,32,triton\n{path},2,32,none\n{path},2,32,cuda\n")
    out = tmp_path / "out.csv"
    assert flopcast("sweep", "--gpu", "nvidia-h200", "--from", rows, "--out", out).code == 0
    header, *lines = out.read_text().splitlines()
    at = header.split(",").index("step_seconds")
    found = [float(line.split(",")[at]) for line in lines[:2]]
    assert found == pytest.approx([fused["step_seconds"], plain["step_seconds"]])
    assert "valid are none, triton" in lines[2]


def test_what_cannot_be_patched_is_bad_use(flopcast: Command) -> None:
    module = ("--module", "flopcast.microbench.zoo:mlp")
    for arguments, said in (
        ((*module, "--fused", "triton"), "--module with --fused"),
        (
            ("--config", "gpt2", "--fused", "triton"),
            "fused 'triton' of a gpt2: the fused kernels are patched into Qwen3",
        ),
        (("--width", "256", "--fused", "cuda"), "fused 'cuda': valid are none, triton, patch"),
        (("--width", "256", "--fused", "patch"), "fused 'patch' with attention 'sdpa': a patched model runs on"),
    ):
        result = flopcast("predict", "--gpu", "nvidia-h200", *arguments)
        assert result.code == 2
        assert said in result.err
    result = flopcast("bench", "--device", "cpu", "--suite", "fused", "--out", "unused")
    assert result.code == 2
    assert "CUDA GPU" in result.err
    assert not Path("unused").exists()
