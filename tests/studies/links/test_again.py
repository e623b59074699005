"""The shipped link holds for collectives that two other H200s ran on another day."""

from __future__ import annotations

from statistics import median

from studies.links.again import FILE, LARGE, judged, page


def test_the_link_is_that_of_another_day() -> None:
    found = judged()
    large = [abs(one.error) for one in found if one.bytes >= LARGE]
    assert len(large) == 132
    assert median(large) < 0.01
    assert max(large) < 0.07
    assert median(abs(one.error) for one in found if one.bytes < LARGE) < 0.02


def test_the_page_is_of_these_rows() -> None:
    assert FILE.parents[1].joinpath("again.md").read_text(encoding="utf-8") == page(judged())
