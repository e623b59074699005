"""A step of many compiled graphs says how far such forecasts were off, where the host decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step import priced_step
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops import op_stream

STREAMS = Path("reports/nvidia-h200/compiled-validation/streams")


@pytest.mark.parametrize(("name", "batch", "seq", "is_told"), [
    ("w1024-d5-4x128", 4, 128, True),  # its host bounds it
    ("w1024-d5-8x2048", 8, 2048, False),
])  # fmt: skip
def test_many_graphs_of_a_step_that_its_host_bounds_are_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, batch: int, seq: int, is_told: bool
) -> None:
    stream = op_stream.load(root / STREAMS / f"{name}-compile.json.gz")
    graphs = len(stream.meta["graphs"])
    run = Run(batch=batch, seq=seq, optimizer="adamw-fused", mode="compile")
    step = PricedStep(stream, run, find_profile("nvidia-h200"))
    told = f"the step enters {graphs} compiled graphs"
    assert not any(told in warning for warning in step.warnings)  # a whole model's two are no small ones
    monkeypatch.setattr(priced_step, "MANY_GRAPHS", graphs)
    again = PricedStep(stream, run, find_profile("nvidia-h200"))
    assert any(told in warning for warning in again.warnings) == is_told
