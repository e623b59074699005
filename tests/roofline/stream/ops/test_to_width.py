"""Streams of any dimensions from one trace with primes for dimensions, and the forward alone of a step's stream."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import FunctionStep, build
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.stream.library.streams import get_stream, trace_now
from flopcast.roofline.stream.model.models import load_config, make_config, n_params, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.ops.forward_only import forward_only
from flopcast.roofline.stream.ops.op_stream import NotDerivable, Stream
from flopcast.roofline.stream.ops.to_depth import to_depth
from flopcast.roofline.stream.ops.to_width import dimensions, reference_of, to_width
from flopcast.roofline.stream.tracer.record_step import record_step
from flopcast.roofline.widths import answer

LLAMA = {
    "model_type": "llama", "hidden_size": 100, "num_hidden_layers": 3, "num_attention_heads": 5,
    "num_key_value_heads": 1, "head_dim": 18, "intermediate_size": 202, "vocab_size": 999,
    "tie_word_embeddings": False,
}  # fmt: skip
UNALIGNED = make_config(width=97, depth=3, heads=6, kv_heads=2, head_dim=22, ffn=331, vocab=1009)
CASES = {
    "unaligned": (UNALIGNED, {}),
    # hidden size, heads x head_dim, ffn, vocabulary and tokens are one number
    "equal sizes": (
        make_config(width=256, depth=3, heads=8, kv_heads=4, head_dim=32, ffn=256, vocab=256, tied=False),
        {"seq": 256, "optimizer": "adamw-fused", "checkpoint": "full"},
    ),
    "flopcast's AdamW": (UNALIGNED, {"optimizer": "adamw-triton", "clip": 1.0}),
    # the reference's hidden size is a multiple of both numbers of heads, and no larger than a config may say
    "heads in groups": ({**LLAMA, "hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2}, {}),
    # one key-value head, one layer: what stands alone takes other paths
    "a head alone": (with_depth(LLAMA, 1), {"accumulate": 2, "precision": "bf16", "device": "cpu"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_of_other_dimensions_is_as_traced(case: str) -> None:
    """Shapes, strides, bytes, arguments, lifetimes: all of a real trace, to the last number."""
    config, run = CASES[case]
    traced = Traced(**{"batch": 2, "seq": 48, **run})
    got = streams.to_json(to_width(get_stream(reference_of(config, traced), traced), config))
    want = streams.to_json(get_stream(config, traced))
    for part in ("n_params", "depth", "storages", "tensors", "ops"):
        assert got[part] == want[part], part
    assert got["meta"]["layer_params"] == want["meta"]["layer_params"]
    assert got["n_params"] == n_params(config)


def test_unfolded_to_the_depth_asked_for() -> None:
    config = with_depth(UNALIGNED, 6)
    traced = Traced(batch=2, seq=48)
    want = get_stream(config, traced)
    got = to_depth(to_width(get_stream(reference_of(config, traced), traced), config), 6)
    assert got.depth == 6
    assert got.ops == want.ops
    assert got.n_params == n_params(config)


@given(batch=st.integers(1, 512), seq=st.integers(2, 40_000), accumulate=st.integers(1, 300))
def test_the_primes_are_no_factors_of_tokens(batch: int, seq: int, accumulate: int) -> None:
    """Else tokens would change with a width."""
    reference = reference_of(make_config(width=256, depth=4), Traced(batch=batch, seq=seq, accumulate=accumulate))
    sizes = dimensions(reference)
    primes = [prime for prime in sizes.values() if prime != 1]
    assert len(set(primes)) == len(primes)
    for prime in primes:
        assert all(number % prime for number in (batch, seq, seq + 1, accumulate) if number)


def test_models_without_these_dimensions_are_refused() -> None:
    gpt2 = load_config("gpt2")
    with pytest.raises(NotDerivable):
        dimensions(gpt2)
    with pytest.raises(UsageError, match="valid are qwen3, llama, mistral"):
        answer.with_all_sizes(gpt2)


@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_optimizers_that_go_by_how_large_a_tensor_is_are_refused(optimizer: str) -> None:
    """Numbers of blocks are no products of dimensions: a step of Llama-3.2-1B came out seventy times as long."""
    with pytest.raises(NotDerivable, match="an optimizer that"):
        reference_of(UNALIGNED, Traced(optimizer=optimizer))
    config, traced = make_config(width=96, depth=2), Traced(batch=2, seq=48, optimizer=optimizer)
    assert _calls(get_stream(config, traced, vary="width")) == _calls(trace_now(config, traced))


@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_the_forward_alone_is_what_a_model_without_gradients_runs(precision: str) -> None:
    """Against a real forward under no_grad: the same calls on the same shapes, the same memory."""
    config = make_config(width=96, depth=3, heads=4, kv_heads=2, head_dim=32, ffn=160, vocab=1000)
    step = build(config, "cpu", Recipe(batch=2, seq=64, precision=precision))
    ids = step.batch["input_ids"]

    def forward() -> None:
        with torch.no_grad(), step.autocast():
            step.model(input_ids=ids, use_cache=False)

    inference = FunctionStep(forward, "cpu")
    inference.batch = {"input_ids": ids}  # type: ignore[attr-defined]
    real = record_step(inference)
    mine = forward_only(trace_now(config, Traced(batch=2, seq=64, precision=precision, device="cpu")))
    assert _calls(mine) == _calls(real)
    assert peak_bytes(mine) == pytest.approx(peak_bytes(real), rel=0.03)
    assert {op.phase for op in mine.ops} == {"forward"}


def _calls(stream: Stream) -> Counter[Any]:
    return Counter(
        (op.name, tuple(stream.tensors[i].operand.shape for i in op.inputs)) for op in stream.ops if op.kind != "view"
    )
