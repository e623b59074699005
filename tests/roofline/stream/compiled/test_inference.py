"""Compiled calls of inference: what inductor generates of a small Qwen3 with a static cache, beside the real call."""

from __future__ import annotations

import gzip
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flopcast.microbench.recipe.inference import InferenceStep
from flopcast.microbench.recipe.settings import NEW_TOKENS, QUANTISED
from flopcast.microbench.recipe.training_step import build_model
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.device_work import describe_ops
from flopcast.roofline.step.memory.peak import cache_bytes, peak_bytes
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.compiled import stream_of
from flopcast.roofline.stream.library.streams import folding
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_depth import to_depth
from flopcast.roofline.stream.ops.to_micro_batches import times_run
from flopcast.roofline.stream.tracer.compiler.asked import OutputCode
from flopcast.roofline.stream.tracer.record_step import record_step
from flopcast.roofline.stream.tracer.trace import trace
from flopcast.roofline.validation.step_plans import validation_plans

HERE = Path(__file__).parent
BATCH, CONTEXT, DEPTH = 2, 40, 3
WIDTH = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
PHASES = ("prefill", "decode")


def config(depth: int = DEPTH) -> dict[str, Any]:
    return {**make_config(width=256, depth=depth, vocab=512), **WIDTH}


def code(phase: str, depth: int, weights: str = "") -> OutputCode:
    """As `tracer/compiler` answers for an H200."""
    text = gzip.decompress((HERE / f"{phase}{weights}-l{depth}.code.gz").read_bytes()).decode()
    outside = {"aten._foreach_zero_": 1} if phase == "prefill" else {}
    return OutputCode(
        graphs=(text.removeprefix("# ---- graph 0\n"),), calls=(0,), captured=1, breaks=(), waits=(), outside=outside,
        torch="2.13.0", triton="3.7.1",
    )  # fmt: skip


def run_of(phase: str, mode: str = "compile-graphs") -> Run:
    found = Run(batch=BATCH, context=CONTEXT, precision="bf16", phase=phase, mode=mode)
    found.check()
    return found


@cache
def eager(phase: str) -> Stream:
    seq = 1 if phase == "decode" else CONTEXT
    return trace(config(), Traced(batch=BATCH, seq=seq, precision="bf16", phase=phase, context=CONTEXT, cache="static"))


@cache
def compiled(phase: str, mode: str = "compile-graphs") -> Stream:
    return stream_of([code(phase, 2), code(phase, 3)], eager(phase), mode, is_folded=True)


def products(stream: Stream) -> Counter[tuple[str, int]]:
    """Products by the FLOPs of one, but for the rotary angles', which inductor makes element-wise."""
    found = Counter[tuple[str, int]]()
    works = describe_ops(stream)
    for op, work, times in zip(stream.ops, works, times_run(stream), strict=True):
        if work is not None and work.op_class in ("gemm", "attention") and not op.name.startswith("aten.bmm"):
            found[work.op_class, work.flops] += times
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_the_products_and_the_attention_are_those_of_the_real_call(phase: str) -> None:
    model = build_model(config(), precision="bf16").eval()
    ids = torch.randint(0, 512, (BATCH, CONTEXT if phase == "prefill" else 1))
    real = record_step(InferenceStep(model, ids, "bf16", "cpu", phase, CONTEXT, cache_kind="static"))
    assert products(compiled(phase)) == products(real)
    assert sum(n for (kind, _), n in products(real).items() if kind == "attention") == DEPTH


@pytest.mark.parametrize("phase", PHASES)
def test_a_call_holds_its_weights_and_the_places_of_its_cache(phase: str) -> None:
    stream = compiled(phase)
    places = 2 * DEPTH * BATCH * 2 * (CONTEXT + NEW_TOKENS) * 64 * 2
    assert cache_bytes(stream) == places
    assert stream.parameter_bytes == eager(phase).parameter_bytes
    assert stream.parameter_bytes + places < peak_bytes(stream) < 1.1 * (stream.parameter_bytes + places)
    assert peak_bytes(stream) <= peak_bytes(eager(phase))


