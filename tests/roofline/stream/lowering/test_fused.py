"""Steps on the fused memory-bound kernels: what is traced, what they cost device and host, what is measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from flopcast.decode import decode
from flopcast.errors import DataError, UsageError
from flopcast.kernels.shapes import Call
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.gpu import suites
from flopcast.roofline.gpu.fit.host import fit_host, operator_costs
from flopcast.roofline.gpu.fit.host_calibration import host_plan
from flopcast.roofline.gpu.profile.host import HostCosts, combine
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.fused import FUSED_LAUNCHES
from flopcast.roofline.stream.lowering.lower import launches, lower
from flopcast.roofline.stream.model.models import with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.validation.host_of_run import hosts_of_runs
from flopcast.roofline.validation.step_plans import validation_plans
from studies.suites.plans import FUSED_SOURCES

Tracing = Callable[..., Stream]
FORWARD = ("rms_norm", "add_rms_norm", "rope_qk_norm", "swiglu")
RUN = Run(batch=2, seq=32, fused="triton")


def operators(stream: Stream) -> Counter[str]:
    """How often each fused operator is called."""
    names = (op.name.split(".") for op in stream.ops)
    return Counter(name for namespace, name, _ in names if namespace == "flopcast" and name in FUSED_LAUNCHES)


def per_layer(stream: Stream) -> dict[str, int]:
    layered = [op for op in stream.ops if op.layer == 1]
    return dict(operators(replace(stream, ops=tuple(layered))))


def test_a_patched_layer_is_traced_as_it_launches(tiny: Mapping[str, Any], traced: Tracing) -> None:
    """A layer in the middle: its weights cast at once, four products of six, gradients of weights in fp32, and those of
    one input added by products."""
    stream = traced(tiny, fused="patch", attention="triton")
    names = Counter(op.name for op in stream.ops if op.layer == 1)
    assert names["aten._foreach_copy_.default"] == 1
    assert names["aten.mm.default"] == 5 + 4  # forth: queries, keys and values are one; back: a product an input
    assert names["aten.mm.dtype"] == 7
    assert names["aten.addmm_.default"] == 3
    assert not {"aten._to_copy.default", "aten.add.Tensor", "flopcast.rms_norm.default"} & set(names)
    assert names["flopcast.add_rms_norm.default"] == names["flopcast.add_rms_norm_backward.default"] == 2
    assert names["flopcast.triton_attention_forward.default"] == 1
    products = [lower(stream, op) for op in stream.ops if op.name.startswith(("aten.mm", "aten.addmm_"))]
    plain = [lower(other, op) for other in [traced(tiny)] for op in other.ops if op.name.startswith("aten.mm.")]
    assert sum(found[0].flops for found in products if found) == sum(found[0].flops for found in plain if found)


def test_a_patched_step_is_a_stream_of_its_operators(tiny: Mapping[str, Any], traced: Tracing) -> None:
    """By the structure of Qwen3: a norm and a norm with the residual, rope, an activation a layer, forth and back."""
    fused, plain = traced(tiny, fused="triton"), traced(tiny)
    assert per_layer(fused) == {name + way: 1 for name in FORWARD for way in ("", "_backward")}
    depth = tiny["num_hidden_layers"]
    assert operators(fused)["rms_norm"] == operators(fused)["rms_norm_backward"] == depth + 1
    assert operators(fused)["cross_entropy_with_gradient"] == operators(fused)["scale_"] == 1
    assert not operators(plain)
    assert fused.n_params == plain.n_params
    # outputs that nobody uses get no gradient: no launch fills one with zeros
    zeros = [op for op in fused.ops if op.name.startswith("aten.zeros") and op.phase == "backward"]
    assert not zeros
    deep = traced(with_depth(tiny, 7), fused="triton")
    assert operators(deep)["swiglu"] == 7


def test_operands_have_autocasts_dtypes(tiny: Mapping[str, Any], traced: Tracing) -> None:
    """The residual stream is fp32 under autocast, what the linear layers take bf16; the loss reads bf16 logits."""
    stream = traced(tiny, fused="triton")
    variants = {
        str(describe(*lowered).variant)
        for op in stream.ops
        if (lowered := lower(stream, op)) is not None and describe(*lowered).op_class == "fused"
    }
    assert {
        "rms_norm|fp32+fp32>bf16+fp32", "add_rms_norm|bf16+fp32+fp32>bf16+fp32+fp32", "swiglu|bf16+bf16>bf16",
        "rope_qk_norm|bf16+bf16+fp32+fp32>bf16+bf16", "cross_entropy_with_gradient|bf16+int64>fp32+bf16",
    } <= variants  # fmt: skip
    assert all("fp32" not in v.split("|")[1].split(">")[1] for v in variants if v.startswith("rope_qk_norm|"))


def forecast(stream: Stream, profile: Profile, host: HostCosts | None = None, run: Run = RUN) -> Forecast:
    return PricedStep(stream, run, profile, host=host).forecast()


def test_its_forecast_moves_less_and_launches_less(tiny: Mapping[str, Any], traced: Tracing, profile: Profile) -> None:
    fused = forecast(traced(tiny, fused="triton", batch=8, seq=256), profile, run=replace(RUN, batch=8, seq=256))
    plain = forecast(traced(tiny, batch=8, seq=256), profile, run=replace(RUN, batch=8, seq=256, fused="none"))
    classes = {share.op_class: share for share in fused.breakdown}
    assert classes["fused"].calls == sum(operators(traced(tiny, fused="triton")).values())
    assert "softmax" not in classes
    assert "loss" not in classes
    assert fused.flops_counted == plain.flops_counted
    assert fused.kernels < 0.7 * plain.kernels
    assert sum(s.bytes for s in fused.breakdown) < 0.8 * sum(s.bytes for s in plain.breakdown)
    assert fused.peak_bytes < plain.peak_bytes  # no fp32 logits


def test_a_loss_of_one_micro_batch_is_not_scaled(tiny: Mapping[str, Any], traced: Tracing) -> None:
    """The factor is 1 there, and the kernel returns; of several the whole gradient is read and written."""
    moved = {}
    for accumulate in (1, 2):
        stream = traced(tiny, fused="triton", accumulate=accumulate)
        (work, *_) = (
            describe(*lowered)
            for op in stream.ops
            if op.name.startswith("flopcast.scale_") and (lowered := lower(stream, op)) is not None
        )
        moved[accumulate] = work.bytes
    assert moved[1] < 100
    assert moved[2] >= 2 * 2 * 2 * 32 * tiny["vocab_size"]


def test_kernels_of_a_call(tiny: Mapping[str, Any], traced: Tracing) -> None:
    """Sums over rows take a second kernel; a loss counts, works and averages."""
    stream = traced(tiny, fused="triton")
    counts = {
        op.name.split(".")[1]: launches(lowered[0])
        for op in stream.ops
        if op.name.startswith("flopcast.") and (lowered := lower(stream, op)) is not None
    }
    assert counts["rms_norm"] == counts["swiglu_backward"] == counts["scale_"] == 1
    assert counts["rms_norm_backward"] == counts["rope_qk_norm_backward"] == 2
    assert counts["cross_entropy_with_gradient"] == 3


# --- the host


COSTS = {"rms_norm": 3e-5, "rms_norm_backward": 5e-5, "swiglu": 2e-5, "mm": 1e-5, "attention": 4e-5}


def test_an_operator_costs_the_host_what_was_measured_besides(
    tiny: Mapping[str, Any], traced: Tracing, profile: Profile
) -> None:
    assert profile.host is not None
    stream = traced(tiny, fused="triton")
    before = forecast(stream, profile)
    assert any("host time is low" in warning for warning in before.warnings)
    after = forecast(stream, profile, replace(profile.host, triton=COSTS))
    assert not any("host time is low" in warning for warning in after.warnings)
    calls = operators(stream)
    more = sum(calls[name] * COSTS[name] for name in ("rms_norm", "rms_norm_backward", "swiglu"))
    assert after.host_seconds - before.host_seconds == pytest.approx(more)
    assert after.device_seconds == before.device_seconds
    # products and attention of Triton's too, where they are chosen, and nowhere else
    chosen = forecast(
        stream, profile, replace(profile.host, triton=COSTS), replace(RUN, matmul="triton", attention="triton")
    )
    products = sum(
        op.name.startswith(("aten.mm", "aten.addmm")) and stream.tensors[op.inputs[0]].operand.dtype == "bf16"
        for op in stream.ops
    )
    layers = tiny["num_hidden_layers"]
    assert chosen.host_seconds - after.host_seconds == pytest.approx(products * 1e-5 + layers * 4e-5)
    plain = forecast(traced(tiny), profile, replace(profile.host, triton=COSTS), replace(RUN, fused="none"))
    assert plain.host_seconds == forecast(traced(tiny), profile, run=replace(RUN, fused="none")).host_seconds


def rows(value: float = 6e-5, base: float = 1e-5, session: str | None = None) -> list[dict[str, Any]]:
    return [
        {"key": f"host_op/{name}", "status": "ok", "value": value, "base_seconds": base, "samples": [value],
         "session": session}
        for name in ("rms_norm", "swiglu")
    ]  # fmt: skip


def test_costs_come_from_rows_and_go_through_files(profile: Profile) -> None:
    failed = {"key": "host_op/attention", "status": "ok", "value": None, "base_seconds": None}
    below = {"key": "host_op/mm", "status": "ok", "value": 1e-5, "base_seconds": 2e-5}
    assert operator_costs([*rows(), failed, below]) == {
        "rms_norm": pytest.approx(5e-5),
        "swiglu": pytest.approx(5e-5),
        "mm": 0.0,
    }
    host = fit_host(rows(), {}, {**profile.ceilings, "launch": profile.ceilings["sync"]}, {"cpu": "x"}, [])
    assert host is not None
    again = decode(HostCosts, json.loads(json.dumps(host.to_json())), "host")
    assert again == host
    assert again.triton["rms_norm"] == pytest.approx(5e-5)
    assert host.scaled(2.0).triton["swiglu"] == pytest.approx(1e-4)
    assert combine([host, replace(host, triton={"swiglu": 2e-4})]).triton == {
        "rms_norm": pytest.approx(5e-5),
        "swiglu": pytest.approx(1e-4),
    }
    with pytest.raises(DataError, match=r"triton\.mm is -1\.0"):
        decode(HostCosts, {**host.to_json(), "triton": {"mm": -1.0}}, "host")


def test_files_of_older_versions_say_nothing_of_operators(
    tiny: Mapping[str, Any], traced: Tracing, profile: Profile
) -> None:
    assert profile.host is not None
    record = {"schema": 1, "kind": "host", **asdict(profile.host)}
    del record["triton"]
    old = decode(HostCosts, record, "host")
    assert old == profile.host
    stream = traced(tiny, fused="triton")
    assert forecast(stream, profile, old).host_seconds == forecast(stream, profile).host_seconds


def test_a_run_has_its_own_operators_costs_else_the_profiles(profile: Profile) -> None:
    """Rows as `run_steps` writes them, with the tiny models beside."""
    assert profile.host is not None
    plan = host_plan("cuda")
    tiny_models = [
        {"key": plan.row_key(depth, phase), "status": "ok", "value": depth * 1e-3, "samples": [depth * 1e-3] * 4,
         "session": "s"}
        for depth in plan.configs
        for phase in ("forward", "backward", "optimizer")
    ]  # fmt: skip
    known = profile.with_host(replace(profile.host, triton={"rms_norm": 7e-5}))
    (found,) = hosts_of_runs([*tiny_models, *rows(session="s")], known).values()
    assert found.costs.triton["rms_norm"] == pytest.approx(5e-5)
    (found,) = hosts_of_runs(tiny_models, known).values()
    assert found.costs.triton == {"rms_norm": pytest.approx(7e-5)}
    assert hosts_of_runs(rows(session="s"), known) == {}  # stopped before the tiny models were written


# --- what is measured


def test_the_suite_holds_what_patched_steps_launch() -> None:
    cases = suites.load(suites.FUSED)
    calls = [(case, case.shape) for case in cases if isinstance(case.shape, Call)]
    assert len(calls) == len(cases)
    assert {case.backend for case in cases} == {"triton"}
    fitted = {shape for case, shape in calls if case.role == "fit"}
    held = {shape for case, shape in calls if case.role == "holdout"}
    assert not fitted & held
    for shapes in (fitted, held):
        names = {shape.op.split(".")[1] for shape in shapes}
        assert names >= {name + way for name in FORWARD for way in ("", "_backward")}
        assert names >= {"cross_entropy_with_gradient"}
    fit_steps, held_steps = ({(s.width, s.batch, s.seq) for s in own} for own in FUSED_SOURCES.values())
    assert not fit_steps & held_steps
    assert max(case.shape.bytes for case in cases) <= 6 * 10**9
    assert {case.cache for case in cases} == {"cold", "hot"}


def test_steps_that_judge_it() -> None:
    plans = validation_plans("cuda", "fused")
    assert len(plans) >= 6
    assert all(plan.fused == "triton" and plan.has_triton for plan in plans)
    assert len({plan.key for plan in plans}) == len(plans)
    everything = validation_plans("cuda")
    assert {plan.key for plan in plans} <= {plan.key for plan in everything}
    assert not StepPlan(name="a", config={}).has_triton


def test_what_cannot_be_patched_is_said(tmp_path: Any) -> None:
    from flopcast.roofline.stream.library.streams import get_stream
    from flopcast.roofline.stream.model.models import load_config
    from flopcast.roofline.stream.model.run import Traced

    config = {**load_config("gpt2"), "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 64}
    with pytest.raises(UsageError, match="patched into Qwen3 alone"):
        get_stream(config, Traced(batch=1, seq=8, fused="triton"))
    with pytest.raises(UsageError, match="fused 'cuda': valid are none, triton"):
        Run(fused="cuda").check()
