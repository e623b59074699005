"""Calls of inference are run and measured as training steps are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flopcast.microbench.recipe.inference import InferenceStep, build_inference
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.recipe.settings import NEW_TOKENS, Recipe
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.steps.build import build_plan
from flopcast.microbench.steps.measure import time_step
from flopcast.microbench.steps.run import run_steps
from flopcast.microbench.timing.device import describe
from flopcast.roofline.stream.model.models import make_config

CPU = torch.device("cpu")
TINY = make_config(width=64, depth=2, vocab=512)
DECODE = StepPlan(name="tiny", config=TINY, batch=2, precision="bf16", phase="decode", context=24)


def held(step: InferenceStep) -> set[int]:
    return {tensor.shape[2] for tensor, _ in step.cached}


@pytest.mark.parametrize(("phase", "tokens"), [("prefill", 24), ("decode", 1)])
def test_a_call_takes_its_tokens_and_leaves_its_cache(phase: str, tokens: int) -> None:
    step = build_inference(TINY, CPU, Recipe(phase=phase, precision="bf16", context=24, batch=2))
    assert step.input_ids.shape == (2, tokens)
    assert next(step.model.parameters()).dtype == torch.bfloat16
    assert list(step.phases()) == ["forward"]
    assert held(step) == {24 if phase == "prefill" else 25}
    step.run()
    assert held(step) == {24 if phase == "prefill" else 26}, "a prefill begins anew, a decode goes on"


def test_every_round_of_decodes_begins_with_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    step = build_inference(TINY, CPU, Recipe(phase="decode", precision="bf16", context=24, batch=1))
    seen: list[int] = []
    run = InferenceStep.run

    def noted(self: InferenceStep) -> Any:
        result = run(self)
        seen.append(min(held(self)))
        return result

    monkeypatch.setattr(InferenceStep, "run", noted)
    timing = time_step(step, rounds=2, steps_per_round=2, warm_up=1)
    assert seen[1:] == [25, 26, 27] * 2
    assert min(*timing.step_seconds, *timing.host_seconds, *timing.forward_seconds) > 0
    assert set(timing.backward_seconds) == {0.0}


# Families that keep something else than the heads and widths of their config: latents, the one head of several queries,
# the last tokens of a window, states that do not grow.
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
KEEPERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
                    "qk_nope_head_dim": 16, "v_head_dim": 8, "first_k_dense_replace": 2},
    "falcon": {},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "pad_token_id": 0},
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 16, "mlp_only_layers": [0, 1],
                   "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_decode_begins_with_what_a_prompt_leaves(kind: str) -> None:
    config = {"model_type": kind, **_SIZES, **KEEPERS[kind]}
    steps = {
        phase: build_inference(config, CPU, Recipe(phase=phase, precision="bf16", context=24, batch=2))
        for phase in ("prefill", "decode")
    }
    steps["prefill"].run()
    steps["decode"].refill()
    prompt, begun = ([(tuple(t.shape), t.dtype, layer) for t, layer in step.cached] for step in steps.values())
    assert begun == prompt
    lengths = [step.cache.get_seq_length() for step in steps.values()]
    assert lengths == [24, 24]
    steps["decode"].run()
    assert steps["decode"].cache.get_seq_length() == 25


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_static_cache_has_the_places_that_a_model_fills(kind: str) -> None:
    config = {"model_type": kind, **_SIZES, **KEEPERS[kind]}
    step = build_inference(config, CPU, Recipe(phase="decode", precision="bf16", context=24, batch=2, cache="static"))
    step.run()
    before = [(tensor.data_ptr(), tensor.shape) for tensor, _ in step.cached]
    step.run()
    assert [(tensor.data_ptr(), tensor.shape) for tensor, _ in step.cached] == before
    assert int(step.cache.get_seq_length()) == 26


def test_a_static_cache_stays_and_begins_anew_where_it_is_full() -> None:
    step = build_inference(TINY, CPU, Recipe(phase="decode", precision="bf16", context=24, batch=2, cache="static"))
    step.refill()
    first = [tensor.data_ptr() for tensor, _ in step.cached]
    for _ in range(NEW_TOKENS):
        step.run()
    assert {int(length) for length, _ in step.lengths} == {24 + NEW_TOKENS}
    step.run()
    assert {int(length) for length, _ in step.lengths} == {25}
    assert [tensor.data_ptr() for tensor, _ in step.cached] == first
    assert held(step) == {24 + NEW_TOKENS}


def test_a_compiled_call_has_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: modes.append(mode) or model)
    for mode, asked, kind in (("compile-graphs", "auto", "static"), ("eager", "auto", "dynamic"),
                              ("eager", "static", "static")):  # fmt: skip
        plan = replace(DECODE, mode=mode, cache=asked)
        step = build_plan(plan, CPU)
        assert isinstance(step, InferenceStep)
        assert step.cache_kind == kind
    assert modes == ["reduce-overhead"]
    assert len({replace(DECODE, mode=mode, cache=cache).key for mode in ("eager", "compile") for cache in
                ("auto", "static")}) == 4  # fmt: skip


def test_calls_are_rows_like_steps(tmp_path: Path) -> None:
    plans = [DECODE, replace(DECODE, phase="prefill")]
    with Recorder(tmp_path, describe(CPU)) as recorder:
        summary = run_steps(plans, device=CPU, recorder=recorder, rounds=1, steps_per_round=1)
        rows = {row["key"]: row for row in recorder.rows}
    assert summary.statuses == {"ok": 4}
    for plan in plans:
        assert rows[plan.key]["plan"]["context"] == 24
        assert rows[plan.key]["phase_seconds"]["backward"] == 0
        assert rows[plan.kernels_key]["ops"]["aten::mm"][1] == 15
