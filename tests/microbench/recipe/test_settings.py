"""A setting that is declared once walks through: these declare one more and look where it comes out."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.microbench.recipe.plans import HostPlan, StepPlan
from flopcast.microbench.recipe.settings import Recipe, setting, settings_of
from flopcast.roofline.cli.shared.groups import expanded
from flopcast.roofline.step.questions.sweep import RUN_COLUMNS
from flopcast.roofline.stream.library.stored import stream_key
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.tracer.compiler.asked import Asked
from flopcast.roofline.validation.step_comparison import COLUMNS, StepComparison
from flopcast.roofline.views.terminal.forecast import run_words

TINY = make_config(width=64, depth=2)
SPEED: Any = setting("How fast: {}.", {"slow": "", "fast": "with wind"})


@dataclass(frozen=True, kw_only=True)
class Windy(StepPlan):
    speed: str = field(default="slow", metadata=SPEED)


@dataclass(frozen=True, kw_only=True)
class WindyRun(Run):
    speed: str = field(default="slow", metadata=SPEED)


@pytest.mark.parametrize("kind", [Run, Traced, StepPlan, HostPlan, Asked])
def test_what_is_run_traced_and_measured_has_every_setting(kind: type[Recipe]) -> None:
    assert set(asdict(Recipe())) == set(settings_of(Recipe)) <= set(settings_of(kind))


def test_defaults_are_valid() -> None:
    Recipe().check_each()
    Run().check()
    assert not Run().unusual


def test_one_recipe_is_made_of_another() -> None:
    plan = StepPlan(name="one", config={}, batch=2, clip=1.0)
    assert Run(**plan.settings) == Run(batch=2, clip=1.0)
    assert Run(**plan.settings).unusual == plan.unusual == {"batch": 2, "clip": 1.0}


def test_a_setting_is_an_option_and_is_checked() -> None:
    def command(run: WindyRun) -> None: ...

    option = inspect.signature(expanded(command), eval_str=False).parameters["speed"]
    assert option.default == "slow"
    assert option.annotation.__metadata__[0].help == "How fast: slow or fast (with wind)."
    with pytest.raises(UsageError, match="speed 'calm': valid are slow, fast"):
        WindyRun(speed="calm").check()


def test_a_setting_is_in_keys_and_words_where_it_is_not_at_its_default() -> None:
    plan = Windy(name="one", config=dict(TINY))
    assert plan.key == StepPlan(name="one", config=dict(TINY)).key
    fast = replace(plan, speed="fast")
    assert fast.key == f"{plan.key}/speed-fast"
    assert StepComparison(fast, "ok").label == f"{StepComparison(plan, 'ok').label} speed fast"
    assert run_words(WindyRun(speed="fast")) == f"{run_words(Run())}, speed fast"


def test_settings_are_columns() -> None:
    assert set(settings_of(Run)) == set(RUN_COLUMNS)
    assert set(settings_of(Recipe)) - {"parallel"} <= set(COLUMNS)


def test_streams_differ_by_what_they_depend_on() -> None:
    """Kernels put into the same calls, uneven experts and hosts are no part of a stream's key."""
    key = stream_key(TINY, Run().traced_on("cuda"))
    same = Run(matmul="triton", attention="best", imbalance=2.0, cache="auto").traced_on("cuda")
    assert stream_key(TINY, same) == key
    changed = {"batch": 2, "seq": 32, "accumulate": 2, "checkpoint": "full", "precision": "bf16", "optimizer": "muon",
               "clip": 1.0, "finetune": "lora", "lora_rank": 8, "lora_targets": "q_proj", "base_dtype": "bf16",
               "fused": "triton", "parallel": "ddp=2"}  # fmt: skip
    keys = [stream_key(TINY, Run(**{name: value}).traced_on("cuda")) for name, value in changed.items()]
    assert len({key, *keys}) == len(changed) + 1
