"""A tensor that a call takes twice is two factors and one operand in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.record_step import record_step
from flopcast.roofline.stream.tracer.trace import trace_module

SIZE = 16


def batched(p: torch.Tensor) -> torch.Tensor:
    return p.repeat(3, 1, 1)


def image(p: torch.Tensor) -> torch.Tensor:
    return p.view(1, 1, SIZE, SIZE)


TWICE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mm": lambda p: torch.mm(p, p),
    "bmm": lambda p: torch.bmm(*[batched(p)] * 2),
    "addmm": lambda p: torch.addmm(p, p, p),
    "baddbmm": lambda p: torch.baddbmm(*[batched(p)] * 3),
    "conv": lambda p: F.conv2d(image(p), image(p)),
    "copy": lambda p: (copy := p * 2).copy_(copy),
}  # fmt: skip


ATTENTIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {  # by the number of queries
    SIZE: lambda p: F.scaled_dot_product_attention(*[image(p).bfloat16()] * 3),
    8: lambda p: F.scaled_dot_product_attention(image(p)[:, :, :8].bfloat16(), *[image(p).bfloat16()] * 2),
}


def flops(stream: Stream, phase: str) -> int:
    return sum(
        describe(*lowered).flops
        for op in stream.ops
        if op.phase == phase and (lowered := lower(stream, op)) is not None
    )


@pytest.mark.parametrize("name", TWICE)
def test_a_tensor_passed_twice_is_both_factors(name: str) -> None:
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))

    def step() -> None:
        TWICE[name](weight).sum().backward()

    stream = trace_module(step)
    with FlopCounterMode(display=False) as counter:
        step()
    assert sum(flops(stream, phase) for phase in ("forward", "backward", "optimizer")) == counter.get_total_flops()


@pytest.mark.parametrize("queries", ATTENTIONS)
def test_attention_of_a_tensor_to_itself(queries: int) -> None:
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
    stream = trace_module(lambda: ATTENTIONS[queries](weight).sum().backward())
    forward = 4 * queries * SIZE * SIZE
    assert (flops(stream, "forward"), flops(stream, "backward")) == (forward, forward * 5 // 2)


def test_a_copy_to_itself_runs_nothing() -> None:
    stream = trace_module(lambda: TWICE["copy"](torch.nn.Parameter(torch.randn(4))).sum().backward())
    copies = [op for op in stream.ops if op.name == "aten.copy_.default"]
    assert copies
    assert all(lower(stream, op) is None for op in copies)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_what_this_processor_runs() -> None:
    """Newton-Schulz squares a matrix: addmm(gram, gram, gram)."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 24, bias=False), torch.nn.Linear(24, 8, bias=False))
    optimizer = torch.optim.Muon(model.parameters())
    x = torch.randn(4, 8)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def calls(stream: Stream) -> Counter[object]:
        return Counter(
            (op.phase, op.kind, op.name, op.args, tuple(stream.tensors[i].operand.key for i in op.inputs))
            for op in stream.ops
        )

    fake = trace_module(step, traced=Traced(device="cpu"))
    steps = 5  # of the iteration, each with three products: gram, its square, the update
    a, b = 8, 24
    assert flops(fake, "optimizer") == 2 * steps * 2 * (a * a * b + a**3 + a * a * b)

    class Real:
        device_type = "cpu"
        run = staticmethod(step)

    assert calls(record_step(Real())) == calls(fake)
