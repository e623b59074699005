"""Builds the training step that a plan describes on a device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from flopcast.microbench import images
from flopcast.microbench.recipe import training_step
from flopcast.microbench.recipe.compiling import compile_model
from flopcast.microbench.recipe.factories import import_holder
from flopcast.microbench.recipe.inference import InferenceStep, build_inference
from flopcast.microbench.recipe.optimizers import hold_learning_rate
from flopcast.microbench.recipe.plans import StepPlan


def build_plan(plan: StepPlan, device: torch.device) -> training_step.TrainingStep | InferenceStep:
    """Builds the plan's step on `device`, its model compiled in the plan's mode when it first runs; it trains, but so
    slowly that it may run thousands of times. Raises what `training_step.build`, `build_module` and the factory raise.
    """
    step = build_inference(plan.config, device, plan) if plan.phase != "train" else _eager(plan, device)
    if isinstance(step, training_step.TrainingStep):
        hold_learning_rate(step.optimizers)
    compile_model(step, plan.mode)
    return step


def _eager(plan: StepPlan, device: torch.device) -> training_step.TrainingStep:
    if not plan.module:
        return training_step.build(plan.config, device, plan)
    torch.manual_seed(0)
    factory = _factory(plan.module)
    known = inspect.signature(factory).parameters
    with torch.device(device):
        module, batch, *loss_fn = factory(**{name: size for name, size in plan.sizes.items() if name in known})
    return training_step.build_module(module, batch, device, plan, loss_fn=loss_fn[0] if loss_fn else None)


def _factory(name: str) -> Callable[..., Any]:
    """Imports the factory "package.module:function" or "path/file.py:function", or makes that of an image model."""
    if (known := images.named(name)) is not None:
        return known
    holder, _, function = name.rpartition(":")
    found: Callable[..., Any] = getattr(import_holder(holder), function)
    return found
