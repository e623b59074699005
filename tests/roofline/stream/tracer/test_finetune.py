"""Steps that train a part of a model: the streams of their options are those of models frozen or adapted by hand."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch

from flopcast.errors import UsageError
from flopcast.microbench.recipe import training_step
from flopcast.microbench.recipe.settings import Recipe
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.memory.peak import is_scale, peak_bytes
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.streams import get_stream, trace_now
from flopcast.roofline.stream.lowering.six_n import count_parameters
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.model.run import Run, Traced
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

    real = trace_module(
        factory, traced=Traced(**{name: run[name] for name in ("optimizer", "checkpoint", "clip") if name in run})
    )
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
    step = training_step.build(tiny, "cpu", Recipe(batch=BATCH, seq=SEQ, finetune="lora", base_dtype="bf16"))
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    losses = [float(step.run()) for _ in range(8)]
    assert losses[-1] < losses[0]
    moved = {name for name, p in step.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_qlora_is_lora_on_weights_of_four_bits(tiny: dict[str, Any]) -> None:
    """By hand from what bitsandbytes keeps: half a byte a weight, a byte per 64 and four per 64 x 256 of them."""
    pytest.importorskip("peft")
    lora, qlora = (traced(tiny, finetune=way, optimizer="adamw-fused") for way in ("lora", "qlora"))
    assert qlora.n_params == lora.n_params
    assert count_parameters(qlora, 10) == count_parameters(lora, 10)
    up = [
        op for op in qlora.ops if op.layer == 1 and op.module.endswith(("up_proj", "up_proj.base_layer"))
        and op.kind == "launch"
    ]  # fmt: skip
    unpacked = [
        "bnb.dequantize_blockwise.default",
        "aten.add_.Tensor",
        "bnb.dequantize_4bit.default",
        "aten.mm.default",
    ]
    assert [op.name for op in up if op.phase == "forward"][:5] == [*unpacked, "aten.clone.default"]
    backward = [op.name for op in up if op.phase == "backward"]
    assert "".join(backward).count("".join(unpacked)) == 1
    read = {qlora.tensors[i].storage for op in up if op.name.startswith("bnb.") for i in op.inputs}
    found = [qlora.storages[storage] for storage in read]
    weights = 64 * 192
    assert {s.bytes for s in found if s.kind == "parameter"} == {weights // 2}
    assert sorted(s.bytes for s in found if s.kind == "buffer") == [
        4,
        weights // 64,
        256 * 4,
    ]  # of 192 blocks one value
    # what is trained is the same, in the same memory
    for kind in ("gradient", "state"):
        assert sum(s.bytes for s in qlora.storages if s.kind == kind) == sum(
            s.bytes for s in lora.storages if s.kind == kind
        )
    assert peak_bytes(qlora) < peak_bytes(lora)
    # the rest of the model in fp32, as transformers' users prepare it
    wide = traced(tiny, finetune="qlora", optimizer="adamw-fused", base_dtype="fp32")
    assert wide.parameter_bytes > qlora.parameter_bytes
    assert sum(op.name == "bnb.dequantize_4bit.default" for op in wide.ops) == sum(
        op.name == "bnb.dequantize_4bit.default" for op in qlora.ops
    )


@pytest.mark.parametrize("run", [{"finetune": "qlora"}, {"optimizer": "adamw8bit"}], ids=["qlora", "8-bit AdamW"])
def test_what_bitsandbytes_runs_of_three_layers_unfolds_to_what_five_give(
    run: dict[str, Any], tiny: dict[str, Any]
) -> None:
    if "finetune" in run:
        pytest.importorskip("peft")
    five = with_depth(tiny, 5)
    asked = Run(batch=BATCH, seq=SEQ, **run).traced_on("cuda")
    derived, whole = get_stream(five, asked), trace_now(five, asked)
    assert calls(derived) == calls(whole)
    assert derived.n_params == whole.n_params
    for is_held in (lambda s: s.kind == "parameter", lambda s: s.kind == "state", is_scale):
        assert sum(s.bytes for s in derived.storages if is_held(s)) == sum(
            s.bytes for s in whole.storages if is_held(s)
        )


def test_states_of_eight_bits_by_hand(tiny: dict[str, Any]) -> None:
    """Two bytes a parameter and two fp32 numbers per 256; small parameters keep theirs in fp32."""
    found, usual = (traced(tiny, optimizer=name) for name in ("adamw8bit", "adamw"))
    sizes = [s.bytes // 4 for s in found.storages if s.kind == "parameter"]
    expected = sum(8 * n if n < 4096 else 2 * n + 2 * 4 * -(-n // 256) for n in sizes)
    assert sum(s.bytes for s in found.storages if s.kind == "state") == expected
    ops = [op for op in found.ops if op.phase == "optimizer"]
    updates = [op for op in ops if op.name.startswith("bnb.optimizer_update")]
    assert len(updates) == len(sizes)
    assert sum("8bit" in op.name for op in updates) == sum(n >= 4096 for n in sizes)
    assert sum(op.kind == "sync" for op in ops) == len(sizes), "it waits for the device at each parameter"
    assert [op.name for op in found.ops if op.phase != "optimizer"] == [
        op.name for op in usual.ops if op.phase != "optimizer"
    ]


def test_its_update_is_priced_between_five_and_fourteen_times_its_bytes(tiny: dict[str, Any], profile: Profile) -> None:
    run = Run(batch=BATCH, seq=SEQ, optimizer="adamw8bit")
    step = PricedStep(traced(with_depth(tiny, 3) | {"vocab_size": 2**20}, optimizer="adamw8bit"), run, profile)
    update = max(step.by_class["optimizer"], key=lambda op: op.seconds)
    numel = 2**20 * 64
    assert update.bytes == 2 * 4 * numel + 4 * numel + 4 * numel + 4 * 4 * numel // 256 + 2 * 256 * 4
    assert 5 * update.bytes / 4.8e12 < update.seconds < 14 * update.bytes / 3.5e12
    assert "steps with kernels of bitsandbytes" in " ".join(step.warnings)


def test_steps_of_bitsandbytes_run_where_it_is_installed(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.nn", raising=False)
    with pytest.raises(UsageError, match="pip install bitsandbytes"):
        training_step.build(tiny, "cpu", Recipe(batch=BATCH, seq=SEQ, finetune="qlora"))
    for run in ({"finetune": "qlora"}, {"optimizer": "adamw8bit"}):
        with pytest.raises(UsageError, match="on processors"):
            Run(**run).traced_on("cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="GPT2LMHeadModel has no linear layers"):
        traced(load_config("gpt2") | {"n_embd": 64, "n_layer": 1, "n_head": 2}, finetune="qlora")
