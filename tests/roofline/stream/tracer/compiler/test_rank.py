"""One rank's compiled step: real DistributedDataParallel, fully_shard and compiler, for GPUs that are not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.step.priced_step import COMPILED_RANKS, PricedStep
from flopcast.roofline.stream.compiled.to_rank import GRAPH
from flopcast.roofline.stream.library.compiled import rank_stream
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.collectives import collectives
from flopcast.roofline.stream.ops.op_stream import FOLDED_PARALLEL, Stream, from_json
from flopcast.roofline.stream.ops.to_depth import to_depth
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode
from flopcast.roofline.stream.tracer.parallel.trace import trace_module_rank

pytest.importorskip("triton")

WIDTH = 1024
NET = f"""
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({WIDTH}, {4 * WIDTH}), nn.Linear({4 * WIDTH}, {WIDTH})

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.stem, self.head = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, 8)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(x))

    def loss(self, logits):
        return logits.float().logsumexp(-1).mean()

class Broken(Net):
    # as GPT-2: both ends share a weight, and the graph breaks between the logits and their loss

    def __init__(self, depth):
        super().__init__(depth)
        self.head = nn.Linear({WIDTH}, {WIDTH})
        self.head.weight = self.stem.weight

    def loss(self, logits):
        torch._dynamo.graph_break()
        return super().loss(logits)

def net(depth: int = 3):
    return Net(depth), torch.randn(8, {WIDTH})

def broken(depth: int = 1):
    return Broken(depth), torch.randn(8, {WIDTH})
"""
FSDP, DDP, DEEP = "fsdp=2", "ddp=2", 6
Steps = dict[tuple[str, int], tuple[OutputCode, Stream]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(NET, encoding="utf-8")
    return f"{path}:net"


@pytest.fixture(scope="module")
def steps(source: str, compiled: Callable[[Asked], Future[OutputCode]]) -> Steps:
    """By layout and depth, the code of a rank's step and its stream."""
    wanted = ((FSDP, FOLDED_PARALLEL), (FSDP, DEEP), (DDP, DEEP))
    asked: dict[tuple[str, int], Future[OutputCode]] = {
        (layout, depth): compiled(
            Asked(module=source, sizes={"depth": depth}, parallel=layout, optimizer="adamw-fused")
        )
        for layout, depth in wanted
    }
    codes = {key: one.result() for key, one in asked.items()}
    return {
        (layout, depth): (code, rank_stream(code, Traced(mode="compile", device="cuda 9.0 132", parallel=layout)))
        for (layout, depth), code in codes.items()
    }


@cache
def eager(source: str, layout: str, depth: int) -> Stream:
    return trace_module_rank(source, Traced(parallel=layout, optimizer="adamw-fused"), sizes={"depth": depth})


def test_layers_under_fsdp_share_two_graphs(steps: Steps) -> None:
    code, stream = steps[FSDP, DEEP]
    assert code.calls == (*[0] * DEEP, *[1] * DEEP)
    assert len(code.graphs) == 2
    calls = stream.meta["graphs"]
    assert [label for label, *_ in calls] == ["0_forward"] * DEEP + ["0_backward"] * DEEP
    layers = [{op.layer for op in stream.ops[first : last + 1]} for _, first, last in calls]
    assert layers == [{n} for n in (*range(DEEP), *reversed(range(DEEP)))]


@pytest.mark.parametrize("layout", [FSDP, DDP])
def test_what_surrounds_graphs_is_the_eager_step_s(layout: str, steps: Steps, source: str) -> None:
    of_eager = eager(source, layout, DEEP)
    code, _ = steps[layout, DEEP]
    assert code.recorded is not None
    recorded = from_json(code.recorded)

    def sent(stream: Stream) -> list[tuple[str, int, int]]:
        return [(one.kind, one.bytes if layout == FSDP else 0, one.lane) for one in collectives(stream)]

    def outside(stream: Stream) -> Counter[tuple[str, str, int]]:
        return Counter((op.name, op.phase, op.lane) for op in stream.ops if op.kind == "launch" and op.name != GRAPH)

    if layout == FSDP:
        assert sent(recorded) == sent(of_eager)
    assert sum(one.bytes for one in collectives(recorded)) == sum(one.bytes for one in collectives(of_eager))
    assert outside(recorded) <= outside(of_eager) + Counter(
        {("c10d.allreduce_.default", "backward", 1): 9, ("aten.mul.Tensor", "backward", 0): 99} if layout == DDP else {}
    )
    assert recorded.n_params == of_eager.n_params


