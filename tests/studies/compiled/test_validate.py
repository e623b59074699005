"""The measurements that compiled forecasts are judged by: which steps, by which commands, within which time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.validation.step_plans import COMPILED, INTERVALS
from studies.compiled.record import CASES
from studies.compiled.validate import MODES, plans_of


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_of_many_models_sizes_and_of_no_recorded_case(mode: str) -> None:
    every = plans_of(mode)
    assert len({plan.key for plan in every}) == len(every)
    assert {plan.mode for plan in every} == {mode}
    assert {plan.group for plan in every} == {COMPILED, INTERVALS}
    plans = [plan for plan in every if plan.group == COMPILED]
    setting = [plan for plan in every if plan.group == INTERVALS]
    assert len(setting) >= 8
    assert not {(plan.name, plan.batch) for plan in setting} & {(plan.name, plan.batch) for plan in plans}
    assert len(plans) >= 30
    assert len({plan.name for plan in plans}) >= 8
    tokens = [(plan.batch, plan.seq) for plan in plans]
    assert (4, 128) in tokens
    assert (8, 2048) in tokens
    assert {plan.config.get("head_dim") for plan in plans} >= {64, 128}
    assert {plan.config.get("vocab_size") for plan in plans} >= {32_000, 151_936}
    recorded = {(case.config, case.batch, case.seq) for case in CASES if case.config and case.layers is None}
    own = {(plan.name, plan.batch, plan.seq) for plan in plans}
    assert recorded <= own  # which stand beside earlier records of other machines
    assert len(own - recorded) >= 24


def test_steps_are_named_with_or_without_their_batch() -> None:
    assert [(plan.name, plan.batch) for plan in plans_of("compile", "mlp:1024x1,gpt2")] == [
        ("mlp", 1024), ("gpt2", 4), ("gpt2", 8),
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"no step is named 'gpt3'.*gpt2"):
        plans_of("compile", "gpt3")


def test_no_time_begins_no_stage(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "studies.compiled.validate", str(tmp_path / "out"), "--seconds", "5"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["host", "steps"]
    assert "not begun" in done.stdout
