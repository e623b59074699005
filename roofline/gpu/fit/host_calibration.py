"""Calibrates host costs: which tiny models are run, and how many ops of each kind their streams hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from math import hypot
from statistics import median
from typing import Any

from flopcast.microbench.recipe.plans import PHASES, HostPlan
from flopcast.microbench.recipe.settings import TORCH_MODES
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.profile.host import PROCESS_SPREAD, HostCosts, listed_tensors
from flopcast.roofline.gpu.profile.host_graphs import GIVEN, GIVEN_KINDS, GRADIENT, HEAVIER_CALLS
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import launches, lower
from flopcast.roofline.stream.model.models import CPU_BATCH, CPU_SEQ, CPU_VOCABULARY, make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream, packet

_ATTENTION, _PICKED = "flopcast.attention", "aten._scaled_dot_product_cudnn_attention"  # traced for any GPU; compiled


def host_plan(device_type: str) -> HostPlan:
    """The models that calibrate the host: depths 2, 6 and 12 at width 256 on a GPU; 2 and 4 at width 64 on a CPU."""
    if device_type == "cpu":
        configs = {depth: make_config(width=64, depth=depth, vocab=CPU_VOCABULARY) for depth in (2, 4)}
        return HostPlan(model="qwen3-adamw", configs=configs, batch=CPU_BATCH, seq=CPU_SEQ, rounds=2, steps_per_round=2)
    configs = {depth: make_config(width=256, depth=depth) for depth in (2, 6, 12)}
    return HostPlan(model="qwen3-adamw", configs=configs, batch=4, seq=256)


def compiled_host_plans() -> list[HostPlan]:
    """The models that calibrate a GPU's host for compiled steps: two depths in each mode. Their rows carry what their
    graphs launch, so that no fit has to compile them."""
    configs = {depth: make_config(width=256, depth=depth) for depth in (2, 6)}
    return [HostPlan(model=f"qwen3-adamw-{mode}", configs=configs, batch=4, seq=256, mode=mode) for mode in TORCH_MODES]


def fine_tune_host_plans() -> list[HostPlan]:
    """The models that tell what Python other optimizers, adapters and checkpointing run on a GPU's host: two depths of
    each, beside those of `host_plan` in the same process."""
    configs = {depth: make_config(width=256, depth=depth) for depth in (2, 6)}
    sizes: dict[str, Any] = {"configs": configs, "batch": 4, "seq": 256, "rounds": 3}
    optimizers = ("muon", "adafactor", "adafactor-foreach", "sgd-momentum")
    return [
        HostPlan(model="qwen3-lora", finetune="lora", **sizes),
        HostPlan(model="qwen3-lora-checkpoint", finetune="lora", checkpoint="full", **sizes),
        HostPlan(model="qwen3-checkpoint", checkpoint="full", **sizes),
        *(HostPlan(model=f"qwen3-{optimizer}", optimizer=optimizer, **sizes) for optimizer in optimizers),
    ]


def adamw_host_plans() -> list[HostPlan]:
    """The models that tell what a step of flopcast's AdamW costs a GPU's host, for each parameter and besides, and one
    of torch's fused AdamW: two depths of each, with clipping and without."""
    configs = {depth: make_config(width=256, depth=depth) for depth in (2, 12)}
    return [
        HostPlan(
            model=f"qwen3-{optimizer}{'-clip' if clip else ''}", configs=configs, batch=4, seq=256, optimizer=optimizer,
            clip=clip,
        )
        for clip in (0.0, 1.0)
        for optimizer in ("adamw-fused", "adamw-triton")
    ]  # fmt: skip


def plan_streams(plan: HostPlan, device_type: str) -> dict[int, Stream]:
    """The op stream of each model of the plan, by depth."""
    traced = replace(Run(**plan.settings), mode="eager").traced_on(device_type)
    return {depth: get_stream(config, traced) for depth, config in plan.configs.items()}