def test_graphs_end_where_buckets_of_ddp_do(steps: Steps) -> None:
    code, stream = steps[DDP, DEEP]
    assert code.breaks == ()  # torch's own cuts are none of the user's
    assert len(set(code.calls)) == len(code.graphs) < len(code.calls)  # graphs that are others anew are compiled once
    reduced = [i for i, op in enumerate(stream.ops) if op.name == "c10d.allreduce_.default"]
    backwards = [first for label, first, _ in stream.meta["graphs"] if label.endswith("backward")]
    assert len(backwards) == len(code.calls) // 2 > 1
    assert reduced[0] < backwards[-1]  # gradients are sent while the rest of the backward runs


def test_a_model_under_ddp_may_break_its_graph(source: str, compiled: Callable[[Asked], Future[OutputCode]]) -> None:
    asked = Asked(module=source.replace(":net", ":broken"), parallel=DDP, optimizer="adamw-fused")
    code = compiled(asked).result()
    assert [one.reason for one in code.breaks] == ["Call to `torch._dynamo.graph_break()`"]
    stream = rank_stream(code, Traced(mode="compile", device="cuda 9.0 132", parallel=DDP))
    labels = [label for label, *_ in stream.meta["graphs"]]
    forwards, backwards = labels[: len(labels) // 2], labels[len(labels) // 2 :]
    assert len(forwards) == 4  # three of the buckets, and that of the loss
    assert backwards == [label.replace("forward", "backward") for label in reversed(forwards)]
    outside = Counter(op.name for op in stream.ops if op.phase == "backward")
    assert outside["aten.add.Tensor"] == 1  # the shared weight's gradients are of two graphs


def test_every_gradient_is_in_a_bucket_once(steps: Steps) -> None:
    _, stream = steps[DDP, DEEP]
    held = Counter[str]()
    for storage in stream.storages:
        held[storage.kind] += storage.bytes
    assert held["bucket"] == held["parameter"] == 4 * stream.n_params
    assert held["gradient"] == 0


def test_a_step_of_any_depth_follows_from_four_layers(steps: Steps) -> None:
    folded, deep = steps[FSDP, FOLDED_PARALLEL][1], steps[FSDP, DEEP][1]
    found = to_depth(folded, DEEP)
    assert found.meta["graphs"] == deep.meta["graphs"]

    def told(stream: Stream) -> list[tuple[object, ...]]:
        return [
            (op.name, op.phase, op.layer, op.lane, op.waits, op.args, [stream.tensors[i].operand for i in op.inputs])
            for op in stream.ops
            if '"ts"' not in op.args
        ]

    assert told(found) == told(deep)
    assert peak_bytes(found) == pytest.approx(peak_bytes(deep), abs=4096)


def test_compiled_steps_keep_less_than_eager_ones(steps: Steps, source: str) -> None:
    assert peak_bytes(steps[FSDP, DEEP][1]) <= peak_bytes(eager(source, FSDP, DEEP))


def test_the_time_of_a_rank_s_step_is_forecast(steps: Steps, source: str) -> None:
    _, stream = steps[FSDP, DEEP]
    run = Run(mode="compile", parallel=FSDP, optimizer="adamw-fused")
    step = PricedStep(stream, run, find_profile("nvidia-h200"))
    assert step.timeline.shares.communication > 0
    assert COMPILED_RANKS in step.warnings
    as_eager = PricedStep(eager(source, FSDP, DEEP), replace(run, mode="eager"), step.profile)
    assert COMPILED_RANKS not in as_eager.warnings
    assert step.forecast().kernels < as_eager.forecast().kernels
