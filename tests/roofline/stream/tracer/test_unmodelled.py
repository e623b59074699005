"""What is not modelled yet is refused in words, with the user's line; nothing of it is forecast as something else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from flopcast.errors import UsageError
from flopcast.roofline.stream.tracer.trace import trace_module
from flopcast.roofline.stream.tracer.unmodelled import NotModelled, Topic

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]
Step = Callable[[], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def with_module(change: Callable[[Net], Any]) -> Callable[[], Any]:
    """A factory of a module that `change` returns or alters."""

    def factory() -> Any:
        net = Net()
        made = change(net)
        return net if made is None else made, torch.randn(4, 8)

    return factory


def on_a_weight(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """A factory of a step that trains one matrix of 16 x 16."""

    def factory() -> Step:
        weight = nn.Parameter(torch.randn(16, 16, device="cuda"))
        return lambda: function(weight).sum().backward()

    return factory


def compiled_block(net: Net) -> None:
    net.first = torch.compile(net.first)  # type: ignore[assignment]


def compiled_optimizer() -> Step:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(4, 8)

    @torch.compile(fullgraph=False)
    def update() -> None:
        optimizer.step()

    def step() -> None:
        net(x).sum().backward()
        update()

    return step


compiled_before = torch.compile(lambda x: x * torch.sigmoid(x))


class Activated(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return compiled_before(super().forward(x))  # type: ignore[no-any-return]


def fsdp(net: Net) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net)


def fsdp2(net: Net) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net)


def launched() -> Any:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def processes() -> Any:
    torch.distributed.init_process_group("nccl")


def all_reduce(p: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(p)
    return p


def captured() -> Any:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        Net()


def fp8(p: torch.Tensor) -> torch.Tensor:
    a, scale = p.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    return torch._scaled_mm(a, a.t(), scale, scale, out_dtype=torch.bfloat16) * p


def flex(p: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    heads = p.view(1, 1, 16, 16)
    return flex_attention(heads, heads, heads)  # type: ignore[return-value]


def nested(p: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([p, p[:3]], layout=torch.jagged).values()


def sparse_gradient() -> Step:
    embedding = nn.Embedding(5, 8, sparse=True)
    return lambda: embedding(torch.zeros(4, dtype=torch.int64)).sum().backward()


REFUSED: dict[str, tuple[Callable[[], Any], Topic]] = {
    "compiled module": (with_module(torch.compile), Topic.COMPILED),
    "module.compile()": (with_module(lambda net: net.compile()), Topic.COMPILED),
    "compiled block": (with_module(compiled_block), Topic.COMPILED),
    "block.compile()": (with_module(lambda net: net.second.compile(mode="max-autotune")), Topic.COMPILED),
    "compiled step": (lambda: torch.compile(compiled_optimizer()), Topic.COMPILED),
    "compiled optimizer": (compiled_optimizer, Topic.COMPILED),
    "compiled function": (lambda: (Activated(), torch.randn(4, 8)), Topic.COMPILED),
    "compiled loss": (lambda: (Net(), torch.randn(4, 8), torch.compile(lambda out: out.mean())), Topic.COMPILED),
    "scripted module": (with_module(torch.jit.script), Topic.SCRIPTED),
    "data parallel": (with_module(nn.DataParallel), Topic.SEVERAL_GPUS),
    "ddp": (with_module(nn.parallel.DistributedDataParallel), Topic.SEVERAL_GPUS),
    "fsdp": (with_module(fsdp), Topic.SEVERAL_GPUS),
    "fsdp2": (with_module(fsdp2), Topic.SEVERAL_GPUS),
    "launcher": (launched, Topic.SEVERAL_GPUS),
    "processes": (processes, Topic.SEVERAL_GPUS),
    "all-reduce": (on_a_weight(all_reduce), Topic.SEVERAL_GPUS),
    "CUDA graph": (captured, Topic.CAPTURED),
    "graphed callable": (
        with_module(lambda net: torch.cuda.make_graphed_callables(net, (torch.randn(4, 8),))),
        Topic.CAPTURED,
    ),
    "fp8 product": (on_a_weight(fp8), Topic.FP8),
    "fp8 weights": (on_a_weight(lambda p: p * torch.zeros(16, 16, dtype=torch.float8_e5m2).float()), Topic.FP8),
    "flex attention": (on_a_weight(flex), Topic.FLEX_ATTENTION),
    "quantized": (on_a_weight(lambda p: torch.quantize_per_tensor(p, 0.1, 0, torch.qint8) * p), Topic.QUANTIZED),
    "sparse": (on_a_weight(lambda p: torch.sparse.mm(torch.eye(16).to_sparse(), p)), Topic.SPARSE),
    "sparse gradient": (sparse_gradient, Topic.SPARSE),
    "nested": (on_a_weight(nested), Topic.NESTED),
    "complex product": (on_a_weight(lambda p: (p.cfloat() @ p.cfloat()).abs()), Topic.COMPLEX),
    "complex128": (on_a_weight(lambda p: p.to(torch.complex128).abs()), Topic.DTYPE),
    "control flow": (
        on_a_weight(lambda p: torch.cond(torch.ones((), dtype=torch.bool), torch.sin, torch.cos, (p,))),
        Topic.CONTROL_FLOW,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_modelled_is_refused(name: str) -> None:
    factory, topic = REFUSED[name]
    with pytest.raises(UsageError, match="cannot be forecast") as caught:
        trace_module(factory)
    cause = caught.value.__cause__
    assert topic.value in str(caught.value)
    if isinstance(cause, NotModelled):
        assert cause.finding.topic is topic


def test_integers_without_a_sign_are_as_those_with_one() -> None:
    """Such as the seeds of random numbers that inductor's graphs take."""
    numbers = {torch.uint16: "int16", torch.uint32: "int32", torch.uint64: "int64"}
    for dtype, name in numbers.items():
        stream = trace_module(on_a_weight(lambda p, dtype=dtype: p * p.detach().to(dtype).float()))
        assert name in {ref.operand.dtype for ref in stream.tensors}


