"""Steps that a seed draws: the same anywhere, of sizes that a GPU holds, and none that flopcast would refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.stream.model.models import check_config, n_params
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.validation.compare_steps import stream_of
from flopcast.roofline.validation.random_steps import random_steps
from flopcast.roofline.validation.step_plans import validation_plans


def test_a_seed_draws_the_same_steps_and_another_one_others() -> None:
    first, again, other = (random_steps(seed) for seed in (5, 5, 6))
    assert first == again
    assert not {plan.key for plan in first} & {plan.key for plan in other}
    assert len({plan.key for plan in first}) == len(first) == 24


def test_what_is_drawn_is_broad() -> None:
    drawn = [plan for seed in range(20) for plan in random_steps(seed)]
    for setting in ("precision", "optimizer", "checkpoint", "clip", "accumulate", "phase", "finetune"):
        assert len({getattr(plan, setting) for plan in drawn}) >= 2, setting
    assert any(plan.module for plan in drawn)
    widths = {plan.config.get("hidden_size", 0) for plan in drawn}
    assert any(width % 64 for width in widths)
    assert max(widths) > 8 * min(widths - {0})


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_valid_and_fits(seed: int) -> None:
    for plan in random_steps(seed):
        Run(**plan.settings)  # raises for settings that do not go together
        if plan.module:
            continue
        check_config(plan.config)
        parameters, tokens = n_params(plan.config), plan.batch * max(plan.seq, plan.context) * plan.accumulate
        if plan.phase != "train":
            continue
        assert parameters <= 2e9
        assert 6 * parameters * tokens < 6e14  # one layer of the widest may be more than is asked for


def test_compiled_ones_are_the_same_steps() -> None:
    eager, compiled = (validation_plans("cuda", "random", mode, seed=4) for mode in ("eager", "compile"))
    assert [_without_mode(plan) for plan in eager] == [_without_mode(plan) for plan in compiled]
    assert {plan.mode for plan in compiled} == {"compile"}


def test_the_smallest_drawn_one_is_forecast(h200: Any) -> None:
    plan = min(
        (plan for plan in random_steps(1) if plan.config and plan.phase == "train"), key=lambda p: n_params(p.config)
    )
    assert len(stream_of(plan, Run(**plan.settings), h200).ops) > 100


def test_the_command_takes_a_seed_for_drawn_steps_alone(flopcast: Any, tmp_path: Path) -> None:
    refused = flopcast("validate", "--suite", "quick", "--seed", 3, "--out", tmp_path)
    assert refused.code == 2
    assert "--seed" in refused.err
    assert "listed, not drawn" in refused.err


def _without_mode(plan: StepPlan) -> dict[str, Any]:
    return {**plan.settings, "mode": "", "name": plan.name, "config": plan.config}
