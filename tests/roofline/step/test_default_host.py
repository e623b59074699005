"""The host that feeds a GPU unless another is named: how a forecast says so, and which steps carry its fixed costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.step.priced_step import PricedStep, forecast
from flopcast.roofline.stream.library.modules import module_stream
from flopcast.roofline.stream.model.models import load_config
from flopcast.roofline.stream.model.run import Run


def test_a_step_bound_by_a_host_that_was_not_measured_says_so() -> None:
    """The mean of several machines is nobody's host; one's own, and a step that the device bounds, need no advice."""
    profile = find_profile("nvidia-h200")
    config = load_config("qwen3-0.6b")
    small = forecast(config, Run(), profile)
    assert small.bound == "host"
    assert small.host_machines == default_host().n_machines
    assert small.advice is not None
    assert "flopcast bench --suite host" in small.advice
    assert small.to_json()["advice"] == small.advice
    assert forecast(config, Run(), profile, host=replace(default_host(), layers={})).advice is None
    assert forecast(config, Run(batch=8, seq=1024), profile).advice is None


def test_what_follows_a_models_wait_leaves_the_device_idle_and_modules_have_none() -> None:
    """transformers' forward waits for the device before its first layer and then makes masks and tables for 1 ms: a
    step that the device bounds takes that longer, and a module that never waits knows nothing of it."""
    profile = find_profile("nvidia-h200")
    host = default_host()
    calm = replace(host, forward={**host.forward, "fixed": 0.0}, backward={**host.backward, "fixed": 0.0})
    config, run = load_config("qwen3-0.6b"), Run(batch=8, seq=1024)
    longer = forecast(config, run, profile).step_seconds - forecast(config, run, profile, host=calm).step_seconds
    assert longer == pytest.approx(host.forward["fixed"], rel=0.05)
    module = module_stream(lambda: (torch.nn.Linear(64, 64), torch.randn(8, 64)), Run(), "cuda")
    assert PricedStep(module, Run(), profile, host).timeline.host_seconds < 1.1e-3  # 0.83 to 0.87 ms measured
    assert (
        PricedStep(module, Run(), profile, calm).timeline.host_seconds
        == PricedStep(module, Run(), profile, host).timeline.host_seconds
    )
