"""`flopcast finetune` as scripts meet it: each way beside the first, what it saves, and where it fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flopcast.roofline.gpu.catalogue.datasheets import load_specs

STEP = ("--gpu", "nvidia-h200", "--config", "qwen3-0.6b", "--depth", 3, "--on", "2026-11-15")


def test_ways_stand_side_by_side(flopcast: Callable[..., Any]) -> None:
    done = flopcast("finetune", *STEP, "--ways", "full,last=1,last=9", "--json")
    assert done.code == 0, done.err
    full, last, more = done.document
    alone = flopcast("predict", *STEP, "--json").document
    assert full["forecast"] == alone  # one recipe: a way is the step that predict forecasts
    assert full["saves"] == {"step_seconds": 0.0, "needed_bytes": 0.0, "usd": 0.0}
    found = last["forecast"]
    assert found["n_params_trained"] < found["n_params"] == alone["n_params"]
    for name, field in (("step_seconds", "step_seconds"), ("needed_bytes", "needed_bytes"), ("usd", "usd_per_step")):
        assert last["saves"][name] == pytest.approx(1 - found[field] / alone[field])
        assert last["saves"][name] > 0
    for way in (full, last):
        need = way["forecast"]["needed_bytes"]
        assert set(way["fits_on"]) == {name for name, spec in load_specs().items() if need <= spec.memory_bytes}
    assert (more["forecast"], more["saves"]) == (None, None)
    assert "the model has 3 layers" in more["reason"]
    printed = flopcast("finetune", *STEP, "--ways", "full,last=1,last=9")
    assert printed.code == 0
    assert "last=1 fits on: h200" in printed.out
    assert "last=9 (finetune last=9: the model has 3 layers" in printed.err


def test_full_lora_and_qlora_by_default(flopcast: Callable[..., Any]) -> None:
    pytest.importorskip("peft")
    done = flopcast("finetune", *STEP, "--json")
    assert done.code == 0, done.err
    full, lora, qlora = (way["forecast"] for way in done.document)
    assert lora["n_params_trained"] == qlora["n_params_trained"] < full["n_params_trained"]
    assert qlora["needed_bytes"] < lora["needed_bytes"] < full["needed_bytes"]
    assert "steps with kernels of bitsandbytes" in " ".join(qlora["warnings"])


def test_a_table_of_ways_is_swept(flopcast: Callable[..., Any], tmp_path: Any) -> None:
    source = tmp_path / "ways.csv"
    source.write_text(
        "width,depth,finetune,base_dtype,clip\n512,3,full,,\n512,3,last=2,,1\n512,3,full,bf16,\n512,3,last=9,,\n512,3,full,,much\n"
    )
    rows = flopcast("sweep", "--gpu", "H200", "--from", source, "--json").document
    assert rows[1]["step_seconds"] < rows[0]["step_seconds"]
    assert rows[2]["peak_bytes"] < rows[0]["peak_bytes"]
    assert "the model has 3 layers" in rows[3]["reason"]
    assert "clip is 'much': valid is a number" in rows[4]["reason"]
