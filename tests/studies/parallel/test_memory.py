"""The memory of measured parallel steps: the forecast of each rank, on steps of every kind that are traced quickly."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from flopcast.microbench.recipe.layout import Layout
from flopcast.roofline.step.memory.needed import holds_first_buckets
from studies.parallel.measured import FILE, read, write
from studies.parallel.memory import MIB, Compared, compared
from studies.parallel.steps import ALL, STEPS, Step

MEASURED = read()
QUICK = [step for step in STEPS if step.model in ("w640-d6", "w2048-d3-v32000", "w3584-d2")]


def test_the_table_of_measured_steps_is_whole() -> None:
    assert list(MEASURED) == list(ALL)
    counts = {step: Layout.parse(step.layout.format(n=2)).world for step in ALL}
    assert all([rank.rank for rank in ranks] == [*range(counts[step])] for step, ranks in MEASURED.items())
    assert FILE.read_text().count("\n") == 1 + sum(counts.values())


def test_it_is_written_as_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    write([rank for ranks in MEASURED.values() for rank in ranks], path)
    assert path.read_bytes() == FILE.read_bytes()


@pytest.mark.parametrize(
    ("name", "is_held"),
    [
        ("gpt2-ddp-8x1024-adamw-fused", True),
        ("w3584-d2-ddp-4x512-adamw-fused", True),
        ("llama-3.2-1b-ddp-4x1024-adamw-fused-compile", False),
        ("qwen3-0.6b-ddp-4x256-adamw-fused-compile", False),
    ],
)
def test_quick_steps_hold_their_first_buckets(name: str, is_held: bool) -> None:
    """By their measured times: of two a rank held a copy more of the gradients, of the others none."""
    ranks = next(ranks for step, ranks in MEASURED.items() if step.name == name)
    assert holds_first_buckets(median(ranks[0].step_seconds)) is is_held


@pytest.mark.parametrize("step", [s for s in QUICK if s.batch != 8 or s.model != "w640-d6"], ids=lambda step: step.name)
def test_the_fullest_rank_is_foretold(step: Step) -> None:
    found: Compared = compared(step, MEASURED[step])
    assert found.error == pytest.approx(0.0, abs=0.0014)
    assert min(map(abs, found.steady_errors)) < 0.0014
    assert all(1600 * MIB <= outside <= 2000 * MIB for outside in found.outside)
    assert 0 <= found.outside_forecast / max(found.outside) - 1 + 0.2 < 0.25
    held = found.parts
    if "ddp" in step.layout:
        assert found.first_buckets == pytest.approx(held["gradients"], rel=0.01)  # but for what is left of blocks
        assert held["optimizer"] == pytest.approx(2 * held["weights"], rel=3e-3)  # likewise
    else:
        assert not found.first_buckets
    if "zero2" in step.layout:
        assert held["communication"] > held["weights"] / 2  # layers gathered in bf16: all of a shard of half in fp32
