"""Steps that call torch.compile by themselves: the same graphs as of --mode, and around them what the step does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # it registers an operator
from torch._subclasses.fake_tensor import DataDependentOutputException

from flopcast.errors import UsageError
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library import compiled as library
from flopcast.roofline.stream.library.modules import module_stream, run_of_stream
from flopcast.roofline.stream.lowering.grouped import ONE_CALL
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_depth import to_depth
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode
from flopcast.roofline.stream.tracer.compiler.experts import _refusing, one_by_one

pytest.importorskip("triton")

NET = """
import torch
from torch import nn
from transformers.integrations.moe import _grouped_mm

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return (x + self.down(nn.functional.gelu(self.up(x)))).float().logsumexp(-1).mean()

def net():
    return Net(), torch.randn(256, 512)

def step(mode="default", micro_batches=1, of_optimizer=lambda update: update):
    model = Net().to("cuda")
    update = torch.optim.AdamW(model.parameters())
    run, advance = torch.compile(model, mode=mode), of_optimizer(update.step)
    x = torch.randn(256, 512, device="cuda")

    def one():
        update.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(x)
            (loss / micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        advance()

    return one

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x):
        x = self.first(x).float()
        for layer in self.layers:
            x = layer(x)
        return self.last(x).float().logsumexp(-1).mean()

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape)) for shape in ((64, 128), (128, 64)))

    def forward(self, x):
        normed = self.norm(x)
        ends = torch.arange(1, 5, device=x.device, dtype=torch.int32) * (len(x) // 4)
        found = _grouped_mm(normed, self.up, ends)
        return x + _grouped_mm(found.relu(), self.down, ends)

def experts(): return Experts(), torch.randn(256, 64)
def whole(): return torch.compile(net()[0]), net()[1]
def graphs(): return step("reduce-overhead", 2)
def tuned(): return step("max-autotune")
def advancing(): return step(of_optimizer=torch.compile)
"""
STEPS = ("step", "whole", "graphs")
REFUSED = {"tuned": "valid are the modes default, reduce-overhead", "advancing": "compiled step of an optimizer"}
GPU = {"type": "cuda", "capability": [9, 0], "sm_count": 132}
Codes = dict[str, Future[OutputCode]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "train.py"
    path.write_text(NET, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def codes(source: str, compiled: Callable[[Asked], Future[OutputCode]]) -> Codes:
    """Of each factory; "net" compiled by us, as --mode does it."""
    own = {name: compiled(Asked(module=f"{source}:{name}", is_own=True)) for name in (*STEPS, *REFUSED)}
    experts = compiled(Asked(module=f"{source}:experts", is_whole=True))
    return {"net": compiled(Asked(module=f"{source}:net")), "experts": experts, **own}


@pytest.fixture
def streams(source: str, codes: Codes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stream of a factory's step as it is asked for, with the code that is there already."""

    @contextmanager
    def known(asked: Asked, _codes: Any) -> Iterator[Any]:
        name = asked.module.rpartition(":")[2]
        found = codes[name].result
        if name != "experts" or asked.is_whole:
            yield found
        else:
            yield lambda: replace(found(), outside={"transformers.grouped_mm_fallback": 6})

    monkeypatch.setattr(library, "compiled_once", known)

    def stream(name: str, mode: str = "eager") -> Stream:
        run = Run(mode=mode)
        return module_stream(f"{source}:{name}", run, run.device_of(GPU), gpu=GPU)

    return stream


def launches(stream: Stream) -> Counter[tuple[str, str]]:
    return Counter((op.phase, op.name) for op in stream.ops if op.kind == "launch")


@pytest.mark.parametrize("name", ["step", "whole"])
def test_around_the_graphs_is_what_the_step_does(name: str, streams: Any) -> None:
    own, ours = streams(name), streams("net", "compile")
    in_graphs = [
        [(op.name, op.args) for _, first, last in stream.meta["graphs"] for op in stream.ops[first : last + 1]]
        for stream in (own, ours)
    ]
    assert in_graphs[0] == in_graphs[1]
    assert (own.meta["mode"], own.n_params) == ("compile", ours.n_params)
    more = launches(own) - launches(ours)
    clipping = [("optimizer", name) for name in ("aten._foreach_norm.Scalar", "aten._foreach_mul_.Tensor")]
    assert all(more[each] == (name == "step") for each in clipping)
    assert peak_bytes(own) == pytest.approx(peak_bytes(ours), rel=0.01)
    profile = find_profile("nvidia-h200")
    step = PricedStep(own, run_of_stream(own, Run()), profile)
    assert step.forecast().mode == "compile"
    assert step.by_class.keys() >= {"gemm", "generated", "optimizer"}


def test_micro_batches_of_captured_graphs_copy_what_lies_elsewhere(streams: Any) -> None:
    stream = streams("graphs")
    assert stream.meta["mode"] == "compile-graphs"
    calls = [label.partition("_")[2] for label, *_ in stream.meta["graphs"]]
    assert calls == ["forward", "backward"] * 2
    copies = [op for op in stream.ops if op.name == "aten.copy_.default"]
    shapes = [stream.tensors[op.inputs[0]].operand.shape for op in copies]
    assert shapes == [(256, 512), ()] * 2  # the batch, and the gradient of the loss
    assert [op.phase for op in copies] == ["forward", "backward"] * 2
    assert launches(stream)["backward", "aten.add_.Tensor"] == 4  # autograd sums what the graphs return


def test_grouped_products_in_fp32_have_results_outside_of_graphs() -> None:
    """Those of checkpointed layers, whose graphs break: torch's own rule refuses what a GPU multiplies."""
    rows, weights = torch.empty(64, 32, device="meta"), torch.empty(4, 32, 16, device="meta")
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    with one_by_one():
        assert torch._grouped_mm(rows, weights, offs=ends).shape == (64, 16)
    with pytest.raises(RuntimeError, match="BF16"):
        torch._grouped_mm(rows, weights, offs=ends)


def test_experts_outside_of_the_graphs_are_as_many_products_as_in_an_eager_step(streams: Any) -> None:
    eager, stream = streams("experts"), streams("experts", "compile")
    layers = range(3)

    def products(stream: Stream) -> Counter[Any]:
        calls = (stream.call(op) for op in stream.ops if op.name == "aten._grouped_mm.default")
        return Counter(tuple(operand.shape for operand in (*call.inputs, *call.outputs)) for call in calls)

    assert products(stream) == products(eager)
    assert products(stream).total() == 6 * len(layers)
    assert Counter(op.layer for op in stream.ops if op.kind == "sync") == dict.fromkeys(layers, 4)  # once each loop
    own = [op.layer for op in stream.ops if op.name == ONE_CALL]
    assert Counter(own) == dict.fromkeys(layers, 2 * 4 * (1 + 2))  # of two products and their gradients, four experts
    assert launches(stream)["backward", "aten.zeros_like.default"] == 4 * len(layers)
    assert {op.name for op in stream.ops if op.layer is None} >= {"aten.addmm.default", "aten.mm.default"}
    called = [label for label, *_ in stream.meta["graphs"]]
    assert [label.rpartition("_")[2] for label in called] == ["forward"] * 3 + ["backward"] * 3


def test_the_gpu_works_while_the_host_calls_the_other_experts(streams: Any) -> None:
    stream = streams("experts", "compile")
    names = [op.name for op in stream.ops]
    grouped = "aten._grouped_mm.default"
    for place in (i for i, op in enumerate(stream.ops) if op.kind == "sync"):
        phase = stream.ops[place].phase
        called = 4 * [ONE_CALL] if phase == "forward" else 8 * [ONE_CALL]
        for product in range(1 if phase == "forward" else 2):
            called.insert(1 + 2 * product, grouped)
        assert names[place + 1 : place + 1 + len(called)] == called
    host, profile = default_host(), find_profile("nvidia-h200")
    ops = PricedStep(stream, run_of_stream(stream, Run()), profile, host).ops
    calls = {op.phase: timed for op, timed in zip(stream.ops, ops, strict=True) if op.name == ONE_CALL}
    assert all(timed.work is None and not timed.launches for timed in calls.values())
    assert calls["backward"].host_seconds > calls["forward"].host_seconds > host.optimizer["launch"]


def test_graphs_that_hold_gradients_of_experts_fail_before_they_are_traced() -> None:
    made: list[Any] = []
    operator = torch.ops.transformers.grouped_mm_fallback
    compile_ = _refusing(operator.default, lambda graph: made.append(graph) or graph)

    def graph(target: Any, requires_grad: bool) -> torch.fx.GraphModule:
        found = torch.fx.Graph()
        node = found.call_function(target, (found.placeholder("x"),))
        node.meta["example_value"] = torch.empty(1, requires_grad=requires_grad)
        found.output(node)
        return torch.fx.GraphModule(torch.nn.Module(), found)

    for one in (graph(torch.relu, True), graph(operator, False)):
        assert compile_(one) is one
    for target in (operator, operator.default):
        one = graph(target, True)
        with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
            compile_(one)
        with torch.no_grad():
            assert compile_(one) is one
    assert len(made) == 4


def test_layers_with_experts_repeat(streams: Any) -> None:
    stream = streams("experts", "compile")
    assert stream.depth == 3
    deep = to_depth(stream, 6)
    layer = Counter((op.phase, op.name) for op in stream.ops if op.layer == 1 and op.kind == "launch")
    assert launches(deep) == launches(stream) + Counter({call: 3 * count for call, count in layer.items()})
    assert len(deep.meta["graphs"]) == 12
    for _, first, last in deep.meta["graphs"]:
        assert all(op.name.startswith(("inductor.", "aten.sum")) for op in deep.ops[first : last + 1])
    more = (deep.n_params - stream.n_params) / 3
    assert more == 64 + 4 * 2 * 64 * 128
    grown = (peak_bytes(deep) - peak_bytes(stream)) / 3
    assert grown > 16 * more


def test_uneven_experts_take_longer(streams: Any) -> None:
    stream, profile = streams("experts", "compile"), find_profile("nvidia-h200")
    even, uneven = (
        PricedStep(stream, replace(run_of_stream(stream, Run()), imbalance=imbalance), profile)
        .forecast()
        .device_seconds
        for imbalance in (1.0, 3.0)
    )
    assert uneven > even


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_not_modelled_is_refused_with_the_reason(name: str, streams: Any) -> None:
    with pytest.raises(UsageError, match=REFUSED[name]) as refused:
        streams(name)
    assert "\n" not in str(refused.value)


def test_a_mode_beside_its_own_is_refused(streams: Any) -> None:
    with pytest.raises(UsageError, match="it is forecast in the mode that it asks for; leave mode out"):
        streams("step", "compile")


def test_one_gpu_has_to_be_named(source: str) -> None:
    with pytest.raises(UsageError, match="name its factory, as"):
        module_stream(f"{source}:step", Run(), "cuda")
    with pytest.raises(UsageError, match="a step function: it does that by itself"):
        module_stream(f"{source}:step", replace(Run(), clip=1.0), "cuda", gpu=GPU)
