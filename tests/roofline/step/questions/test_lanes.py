"""What one GPU of several does when, and how a page shows it."""

from __future__ import annotations

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.step.questions.lanes import EXPOSED, HIDDEN, Busy, _told_apart, lanes_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.figures.several_gpus import lanes_figure
from flopcast.roofline.views.page.several_gpus import several_section

pytestmark = pytest.mark.usefixtures("cache_of_the_module")


def test_what_is_sent_is_told_apart_by_the_kernels_beside_it() -> None:
    kernels = [Busy(0.0, 2.0, "forward", 2.0), Busy(3.0, 4.0, "backward", 1.0)]
    (early,) = _told_apart([Busy(0.5, 1.5, "", 1.0)], kernels)
    assert (early.what, early.seconds) == (HIDDEN, 1.0)
    parts = _told_apart([Busy(1.0, 5.0, "", 4.0)], kernels)
    assert [(one.start, one.end, one.what) for one in parts] == [
        (1.0, 2.0, HIDDEN), (2.0, 3.0, EXPOSED), (3.0, 4.0, HIDDEN), (4.0, 5.0, EXPOSED),
    ]  # fmt: skip


def test_the_lanes_of_a_step_hold_its_kernels_and_its_exposed_communication() -> None:
    profile = find_profile("nvidia-h200")
    run = Run(batch=2, seq=64, optimizer="adamw-fused", parallel="fsdp=2")
    step = PricedStep(get_stream(make_config(width=256, depth=3, vocab=1024), traced_of(run, profile)), run, profile)
    found = lanes_of(step)
    assert {one.what for one in found.kernels} == {"forward", "backward", "optimizer"}
    exposed = sum(one.seconds for one in found.sent if one.what == EXPOSED)
    assert exposed == pytest.approx(found.shares.exposed, rel=0.02)
    assert sum(one.seconds for one in found.sent) == pytest.approx(found.shares.communication, rel=0.02)
    assert 0 <= found.idle_seconds < found.step_seconds
    figure = lanes_figure([found], "nvidia-h200", "measured", "a step")
    assert figure is not None
    assert "fsdp=2: kernels" in figure.svg
    assert lanes_figure([], "nvidia-h200", "measured", "a step") is None


def test_a_page_without_a_measured_link_has_no_such_section() -> None:
    assert several_section(find_profile("nvidia-l4"), may_trace=True) is None
    assert several_section(find_profile("nvidia-h200"), may_trace=False) is None
