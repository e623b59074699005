"""What a step of AdamW costs the host, by parameters: lines through the tiny models of two depths."""

from __future__ import annotations

from typing import cast

import pytest

from flopcast.microbench.records import records
from flopcast.roofline.gpu.fit.host import warm_value
from flopcast.roofline.gpu.fit.host_calibration import adamw_host_plans, host_plan, plan_streams
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.profile.host import LIST_TENSOR_WEIGHT, listed_tensors
from flopcast.roofline.stream.ops.op_stream import Op
from studies.calls.optimizers import forecast_of, line, of_adamw
from studies.imports import ROOT


def test_a_host_that_is_as_forecast_has_the_forecasts_line() -> None:
    plans = (host_plan("cuda"), *adamw_host_plans())
    seconds = {
        plan.row_key(depth, "optimizer"): forecast_of(stream)
        for plan in plans
        for depth, stream in plan_streams(plan, "cuda").items()
    }
    _, _, *rows = of_adamw(seconds).splitlines()
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    assert [row[0] for row in cells] == [plan.model for plan in plans]
    assert all(row[1:3] == row[3:5] for row in cells)
    each = {row[0]: float(row[1]) for row in cells}
    assert each["qwen3-adamw-fused"] < each["qwen3-adamw-fused-clip"]
    assert each["qwen3-adamw-triton"] < each["qwen3-adamw-triton-clip"] < each["qwen3-adamw-fused-clip"]


def test_a_line_through_two_points() -> None:
    assert line((10, 30), (5e-4, 7e-4)) == pytest.approx((1e-5, 4e-4))


def test_a_parameter_of_ours_costs_the_host_what_one_of_torchs_does() -> None:
    """As measured, and as forecast beside it: with clipping less, since nothing is made for each norm."""
    rows = records.read(ROOT / "reports" / "nvidia-h200" / "optimizers" / "hosts-2").rows
    lines = of_adamw({row["key"]: warm_value(cast(FitRow, row)) for row in rows}).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    measured, forecast = ({row[0]: float(row[place]) for row in cells} for place in (1, 3))
    for ours, torchs, most in (("triton", "fused", 1.05), ("triton-clip", "fused-clip", 0.6)):
        found, told = (own[f"qwen3-adamw-{ours}"] / own[f"qwen3-adamw-{torchs}"] for own in (measured, forecast))
        assert found < most
        assert told == pytest.approx(found, rel=0.15)


def test_tensors_count_by_what_each_costs_the_host() -> None:
    def counted(name: str, args: str) -> float:
        return listed_tensors(Op(name, "optimizer", (0, 1, 2), (), (), args))

    assert counted("aten._foreach_mul_.Tensor", '[{"ts":[0,3]}]') == 3
    assert counted("aten.stack.default", '[{"ts":[0,3]}]') == 3 * LIST_TENSOR_WEIGHT["aten.stack"]
    assert counted("aten.add_.Tensor", '[{"t":0}]') == 0
