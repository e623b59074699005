"""Estimates a step with torch's own estimator, `RuntimeEstimator`, as a baseline.

The estimator runs a step on fake tensors of the device and sums over calls, in its mode COST_MODEL, the larger of FLOPs
divided by a share of the datasheet peak and bytes divided by the datasheet bandwidth, both as torch and Triton query
them from the device. That needs CUDA, but neither the device's time nor its memory: it runs in processes of its own,
after all measurements. In its mode BENCHMARK it runs every call on the device, on random operands, and sums the mean
times of three runs.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flopcast.microbench.recipe import training_step
from flopcast.microbench.recipe.optimizers import make_optimizers
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records.rows import EMPTY_FIELDS, Fields
from flopcast.microbench.sweep.work import first_line

# The estimate is a sum over calls and so linear in the number of equal layers: two shallow models determine any depth.
SHALLOW = (2, 3)
COST_MODEL, BENCHMARK = "operator-level-cost-model", "operator-level-benchmark"
PROCESSES = 12  # each holds torch and transformers, about 1 GB


@contextlib.contextmanager
def estimate_plans(
    plans: Sequence[StepPlan], device: torch.device, *, budget_seconds: float | None = None
) -> Iterator[Callable[[StepPlan], Fields]]:
    """A context with a function that returns the fields of a plan's row, while processes work through `plans`.

    A plan that cannot be estimated, or not in time, gets a row of status "error" with a reason.
    """
    end = None if budget_seconds is None else time.monotonic() + max(budget_seconds, 0.0)
    processes = max(1, min(PROCESSES, len(plans), len(os.sched_getaffinity(0)) - 1))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting: dict[str, Future[Fields]] = {plan.key: pool.submit(estimate_row, plan, device.type) for plan in plans}

        def row(plan: StepPlan) -> Fields:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                return waiting[plan.key].result(left)
            except Exception as fault:  # a process that died, or no time left
                return {**_empty(plan), "status": "error", "reason": first_line(fault)}

        try:
            yield row
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def estimate_row(plan: StepPlan, device_type: str, mode: str = COST_MODEL) -> Fields:
    """Returns the fields of one plan's row, also where the estimate fails."""
    empty = _empty(plan, mode)
    try:
        seconds = estimate(plan, device_type, mode)
    except Exception as fault:
        return {**empty, "status": "error", "reason": first_line(fault)}
    return {**empty, "value": seconds, "seconds": seconds}


def _empty(plan: StepPlan, mode: str = COST_MODEL) -> Fields:
    timer = "torch RuntimeEstimator" + ("" if mode == COST_MODEL else f", {mode}")
    return {**EMPTY_FIELDS, "role": "baseline", "plan": asdict(plan), "unit": "seconds", "value": None, "timer": timer}


def estimate(plan: StepPlan, device_type: str = "cuda", mode: str = COST_MODEL) -> float:
    """The estimated seconds per step. Raises what torch raises, including AssertionError without CUDA.

    The benchmark runs at the model's own depth: two shallow models would multiply its noise by the depth."""
    depth = plan.config.get("num_hidden_layers")
    if mode == BENCHMARK or plan.module or depth is None or depth <= SHALLOW[1]:
        return _estimate(plan, device_type, mode)
    low, high = (
        _estimate(replace(plan, config={**plan.config, "num_hidden_layers": layers}), device_type) for layers in SHALLOW
    )
    return low + (int(depth) - SHALLOW[0]) * (high - low)


def _estimate(plan: StepPlan, device_type: str, mode: str = COST_MODEL) -> float:
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    with untraced(), _mixed_results(), FakeTensorMode(), _FakeResults():  # type: ignore[no-untyped-call]
        step = build(plan, device_type)
        step.run()  # makes the optimizer's state
        estimator = RuntimeEstimator()
        # with an encoding: Triton decodes nvidia-smi's output with stdout's encoding, and a StringIO has none
        silence = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(silence), estimator(mode):
            step.run()
        seconds: float = estimator.total_runtime * 1e-3
    return seconds


