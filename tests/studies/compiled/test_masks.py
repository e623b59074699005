"""What masks add to attention, fitted to some recorded compiled steps, against others."""

from __future__ import annotations

from functools import cache

import pytest

from flopcast.roofline.gpu.laws.attention_mask import seconds
from flopcast.roofline.gpu.library.attention_mask import fitted
from flopcast.roofline.gpu.library.generated import rates_of_profile
from flopcast.roofline.gpu.library.profiles import find_profile
from studies.compiled import masks
from studies.compiled.record import CASES
from studies.compiled.recorded import FOLDER

PROFILE = find_profile(masks.GPU)
RATES = rates_of_profile(PROFILE)


@cache
def rows(name: str) -> list[masks.Row]:
    return masks.rows_of(FOLDER, next(case for case in CASES if case.name == name), PROFILE)


@pytest.mark.parametrize(("name", "most"), [("llama-3.2-1b-l2", 0.02), ("qwen3-1.7b-l2", 0.10)])
def test_attention_of_steps_that_the_law_never_saw(name: str, most: float) -> None:
    for row in rows(name):
        assert row.shape.mask
        assert row.measured > 1.5 * row.plain
        assert seconds(row.shape, row.plain, RATES, fitted().law) == pytest.approx(row.measured, rel=most)


def test_what_ships_is_what_the_recorded_steps_give() -> None:
    chosen = [row for name in ("qwen3-0.6b-l2", "qwen3-0.6b-l2-4x256", "gpt2-l2") for row in rows(name)]
    found = masks.fitted_law(chosen, RATES)
    for row in chosen:
        of, shipped = (seconds(row.shape, row.plain, RATES, law) for law in (found, fitted().law))
        assert of == pytest.approx(shipped, rel=0.025)  # three of the five steps that it was fitted to
