"""What a step of AdamW costs the host, by parameters: lines through the tiny models of two depths."""

from __future__ import annotations

import pytest

from flopcast.roofline.gpu.fit.host_calibration import adamw_host_plans, host_plan, plan_streams
from studies.calls.optimizers import forecast_of, line, of_adamw


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