@pytest.mark.parametrize("phase", PHASES)
def test_any_depth_follows(phase: str) -> None:
    assert folding(config(9), run_of(phase).traced_on("cuda 9.0 132"))
    deep, whole = to_depth(compiled(phase), 9), compiled(phase)
    assert sum(n for (kind, _), n in products(deep).items() if kind == "attention") == 9
    layer = (whole.parameter_bytes - 512 * 256 * 2 - 256 * 2) // DEPTH
    assert deep.parameter_bytes == whole.parameter_bytes + 6 * layer
    assert cache_bytes(deep) == 3 * cache_bytes(whole)
    begun = [op for op in deep.ops if op.name == "aten._foreach_zero_.default"]
    assert [len(op.inputs) for op in begun] == [9] * (phase == "prefill"), "in a cache of the last call"


def test_graphs_read_the_token_from_a_copy_and_cost_the_host_a_replay() -> None:
    profile = find_profile("nvidia-h200")
    plain, captured = (
        PricedStep(compiled("decode", mode), run_of("decode", mode), profile) for mode in ("compile", "compile-graphs")
    )
    copied = [op for op in captured.stream.ops if op.name == "aten.copy_.default"]
    assert len(captured.stream.ops) == len(plain.stream.ops) + len(copied) == len(plain.stream.ops) + 1
    assert captured.forecast().host_seconds < plain.forecast().host_seconds
    assert captured.forecast().turning_batch == plain.forecast().turning_batch
    assert "decode|bf16|d64-masked" not in " ".join(captured.warnings)
    assert not captured.stream.meta["notes"]


@pytest.mark.parametrize("weights", QUANTISED)
def test_products_of_weights_of_few_bits_stay_and_what_is_around_them_is_fused(weights: str) -> None:
    how: dict[str, Any] = {"batch": BATCH, "precision": "bf16", "phase": "decode", "context": CONTEXT}
    loose = trace(config(), Traced(seq=1, cache="static", base_dtype=weights, **how))
    codes = [code("decode", depth, f"-{weights}") for depth in (2, 3)]
    found = stream_of(codes, loose, "compile-graphs", is_folded=True)
    assert products(found) == products(loose)
    assert found.parameter_bytes == loose.parameter_bytes < eager("decode").parameter_bytes
    assert peak_bytes(found) <= peak_bytes(loose)
    run = Run(mode="compile-graphs", base_dtype=weights, **how)
    run.check()
    profile = find_profile("nvidia-h200")
    fused, apart = (PricedStep(s, run, profile) for s in (found, loose))
    assert len(fused.ops) < len(apart.ops)
    assert fused.forecast().device_seconds < apart.forecast().device_seconds
    assert f"no call with weights in {weights} was timed yet" in " ".join(fused.warnings)
    if weights == "fp8":  # of every other layer the norm is fused into the cast behind it
        assert found.depth is None
        return
    assert products(to_depth(found, 9)) == products(
        trace(config(9), Traced(seq=1, cache="static", base_dtype=weights, **how))
    )


def test_notes_name_what_else_runs_outside() -> None:
    other = replace(code("prefill", 3), outside={"aten._foreach_zero_": 1, "aten.cumsum": 2})
    found = stream_of([code("prefill", 2), other], eager("prefill"), "compile", is_folded=True)
    assert found.meta["notes"] == ["outside of the compiled graphs, and not in the forecast: 2 aten.cumsum"]


def test_the_calls_that_validate_runs_are_run_compiled_too() -> None:
    calls, compiled_calls = (validation_plans("cuda", "inference", mode) for mode in ("eager", "compile-graphs"))
    assert [replace(plan, mode="eager") for plan in compiled_calls] == calls
    assert {plan.phase for plan in compiled_calls} == {"prefill", "decode"}
