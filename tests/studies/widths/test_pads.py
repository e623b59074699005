"""Which products of a model 1,023 wide inductor padded on H100s, and what its kernels then took."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.model.run import Run
from studies.compiled.validate import plans_of
from studies.compiled.validation import kept_stream
from studies.imports import ROOT
from studies.widths.pads import CASE, choice_of

GPU = "nvidia-h100-sxm"
PROCESSES = json.loads((ROOT / "reports" / GPU / "pads.json").read_text())


def device_error(process: dict[str, Any]) -> float:
    (plan,) = plans_of(process["mode"], CASE)
    profile, run = find_profile(GPU), Run(**plan.settings)
    priced = PricedStep(kept_stream(plan, run, profile), run, profile, None)
    return priced.timeline.device_seconds / process["device_seconds"] - 1


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process["name"])
def test_where_the_host_is_quick_nearly_all_are_padded_and_kernels_are_as_forecast(process: dict[str, Any]) -> None:
    padded = sum(one["padded"] for one in process["choices"])
    assert len(process["choices"]) == 18
    if process["name"] == "slow host":
        assert padded == 4
        assert device_error(process) < -0.25
    else:
        assert padded >= 15
        assert abs(device_error(process)) <= 0.055


def test_what_pays_by_far_is_padded_whatever_the_host() -> None:
    large = [one for process in PROCESSES for one in process["choices"] if one["as_it_is_us"] > 1000]
    assert len(large) == 3 * len(PROCESSES)
    assert all(one["padded"] for one in large)


def test_a_choice_is_read_from_the_key_that_inductor_gives_it() -> None:
    key = (
        "((torch.Size([4096, 1024]), (1024, 1), torch.bfloat16), (torch.Size([1024, 1023]), (1023, 1), "
        "torch.bfloat16), 'exclude_pad:True', 'exclude_pad:True', <OpOverloadPacket(op='aten.mm')>, None, None)"
    )
    found = choice_of(key, 0.0813, 0.1381, False)
    assert found == {"m": 4096, "k": 1024, "n": 1023, "as_it_is_us": 81.3, "padded_us": 138.1, "padded": False}
