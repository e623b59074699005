"""What the power limit does to kernels and steps in a row, as it was measured."""

from __future__ import annotations

from statistics import median

import pytest

from studies.power.steps import PLANS
from studies.power.table import FITTED, FOLDER, Step, eager_kernels, kernels, longer, page, steps

IN_TURN = "in_turn_kernels"


@pytest.fixture(scope="module")
def measured() -> list[Step]:
    return steps()


def test_kernels_run_at_clocks_of_their_own_and_products_lowest() -> None:
    """After a rest; the order that the page tells."""
    mhz = {row["name"]: row["rested"]["mhz"] for row in kernels()}
    assert mhz["product 8192x4096x4096"] < mhz["attention, heads of 128"] < mhz["attention backward, heads of 128"]
    assert all(1_950 < mhz[name] < 1_981 for name in ("loss", "SwiGLU", "GELU", "RMSNorm", "fused AdamW"))


def test_in_turn_with_products_all_run_at_one_clock_and_only_those_that_go_by_it_take_longer() -> None:
    rows = {row["name"]: row for row in kernels()}
    assert all(row["in_turn"]["mhz"] < 1_600 for row in rows.values() if "in_turn" in row)

    assert longer(rows["sum of two, 400 MB"], IN_TURN) < 1.01
    assert longer(rows["fused AdamW"], IN_TURN) < 1.02
    assert min(longer(row, IN_TURN) for name, row in rows.items() if name.startswith("attention")) > 1.08


def test_the_law_is_as_far_off_as_the_page_says(measured: list[Step]) -> None:
    """Four steps chose its constants; the others ran afterwards, on two cards."""
    assert [step.name for step in measured] == [*PLANS]
    assert max(abs(step.error) for step in measured if step.name in FITTED) < 0.017
    others = [step for step in measured if step.name not in FITTED]
    errors = sorted(abs(step.error) for step in others)
    assert median(errors) < 0.015
    assert errors[-2] < 0.0311  # in the last the card, at 600 W, has waited
    again = sorted(abs(step.error_again) for step in others if step.error_again is not None)
    assert len(again) == len(others) == 11
    assert median(again) < 0.021
    assert again[-1] < 0.072
    assert all(step.free < 0.99 * step.seconds for step in measured), "the limit lengthens each"


def test_eager_steps_keep_their_clock_under_the_profiler() -> None:
    """And so are forecast at full clock, hot or rested (`compare_steps`)."""
    again = [second / first - 1.0 for first, second in eager_kernels().values()]
    assert len(again) == 10
    assert abs(median(again)) < 0.002
    assert max(map(abs, again)) < 0.039


def test_the_committed_page_is_of_these_rows(measured: list[Step]) -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == page(kernels(), measured)
