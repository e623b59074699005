"""Builds the training step that a plan describes on a device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from flopcast.microbench import images
from flopcast.microbench.recipe import training_step
from flopcast.microbench.recipe.compiling import compile_model
from flopcast.microbench.recipe.inference import InferenceStep, build_inference
from flopcast.microbench.recipe.patches import attention_implementation
from flopcast.microbench.recipe.plans import StepPlan


def build_plan(plan: StepPlan, device: torch.device) -> training_step.TrainingStep | InferenceStep:
    """Builds the plan's step on `device`, its model compiled in the plan's mode when it first runs. Raises what
    `training_step.build`, `build_module` and the factory raise."""
    if plan.phase != "train":
        step: training_step.TrainingStep | InferenceStep = build_inference(
            plan.config, device, phase=plan.phase, context=plan.context, batch=plan.batch, precision=plan.precision,
            attention=attention_implementation(plan.attention), base_dtype=plan.base_dtype,
            cache=plan.cache_kind,
        )  # fmt: skip
    else:
        step = _eager(plan, device)
    compile_model(step, plan.mode)
    return step


def _eager(plan: StepPlan, device: torch.device) -> training_step.TrainingStep:
    run: dict[str, Any] = {
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "accumulate": plan.accumulate,
        "checkpoint": plan.checkpoint,
        "clip": plan.clip,
    }
    if plan.module:
        torch.manual_seed(0)
        with torch.device(device):
            module, batch, *loss_fn = _factory(plan.module)(batch=plan.batch)
        return training_step.build_module(module, batch, device, loss_fn=loss_fn[0] if loss_fn else None, **run)
    attention = attention_implementation(plan.attention)
    return training_step.build(
        plan.config, device, batch=plan.batch, seq=plan.seq, attention=attention, fused=plan.fused,
        finetune=plan.finetune, lora_rank=plan.lora_rank, lora_targets=plan.lora_targets,
        base_dtype=plan.weights_dtype, **run,
    )  # fmt: skip


def _factory(name: str) -> Callable[..., Any]:
    """Imports the factory named "package.module:function", or makes that of an image model."""
    if (known := images.named(name)) is not None:
        return known
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
