"""Any module, factory or step function is forecast; what cannot be says why."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flopcast
from flopcast.errors import UsageError
from flopcast.microbench import zoo
from flopcast.microbench.recipe import training_step
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep, forecast
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.model.models import load_config
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.trace import trace, trace_module
from flopcast.roofline.views.terminal.forecast import print_forecast

ZOO = "flopcast.microbench.zoo:"


def tiny_mlp() -> tuple[torch.nn.Module, Any]:
    return zoo.mlp(batch=8, width=16, depth=3)


def test_a_module_that_exists_is_forecast_and_left_as_it_was(profile: Profile) -> None:
    model, batch = tiny_mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = flopcast.forecast(model, batch, gpu=profile)
    assert found.n_params == sum(p.numel() for p in model.parameters())
    assert found.step_seconds_low < found.step_seconds < found.step_seconds_high
    assert found.tokens_per_second == pytest.approx(8 / found.step_seconds)
    # 3 forward, 3 wgrad, 2 dgrad products of 16 x 16 (the input learns nothing), and the head's three
    assert found.flops_counted == 2 * 8 * 16 * (8 * 16 + 3 * 1000)
    after = dict(model.named_parameters())
    assert all(type(p) is torch.nn.Parameter and torch.equal(p, before[name]) for name, p in after.items())
    assert all(p.grad is None for p in after.values())
    model(*batch).backward()  # and it still runs


def test_factories_modules_and_step_functions_trace_alike(golden: Any) -> None:
    model, (x, labels) = tiny_mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x, labels)
        loss.backward()
        optimizer.step()

    by_function = trace_module(step)
    assert not optimizer.state  # the real one was not stepped
    assert all(type(p) is torch.nn.Parameter for p in optimizer.param_groups[0]["params"])
    by_module, by_factory = trace_module(model, (x, labels)), trace_module(tiny_mlp)
    expected = golden.ops_of(by_module)
    assert golden.ops_of(by_factory) == expected
    assert golden.ops_of(by_function) == expected
    assert by_function.n_params == by_module.n_params
    assert {op.phase for op in by_function.ops} == {"forward", "backward", "optimizer"}


class Half(torch.nn.Module):
    """Two products in fp16 and a smaller one in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            hidden = self.layers(x)
        return self.head(hidden.float())


