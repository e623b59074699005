"""Calls of inference: what is traced is what runs, with the cache of keys and values that transformers itself keeps."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch

import flopcast
from flopcast.errors import UsageError
from flopcast.microbench.recipe.inference import InferenceStep, build_inference
from flopcast.microbench.recipe.settings import NEW_TOKENS, Recipe
from flopcast.microbench.recipe.training_step import build_model
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import WITHOUT_GRADIENTS
from flopcast.roofline.step.inference import memory_parts, turning_batch, weight_bytes
from flopcast.roofline.step.memory.peak import cache_bytes, peak_bytes
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.streams import get_stream, trace_now
from flopcast.roofline.stream.lowering.six_n import count_parameters
from flopcast.roofline.stream.model.models import make_config, with_depth
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.record_step import record_step
from flopcast.roofline.stream.tracer.trace import trace, trace_module
from flopcast.roofline.stream.tracer.unmodelled import Topic, modelled

BATCH, CONTEXT = 3, 48


def asked(phase: str, **run: Any) -> Run:
    found = Run(**{"batch": BATCH, "context": CONTEXT, "precision": "bf16", "phase": phase, **run})
    found.check()
    return found


def stream_of(config: dict[str, Any], phase: str, **run: Any) -> Stream:
    return get_stream(config, asked(phase, **run).traced_on("cuda"))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_trace_is_what_this_processor_runs(
    phase: str, cache: str, tiny: dict[str, Any], golden: ModuleType
) -> None:
    model = build_model(tiny, precision="bf16").eval()
    ids = torch.randint(0, 512, (BATCH, CONTEXT if phase == "prefill" else 1))
    real = record_step(InferenceStep(model, ids, "bf16", "cpu", phase, CONTEXT, cache_kind=cache))
    fake = trace(
        tiny,
        Traced(
            batch=BATCH, seq=ids.shape[1], precision="bf16", device="cpu", phase=phase, context=CONTEXT, cache=cache
        ),
    )
    assert golden.ops_of(fake) == golden.ops_of(real)
    assert cache_bytes(fake) == cache_bytes(real)
    assert {op.phase for op in fake.ops} == {"forward"}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_decode_after_a_prefill_says_what_the_whole_prompt_says(cache: str, tiny: dict[str, Any]) -> None:
    """The recipe's calls are the model's: the cache that a prefill leaves, and one token more."""
    torch.manual_seed(0)
    model = build_model(tiny, precision="fp32").eval()
    ids = torch.randint(0, 512, (BATCH, CONTEXT + 1))
    prefill = InferenceStep(model, ids[:, :-1], "fp32", "cpu", "prefill", CONTEXT, cache_kind=cache)
    prefill.run()
    decode = InferenceStep(model, ids[:, -1:], "fp32", "cpu", "decode", CONTEXT, cache_kind=cache)
    decode.refill()
    decode.cache = prefill.cache
    whole = InferenceStep(model, ids, "fp32", "cpu", "prefill", CONTEXT + 1)
    torch.testing.assert_close(decode.run(), whole.run(), rtol=1e-4, atol=1e-4)


def test_a_decode_attends_to_its_cache_and_leaves_one_token_more(tiny: dict[str, Any]) -> None:
    found = stream_of(tiny, "decode")
    layers, kv_heads, head_dim = 3, 2, 16
    attention = [found.call(op) for op in found.ops if "attention" in op.name]
    assert len(attention) == layers
    assert {call.inputs[0].shape[2] for call in attention} == {1}
    assert {call.inputs[1].shape for call in attention} == {(BATCH, kv_heads, CONTEXT + 1, head_dim)}
    before = [s for s in found.storages if s.kind == "cache"]
    assert {s.bytes for s in before} == {BATCH * kv_heads * CONTEXT * head_dim * 2}
    after = 2 * layers * BATCH * kv_heads * (CONTEXT + 1) * head_dim * 2
    assert after <= cache_bytes(found) <= after + 2 * layers * 512  # the allocator rounds
    # a growing cache is copied: of one layer at a time both are held
    used = peak_bytes(found)
    assert found.parameter_bytes + after < used < found.parameter_bytes + 1.5 * after + 2**16


def test_a_static_cache_is_written_in_its_places_and_read_whole_under_a_mask(tiny: dict[str, Any]) -> None:
    found = stream_of(tiny, "decode", cache="static")
    places = CONTEXT + NEW_TOKENS
    assert cache_bytes(found) == 2 * 3 * BATCH * 2 * places * 16 * 2
    step = PricedStep(found, asked("decode", cache="static"), find_profile("nvidia-h200"))
    written = [op for op in step.by_class["pointwise"] if op.work and "index_copy_" in str(op.work.variant)]
    assert {op.bytes for op in written} == {BATCH * 2 * 16 * 2 * 2 + 8}, "one token's keys, read and written"
    (attention, *_) = [op.work for op in step.by_class["attention"] if op.work is not None]
    assert str(attention.variant) == "decode|bf16|d16-masked"
    query, keys, *_ = attention.shape.inputs  # type: ignore[union-attr]
    assert keys.shape == (BATCH, query.shape[1], places, 16), "repeated for every head, as under a mask"
    assert "masked" in " ".join(step.warnings), "no GPU has measured it"


def test_which_cache_a_mode_has() -> None:
    assert asked("decode").traced_on("cuda").cache == "dynamic"
    assert asked("decode", mode="compile").traced_on("cuda 9.0 132").cache == "static"
    for wrong, words in (({"mode": "compile", "cache": "dynamic"}, "grows with every token"),
                         ({"cache": "paged"}, "auto, dynamic, static")):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            asked("decode", **wrong)
    with pytest.raises(UsageError, match="without a phase"):
        Run(cache="static").check()


def test_a_prefill_computes_the_logits_of_the_last_token(tiny: dict[str, Any]) -> None:
    found = stream_of(tiny, "prefill")
    last = [found.call(op) for op in found.ops if op.name == "aten.mm.default"][-1]
    assert last.outputs[0].shape == (BATCH, 512)
    assert cache_bytes(found) == 2 * 3 * BATCH * 2 * CONTEXT * 16 * 2
    parts = memory_parts(found, peak_bytes(found))
    assert parts["weights"] == found.parameter_bytes
    assert sum(parts.values()) == peak_bytes(found)
    assert min(parts.values()) > 0
    assert count_parameters(found, 10).flops_6n == 2 * found.n_params * 10
    assert count_parameters(found, 10).trained == 0


def test_batches_of_a_decode_are_derived(tiny: dict[str, Any]) -> None:
    run = asked("decode", batch=13).traced_on("cuda")
    derived, traced = get_stream(tiny, run, vary="batch"), get_stream(tiny, run)
    assert Counter(derived.call(op).key for op in derived.ops) == Counter(traced.call(op).key for op in traced.ops)
    assert peak_bytes(derived) == peak_bytes(traced)


def test_where_a_decode_turns_is_worked_out_by_hand(tiny: dict[str, Any], profile: Profile) -> None:
    """copy 4e12 B/s, 9e14 FLOP/s: a short context turns where weights take as long as FLOPs less the caches do."""
    found = stream_of(tiny, "decode", context=1)
    step = PricedStep(found, asked("decode", context=1), profile)
    products = {i for op in found.ops if op.name == "aten.mm.default" for i in op.inputs}
    stored = {found.tensors[i].storage for i in products}
    weights = sum(found.storages[s].bytes for s in stored if found.storages[s].kind == "parameter")
    each = step.flops / BATCH / 9e14 - cache_bytes(found) / BATCH / 4e12
    expected = weights / 4e12 / each if each > 0 else None
    assert turning_batch(found, step.flops, "bf16", profile) == (expected and pytest.approx(expected))
    # far into a context each sequence brings more to read than to compute
    far = stream_of(tiny, "decode", context=4096)
    assert turning_batch(far, PricedStep(far, asked("decode", context=4096), profile).flops, "bf16", profile) is None


def test_attention_of_one_token_is_no_other_attention(tiny: dict[str, Any], profile: Profile) -> None:
    """It is of no measured kind, known within a factor of what reading its cache takes."""
    found = PricedStep(stream_of(tiny, "decode", context=2**16), asked("decode", context=2**16), profile)
    (one, *_) = found.by_class["attention"]
    assert one.work is not None
    assert one.work.variant.tokens[0] == "decode"
    read = one.work.bytes / 4e12
    assert read < one.seconds < 6 * read
    assert one.sigma > 0.4


def test_the_host_is_quicker_where_autograd_records_nothing(tiny: dict[str, Any], profile: Profile) -> None:
    found = PricedStep(stream_of(tiny, "decode"), asked("decode"), profile)
    assert profile.host is not None
    least = min(op.host_seconds for op in found.ops if op.kind == "launch")
    assert least == pytest.approx(WITHOUT_GRADIENTS * profile.host.forward["launch"])


def test_products_of_few_rows_are_less_certain(tiny: dict[str, Any], profile: Profile) -> None:
    few, many = (
        {op.sigma for op in PricedStep(stream_of(tiny, "decode", batch=batch), asked("decode", batch=batch), profile)
         .by_class["gemm"] if op.work is not None and op.work.shape.layout == "nt"}  # type: ignore[union-attr]
        for batch in (3, 64)
    )  # fmt: skip
    assert min(few) > max(many)


def test_a_function_without_a_backward_is_forecast() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    batch = torch.zeros(32, 256)

    def infer() -> None:
        with torch.inference_mode():
            net(batch)

    found = trace_module(infer)
    assert [op.name for op in found.ops if op.name == "aten.addmm.default"] == ["aten.addmm.default"] * 2
    assert {op.phase for op in found.ops} == {"forward"}
    forecast = flopcast.forecast(infer, gpu="nvidia-h200")
    assert forecast.flops_counted == 2 * 32 * (256 * 512 + 512 * 64)
    assert forecast.unit == "steps"


WIDE = make_config(width=128, depth=3, vocab=512)


@pytest.mark.parametrize("weights", ["fp8", "int8"])  # of 4 bits processors have another product
def test_weights_of_few_bits_are_traced_as_this_processor_runs_them(weights: str, golden: ModuleType) -> None:
    step = build_inference(
        WIDE, "cpu", Recipe(phase="decode", precision="bf16", context=CONTEXT, batch=BATCH, base_dtype=weights)
    )
    with modelled(Topic.FP8):
        real = record_step(step)
    fake = trace(
        WIDE,
        Traced(batch=BATCH, seq=1, precision="bf16", device="cpu", phase="decode", context=CONTEXT, base_dtype=weights),
    )
    assert golden.ops_of(fake) == golden.ops_of(real)


@pytest.mark.parametrize(
    ("weights", "product", "bits", "scales"),
    [  # of a matrix of 128 inputs, per result: bf16 per row; bf16 scale and zero per 64; one fp32 a matrix, or as many
        ("int8", "aten.mm.default", 8, lambda results: 2 * results),
        ("int4", "aten._weight_int4pack_mm.default", 4, lambda results: 2 * 2 * 2 * results),
        ("fp8", "aten._scaled_mm.default", 8, lambda results: 4),
    ],
)
def test_weights_of_few_bits_take_less_memory_and_count_as_many(
    weights: str, product: str, bits: int, scales: Any
) -> None:
    plain, packed = (stream_of(with_depth(WIDE, 5), "decode", base_dtype=dtype) for dtype in ("auto", weights))
    assert packed.n_params == plain.n_params
    assert count_parameters(packed, 10) == count_parameters(plain, 10)
    queries = next(op for op in packed.ops if op.name == product and "q_proj" in op.module)
    results = packed.tensors[queries.outputs[0]].operand.shape[1]
    q_proj = [
        packed.storages[packed.tensors[i].storage]
        for op in packed.ops
        if op.layer == 3 and "q_proj" in op.module and op.kind == "launch"
        for i in op.inputs
    ]
    assert {s.bytes for s in q_proj if s.kind == "parameter"} == {results * 128 * bits // 8}
    assert {s.bytes for s in q_proj if s.kind == "buffer"} == {scales(results)}
    inner = sum(s.bytes for s in plain.storages if s.kind == "parameter" and s.layer is not None)
    saved = plain.parameter_bytes - packed.parameter_bytes
    assert saved == pytest.approx(inner * (1 - bits / 16), rel=0.01), "norms stay as they are"
    held = memory_parts(packed, peak_bytes(packed))
    assert held["weights"] > packed.parameter_bytes, "with their scales"
    assert weight_bytes(packed) <= held["weights"]
    assert weight_bytes(plain) - weight_bytes(packed) == pytest.approx(saved, rel=0.01)
    assert held["cache"] == memory_parts(plain, peak_bytes(plain))["cache"]
    assert peak_bytes(packed) < peak_bytes(plain)
    # the layers that were traced unfold to what five layers give
    run = asked("decode", base_dtype=weights).traced_on("cuda")
    assert Counter(packed.call(op).key for op in packed.ops) == Counter(
        found.call(op).key for found in [trace_now(with_depth(WIDE, 5), run)] for op in found.ops
    )


def test_products_of_few_bits_are_products(profile: Profile) -> None:
    """By FLOPs the same; in fp8 of operands of a byte, of 4 bits known within a factor of reading its bytes."""
    flops = {}
    for weights in ("auto", "fp8", "int8", "int4"):
        run = asked("decode", base_dtype=weights)
        step = PricedStep(stream_of(WIDE, "decode", base_dtype=weights), run, profile)
        flops[weights] = sum(op.flops for op in step.by_class["gemm"])
        found = [op for op in step.by_class["gemm"] if op.work is not None and op.flops == 2 * BATCH * 128 * 128]
        assert found, "the output of attention"
        work = found[0].work
        assert work is not None
        if weights == "fp8":
            assert str(work.variant) == "nt/fp8"
            assert work.bytes == BATCH * 128 + 128 * 128 + BATCH * 128 * 2
        if weights == "int4":
            assert str(work.variant) == "_weight_int4pack_mm|bf16+int32+bf16>bf16|g64"
            assert work.matrix_dtype == "bf16"
            assert found[0].sigma > 0.2
        assert ("was timed yet" in " ".join(step.warnings)) == (weights != "auto")
    assert len(set(flops.values())) == 1


def test_which_weights_a_gpu_multiplies() -> None:
    old = {"type": "cuda", "name": "a Volta", "capability": [7, 0]}
    for weights, least in (("fp8", "8.9"), ("int4", "8.0")):
        with pytest.raises(UsageError, match=rf"'{weights}' on a Volta of compute capability 7.0: .* from {least} on"):
            asked("decode", base_dtype=weights).device_of(old)
    assert asked("decode", base_dtype="int8").device_of(old) == "cuda"
    with pytest.raises(UsageError, match="on processors"):
        asked("decode", base_dtype="int8").traced_on("cpu")
