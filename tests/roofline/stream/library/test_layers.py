"""Models whose layers differ beyond those that are traced: their streams have every layer's own launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flopcast.microbench.recipe.training_step import build_model
from flopcast.roofline.stream.library import layers
from flopcast.roofline.stream.library.layers import are_alike
from flopcast.roofline.stream.model.models import load_config, shipped_names, with_depth
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH
from tests.roofline.conftest import Tracing

_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
}  # fmt: skip
# As published: the first layers of DeepSeek-V3 have no experts, SmolLM3 rotates no fourth one, the layers without a
# window of Cohere2 rotate nothing, also where a sequence is shorter than the window.
UNLIKE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_SIZES, **_EXPERTS, **_LATENT, "num_hidden_layers": 5, "first_k_dense_replace": 3},
    "smollm3": {**_SIZES, "num_hidden_layers": 5},
    "cohere2": {**_SIZES, "num_hidden_layers": 5},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "num_experts": 4, "num_hidden_layers": 5, "mlp_only_layers": [4]},
}
ALIKE: dict[str, dict[str, Any]] = {
    "olmo2": {**_SIZES, "num_hidden_layers": 5},
    "gemma2": {**_SIZES, "num_hidden_layers": 5},  # by their window alone, which 32 tokens do not fill
    "gpt_neox": {**_SIZES, "num_hidden_layers": 5},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_hidden_layers": 5},
}


@pytest.mark.parametrize("kind", [*UNLIKE, *ALIKE])
def test_every_layer_launches_its_own(kind: str, traced: Tracing) -> None:
    config = {"model_type": kind, **(UNLIKE | ALIKE)[kind]}
    assert are_alike(config) == (kind in ALIKE)
    stream = traced(config)
    with torch.device("meta"):
        model = build_model(config)
    assert stream.n_params == sum(weight.numel() for weight in model.parameters())
    whole = traced(config, folded=False)
    assert [(op.name, op.phase) for op in stream.ops] == [(op.name, op.phase) for op in whole.ops]


def test_layers_that_are_traced_may_be_alike_where_others_are_not() -> None:
    """What the answer is for: the few layers that would be traced are of one kind."""
    for kind, config in UNLIKE.items():
        whole = {"model_type": kind, **config}
        assert are_alike(with_depth(whole, FOLDED_DEPTH))
        assert not are_alike(whole)


def test_nothing_is_built_for_shipped_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_built", lambda _config: pytest.fail("built"))
    assert all(are_alike(load_config(name)) for name in shipped_names())


def test_the_answer_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"model_type": "smollm3", **UNLIKE["smollm3"], "vocab_size": 640}
    assert not are_alike(config)
    layers._answered.cache_clear()
    monkeypatch.setattr(layers, "_built", lambda _config: pytest.fail("built again"))
    assert not are_alike(config)
    (path,) = tmp_path.rglob("*.json")
    path.write_text("torn {")
    layers._answered.cache_clear()
    monkeypatch.setattr(layers, "_built", lambda _config: False)
    assert not are_alike(config)