def count_ops(stream: Stream) -> dict[str, dict[str, float]]:
    """Counts the ops of each phase by kind: {"launch", "view", "host", "tensors"}.

    Forward and backward count calls. The optimizer counts kernels, and the tensors in its lists: one of its calls
    launches many kernels, and its host cost comes from the lists.
    """
    counts: dict[str, dict[str, float]] = {phase: defaultdict(float) for phase in PHASES}
    for op in stream.ops:
        kind = "launch" if op.kind == "sync" else op.kind
        amount = 1
        if op.phase == "optimizer":
            counts[op.phase]["tensors"] += listed_tensors(op)
        if op.phase == "optimizer" and kind == "launch":
            lowered = lower(stream, op)
            amount = launches(lowered[0]) if lowered is not None else 0
        counts[op.phase][kind] += amount
    return {phase: dict(kinds) for phase, kinds in counts.items()}


def calibration_counts(device_type: str) -> dict[str, dict[str, float]]:
    """`host_counts` of all models that calibrate the host of a device."""
    plans = [host_plan(device_type), *(compiled_host_plans() if device_type != "cpu" else ())]
    return {key: counts for plan in plans for key, counts in host_counts(plan, device_type).items()}


def host_counts(plan: HostPlan, device_type: str) -> dict[str, dict[str, float]]:
    """Counts by the key of the plan's measurement rows, as `rows.fit` takes them: `count_ops`, or of compiled models,
    whose rows count the launches, what costs the host "beyond" them."""
    if plan.mode == "compile-graphs":
        return {}
    if plan.mode == "compile":
        return {
            plan.row_key(depth, phase): {"beyond": beyond_launches(stream, phase)}
            for depth, stream in plan_streams(plan, device_type).items()
            for phase in ("forward", "backward")
        }
    return {
        plan.row_key(depth, phase): counts
        for depth, stream in plan_streams(plan, device_type).items()
        for phase, counts in count_ops(stream).items()
    }


def beyond_launches(stream: Stream, phase: str) -> float:
    """What costs the host beyond the launches of the graph of a phase, in launches, by the stream of the eager step: a
    forward is given the parameters, buffers and inputs, a backward leaves the gradients."""
    kinds, each = (GIVEN_KINDS, GIVEN) if phase == "forward" else (("gradient",), GRADIENT)
    names = (packet(op.name) for op in stream.ops if op.phase == phase)
    heavier = sum(HEAVIER_CALLS.get(name.replace(_ATTENTION, _PICKED), (0.0,))[0] for name in names)
    return each * sum(storage.kind in kinds for storage in stream.storages) + heavier


def synchronous_host(profile: Profile, plan: HostPlan, rows: Iterable[FitRow]) -> HostCosts | None:
    """Host costs where ops run synchronously (the CPU as a device); None without calibration rows.

    There a phase's seconds include its operators' own time. What remains after subtracting the forecast of that time is
    the cost of Python, dispatcher and autograd, which is divided evenly among the ops. It was measured in one process
    and is asked for in another.
    """
    rows_by_key = {row["key"]: row for row in rows if row.get("value")}
    per_op: dict[str, list[float]] = defaultdict(list)
    spreads: list[float] = []
    for depth, stream in plan_streams(plan, "cpu").items():
        for phase in PHASES:
            row = rows_by_key.get(plan.row_key(depth, phase))
            if row is None or not (value := row.get("value")):
                continue
            ops = [op for op in stream.ops if op.phase == phase]
            works = [describe(*lowered) for op in ops if (lowered := lower(stream, op)) is not None]
            own = sum(e.seconds for e in profile.estimate([(w, w.backend, "cold") for w in works]))
            per_op[phase].append(max(0.0, value - own) / max(len(ops), 1))
            samples = row.get("samples") or [value]
            spreads.append((max(samples) - min(samples)) / 3 / value)
    if not all(phase in per_op for phase in PHASES):
        return None
    costs = {
        phase: {"launch": median(per_op[phase]), "view": median(per_op[phase]), "host_op": median(per_op[phase])}
        for phase in PHASES
    }
    base = profile.host
    name = base.name if base is not None else "cpu"
    found = HostCosts(
        name=name, step_fixed=0.0, sigma=hypot(max(0.1, median(spreads)), PROCESS_SPREAD), basis="measured", cpu=name,
        forward=costs["forward"], backward=costs["backward"], optimizer=costs["optimizer"],
    )  # fmt: skip
    if base is None:
        return found
    return replace(
        found, cpu=base.cpu, cores=base.cores, device=base.device, date=base.date, stack=base.stack, layers=base.layers
    )
