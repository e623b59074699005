"""Compiled steps measured a second time, on other cards."""

from __future__ import annotations

from statistics import median

import pytest

from flopcast.roofline.validation.step_comparison import StepComparison
from studies.power.again import FOLDER, compared, page, twice

# Inductor padded products of 1,023 columns the first time and, in these runs, did not; the kernels of the ViT's profile
# take longer than its steps, as if others' had run beside them.
OTHERWISE = ("w1023-d4", "vit_b16")


@pytest.fixture(scope="module")
def rows() -> list[StepComparison]:
    return compared()


def test_another_card_takes_as_long_for_steps_that_the_device_bounds() -> None:
    """The page says so, and that their kernels are quicker after a rest."""
    rows = twice()
    assert len(rows) == 48
    long = [row for row in rows if row.is_long]
    assert len(long) == 24
    assert all(abs(row.steps[1] / row.steps[0] - 1.0) < 0.028 for row in long)
    kernels = [second / first - 1.0 for first, second in (row.kernels for row in long if row.kernels is not None)]
    assert median(kernels) < -0.01
    assert sorted(kernels)[-2] < 0.019
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == page(rows)


def test_kernels_after_a_rest_take_what_is_forecast(rows: list[StepComparison]) -> None:
    """A worse law of the fall of the clock, or of products, fails here: those of w1024-d5, of 16,384 tokens, are 5%
    quicker in steps than by themselves."""
    found = [row.device for row in rows if row.plan.name not in OTHERWISE and row.device.error is not None]
    assert len(found) == 46
    assert median(abs(part.error or 0.0) for part in found) < 0.009
    assert max(abs(part.error or 0.0) for part in found) < 0.058
    assert 0.85 * len(found) <= sum(bool(part.is_within) for part in found) <= 0.97 * len(found)


def test_steps_on_other_cards_take_what_is_forecast(rows: list[StepComparison]) -> None:
    found = [row.step for row in rows if not row.is_host_bound and row.plan.name not in OTHERWISE]
    assert len(found) == 34
    assert median(abs(part.error or 0.0) for part in found) < 0.016
    assert max(abs(part.error or 0.0) for part in found) < 0.048
    assert sum(bool(part.is_within) for part in found) >= 33
