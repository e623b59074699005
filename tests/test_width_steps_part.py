"""`benchmarks/width_steps.py` on several GPUs: whole neighbourhoods, each once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "width_steps.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("width_steps", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_hold_whole_neighbourhoods_and_together_all() -> None:
    rows = [{"neighbourhood": name, "value": str(value)} for name in "abcde" for value in range(3)]
    parts = [script().rows_of_part(rows, i, 2) for i in (1, 2)]
    assert [{row["neighbourhood"] for row in part} for part in parts] == [{*"ace"}, {*"bd"}]
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, rows))
    assert script().rows_of_part(rows, 1, 1) == rows


@pytest.mark.parametrize("text", ["3/2", "0/2", "half"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"3/2|0/2|invalid literal"):
        script().part(text)