STEPS: dict[str, tuple[type[torch.nn.Module], Callable[..., torch.optim.Optimizer], dict[str, str]]] = {
    "SGD": (Half, torch.optim.SGD, {"precision": "fp16", "optimizer": "SGD"}),
    "Adafactor": (zoo._MLP, torch.optim.Adafactor, {"precision": "fp32", "optimizer": "Adafactor"}),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_function_is_labelled_by_what_was_traced(
    profile: Profile, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, made, expected = STEPS[case]
    model = kind() if kind is Half else zoo.mlp(batch=8, width=32, depth=1)[0]
    x, labels = torch.randn(8, 32), torch.zeros(8, dtype=torch.int64)
    optimizer = made(model.parameters(), lr=0.1)

    def step() -> None:
        (model(x).square().mean() if kind is Half else model(x, labels)).backward()
        optimizer.step()

    found = flopcast.forecast(step, gpu=profile)
    assert {name: found.to_json()[name] for name in expected} == expected
    assert found.peak_flops_per_second == profile.peaks[found.precision].value
    stream = trace_module(step)
    print_forecast(found, run_of_stream(stream, Run()))
    title = " ".join(capsys.readouterr().out.split())
    assert f"a step of its own, products in {expected['precision']}, {case}, eager" in title
    with pytest.raises(UsageError, match=r"precision bf16 of .* it does that by itself"):
        flopcast.forecast(step, gpu=profile, precision="bf16")
    as_tf32 = {"fp16": "fp16", "fp32": "tf32"}[expected["precision"]]
    assert flopcast.forecast(step, gpu=profile, precision="tf32").precision == as_tf32


def test_a_step_without_optimizer_or_products_claims_neither(profile: Profile) -> None:
    weight, x = torch.nn.Parameter(torch.randn(64)), torch.randn(64)

    def step() -> None:
        (weight * x).sum().backward()

    found = flopcast.forecast(step, gpu=profile)
    assert (found.precision, found.optimizer, found.mfu) == ("", "", 0.0)


def test_dollars_are_those_of_the_command_line(profile: Profile) -> None:
    model, batch = tiny_mlp()
    h100 = flopcast.forecast(model, batch, gpu="nvidia-h100-sxm", on="2025-11-15")
    assert h100.usd_per_step == pytest.approx(2.69 / 3600 * h100.step_seconds)
    assert flopcast.forecast(model, batch, gpu="nvidia-h100-sxm").usd_per_step is not None
    own = flopcast.forecast(model, batch, gpu=profile)
    assert (own.price, own.usd_per_step) == (None, None)
    given = flopcast.forecast(model, batch, gpu=profile, price=2.0)
    assert given.usd_per_step == pytest.approx(2.0 / 3600 * given.step_seconds)


def test_tracing_leaves_a_config_as_it_was() -> None:
    config = load_config("llama-3.2-1b")
    small = {**config, "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 2}  # fmt: skip
    before = deepcopy(small)
    trace(small, Traced(batch=1, seq=8))
    assert small == before  # transformers writes into rope_scaling


def test_sizes_and_loss_functions() -> None:
    stream = trace_module(ZOO + "transformer_encoder", sizes={"batch": 2, "seq": 16})
    assert (stream.meta["batch"], stream.depth) == (2, 6)
    model = torch.nn.Linear(4, 3)
    mean = trace_module(model, torch.randn(5, 4))
    assert any(op.name == "aten.mean.default" for op in mean.ops)
    summed = trace_module(model, torch.randn(5, 4), loss_fn=lambda out: out.sum())
    assert not any(op.name == "aten.mean.default" for op in summed.ops)
    ids = trace_module(torch.nn.Embedding(10, 4), torch.zeros((3, 7), dtype=torch.int64))
    assert (ids.meta["batch"], ids.meta["seq"]) == (3, 7)


def test_convolutions_count_what_torch_counts() -> None:
    stream = trace_module(lambda: zoo.resnet50(batch=2, size=64, depths=(1, 1, 1, 1)))
    works = [describe(*w) for op in stream.ops if (w := lower(stream, op))]
    model, batch = zoo.resnet50(batch=2, size=64, depths=(1, 1, 1, 1))
    with FlopCounterMode(display=False) as counter:
        training_step.loss_of(model(**batch)).backward()
    assert sum(w.flops for w in works) == counter.get_total_flops()
    assert {w.op_class for w in works} >= {"conv", "reduction", "gemm", "pointwise"}
    assert any(str(w.variant) == "fwd/bf16/nchw/few" for w in works)


def test_experts_count_as_many_rows_as_they_are_given() -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512,
    }  # fmt: skip
    stream = trace(config, Traced(batch=2, seq=32, precision="bf16"))
    works = [describe(*w) for op in stream.ops if (w := lower(stream, op))]
    grouped = [w for w in works if w.variant.tokens[0] == "grouped"]
    rows = 2 * 32 * 2  # every token goes to two experts
    one_pass = 2 * rows * (64 * 64 + 32 * 64)  # gate and up together, and down
    assert sum(w.flops for w in grouped) == 2 * 3 * one_pass
    assert all(w.op_class == "gemm" and w.features[-1] == math.log2(8) for w in grouped)


def test_what_torch_says_of_its_own_copies_is_not_passed_on(recwarn: pytest.WarningsRecorder) -> None:
    class Copied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn(
                "Accessing the data pointer of FakeTensor is deprecated", stacklevel=1
            )  # torch's, once a process
            warnings.warn("mine", stacklevel=1)
            return self.layer(x)  # type: ignore[no-any-return]

    trace_module(Copied(), torch.randn(2, 4))
    assert {str(warning.message) for warning in recwarn} == {"mine"}


def test_runs_of_other_batches_are_derived_from_the_same_traces() -> None:
    module = Module("flopcast.microbench.zoo:mlp")
    streams = [module.at_batch(Run(batch=batch), "cuda", batch) for batch in (8, 64)]
    assert [stream.meta["batch"] for stream in streams] == [8, 64]
    assert len(module._traced) == 2


def test_micro_batches_and_checkpointing(tiny: dict[str, Any], profile: Profile) -> None:
    run = Run(batch=2, seq=32)
    once = forecast(tiny, run, profile)
    thrice = forecast(tiny, replace(run, accumulate=3), profile)
    again = forecast(tiny, replace(run, checkpoint="full"), profile)
    assert thrice.flops_counted == 3 * once.flops_counted
    assert thrice.tokens_per_second * thrice.step_seconds == pytest.approx(3 * 2 * 32)
    # one optimizer for three, but gradients are added twice: at this size the more of the two
    assert 2 * once.device_seconds < thrice.device_seconds < 3.3 * once.device_seconds
    assert again.flops_counted == once.flops_counted  # of the model
    layers = sum(share.flops for share in again.breakdown) - again.flops_counted
    assert 0.1 * once.flops_counted < layers < once.flops_counted / 3  # a forward without the head
    assert again.device_seconds > once.device_seconds


def test_checkpointing_saves_memory(traced: Callable[..., Stream], profile: Profile, tiny: dict[str, Any]) -> None:
    deep = {**tiny, "num_hidden_layers": 12}
    stream = traced(deep, batch=8, seq=64, checkpoint="full")
    peak = {
        name: PricedStep(s, Run(batch=8, seq=64), profile).forecast().peak_bytes
        for name, s in (("none", traced(deep, batch=8, seq=64)), ("full", stream))
    }
    assert peak["full"] < 0.8 * peak["none"]
    inside = [op for op in stream.ops if op.is_recomputed]
    assert {op.layer for op in inside} == set(range(12))


def test_what_has_no_measured_class_is_named() -> None:
    class Sorted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4096))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sort(dim=-1).values

    known = flopcast.forecast(torch.nn.Linear(4096, 4096), torch.randn(4096, 4096))
    found = flopcast.forecast(Sorted(), torch.randn(4096, 4096))
    assert any("or by bytes" in warning and "sort" in warning for warning in found.warnings)
    assert found.device_seconds_high / found.device_seconds > known.device_seconds_high / known.device_seconds


