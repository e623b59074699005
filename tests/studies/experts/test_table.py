"""Products of experts in real steps, by the loads that the experts had."""

from __future__ import annotations

from statistics import median

import pytest

from studies.experts.measure import CASES, FOLDER, load
from studies.experts.table import Compared, compared, page

BALANCED, BY_IMBALANCE, BY_LOADS = range(3)


@pytest.fixture(scope="module")
def steps() -> list[Compared]:
    """Of each case; `compared` raises where a step's products are not those of its loads."""
    return compared(load())


def test_every_case_has_a_row(steps: list[Compared]) -> None:
    assert [one.case for one in steps] == list(CASES)


def test_products_are_within_three_percent_by_the_loads_that_they_had(steps: list[Compared]) -> None:
    errors = [abs(one.error(BY_LOADS)) for one in steps]
    kernels = [abs(one.kernels_error(BY_LOADS)) for one in steps]
    assert median(errors) < 0.016
    assert max(errors) < 0.031
    assert median(kernels) < 0.03
    assert max(kernels) < 0.07
    unseen = [abs(one.error(BY_LOADS)) for one in steps if not one.case.seen]
    assert median(unseen) < 0.0105
    assert max(unseen) < 0.0185


def test_the_imbalance_tells_more_than_balanced_loads_of_steps_that_chose_nothing(steps: list[Compared]) -> None:
    unseen = [one for one in steps if not one.case.seen]
    by_imbalance, balanced = ([abs(one.error(way)) for one in unseen] for way in (BY_IMBALANCE, BALANCED))
    assert median(by_imbalance) < 0.027 < median(balanced)
    assert max(by_imbalance) < 0.07 < max(balanced)


def test_the_committed_page_is_of_these_rows(steps: list[Compared]) -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == page(steps, load()[0].gpu)
