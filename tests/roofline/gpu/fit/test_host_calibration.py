"""The host's calibration: what the tiny models count, and what it finds where every op runs when it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.microbench.recipe.plans import PHASES, HostPlan
from flopcast.roofline.gpu.fit import host_calibration
from flopcast.roofline.gpu.fit.folder import fit_host_folder
from flopcast.roofline.gpu.fit.host_calibration import count_ops, host_counts, host_plan, synchronous_host
from flopcast.roofline.gpu.profile.host_graphs import GIVEN, GRADIENT, HEAVIER_CALLS
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.model.models import check_config, with_depth
from flopcast.roofline.stream.ops.op_stream import Stream

Tracing = Callable[..., Stream]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plans_have_two_depths_or_more(device: str) -> None:
    plan = host_plan(device)
    assert len(plan.configs) >= 2
    for depth, config in plan.configs.items():
        check_config(config)
        assert config["num_hidden_layers"] == depth
    assert len({config["hidden_size"] for config in plan.configs.values()}) == 1


def test_counts_grow_by_the_layer(tiny: dict[str, Any], traced: Tracing) -> None:
    """Each layer adds the same ops; tensors are those in the optimizer's lists."""
    two, four, six = (count_ops(traced(with_depth(tiny, depth))) for depth in (2, 4, 6))
    for phase in PHASES:
        for kind in ("launch", "view") if phase != "optimizer" else ("tensors", "host"):
            assert six[phase][kind] - four[phase][kind] == four[phase][kind] - two[phase][kind] > 0
    assert set(two) == set(PHASES)
    stream = traced(tiny)
    per_call = sum(len(op.inputs) for op in stream.ops if op.phase == "optimizer" and '"ts"' in op.args)
    assert count_ops(stream)["optimizer"]["tensors"] == per_call


def test_counts_by_row(tiny: dict[str, Any]) -> None:
    plan = HostPlan(model="m", configs={5: with_depth(tiny, 5), 4: with_depth(tiny, 4)}, batch=2, seq=32)
    counts = host_counts(plan, "cuda")
    assert set(counts) == {f"host/m/depth{depth}/{phase}" for depth in (4, 5) for phase in PHASES}
    compiled = host_counts(replace(plan, mode="compile"), "cuda")
    for phase in ("forward", "backward"):  # of a layer: its eleven weights or their gradients, and its attention
        four, five = (compiled[f"host/m/depth{depth}/{phase}"]["beyond"] for depth in (4, 5))
        each, suffix = (GIVEN, "") if phase == "forward" else (GRADIENT, "_backward")
        attention = HEAVIER_CALLS[f"aten._scaled_dot_product_cudnn_attention{suffix}"][0]
        assert five - four == pytest.approx(11 * each + attention)
    assert host_counts(replace(plan, mode="compile-graphs"), "cuda") == {}  # a replay launches its nodes at once


@pytest.fixture
def cpu(profile: Profile) -> Profile:
    return replace(profile, device={**profile.device, "type": "cpu"})


def test_what_the_operators_leave_is_the_hosts(
    tiny: dict[str, Any], traced: Tracing, cpu: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phases made of the operators' forecast and 20 us an op come back as 20 us an op."""
    plan = HostPlan(model="m", configs={2: with_depth(tiny, 2), 3: tiny}, batch=2, seq=32)
    streams = {depth: traced(config, device="cpu") for depth, config in plan.configs.items()}
    monkeypatch.setattr(host_calibration, "plan_streams", lambda _plan, _device: streams)
    rows = []
    for depth, stream in streams.items():
        for phase in PHASES:
            ops = [op for op in stream.ops if op.phase == phase]
            works = [describe(*found) for op in ops if (found := lower(stream, op)) is not None]
            own = sum(estimate.seconds for estimate in cpu.estimate([(w, w.backend, "cold") for w in works]))
            rows.append({"key": plan.row_key(depth, phase), "value": own + 2e-5 * len(ops), "samples": []})
    host = synchronous_host(cpu, plan, rows)
    assert host is not None
    for costs in (host.forward, host.backward, host.optimizer):
        assert costs["launch"] == pytest.approx(2e-5)
        assert costs["view"] == pytest.approx(2e-5)
    faster = [{**row, "value": 1e-9} for row in rows]  # faster than its operators: no host at all, not less
    none = synchronous_host(cpu, plan, faster)
    assert none is not None
    assert none.forward["launch"] == 0
    assert synchronous_host(cpu, plan, rows[:1]) is None
    assert synchronous_host(cpu, plan, []) is None


def test_each_run_of_steps_in_a_folder_is_a_process_of_its_host(root: Path) -> None:
    host = fit_host_folder(root / "reports/nvidia-h100-sxm/steps/run0")
    assert len(host.layers["step"]["processes"]) == 3
