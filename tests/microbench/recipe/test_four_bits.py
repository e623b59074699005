"""QLoRA's real base, where bitsandbytes is installed."""

from __future__ import annotations

import pytest
import torch

from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import build
from flopcast.microbench.steps.run import parameters_of
from flopcast.roofline.stream.model.models import make_config

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
CONFIG = make_config(width=128, depth=2, vocab=512)


def test_a_base_of_four_bits_computes_nearly_what_it_packs_and_adapters_learn() -> None:
    lora, qlora = (
        build(CONFIG, "cpu", Recipe(batch=2, seq=32, finetune=way, base_dtype="fp32")) for way in ("lora", "qlora")
    )
    assert parameters_of(qlora.model) == parameters_of(lora.model)
    first, kept = qlora.run(), lora.run()
    assert float(first) != float(kept)
    assert float(first) == pytest.approx(float(kept), rel=2e-2)
    assert float(qlora.run()) < float(first)
    assert {p.dtype for p in qlora.model.parameters() if not p.is_floating_point()} == {torch.uint8}
    assert all(p.requires_grad == ("lora_" in name) for name, p in qlora.model.named_parameters())
