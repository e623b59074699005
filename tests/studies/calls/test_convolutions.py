"""What convolutions and batch norms cost the host is what stacks of them were measured to."""

from __future__ import annotations

from statistics import fmean

import pytest

from flopcast.roofline.step.device_work import HEAVIER
from studies.calls.convolutions import AGAIN, again, beyond, calls_of_layer, fitted, measured_calls

NAMES = {
    ("conv", "forward"): "aten.convolution", ("conv", "backward"): "aten.convolution_backward",
    ("norm", "forward"): "aten.native_batch_norm", ("norm", "backward"): "aten.native_batch_norm_backward",
}  # fmt: skip


def test_stacks_that_were_held_out_cost_what_their_parts_do() -> None:
    found = fitted()
    for (kind, layout, phase), calls in found.items():
        assert HEAVIER[NAMES[kind, phase]][int(layout == "nhwc")] == pytest.approx(calls, abs=0.06)
    for layout in ("nchw", "nhwc"):
        for phase in ("forward", "backward"):
            traced, more = beyond("conv-norm-relu", layout, phase)
            own = traced + found["conv", layout, phase] + found["norm", layout, phase]
            assert own == pytest.approx(traced + fmean(more), rel=0.14)
            assert own == pytest.approx(fmean(again(layout, phase)), rel=0.14)


@pytest.mark.parametrize(("model", "phase", "off"), [
    ("vit", "forward", 0.05), ("vit", "backward", 0.09), ("gpt2", "forward", 0.20), ("gpt2", "backward", 0.10),
])  # fmt: skip
def test_a_layer_of_another_transformer_costs_what_its_calls_would_in_qwen3(model: str, phase: str, off: float) -> None:
    assert calls_of_layer(model, phase) == pytest.approx(fmean(measured_calls(model, phase, AGAIN)), rel=off)
