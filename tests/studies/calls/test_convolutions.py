"""What convolutions and batch norms cost the host is what stacks of them were measured to."""

from __future__ import annotations

import pytest

from flopcast.roofline.step.device_work import HEAVIER
from studies.calls.convolutions import beyond, fitted

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
            assert own == pytest.approx(traced + sum(more) / len(more), rel=0.14)