FACTORIES = """
import torch
from torch.nn import Linear, Module

def alone(): return Linear(2, 2)
def four(): return Linear(2, 2), torch.zeros(1, 2), sum, sum
def number(): return "three"
def broken(): raise KeyError("no such thing")
def mismatch(): return Linear(2, 2), torch.zeros(1, 3)
def frozen(): return torch.nn.ReLU(), torch.zeros(1, 3)
def nothing(): return lambda: None

class Picks(Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(2, 2)
    def forward(self, x):
        return self.linear(x[x[:, 0] > 0])
def picks(): return Picks(), torch.zeros(4, 2)

class Waits(Picks):
    def forward(self, x):
        while (x > 0).all():
            x = x - 1
        return self.linear(x)
def waits(): return Waits(), torch.zeros(4, 2)
not_a_function = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "some_factories", raising=False)
    return "some_factories:"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alone", r"returns a module alone: valid is \(module, batch\)"),
        ("four", r"returns 4 values"),
        ("number", r"returns str: valid are"),
        ("broken", r"KeyError: 'no such thing'"),
        ("mismatch", r"aten.addmm|shapes cannot be multiplied|size mismatch"),
        ("frozen", r"no parameters that require a gradient"),
        ("nothing", r"nothing ran on the device"),
        ("picks", r"aten.nonzero.default returns depends on values.*some_factories.py:\d+, in forward: .*torch.where"),
        ("waits", r"a loop waits for a value"),
        ("absent", r"absent does not exist in some_factories; functions there: .*picks"),
        ("not_a_function", r"is not a function"),
    ],
)
def test_what_is_wrong_is_said(name: str, message: str, factories: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace_module(factories + name)
    assert torch.empty(1).device.type == "cpu"  # all is as before


def test_names_that_are_none(factories: str) -> None:
    with pytest.raises(UsageError, match="No module named 'no_such_package'"):
        trace_module("no_such_package:f")
    for name in ("json", ":f", "json:"):
        with pytest.raises(UsageError, match=r"valid are package\.module:factory and path/file\.py:factory"):
            trace_module(name)
    with pytest.raises(UsageError, match="needs a batch"):
        trace_module(torch.nn.Linear(2, 2))


LINEAR = "import torch\ndef make(batch=4):\n    return torch.nn.Linear(8, 8), torch.randn(batch, 8)\n"


def test_a_factory_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "my models"
    folder.mkdir()
    (folder / "json.py").write_text("from beside_json import make\n")  # not the standard library's
    (folder / "beside_json.py").write_text(LINEAR)
    expected = trace_module(f"{folder}/beside_json.py:make").ops
    assert trace_module(f"{folder}/json.py:make").ops == expected
    assert not hasattr(sys.modules["json"], "make")
    monkeypatch.chdir(folder)
    assert trace_module("beside_json.py:make").ops == expected


def test_a_file_of_a_package_imports_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    inner = tmp_path / "outer_of_a_file" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "layers.py").write_text(LINEAR)
    (inner / "model.py").write_text("from ..layers import make\n")
    assert trace_module(f"{inner}/model.py:make").meta["batch"] == 4


@pytest.mark.parametrize(
    ("name", "said"),
    [("no/such.py:make", "no/such.py does not exist; give the path of a Python file"), ("{}:make", "is a folder"),
     ("{}/file.py", r"valid are package\.module:factory"), ("{}/notes:make", "is no Python file"),
     ("{}/file.py:absent", r"absent does not exist in .*functions there: make")],
)  # fmt: skip
def test_a_file_that_is_none(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "file.py").write_text(LINEAR)
    (tmp_path / "notes").write_text("none")
    with pytest.raises(UsageError, match=said):
        trace_module(name.format(tmp_path))
