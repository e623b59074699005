"""The measurements that compiled forecasts are judged by: which steps, by which commands, within which time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flopcast.roofline.validation.step_plans import COMPILED
from studies.compiled.record import CASES
from studies.compiled.validate import MODES, STAGES, command_of, gigabytes_of, plans_of


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_of_many_models_sizes_and_of_no_recorded_case(mode: str) -> None:
    plans = plans_of(mode)
    assert len({plan.key for plan in plans}) == len(plans) >= 25
    assert len({plan.name for plan in plans}) >= 8
    assert {plan.mode for plan in plans} == {mode}
    assert {plan.group for plan in plans} == {COMPILED}
    tokens = [(plan.batch, plan.seq) for plan in plans]
    assert (4, 128) in tokens
    assert (8, 2048) in tokens
    assert {plan.config.get("head_dim") for plan in plans} >= {64, 128}
    assert {plan.config.get("vocab_size") for plan in plans} >= {32_000, 151_936}
    recorded = {(case.config, case.batch, case.seq) for case in CASES if case.config and case.layers is None}
    own = {(plan.name, plan.batch, plan.seq) for plan in plans}
    assert recorded <= own  # which stand beside earlier records of other machines
    assert len(own - recorded) >= 24
    assert all(3 <= gigabytes_of(plan) <= 120 for plan in plans)


def test_each_stage_is_a_command_that_keeps_what_it_has(tmp_path: Path) -> None:
    assert command_of("host", tmp_path, 100.0)[:3] == ["bench", "--suite", "host"]
    found = command_of("compile-graphs", tmp_path, 100.0)
    assert found[:3] == ["validate", "--mode", "compile-graphs"]
    assert found[-2:] == ["--budget", "80"]


def test_no_time_begins_no_stage(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "studies.compiled.validate", str(tmp_path / "out"), "--seconds", "5"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(STAGES)
    assert "not begun" in done.stdout
