"""Batches come to the GPU in several ways: each adds to a step what its copy, its waits and its loading take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.roofline.gpu.links.library import measured_copies
from flopcast.roofline.gpu.links.profile import copy_seconds
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.input_pipeline import HANDING, WAYS, Feeding, fed, feeding_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.run import Run


@pytest.fixture
def step(tiny: dict[str, Any], profile: Profile) -> PricedStep:
    run = Run(batch=4, seq=64)
    return PricedStep(get_stream(tiny, run.traced_on("cuda")), run, profile)


def test_copies_take_what_was_measured_and_what_lies_between() -> None:
    copies, source = measured_copies("nvidia-l4")
    assert source == "nvidia-h200"
    for copy in copies:
        found = copy_seconds(copies, copy.direction, copy.bytes, pinned=copy.pinned, gpus=copy.gpus)
        assert found == pytest.approx(copy.seconds)
    sizes = [1, 2**10, 2**20, 2**22, 2**26, 2**30]
    for pinned in (True, False):
        times = [copy_seconds(copies, "to_device", size, pinned=pinned) for size in sizes]
        assert times == sorted(times)
        assert times[0] > 0
    assert copy_seconds(copies, "to_device", 2**26, pinned=True) < copy_seconds(
        copies, "to_device", 2**26, pinned=False
    )


def test_a_batch_is_what_the_step_is_called_with(step: PricedStep) -> None:
    assert feeding_of("tokens", step).bytes == 4 * 64 * 8  # ids, which are the labels too
    assert feeding_of("602112", step, 0.01, 3) == Feeding(bytes=4 * 602112, load_seconds=0.04, workers=3)


def test_what_each_way_saves(step: PricedStep) -> None:
    """A copy as long as the step: waited for, it stands before it; ahead on its own stream it takes nothing from it."""
    alone = step.timeline.step_seconds()
    copies, _ = measured_copies("nvidia-h200")
    size = next(
        n for n in range(2**20, 2**30, 2**20) if copy_seconds(copies, "to_device", n, pinned=True) > 0.9 * alone
    )
    ways = {way.way: way for way in fed(step, Feeding(bytes=size)).ways}
    times = [ways[way].step_seconds for way in WAYS]
    assert times == sorted(times, reverse=True)
    pageable, pinned, unwaited, ahead = (ways[way] for way in WAYS)
    assert pageable.copy_seconds > pinned.copy_seconds == unwaited.copy_seconds == ahead.copy_seconds
    assert pinned.step_seconds > alone + 0.8 * pinned.copy_seconds
    assert ahead.step_seconds == pytest.approx(max(alone, ahead.copy_seconds))
    assert pinned.bound == "copy"


def test_loading_bounds_where_workers_are_too_few(step: PricedStep) -> None:
    alone = step.timeline.step_seconds()
    few, many, none = (
        fed(step, Feeding(bytes=2048, load_seconds=10 * alone, workers=workers)).ways[-1] for workers in (2, 40, 0)
    )
    assert (few.step_seconds, few.bound) == (pytest.approx(5 * alone + HANDING.shared.seconds(2048) / 2), "loading")
    assert (many.step_seconds, many.bound) == (pytest.approx(alone), "step")
    assert none.step_seconds > 10 * alone
    assert none.bound == "loading"


@given(st.floats(1, 2**30), st.floats(1, 2**30))
def test_handing_a_larger_batch_over_takes_longer(one: float, other: float) -> None:
    small, large = sorted((one, other))
    for line in (HANDING.shared, HANDING.pinned_from_workers, HANDING.pinned, HANDING.copied_from_workers):
        assert 0 < line.seconds(small) <= line.seconds(large)


def test_large_batches_of_many_workers_wait_for_the_thread_that_pins(step: PricedStep) -> None:
    """It copies each batch, beside the step; without pinned memory the copy to the GPU reads untouched pages."""
    loaded = fed(step, Feeding(bytes=2**28, load_seconds=0.1, workers=64)).ways
    ready = fed(step, Feeding(bytes=2**28)).ways
    assert [way.bound for way in loaded] == ["copy", "pinning", "pinning", "pinning"]
    assert loaded[0].copy_seconds > ready[0].copy_seconds
    assert loaded[1].copy_seconds == ready[1].copy_seconds
    assert loaded[3].step_seconds == pytest.approx(HANDING.pinned_from_workers.seconds(2**28))


@pytest.mark.parametrize("asked", ["0", "-3", "pictures", "1.5"])
def test_other_inputs_are_refused(step: PricedStep, asked: str) -> None:
    with pytest.raises(UsageError, match="valid are tokens, images, or the bytes of a sample"):
        feeding_of(asked, step)
