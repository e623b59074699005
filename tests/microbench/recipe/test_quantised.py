"""Weights of few bits: what the layers compute, and which models and sizes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flopcast.errors import UsageError
from flopcast.microbench.recipe.inference import build_inference
from flopcast.microbench.recipe.quantised import _LAYERS, Quantised, quantise
from flopcast.microbench.recipe.settings import QUANTISED, Recipe
from flopcast.microbench.recipe.training_step import build_model
from flopcast.roofline.stream.model.models import load_config, make_config

CONFIG = make_config(width=128, depth=2, vocab=512)


@pytest.fixture
def on_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product on weights of 4 bits, which on processors packs them otherwise and computes the same."""

    def packed(pairs: torch.Tensor, tiles: int) -> torch.Tensor:
        numbers = torch.stack([pairs >> 4, pairs & 15], 2).reshape(len(pairs), -1).int()
        return torch._convert_weight_to_int4pack_for_cpu(numbers, tiles)

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", packed)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", torch._weight_int4pack_mm_for_cpu)


# Rounding of weights that are spread evenly over [-b, b], as torch draws them, over their mean square b / sqrt(3): to
# 15 steps of 2b / 15 each 6.7%, to 254 of b / 127 0.5%; e4m3 has a half of 2^-3 at most, of both operands.
@pytest.mark.parametrize(("weights", "error"), [("fp8", 0.05), ("int8", 0.008), ("int4", 0.075)])
@pytest.mark.usefixtures("on_processors")
def test_a_layer_computes_what_it_stands_for(weights: str, error: float) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 512, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        found, wanted = _LAYERS[weights](layer)(x), layer(x)
    assert found.shape == wanted.shape
    assert found.dtype == torch.bfloat16
    assert 0 < float((found.float() - wanted.float()).norm() / wanted.float().norm()) < error


@pytest.mark.parametrize("weights", QUANTISED)
@pytest.mark.usefixtures("on_processors")
def test_a_call_runs_on_them(weights: str) -> None:
    step = build_inference(
        CONFIG, "cpu", Recipe(phase="decode", precision="bf16", context=8, batch=2, base_dtype=weights)
    )
    assert step.run().isfinite().all()
    kinds = {type(module).__name__ for name, module in step.model.named_modules() if name.endswith("_proj")}
    assert kinds == {_LAYERS[weights].__name__}
    model: Any = step.model
    assert type(model.lm_head) is torch.nn.Linear
    assert model.lm_head.weight.dtype == torch.bfloat16
    kept: list[Any] = [m.weight for m in model.modules() if isinstance(m, Quantised)]
    packed = sum(weights.stands_for for weights in kept)
    within = [m.weight.numel() for m in build_model(CONFIG).modules() if type(m) is torch.nn.Linear]
    assert packed == sum(within) - 512 * 128


def test_the_names_are_one_list() -> None:
    assert tuple(_LAYERS) == QUANTISED


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (load_config("gpt2") | {"n_embd": 64, "n_layer": 1, "n_head": 2}, "GPT2LMHeadModel has no linear layers"),
        (load_config("qwen3-moe") | {"num_hidden_layers": 1}, "the weights of its experts together"),
        (make_config(width=192, depth=1), r"q_proj has 192 inputs, .* multiples of 128"),
    ],
    ids=["GPT-2", "experts", "a width"],
)
def test_what_these_operators_do_not_take(config: dict[str, Any], words: str) -> None:
    with torch.device("meta"):
        model = build_model(config, precision="bf16")
    with pytest.raises(UsageError, match=words):
        quantise(model, "int4")
