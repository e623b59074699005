"""Models whose layers differ: their streams are those of all layers, though only a few are traced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.microbench.recipe.training_step import build_model
from flopcast.roofline.stream.library import layers
from flopcast.roofline.stream.library.layers import pattern_in, pattern_of
from flopcast.roofline.stream.library.streams import folding
from flopcast.roofline.stream.model.models import load_config, shipped_names, with_depth
from flopcast.roofline.stream.model.run import Traced, check_step
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, FOLDED_PARALLEL, NotDerivable
from flopcast.roofline.stream.ops.to_groups import Pattern, unfolded
from tests.roofline.conftest import Tracing
from tests.roofline.stream.same_streams import assert_same, facts

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
UNLIKE: dict[str, tuple[dict[str, Any], Pattern]] = {
    "deepseek_v3": ({**_EXPERTS, **_LATENT, "num_hidden_layers": 8, "first_k_dense_replace": 3}, Pattern(3, 1)),
    "smollm3": ({"num_hidden_layers": 17}, Pattern(1, 4)),
    "cohere2": ({"num_hidden_layers": 16}, Pattern(0, 4)),
    "gemma2": ({"num_hidden_layers": 8, "sliding_window": 16}, Pattern(0, 2)),
    "qwen3_moe": ({**_EXPERTS, "num_experts": 4, "num_hidden_layers": 7, "mlp_only_layers": [0, 1]}, Pattern(2, 1)),
}  # fmt: skip
ALIKE: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "gemma2": {},  # by their window alone, which 32 tokens do not fill
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4},
}


def unlike(kind: str) -> tuple[dict[str, Any], Pattern]:
    own, pattern = UNLIKE[kind]
    return {"model_type": kind, **_SIZES, **own}, pattern


@pytest.mark.parametrize("kind", ["deepseek_v3", "smollm3", "gemma2"])
def test_groups_of_layers_unfold_to_what_all_of_them_give(kind: str, traced: Tracing) -> None:
    config, pattern = unlike(kind)
    assert pattern_of(config, 32) == pattern
    unfolded = traced(config)
    assert_same(unfolded, traced(config, folded=False))
    with torch.device("meta"):
        assert unfolded.n_params == sum(weight.numel() for weight in build_model(config).parameters())


@pytest.mark.parametrize("run", [{"accumulate": 2, "clip": 1.0}, {"checkpoint": "full"}], ids=str)
def test_groups_of_layers_in_other_steps(run: dict[str, Any], traced: Tracing) -> None:
    config, pattern = unlike("qwen3_moe")
    assert pattern_of(config, 32) == pattern
    few = traced(with_depth(config, pattern.depth_of(FOLDED_DEPTH)), folded=False, **run)
    assert_same(unfolded(few, pattern, 7), traced(config, folded=False, **run))
    with pytest.raises(NotDerivable, match="groups"):
        unfolded(few, Pattern(2, 2), 7)


@pytest.mark.parametrize("parallel", ["ddp=2", "ep=2,fsdp=2"])
def test_groups_of_layers_over_several_gpus(parallel: str, traced: Tracing) -> None:
    config, pattern = unlike("qwen3_moe")
    run = {"parallel": parallel, "optimizer": "adamw-fused", "device": "cuda"}
    few = traced(with_depth(config, pattern.depth_of(FOLDED_PARALLEL)), folded=False, **run)
    found, real = unfolded(few, pattern, 7), traced(config, folded=False, **run)
    if parallel == "ddp=2":  # views of buckets, which launch nothing, are not unfolded
        launched = [[facts(one, op) for op in one.ops if op.kind == "launch"] for one in (found, real)]
        assert launched[0] == launched[1]
        assert found.n_params == real.n_params
    else:
        assert_same(found, real)


@pytest.mark.parametrize("kind", ALIKE)
def test_layers_of_one_kind(kind: str) -> None:
    config = {"model_type": kind, **_SIZES, "num_hidden_layers": 5, **ALIKE[kind]}
    assert pattern_of(config, 32) == Pattern()


def test_windows_matter_where_they_are_shorter_than_a_sequence() -> None:
    qwen = {"model_type": "qwen3", **_SIZES, "num_hidden_layers": 8, "sliding_window": 64, "max_window_layers": 2}
    used = {**qwen, "use_sliding_window": True}
    asked = [qwen, used, {**used, "max_window_layers": 0}, {**used, "max_window_layers": 8}]
    assert [pattern_of(config, 65) for config in asked] == [Pattern(), Pattern(2, 1), Pattern(), Pattern()]
    gemma = {"model_type": "gemma3_text", **_SIZES, "num_hidden_layers": 24, "sliding_window": 64}
    assert [pattern_of(gemma, seq) for seq in (63, 65)] == [Pattern(), Pattern(0, 6)]


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_are_divided_by_whatever_name_they_have(name: str) -> None:
    traced = Traced(batch=2, seq=32, parallel="ep=4,fsdp=4", optimizer="adamw-fused", device="cuda")
    config = {"model_type": "deepseek_v3", **_SIZES, "num_hidden_layers": 4}
    check_step({**config, name: 8}, traced)
    with pytest.raises(UsageError, match="ep=4 does not divide experts 6"):
        check_step({**config, name: 6}, traced)
    with pytest.raises(UsageError, match="no experts"):
        check_step(config, traced)


def test_a_cache_is_of_the_context_however_few_tokens_a_call_takes() -> None:
    """The layers of a compiled decode keep a window, or the whole context: one token fills no window by itself."""
    config = {"model_type": "gemma2", **_SIZES, "num_hidden_layers": 8, "sliding_window": 1024}
    call = Traced(batch=2, seq=1, phase="decode", mode="compile", cache="static", device="cuda 9.0 132")
    found = [folding(config, replace(call, context=context)) for context in (512, 1024 - 128, 4096)]
    assert found == [Pattern(), None, None]


def test_the_layers_that_would_be_traced_may_be_alike_where_others_are_not() -> None:
    """What the answer is for."""
    for kind in ("deepseek_v3", "smollm3", "cohere2"):
        config, pattern = unlike(kind)
        assert pattern_of(with_depth(config, FOLDED_DEPTH), 32) == Pattern()
        assert pattern_of(config, 32) == pattern


def test_layers_that_repeat_nothing_are_all_traced() -> None:
    config, _ = unlike("qwen3_moe")
    assert pattern_of({**config, "mlp_only_layers": [6]}, 32) is None


@given(
    st.lists(st.sampled_from("ab"), max_size=5),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
    st.integers(3, 6),
)
def test_a_pattern_gives_all_layers(first: list[str], group: list[str], groups: int) -> None:
    kinds = first + group * groups
    found = pattern_in(kinds)
    assert found is not None
    assert found.depth_of(3) <= len(first) + 3 * len(group)
    count = found.groups_of(len(kinds))
    assert count is not None
    assert count >= 3
    start = kinds[: found.first]
    assert start + kinds[found.first : found.depth_of(1)] * count == kinds


def test_nothing_is_built_for_shipped_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_built", lambda *_, **__: pytest.fail("built"))
    assert {pattern_of(load_config(name), 1024) for name in shipped_names()} == {Pattern()}


def test_the_answer_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (config, pattern), (none, _) = unlike("smollm3"), unlike("qwen3_moe")
    asked = {**config, "vocab_size": 640}, {**none, "mlp_only_layers": [6], "vocab_size": 640}
    assert [pattern_of(one, 32) for one in asked] == [pattern, None]
    layers._answered.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(layers, "_built", lambda *_, **__: pytest.fail("built again"))
        assert [pattern_of(one, 32) for one in asked] == [pattern, None]
    for path in tmp_path.rglob("*.json"):
        path.write_text("torn {")
    layers._answered.cache_clear()
    assert [pattern_of(one, 32) for one in asked] == [pattern, None]
