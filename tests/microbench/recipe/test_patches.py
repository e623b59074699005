"""Other kernels in a step, and what torch's own estimator says of one: on this processor, with real models."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch

from flopcast.microbench.recipe.patches import attention_implementation, patched
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.steps import torch_estimate
from flopcast.microbench.steps.build import build_plan
from flopcast.microbench.steps.run import measure_plan
from flopcast.roofline.stream.model.models import load_config, make_config

CPU = torch.device("cpu")
TINY = make_config(width=64, depth=2, heads=4, kv_heads=2, head_dim=16, vocab=256)
PLAN = StepPlan(name="tiny", config=TINY, batch=2, seq=16)

# Triton runs on this processor only in its interpreter, which has to be asked for before the import; fp16, for bf16
# comes out wrong there.
IN_THE_INTERPRETER = """
import torch
from flopcast.kernels import matmul
from flopcast.microbench.recipe import patches

calls = []
triton = patches._triton_product
patches._triton_product = lambda *operands: (calls.append(operands[2]), triton(*operands))[1]
x = torch.randn(2, 16, 64, dtype=torch.float16)
layer = torch.nn.Linear(64, 48, bias=False, dtype=torch.float16)
plain = layer(x)
plain.float().square().sum().backward()
gradient, layer.weight.grad = layer.weight.grad.clone(), None
x.requires_grad_()
with patches.patched("triton", device_type="cpu"):
    out = layer(x)
    out.float().square().sum().backward()
    exact = torch.randn(3, 5) @ torch.randn(5, 4)
assert calls == ["nt", "tn", "nn"] or sorted(calls) == ["nn", "nt", "tn"], calls
assert torch.allclose(out, plain, atol=2e-3), (out - plain).abs().max()
assert torch.allclose(layer.weight.grad, gradient, atol=5e-2)
assert layer(x).shape == out.shape and len(calls) == 3
calls.clear()
with patches.patched(lambda shape: "triton" if shape.layout == "nn" else "torch", device_type="cpu"):
    chosen = layer(x)
    chosen.float().square().sum().backward()
assert calls == ["nn"] and torch.equal(chosen, plain), calls
"""


def test_products_are_triton_s_inside_and_the_library_s_outside() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr and metadata.version("triton").startswith("3.6."):
        pytest.skip("Triton 3.6's interpreter does not run with NumPy 2.4")
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_sdpa_backend_is_the_one_asked_for() -> None:
    assert attention_implementation("sdpa-flash") == "sdpa"
    assert attention_implementation("triton") == "flopcast_triton"
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with patched(attention="sdpa-flash"):
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    for options in ({"matmul": "best"}, {"attention": "fast"}):
        with pytest.raises(ValueError, match="valid are"), patched(**options):
            pass


def test_what_a_patch_cannot_run_is_a_row_with_a_reason() -> None:
    row = measure_plan(replace(PLAN, attention="triton"), CPU, lambda step: {"value": float(step.run())})
    assert row["status"] == "error"
    assert row["reason"]


def test_a_plan_may_name_a_factory() -> None:
    plan = StepPlan(name="mlp", config={}, module="test_patches:small", batch=3, seq=1)
    sys.modules.setdefault("test_patches", sys.modules[__name__])
    step = build_plan(plan, CPU)
    assert step.batch.shape == (3, 8)
    assert torch.isfinite(step.run())


def small(batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A factory as `--module` takes it."""
    return torch.nn.Linear(8, 8), torch.randn(batch, 8)


@pytest.fixture
def datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's figures, as torch reads them where there is one: Triton decodes what nvidia-smi says as stdout would."""
    import torch.utils._runtime_estimation as figures

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a CUDA build asks a driver
    monkeypatch.setattr(figures, "get_device_tflops", lambda dtype: float(b"500".decode(sys.stdout.encoding)))
    monkeypatch.setattr(figures, "get_gpu_dram_gbps", lambda: 1000.0)


def estimated(**changes: Any) -> float:
    seconds: float = torch_estimate.estimate_row(replace(PLAN, **changes), "cpu")["value"]
    return seconds


def test_torch_s_estimate_is_linear_in_depth(datasheet: None) -> None:
    """What is left out where two shallow models stand for a deep one: nothing."""
    deep = {**TINY, "num_hidden_layers": 5}
    assert estimated(config=deep) == pytest.approx(
        torch_estimate._estimate(replace(PLAN, config=deep), "cpu"), rel=1e-6
    )
    assert estimated(batch=64) > estimated() > 16 * 0.4e6 / 1e12  # at least the optimizer's bytes


def test_torch_estimates_modules_and_grouped_products(datasheet: None) -> None:
    """A module is not moved to where it is, which fake tensors refuse; experts' fp32 products count their FLOPs."""
    sys.modules.setdefault("test_patches", sys.modules[__name__])
    assert estimated(config={}, module="test_patches:small", batch=3, seq=1) > 0
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 256,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    row = torch_estimate.estimate_row(replace(PLAN, config={**load_config("qwen3-moe"), **sizes}), "cpu")
    assert row["reason"] is None
    assert row["value"] > 0


def test_without_cuda_there_is_a_reason() -> None:
    row = torch_estimate.estimate_row(PLAN, "cpu")
    assert row["status"] == "error"
    assert "CUDA" in row["reason"]
    assert row["value"] is None


def test_keys_of_grouped_attention_are_counted_as_often_as_they_are_used() -> None:
    query, key = torch.zeros(2, 8, 16, 64), torch.zeros(2, 2, 16, 64)
    found = torch_estimate.with_equal_heads((query, query, key, key, None, 0.1))
    assert [t.shape[1] for t in found[:4]] == [8, 8, 8, 8]
    assert found[4:] == (None, 0.1)


def test_the_second_count_still_knows_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's function takes the dtype out of the set that it is given; 2.11 refuses grouped attention after that."""
    module: Any = importlib.import_module("torch.distributed._tools.runtime_estimator")

    def as_in_2_11(packet: object, args: Any, kwargs: object, out: object, out_dtypes: set[torch.dtype]) -> float:
        assert out_dtypes.pop() == torch.float32
        if len({a.shape[1] for a in args}) > 1:
            raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")
        return float(args[1].shape[1])

    monkeypatch.setattr(module, "get_compute_time", as_in_2_11)
    operands = tuple(torch.zeros(2, heads, 16, 64) for heads in (8, 2, 2))
    with torch_estimate._mixed_results():
        assert module.get_compute_time("sdpa", operands, {}, operands[0], {torch.float32}) == 8
