"""What dropout adds to attention, fitted to a recorded compiled step."""

from __future__ import annotations

import pytest

from flopcast.roofline.gpu.laws.attention_dropout import dropout_seconds
from flopcast.roofline.gpu.library.attention_dropout import fitted
from flopcast.roofline.gpu.library.generated import rates_of_profile
from flopcast.roofline.gpu.library.profiles import find_profile
from studies.compiled import dropout
from studies.compiled.record import CASES
from studies.compiled.recorded import FOLDER

PROFILE = find_profile(dropout.GPU)
RATES = rates_of_profile(PROFILE)


def rows(name: str) -> list[dropout.Row]:
    return dropout.rows_of(FOLDER, next(case for case in CASES if case.name == name), PROFILE)


# Qwen3-1.7B's step runs at a lower clock.
@pytest.mark.parametrize(("name", "most"), [("qwen3-0.6b-8x1024", 0.02), ("qwen3-1.7b-l2", 0.10)])
def test_attention_with_masks_of_steps_that_no_kernel_was_measured_for(name: str, most: float) -> None:
    for row in rows(name):
        assert row.shape.mask
        assert not row.shape.dropout
        assert row.without == pytest.approx(row.measured, rel=most)


def test_what_ships_is_what_the_recorded_step_gives() -> None:
    of_gpt2 = rows(dropout.FIT)
    assert {row.shape.direction for row in of_gpt2} == {"fwd", "bwd"}
    assert all(row.shape.dropout for row in of_gpt2)
    found = dropout.fitted_law(of_gpt2, RATES)
    for row in of_gpt2:
        of, shipped = (row.without + dropout_seconds(row.shape, RATES, law) for law in (found, fitted().law))
        assert shipped == pytest.approx(of, rel=0.01)
        assert of == pytest.approx(row.measured)
