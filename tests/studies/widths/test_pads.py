"""Which products of a model 1,023 wide inductor padded on H100s and an H200, and what its kernels then took."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.unsure_pads import SHARE_LEFT
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.tracer.compiler.asked import PADDED_BY_ANY_HOST_SECONDS
from studies.compiled.validate import plans_of
from studies.compiled.validation import kept_stream
from studies.imports import ROOT
from studies.widths.pads import CASE, choice_of

PROCESSES = {
    gpu: json.loads((ROOT / "reports" / gpu / "pads.json").read_text()) for gpu in ("nvidia-h100-sxm", "nvidia-h200")
}
H100S = PROCESSES["nvidia-h100-sxm"]


def device_errors(gpu: str, process: dict[str, Any]) -> tuple[float, float, float]:
    """Of the kernels' time, with all of the products padded that the code pads, as forecast, and with those left that
    the host may leave."""
    (plan,) = plans_of(process["mode"], CASE)
    profile, run = find_profile(gpu), Run(**plan.settings)
    priced = PricedStep(kept_stream(plan, run, profile), run, profile, None)
    mean = priced.timeline.device_seconds
    left = [pad.more_seconds for pad in priced.unsure_pads.values() if pad.chance_left]
    padded = mean - SHARE_LEFT * sum(left)
    took = process["device_seconds"]
    return padded / took - 1, mean / took - 1, (padded + sum(left)) / took - 1


@pytest.mark.parametrize("process", H100S, ids=lambda process: process["name"])
def test_kernels_are_as_forecast_by_what_the_host_padded(process: dict[str, Any]) -> None:
    padded = sum(one["padded"] for one in process["choices"])
    assert len(process["choices"]) == 18
    if_padded, forecast, if_left = device_errors("nvidia-h100-sxm", process)
    if process["name"] == "slow host":
        assert padded == 4
        assert abs(if_left) <= 0.055
        assert -0.25 < forecast < -0.1
    else:
        assert padded >= 15
        assert abs(if_padded) <= 0.055
        assert 0 < forecast < 0.15


def test_a_host_that_leaves_half_takes_what_is_forecast() -> None:
    (process,) = PROCESSES["nvidia-h200"]
    assert sum(one["padded"] for one in process["choices"]) == 11
    assert abs(device_errors("nvidia-h200", process)[1]) <= 0.05


def test_the_forecast_has_the_share_that_hosts_left() -> None:
    small = [
        one["padded"] for own in PROCESSES.values() for process in own for one in process["choices"]
        if one["as_it_is_us"] < PADDED_BY_ANY_HOST_SECONDS * 1e6
    ]  # fmt: skip
    assert small.count(False) / len(small) == SHARE_LEFT


def test_what_pays_by_far_is_padded_whatever_the_host() -> None:
    processes = [process for own in PROCESSES.values() for process in own]
    large = [one for process in processes for one in process["choices"] if one["as_it_is_us"] > 1000]
    assert len(large) == 3 * len(processes)
    assert all(one["padded"] for one in large)


def test_the_gradient_of_gpt2s_tokens_is_a_close_call_at_most_sizes() -> None:
    """Inductor pads what it finds 1.1 times as quick padded."""
    rows = json.loads((ROOT / "reports" / "nvidia-h200" / "pads-gpt2.json").read_text())
    gains = {
        one["k"]: one["as_it_is_us"] / one["padded_us"] for one in rows if one["m"] == 50257 and one["n"] == 768
    }  # by tokens
    assert all(one["padded"] == (one["as_it_is_us"] / one["padded_us"] > 1.1) for one in rows)
    assert sorted(gains) == [1024, 2048, 2816, 4096, 8192, 9984, 16384]
    assert all(1.05 < gain < 1.15 for tokens, gain in gains.items() if tokens > 1024)


def test_a_choice_is_read_from_the_key_that_inductor_gives_it() -> None:
    key = (
        "((torch.Size([4096, 1024]), (1024, 1), torch.bfloat16), (torch.Size([1024, 1023]), (1023, 1), "
        "torch.bfloat16), 'exclude_pad:True', 'exclude_pad:True', <OpOverloadPacket(op='aten.mm')>, None, None)"
    )
    found = choice_of(key, 0.0813, 0.1381, False)
    assert found == {"m": 4096, "k": 1024, "n": 1023, "as_it_is_us": 81.3, "padded_us": 138.1, "padded": False}
