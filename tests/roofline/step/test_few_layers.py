"""Models of fewer layers than their compiled streams were made of."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.model.run import Run


@pytest.mark.parametrize("mode", ["compile", "compile-graphs"])
def test_two_compiled_layers_have_no_layer_between(mode: str) -> None:
    run = Run(mode=mode)  # whose streams ship
    found = [
        forecast(with_depth(load_config("qwen3-4b"), depth), run, find_profile("nvidia-h200")) for depth in (2, 3, 4)
    ]
    for name in ("device_seconds", "host_seconds", "kernels", "flops_counted", "n_params"):
        two, three, four = (getattr(one, name) for one in found)
        assert 0 < two < three < four, name
        assert three - two == pytest.approx(four - three, rel=0.15), name
    first, second = (deeper.peak_bytes - one.peak_bytes for one, deeper in pairwise(found))
    assert 0.5 * second < first <= second  # two layers hold the parameters of a third: 3.5% too much
    assert all(less.step_seconds < more.step_seconds for less, more in pairwise(found))
