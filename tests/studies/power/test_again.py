"""Compiled steps measured a second time, on other cards."""

from __future__ import annotations

from studies.power.again import FOLDER, LONG_SECONDS, page, twice


def test_another_card_takes_as_long_for_steps_that_the_device_bounds() -> None:
    """The page says so, and that their kernels are quicker after a rest."""
    rows = twice()
    assert len(rows) == 29
    long = [(row.steps, row.kernels) for row in rows if row.kernels is not None and row.kernels[1] > LONG_SECONDS]
    assert len(long) == 13
    assert all(abs(second / first - 1.0) < 0.02 for (first, second), _ in long)
    assert all(0.94 < second / first < 1.0 for _, (first, second) in long)
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == page(rows)
