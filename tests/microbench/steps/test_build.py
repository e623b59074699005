"""Steps as they are built to be measured."""

from __future__ import annotations

import pytest
import torch

from flopcast.microbench.recipe.optimizers import MEASURED_LEARNING_RATE
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.recipe.training_step import TrainingStep
from flopcast.microbench.steps.build import build_plan
from flopcast.roofline.stream.model.models import make_config

CONFIG = make_config(width=64, depth=2, head_dim=32, heads=2, kv_heads=1, vocab=256)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "muon"])
@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_a_step_that_is_measured_stays_where_it_was(optimizer: str, precision: str) -> None:
    """A hundred steps on one batch, as a measurement runs them, neither learn it nor lose their numbers: a step whose
    numbers are gone, or all alike, draws less power and is quicker than any that trains."""
    plan = StepPlan(name="w64", config=CONFIG, batch=1, seq=16, optimizer=optimizer, precision=precision)
    step = build_plan(plan, torch.device("cpu"))
    assert isinstance(step, TrainingStep)
    assert {group["lr"] for one in step.optimizers for group in one.param_groups} == {MEASURED_LEARNING_RATE}
    first = float(step.run())
    for _ in range(100):
        last = float(step.run())
    assert last == pytest.approx(first, rel=0.02)
    gradients = [parameter.grad for parameter in step.model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
