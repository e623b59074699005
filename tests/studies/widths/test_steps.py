"""`studies/widths/steps.py` on several GPUs: whole neighbourhoods, each once."""

from __future__ import annotations

import pytest

from studies.widths import steps


def test_parts_hold_whole_neighbourhoods_and_together_all() -> None:
    rows = [{"neighbourhood": name, "value": str(value)} for name in "abcde" for value in range(3)]
    parts = [steps.rows_of_part(rows, i, 2) for i in (1, 2)]
    assert [{row["neighbourhood"] for row in part} for part in parts] == [{*"ace"}, {*"bd"}]
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, rows))
    assert steps.rows_of_part(rows, 1, 1) == rows


@pytest.mark.parametrize("text", ["3/2", "0/2", "half"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"3/2|0/2|invalid literal"):
        steps.part(text)
