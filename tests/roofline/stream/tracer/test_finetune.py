"""Steps that train a part of a model: the streams of their options are those of models frozen or adapted by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from flopcast.errors import UsageError
from flopcast.microbench.recipe import training_step
from flopcast.roofline.step.memory import peak_bytes
from flopcast.roofline.stream.library.streams import get_stream, trace_now
from flopcast.roofline.stream.lowering.six_n import count_parameters
from flopcast.roofline.stream.model.models import with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.trace import trace_module

BATCH, SEQ = 2, 32


def traced(config: dict[str, Any], **run: Any) -> Stream:
    asked = Run(batch=BATCH, seq=SEQ, **run)
    asked.check()
    return get_stream(config, asked.traced_on("cuda"))


def calls(stream: Stream) -> Counter[Any]:
    return Counter((op.phase, op.kind, op.layer, op.name, stream.call(op).key) for op in stream.ops)


def by_hand(config: dict[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa", dtype=dtype)
    ids = torch.zeros((BATCH, SEQ), dtype=torch.int64)
    return model.train(), {"input_ids": ids, "labels": ids, "use_cache": False}


@pytest.mark.parametrize(
    ("run", "dtype", "lora"),
    [
        ({}, torch.bfloat16, {"r": 16, "target_modules": "all-linear"}),
        (
            {"lora_rank": 4, "lora_targets": "q_proj,v_proj", "base_dtype": "fp32", "optimizer": "adamw-fused"},
            torch.float32,
            {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        ),
        ({"checkpoint": "full", "clip": 1.0}, torch.bfloat16, {"r": 16, "target_modules": "all-linear"}),
    ],
    ids=["all linear layers", "queries and values", "recomputed and clipped"],
)
def test_lora_is_the_step_of_peft_s_own_model(
    run: dict[str, Any], dtype: torch.dtype, lora: dict[str, Any], tiny: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")

    def factory() -> Any:
        model, batch = by_hand(tiny, dtype)
        return peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", lora_alpha=2 * lora["r"], **lora)
        ), batch

    real = trace_module(factory, **{name: run[name] for name in ("optimizer", "checkpoint", "clip") if name in run})
    asked = traced(tiny, finetune="lora", **run)
    assert calls(asked) == calls(real)
    assert peak_bytes(asked) == peak_bytes(real)
    assert asked.n_params == real.n_params
    assert count_parameters(asked, 1).trained == count_parameters(real, 1).trained


def test_lora_of_three_layers_unfolds_to_what_five_give(tiny: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    five = with_depth(tiny, 5)
    run = Run(batch=BATCH, seq=SEQ, finetune="lora").traced_on("cuda")
    assert calls(get_stream(five, run)) == calls(trace_now(five, run))


def test_the_last_layers_are_a_model_frozen_by_hand(tiny: dict[str, Any]) -> None:
    five = with_depth(tiny, 5)

    def factory() -> Any:
        model, batch = by_hand(five, torch.float32)
        model.requires_grad_(False)
        for layer in model.model.layers[-2:]:
            layer.requires_grad_(True)
        return model, batch

    last = traced(five, finetune="last=2")
    assert calls(last) == calls(trace_module(factory))
    assert {op.layer for op in last.ops if op.phase == "backward"} == {None, 3, 4}  # none passes below them
    assert count_parameters(last, 1).trained == 2 * last.meta["layer_params"]


def test_weights_in_bf16_take_half_the_memory_of_weights_and_states(tiny: dict[str, Any]) -> None:
    whole, half = (traced(tiny, base_dtype=dtype) for dtype in ("fp32", "bf16"))
    assert 2 * half.parameter_bytes == whole.parameter_bytes
    states = [sum(s.bytes for s in stream.storages if s.kind == "state") for stream in (half, whole)]
    assert 2 * states[0] == states[1]
    # asked for in so many words, what is the default is the same stream
    assert traced(tiny) == whole
    assert Run(precision="bf16", base_dtype="bf16").traced_on("cuda") == Run(precision="bf16").traced_on("cuda")


def test_a_base_in_bf16_is_what_adapters_are_put_on() -> None:
    assert Run(finetune="lora").traced_on("cuda").base_dtype == "bf16"
    assert Run(finetune="lora", base_dtype="fp32").traced_on("cuda").base_dtype == "auto"
    assert Run(finetune="lora", precision="fp32").traced_on("cuda").base_dtype == "auto"


def test_more_layers_than_there_are(tiny: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"finetune last=4: the model has 3 layers; valid is last=1 to that"):
        traced(tiny, finetune="last=4")


def test_adapters_learn_and_leave_the_base_alone(tiny: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    step = training_step.build(tiny, "cpu", batch=BATCH, seq=SEQ, finetune="lora", base_dtype="bf16")
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    losses = [float(step.run()) for _ in range(8)]
    assert losses[-1] < losses[0]
    moved = {name for name, p in step.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
