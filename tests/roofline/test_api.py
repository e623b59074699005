"""The Python interface: several GPUs, what fits, and how results print."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flopcast
from flopcast.errors import UsageError
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.library import modules


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_several_gpus_take_one_trace_and_answer_as_each_alone(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[Any] = []
    trace = modules.module_stream
    monkeypatch.setattr(modules, "module_stream", lambda *a, **o: traces.append(a) or trace(*a, **o))
    x = torch.randn(64, 256)
    found = flopcast.forecast(model(), x, gpus=[profile, "h200"], loss_fn=loss, optimizer="adamw-fused")
    assert len(traces) == 1
    assert [one.gpu for one in found] == ["test-gpu", "nvidia-h200"]
    alone = flopcast.forecast(model(), x, profile, loss_fn=loss, optimizer="adamw-fused")
    assert found[0].step_seconds == pytest.approx(alone.step_seconds, rel=1e-9)
    assert "samples/s" in str(found)
    for part in (alone.gpu, "90% interval", "samples per second", "fits"):
        assert part in str(alone)
        assert part in alone._repr_html_()
    for wrong in ([], "h200"):
        with pytest.raises(UsageError, match="valid is a list of GPUs"):
            flopcast.forecast(model(), x, gpus=wrong)


def test_the_largest_batch_of_a_module_is_that_of_its_factory(profile: Profile) -> None:
    def factory(batch: int = 4) -> Any:
        return model(), torch.randn(batch, 2**10, 256), loss

    most = flopcast.largest_batch(factory, gpu=profile)
    example = (torch.randn(3, 2**10, 256),)
    assert flopcast.largest_batch(model(), example, profile, loss_fn=loss) == most > 1000
    fits = flopcast.forecast(lambda: factory(most), gpu=profile).needed_bytes
    assert (
        fits <= profile.device["memory_bytes"] < flopcast.forecast(lambda: factory(most + 1), gpu=profile).needed_bytes
    )


def test_a_factory_without_a_batch_has_no_largest(profile: Profile) -> None:
    with pytest.raises(UsageError, match="give it a parameter `batch`"):
        flopcast.largest_batch(lambda: (model(), torch.randn(5, 256), loss), gpu=profile)


def test_a_module_is_forecast_on_several_gpus(profile: Profile) -> None:
    x = torch.randn(64, 256)
    step = {"loss_fn": loss, "optimizer": "adamw-fused"}
    alone, both = (flopcast.forecast(model(), x, "h200", **step, parallel=p) for p in ("none", "ddp=2"))  # type: ignore[call-overload]
    assert (both.num_gpus, both.parallel, both.unit) == (2, "ddp=2", "samples")
    assert both.flops_counted == 2 * alone.flops_counted
    assert both.memory["gradients"] == pytest.approx(alone.memory["gradients"], abs=4096)
    apart = flopcast.forecast(model(), x, "h200", loss_fn=loss, optimizer="adamw-fused", parallel="ddp=2", nodes=2)
    assert apart.communication_seconds > both.communication_seconds
    with pytest.raises(UsageError, match="nodes is 3"):
        flopcast.forecast(model(), x, "h200", loss_fn=loss, parallel="ddp=2", nodes=3)
