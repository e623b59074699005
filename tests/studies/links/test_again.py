"""The shipped link holds for collectives that other H200s ran, and what two say of four is as wrong as told."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from flopcast.roofline.gpu.links.contention_fit import foretold
from flopcast.roofline.gpu.links.fit import fit_links
from flopcast.roofline.gpu.links.library import SHIPPED
from flopcast.roofline.gpu.links.profile import LinkProfile
from studies.links.again import FILE, LARGE, OF_FOUR, OF_H100, judged, judged_by_two, page
from studies.links.shipped import FOUR, shipped


@pytest.mark.parametrize(("file", "worst"), [(FILE, 0.07), (OF_FOUR, 0.04)])
def test_the_link_is_that_of_other_days_and_hosts(file: Path, worst: float) -> None:
    found = judged(file)
    large = [abs(one.error) for one in found if one.bytes >= LARGE]
    assert len(large) == 132
    assert median(large) < 0.01
    assert max(large) < worst
    assert median(abs(one.error) for one in found if one.bytes < LARGE) < 0.02


def test_what_two_say_of_four_is_within_a_tenth_at_the_median() -> None:
    found = [one for one in judged_by_two() if one.bytes >= LARGE]
    assert len(found) == 132
    assert median(abs(one.error) for one in found) < 0.08
    assert max(abs(one.error) for one in found) < 0.55
    assert sum(one.is_within for one in found) >= 112


def test_the_page_is_of_these_rows() -> None:
    assert FILE.parents[1].joinpath("again.md").read_text(encoding="utf-8") == page()


def test_the_shipped_links_are_made_of_their_hosts(tmp_path: Path) -> None:
    for name, made in shipped().items():
        assert made.measured_gpus() == [2, 4]
        made.save(tmp_path / name)
        assert to_twelve_digits(tmp_path / name) == to_twelve_digits(SHIPPED / name)


def to_twelve_digits(path: Path) -> Any:
    """What a file of JSON says: sums that another processor makes differ in the sixteenth."""
    return json.loads(path.read_text(encoding="utf-8"), parse_float=lambda text: f"{float(text):.12g}")


@pytest.mark.parametrize("gpus", [2, 4])
def test_what_h200s_say_of_h100s_is_within_a_tenth(gpus: int) -> None:
    large = [abs(one.error) for one in judged(OF_H100, gpus) if one.bytes >= LARGE]
    assert len(large) == 132
    assert median(large) < 0.02
    assert max(large) < 0.1


def test_what_two_lost_to_collectives_tells_what_four_lose() -> None:
    known, rows = LinkProfile.load(SHIPPED / "nvidia-h200.json").contention, fit_links(FOUR).beside
    assert known is not None
    assert len(rows) == 24
    kernels = [abs(foretold(known, row)[0] / row.beside_seconds - 1) for row in rows]
    assert median(kernels) < 0.03
    assert max(kernels) < 0.12
    sent = [abs(foretold(known, row)[1] / row.collective_beside_seconds - 1) for row in rows]
    assert median(sent) < 0.05
    assert max(sent) < 0.25