@pytest.mark.parametrize("name", ["module.compile()", "compiled function"])
def test_a_module_that_exists_is_looked_at_too(name: str) -> None:
    module, batch, *_ = REFUSED[name][0]()
    with pytest.raises(UsageError, match=r"torch\.compile of "):
        trace_module(module, batch)


def test_the_users_line_is_named() -> None:
    with pytest.raises(UsageError, match=r"\(.*test_unmodelled.py:\d+, in forward: return compiled_before\(super"):
        trace_module(REFUSED["compiled function"][0])


def test_what_is_compiled_and_not_run_is_no_matter() -> None:
    """Nor what torch.compile was asked to leave alone."""

    class Left(Net):
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.compile(self.first)
            return super().forward(x)

    eager = trace_module(lambda: (Net(), torch.randn(4, 8)))
    for module in (Left(), torch.compile(Net(), disable=True)):
        assert len(trace_module(module, torch.randn(4, 8)).ops) == len(eager.ops)


def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> ModuleType:
    """Imports a stand-in for a library whose kernels are its own."""
    (tmp_path / "bitsandbytes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    import bitsandbytes

    return bitsandbytes  # type: ignore[no-any-return]


def test_libraries_with_kernels_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = library(
        tmp_path,
        monkeypatch,
        "import torch\nclass AdamW8bit(torch.optim.SGD): ...\nclass Linear4bit(torch.nn.Linear): ...",
    )
    net = Net()
    optimizer = found.AdamW8bit(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"bitsandbytes's AdamW8bit .*kernels of other libraries"):
        trace_module(step)
    with pytest.raises(UsageError, match="bitsandbytes's Linear4bit"):
        trace_module(found.Linear4bit(8, 8), torch.randn(4, 8))
    monkeypatch.delitem(sys.modules, "bitsandbytes")


def test_errors_of_a_users_module_show_his_line(flopcast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line: exit code 2, his file and line, no traceback and none of ours."""
    (tmp_path / "mine_with_error.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x) + torch.zeros(7)\n\ndef make():\n    return Net(8, 8), torch.randn(4, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = flopcast("predict", "--gpu", "nvidia-h200", "--module", "mine_with_error:make")
    assert done.code == 2
    assert "(mine_with_error.py:5, in forward: return super().forward(x) + torch.zeros(7))" in done.err
    assert "Traceback" not in done.err
    assert "flopcast/roofline" not in done.err
