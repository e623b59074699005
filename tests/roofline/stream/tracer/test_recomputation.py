"""What activation checkpointing repeats is marked, whoever does it, and never counts as the model's work."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from flopcast.microbench.recipe.settings import CHECKPOINTS, Recipe
from flopcast.microbench.recipe.training_step import build
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream, from_json, to_json
from flopcast.roofline.stream.tracer.record_step import record_step
from flopcast.roofline.stream.tracer.trace import trace_module

WIDTH, ROWS = 32, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH  # FLOPs of one layer's forward
HOWS = ("plain", "reentrant", "own")


class _Own(torch.autograd.Function):
    """Checkpointing as a user might write it: the backward runs the layer again, with a graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: torch.nn.Module, *_: Any) -> Any:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return torch.relu(layer(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = torch.relu(ctx.layer(x))
        torch.autograd.backward(out, grads[0])
        return x.grad, None, *[None] * len(list(ctx.layer.parameters()))


class Layers(torch.nn.Module):
    """Layers of WIDTH x WIDTH, each checkpointed by itself in one of the ways of HOWS, or not (None)."""

    def __init__(self, hows: Sequence[str | None], frozen: Sequence[bool] = ()) -> None:
        super().__init__()
        self.hows = hows
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in hows)
        for layer, is_frozen in zip(self.layers, frozen, strict=False):
            layer.requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, how in zip(self.layers, self.hows, strict=True):
            if how is None:
                x = torch.relu(layer(x))
            elif how == "own":
                x = _Own.apply(x, layer, *layer.parameters())  # type: ignore[no-untyped-call]
            else:
                x = checkpoint(lambda y, f=layer: torch.relu(f(y)), x, use_reentrant=how == "reentrant")
        return x


def stream_of(module: torch.nn.Module, batch: Any = None, **options: Any) -> Stream:
    def factory() -> Any:
        # reentrant checkpointing asks for an input with a gradient, which the first layer then has to compute
        return module, torch.randn(ROWS, WIDTH, requires_grad=True) if batch is None else batch

    return trace_module(factory, traced=Traced(**{"precision": "fp32", **options}))


def flops(stream: Stream, profile: Profile) -> tuple[int, int]:
    """The model's FLOPs and the device's."""
    step = PricedStep(stream, Run(precision="fp32"), profile)
    return step.flops, step.hardware_flops


@pytest.mark.parametrize("how", HOWS)
def test_a_checkpointed_mlp_by_hand(how: str, profile: Profile) -> None:
    """Four layers: each has a product forward, two backward and, checkpointed, one again."""
    assert flops(stream_of(Layers([None] * 4)), profile) == (12 * PRODUCT, 12 * PRODUCT)
    model, device = flops(stream_of(Layers([how] * 4)), profile)
    assert model == 12 * PRODUCT
    # torch's newer kind stops where the graph has what it needs: all of these need the product, for its relu
    assert device == 16 * PRODUCT


@pytest.mark.parametrize("how", HOWS)
def test_a_batch_that_exists_already(how: str) -> None:
    """A real batch is on the GPU too: torch's newer kind compares the device of what it saved with what it repeats."""
    batch = torch.randn(ROWS, WIDTH, requires_grad=True)
    model = Layers([how] * 2)
    streams = [trace_module(model, batch, Traced(precision="fp32")), stream_of(model)]
    plain, made_there = (
        Counter((op.name, op.phase, op.kind, op.is_recomputed) for op in stream.ops) for stream in streams
    )
    assert plain == made_there
    assert batch.grad is None

    def step() -> None:
        model(batch).sum().backward()

    assert any(op.is_recomputed for op in trace_module(step).ops)
    assert batch.grad is None


@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from((None, *HOWS)), st.booleans()), min_size=1, max_size=4))
def test_checkpointing_changes_no_work_and_freezing_adds_none(
    profile: Profile, layers: list[tuple[str | None, bool]]
) -> None:
    hows, frozen = [how for how, _ in layers], [is_frozen for _, is_frozen in layers]
    if all(frozen):
        frozen[-1] = False
    plain, _ = flops(stream_of(Layers([None] * len(hows))), profile)
    assert flops(stream_of(Layers(hows)), profile)[0] == plain
    fewer, device = flops(stream_of(Layers([None] * len(hows), frozen)), profile)
    assert fewer == device == plain - PRODUCT * sum(frozen)  # the weights' gradients; x's is wanted here by all
    assert flops(stream_of(Layers(hows, frozen)), profile)[0] == fewer


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_transformers_own_checkpointing(is_reentrant: bool, profile: Profile) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def qwen3() -> Any:
        config = Qwen3Config(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            intermediate_size=128, vocab_size=256,
        )  # fmt: skip
        return Qwen3ForCausalLM(config).train()

    ids = torch.zeros((2, 32), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    once = flops(stream_of(qwen3(), batch, precision="autocast-bf16"), profile)
    model = qwen3()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model.enable_input_require_grads()
    stream = stream_of(model, batch, precision="autocast-bf16")
    again = flops(stream, profile)
    assert once[0] == once[1] == again[0]
    assert 1.15 * once[0] < again[1] < 4 / 3 * once[0]  # a forward without the head
    # attention is an operator of its own, whose forward records no graph
    repeated = [op.name for op in stream.ops if op.is_recomputed]
    assert repeated.count("flopcast.attention.default") == 2
    assert not any("backward" in name for name in repeated)


def test_selective_checkpointing_keeps_attention_and_every_other_product(profile: Profile) -> None:
    config = make_config(width=64, depth=2, heads=4, kv_heads=2, head_dim=16, vocab=256)

    def traced(checkpoint: str) -> Stream:
        return get_stream(config, Traced(batch=32, seq=64, checkpoint=checkpoint))

    streams = {checkpoint: traced(checkpoint) for checkpoint in CHECKPOINTS}
    repeated = Counter(op.name for op in streams["selective"].ops if op.is_recomputed)
    whole = Counter(op.name for op in streams["full"].ops if op.is_recomputed)
    assert whole["aten.mm.default"] == 2 * 6, "of each layer q, k, v, o, gate and up; nothing needs that of down"
    assert repeated["aten.mm.default"] == 2 * 3, "k, o and up"
    assert whole["flopcast.attention.default"] == 2
    assert repeated["flopcast.attention.default"] == 0
    assert all(repeated[name] <= count for name, count in whole.items())
    model, device = zip(*(flops(stream, profile) for stream in streams.values()), strict=True)
    assert len(set(model)) == 1, "what is computed again is no work of the model's"
    none, full, selective = device
    assert none < selective < full
    assert peak_bytes(streams["full"]) < peak_bytes(streams["selective"]) < peak_bytes(streams["none"])


def test_selective_checkpointing_of_a_real_step_makes_the_calls_that_are_traced() -> None:
    """On the processor, with real tensors: what torch's own modes let through is what is recorded of fake ones."""
    config = make_config(width=64, depth=2, heads=4, kv_heads=2, head_dim=16, vocab=256)
    recipe = Recipe(batch=2, seq=32, checkpoint="selective", precision="fp32")
    real = record_step(build(config, "cpu", recipe))
    traced = get_stream(config, Traced(batch=2, seq=32, checkpoint="selective", precision="fp32", device="cpu"))
    assert calls_of(real) == calls_of(traced)


def calls_of(stream: Stream) -> Counter[tuple[str, str, bool]]:
    return Counter((op.name, op.phase, op.is_recomputed) for op in stream.ops if op.kind == "launch")


def test_other_graphs_within_a_step_are_no_recomputation() -> None:
    """A closure that enables gradients, and a gradient of a gradient."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        x = torch.zeros(ROWS, WIDTH, requires_grad=True)
        with torch.enable_grad():
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().mean()).backward()
        optimizer.step()

    assert not any(op.is_recomputed for op in trace_module(step).ops)


def test_files_keep_the_mark_and_older_ones_are_read() -> None:
    stream = stream_of(Layers(["plain"]))
    assert sum(op.is_recomputed for op in stream.ops) > 0
    record = json.loads(json.dumps(to_json(stream)))
    assert from_json(record) == stream
    record["ops"] = [op[:11] for op in record["ops"]]  # as it was written before
    assert not any(op.is_recomputed for op in from_json(record).ops)
