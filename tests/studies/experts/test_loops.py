"""What torch calls within a grouped product that it runs group by group, as an H200's step recorded it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flopcast.roofline.stream.model.models import load_config
from studies.experts.loops import DEPTH, FILE, STEPS, loops

VIEWS = 4  # of a group's rows, weights and result, which the forecast does not count (docs/experts.md)
RECORDED: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())


@pytest.mark.parametrize("precision", [precision for precision, _ in STEPS])
def test_each_group_is_a_product_and_its_views(precision: str) -> None:
    groups = load_config("qwen3-moe")["num_experts"]
    found = RECORDED[precision]
    assert [one["thread"] for one in found] == [0] * 2 * DEPTH + [1] * 4 * DEPTH  # a gradient of each operand
    for one in found:
        calls = one["calls"]
        assert calls["aten::mm"] == groups
        assert calls["aten::select"] + calls["aten::slice"] == VIEWS * groups
        assert one["launches"] >= groups


def test_what_lies_beside_a_product_is_not_within_it() -> None:
    def event(name: str, start: float, seconds: float, thread: int = 7) -> dict[str, Any]:
        return {"name": name, "cat": "cpu_op", "ph": "X", "ts": start, "dur": seconds, "tid": thread}

    events = [
        event("aten::_grouped_mm", 10.0, 5.0), event("aten::mm", 11.0, 1.0), event("cudaLaunchKernel", 11.5, 0.1),
        event("aten::mm", 11.0, 1.0, thread=8), event("aten::mul", 16.0, 1.0),
    ]  # fmt: skip
    (one,) = loops(events)
    assert one["calls"]["aten::mm"] == 1
    assert "aten::mul" not in one["calls"]
    assert one["launches"] == 1
