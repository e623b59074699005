"""A step of many compiled graphs: a further one costs the host a part of the first; a warning says how sure it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host_graphs import MODES
from flopcast.roofline.step import priced_step
from flopcast.roofline.step.graph_launches import FURTHER_GRAPH, shares
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


@pytest.mark.parametrize("mode", MODES)
def test_graphs_that_recur_cost_the_host_a_part_of_a_phases_first(root: Path, mode: str) -> None:
    stream = op_stream.load(root / STREAMS / f"qwen3-moe-d4-4x128-{mode}.json.gz")
    calls = stream.meta["graphs"]
    phases = [stream.ops[first].phase for _, first, _ in calls]
    found = list(shares(stream))
    firsts = [phases.index("forward"), phases.index("backward")]
    for i, (phase, share) in enumerate(zip(phases, found, strict=True)):
        assert share == (1.0 if i in firsts else FURTHER_GRAPH[mode][phase == "backward"])


@pytest.mark.parametrize("mode", MODES)
def test_graphs_of_a_model_that_breaks_once_cost_as_much_each(root: Path, mode: str) -> None:
    """GPT-2's loss is a graph of its own, of which recorded steps do not say that it costs less."""
    stream = op_stream.load(root / STREAMS / f"gpt2-4x256-{mode}.json.gz")
    assert list(shares(stream)) == [1.0] * 4