def build(plan: StepPlan, device_type: str) -> training_step.TrainingStep:
    """Builds the step on fake tensors. Foreach has to be requested: it is not the default for fake tensors."""
    from flopcast.microbench.steps.build import build_plan

    step = build_plan(replace(plan, attention="sdpa"), torch.device(device_type))
    assert isinstance(step, training_step.TrainingStep)
    step.optimizers = make_optimizers(step.model, plan.optimizer, foreach=True, clip=plan.clip)
    return step


class _FakeResults(TorchDispatchMode):
    """Answers calls that fake tensors do not support. They have no value to read back: checks are assumed to pass,
    numbers to be 1. They refuse a grouped product in dtypes other than bf16, which CUDA multiplies group by group
    (2.11)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            a, b, offsets = args[0], args[1], (args[2] if len(args) > 2 else (kwargs or {})["offs"])
            groups = () if a.ndim + b.ndim == 5 else (len(offsets),)
            return a.new_empty((*groups, a.shape[-2], b.shape[-1]))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Makes libraries treat fake tensors like real ones, and lets nothing be drawn or moved.

    Without it transformers takes fake tensors for a compiler's and does not use the causal SDPA; torch's truncated
    normal redraws until the numbers fit; torch's `Module.to` swaps tensors even where they do not change, which fails
    where a weak reference exists.
    """
    import transformers.utils.import_utils as utils

    to = torch.nn.Module.to

    def stay(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if len(args) == 1 and not kwargs and isinstance(args[0], (str, torch.device)):
            kind = torch.device(args[0]).type
            if all(t.device.type == kind for t in (*module.parameters(), *module.buffers())):
                return module
        return to(module, *args, **kwargs)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (utils, "is_fake_tensor", lambda x: False),
        (torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_kwargs: tensor),
        (torch.nn.Module, "to", stay),
    )
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


@contextlib.contextmanager
def _mixed_results() -> Iterator[None]:
    """Lets the estimator accept calls with results of several dtypes, by the first of them (attention's bf16, not its
    fp32 log-sum-exp): unpatched (torch 2.11 and 2.13) it fails there with an assertion, and (2.11) also at attention
    whose keys have fewer heads than its queries."""
    module: Any = importlib.import_module("torch.distributed._tools.runtime_estimator")
    original = module.get_compute_time

    def by_first(packet: Any, args: Any, kwargs: Any, out: Any, out_dtypes: Any, *rest: Any) -> float:
        if len(out_dtypes) > 1:
            first = next(t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            out_dtypes = {first.dtype}
        try:
            try:
                return float(original(packet, args, kwargs, out, set(out_dtypes), *rest))  # it empties the set
            except AssertionError as refused:  # of torch before 2.13, where keys have fewer heads than queries
                if "sdpa" not in str(refused):
                    raise
                return float(original(packet, with_equal_heads(args), kwargs, out, out_dtypes, *rest))
        except TypeError as error:  # torch's operators would hide it: "unsupported operand type(s) for @"
            raise RuntimeError(f"{packet}: {error}") from error

    module.get_compute_time = by_first
    try:
        yield
    finally:
        module.get_compute_time = original


def with_equal_heads(args: Sequence[Any]) -> tuple[Any, ...]:
    """Attention's operands, [batch, heads, seq, head_dim], with keys and values repeated to the queries' number of
    heads: this gives the FLOPs that torch 2.13 counts where there are fewer. Other arguments are returned as they
    are."""
    heads = max((a.shape[1] for a in args if isinstance(a, torch.Tensor) and a.dim() == 4), default=0)

    def repeated(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.shape[1] == heads:
            return value
        return value.repeat_interleave(heads // value.shape[1], dim=1)

    return tuple(repeated(value) for value in args)
