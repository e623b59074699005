"""6N counts what a step is asked to do: what is trained, what gradients pass, and the experts of each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.library.modules import Module
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.lowering.six_n import Parameters, count_parameters
from flopcast.roofline.stream.model.models import with_depth
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_micro_batches import times_run
from flopcast.roofline.stream.tracer.trace import trace, trace_module

H200 = find_profile("nvidia-h200").device
EXPERT_ROWS = 320
WIDTH, ROWS = 32, 8
LAYER = WIDTH * WIDTH + WIDTH


def mlp(*are_trained: bool) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in are_trained))
    for layer, is_trained in zip(model, are_trained, strict=True):
        layer.requires_grad_(is_trained)
    return model


def flops_of(stream: Stream) -> int:
    lowered = ((lower(stream, op), times) for op, times in zip(stream.ops, times_run(stream), strict=True))
    return sum(describe(*work).flops * times for work, times in lowered if work is not None)


def counted(module: torch.nn.Module, **options: Any) -> Parameters:
    return count_parameters(trace_module(module, torch.randn(ROWS, WIDTH), Traced(**options)), ROWS)


@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16", "bf16"])
def test_frozen_layers_by_hand(precision: str) -> None:
    assert counted(mlp(True, True, True), precision=precision) == Parameters(3 * LAYER, 3 * LAYER, 18 * LAYER * ROWS)
    last = counted(mlp(False, False, True), precision=precision)  # nothing below is trained: forward alone
    assert last == Parameters(LAYER, 3 * LAYER, (6 + 2 + 2) * LAYER * ROWS)
    # a gradient passes the weights of the layers above; their biases have no part in it
    first = counted(mlp(True, False, False), precision=precision)
    assert first == Parameters(LAYER, 3 * LAYER, (6 * LAYER + 2 * (2 * LAYER + 2 * WIDTH**2)) * ROWS)


def test_micro_batches_and_checkpointing_count_as_one_pass_each() -> None:
    model = mlp(False, True)
    once = counted(model)
    assert counted(model, accumulate=3) == once  # of the same number of tokens
    seven = trace_module(mlp(True), torch.randn(ROWS, WIDTH), Traced(accumulate=7))
    assert count_parameters(seven, 7 * ROWS).flops_6n == 6 * LAYER * 7 * ROWS


def test_what_is_not_used_is_not_counted() -> None:
    class Spare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    found = counted(Spare())
    assert found.flops_6n == 6 * LAYER * ROWS
    assert found.trained == LAYER


def test_a_step_without_an_optimizer_trains_all() -> None:
    model, x = mlp(True, True), torch.zeros(ROWS, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    assert count_parameters(trace_module(step), ROWS) == Parameters(2 * LAYER, 2 * LAYER, 12 * LAYER * ROWS)


MOE: dict[str, Any] = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 32,
       "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256, "tie_word_embeddings": True}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"checkpoint": "full"}, {"accumulate": 2}])
def test_active_experts_of_transformers_qwen3_moe(options: dict[str, Any]) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    stream = trace(MOE, Traced(batch=2, seq=32, **options))
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE))
    total = model.num_parameters()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts == 3 * 8 * 3 * 64 * 32  # layers, experts, up, gate and down
    active = total - experts * 6 // 8
    tokens = 2 * 32 * options.get("accumulate", 1)
    assert count_parameters(stream, tokens) == Parameters(total, active, 6 * active * tokens)


class Experts(torch.nn.Module):
    """Experts of which each takes as many rows, by torch.bmm: two of eight for a row at the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, 8, bias=False)
        self.up = torch.nn.Parameter(torch.randn(8, WIDTH, 2 * WIDTH))
        self.down = torch.nn.Parameter(torch.randn(8, 2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, index = self.router(x).t().topk(x.shape[0] * 2 // 8, dim=-1)
        rows = torch.bmm(torch.relu(torch.bmm(x[index], self.up)), self.down)
        return x.index_add(0, index.flatten(), rows.flatten(0, 1).to(x.dtype))


def experts() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Sequential(Experts(), Experts()), torch.randn(EXPERT_ROWS, WIDTH)


@pytest.mark.usefixtures("compiled_in_one_process")
@pytest.mark.parametrize("precision", ["autocast-bf16", "bf16", "fp32"])
def test_active_experts_and_flops_are_as_many_in_every_mode(precision: str) -> None:
    bank, router = 8 * WIDTH * 2 * WIDTH, 8 * WIDTH
    module = Module(f"{__file__}:experts")  # which is compiled once for both modes
    for mode in ("eager", "compile", "compile-graphs"):
        run = Run(mode=mode, precision=precision)
        stream = module.stream(run, run.device_of(H200))
        assert count_parameters(stream, EXPERT_ROWS).active == 2 * (router + 2 * bank // 4), mode
        # three products of each bank, but for the gradient of the model's input; the choice of rows passes none on
        assert flops_of(stream) == 2 * EXPERT_ROWS * (11 * bank // 4 + 2 * router), mode


@pytest.mark.usefixtures("compiled_in_one_process")
@pytest.mark.parametrize("mode", ["compile", "compile-graphs"])
@pytest.mark.parametrize("depth", [2, 5])
def test_active_experts_of_compiled_layers_that_stand_for_several(mode: str, depth: int) -> None:
    """Experts in bf16 are in the graphs, where one layer stands for all between the first and the last."""
    run = Run(batch=2, seq=32, precision="bf16")
    eager, compiled = (
        count_parameters(get_stream(with_depth(MOE, depth), one.traced_on(one.device_of(H200))), run.tokens)
        for one in (run, replace(run, mode=mode))
    )
    assert compiled == eager
    assert compiled.active < compiled.trained
