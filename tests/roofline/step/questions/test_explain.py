"""A step taken apart: nothing lost, nothing faster than light, every alternative a forecast of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import NO_HOST
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.alternatives import advise, nearest_multiples, with_fused_adamw
from flopcast.roofline.step.questions.explain import (
    OPTIMIZER,
    Explanation,
    crossing_bytes,
    explain_step,
    layers_together,
)
from flopcast.roofline.step.timeline import Timeline
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config, make_config, with_depth
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_batch import BATCHES
from flopcast.roofline.stream.tracer.trace import trace_module
from flopcast.roofline.validation.baselines import roofline

RUN = Run(batch=2, seq=32)
FAST = settings(max_examples=5, deadline=None, derandomize=True, database=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip


@pytest.fixture(scope="module")
def stream(tiny: dict[str, Any], traced: Callable[..., Stream]) -> Stream:
    return traced(tiny)


@pytest.fixture(scope="module")
def small() -> tuple[Stream, Explanation]:
    """The ladder's smallest model on the shipped H200."""
    found = get_stream(make_config(width=256, depth=4), Traced())
    return found, explain_step(PricedStep(found, Run(), find_profile("nvidia-h200")))


def check(found: Explanation) -> None:
    """What holds of every explanation."""
    step = found.forecast
    device = step.device_seconds
    assert sum(part.seconds for part in found.classes) == pytest.approx(device)
    assert sum(part.share for part in found.classes) == pytest.approx(1.0)
    assert {p.op_class: p.seconds for p in found.classes} == pytest.approx(
        {s.op_class: s.seconds for s in step.breakdown}
    )
    for part in found.classes:
        assert sum(part.bound_seconds.values()) == pytest.approx(part.seconds)
        assert 0 <= part.light_seconds <= part.seconds
        assert part.needed_bytes <= part.bytes
        by_module = sum(module.classes.get(part.op_class, 0.0) for module in found.modules)
        assert by_module == pytest.approx(part.seconds)
    for module in found.modules:
        assert module.forward + module.backward + module.optimizer == pytest.approx(module.seconds)
    assert sum(module.seconds for module in found.modules) == pytest.approx(device)
    assert 0 < found.fused_seconds <= found.light_seconds <= device <= step.step_seconds * (1 + 1e-9)
    assert found.light_seconds <= found.device_only_seconds <= step.step_seconds * (1 + 1e-9)
    assert device + found.gap_seconds + found.idle_seconds == pytest.approx(step.step_seconds)


def test_a_real_step_is_taken_apart_without_loss(small: tuple[Stream, Explanation]) -> None:
    _, found = small
    check(found)
    names = [module.module for module in found.modules]
    assert "model.layers.*.mlp.down_proj" in names
    assert not any(".1." in name for name in names)
    optimizer = next(module for module in found.modules if module.module == OPTIMIZER)
    assert (
        optimizer.seconds
        == optimizer.optimizer
        == pytest.approx(next(part.seconds for part in found.classes if part.op_class == "optimizer"))
    )


@FAST
@given(
    copy=st.floats(1e10, 1e13), rate=st.floats(1e11, 1e16), floor=st.floats(0.0, 1e-4),
    host=st.floats(0.0, 20.0), optimizer=st.sampled_from(["adamw", "adamw-fused"]),
)  # fmt: skip
def test_shares_add_up_on_any_part(
    copy: float, rate: float, floor: float, host: float, optimizer: str,
    profile: Profile, tiny: dict[str, Any], traced: Callable[..., Stream],
) -> None:  # fmt: skip
    def exact(value: float) -> Number:
        return Number(value, value, value, "measured")

    ceilings = {**profile.ceilings, "hbm_copy": exact(copy), "matrix_sustained/bf16": exact(rate),
                "kernel_floor": exact(floor)}  # fmt: skip
    assert profile.host is not None
    costs = {
        phase: {name: seconds * host for name, seconds in getattr(profile.host, phase).items()}
        for phase in ("forward", "backward", "optimizer")
    }
    part = replace(profile, ceilings=ceilings, host=replace(profile.host, **costs))
    step = PricedStep(traced(tiny, optimizer=optimizer), replace(RUN, optimizer=optimizer), part)
    check(explain_step(step))


def test_the_optimizer_cannot_avoid_what_it_reads_and_writes_once(stream: Stream, profile: Profile) -> None:
    """AdamW in fp32: parameter, two averages read and written, the gradient read: 28 bytes a parameter, and what the
    backward left is read though the optimizer is one class."""
    fused = with_fused_adamw(stream)
    assert fused is not None
    for made in (stream, fused):
        ops = PricedStep(made, RUN, profile).ops
        needed = crossing_bytes(made, ops, lambda op_class: op_class)["optimizer"]
        assert needed == pytest.approx(28 * stream.n_params, rel=0.01)


def test_convolutions_and_grouped_products_cost_their_flops(profile: Profile) -> None:
    """They are calls, with no shape of their own: a part of endless bandwidth still has to multiply. The roofline that
    others would draw counts them, too."""
    rate = 1e12
    fast = Number(1e30, 1e30, 1e30, "measured")
    slow = Number(rate, rate, rate, "measured")
    ceilings = {"hbm_copy": fast, "matrix_sustained/bf16": slow, "kernel_floor": Number(0.0, 0.0, 0.0, "measured")}
    part = replace(profile, ceilings={**profile.ceilings, **ceilings})
    conv = trace_module(torch.nn.Conv2d(64, 64, 3), torch.randn(8, 64, 32, 32))
    config = {**load_config("qwen3-moe"), "hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 512}
    moe = get_stream(with_depth(config, 2), Traced(batch=2, seq=32))
    for stream, name in ((conv, "conv"), (moe, "gemm")):
        found = explain_step(PricedStep(stream, Run(batch=8, seq=1), part))
        one = next(share for share in found.classes if share.op_class == name)
        assert one.flops > 0
        assert one.light_seconds == pytest.approx(min(one.flops / rate, one.seconds), rel=0.1)  # some in fp32
        assert one.bound == "matrix"
        assert found.fused_seconds >= one.light_seconds
        h200 = find_profile("nvidia-h200")
        assert (roofline(stream, h200) or 0.0) > one.flops / h200.peaks["bf16"].value


def test_merging_classes_never_adds_bytes(stream: Stream, profile: Profile) -> None:
    ops = PricedStep(stream, RUN, profile).ops
    apart = crossing_bytes(stream, ops, lambda op_class: op_class)
    merged = crossing_bytes(stream, ops, lambda op_class: op_class if op_class == "gemm" else "rest")
    whole = crossing_bytes(stream, ops, lambda _: "all")
    assert sum(whole.values()) < sum(merged.values()) < sum(apart.values())
    # whatever is fused, the step reads and writes its parameters and states
    assert whole["all"] >= 24 * stream.n_params


def test_a_synchronisation_is_named_and_costs_what_the_step_saves(small: tuple[Stream, Explanation]) -> None:
    stream, found = small
    (sync,) = found.syncs
    assert (sync.op, sync.module, sync.phase, sync.calls) == ("aten._local_scalar_dense", "model", "forward", 1)
    profile = find_profile("nvidia-h200")
    ops = PricedStep(stream, Run(), profile).ops
    without = Timeline([replace(op, kind="launch") if op.kind == "sync" else op for op in ops], profile)
    assert found.forecast.step_seconds - sync.step_seconds == pytest.approx(without.step_seconds())


def test_a_module_of_all_layers_has_one_name() -> None:
    assert layers_together("model.layers.11.mlp.down_proj") == "model.layers.*.mlp.down_proj"
    assert layers_together("layer4.2.conv1") == "layer4.*.conv1"
    assert layers_together("0.1") == "*.*"
    assert layers_together("h2o.fc1") == "h2o.fc1"


# --- what would help


@pytest.mark.parametrize("depth", [3, 5])
def test_the_fused_optimizer_is_what_a_trace_of_it_gives(
    depth: int, tiny: dict[str, Any], traced: Callable[..., Stream], profile: Profile
) -> None:
    config = {**tiny, "num_hidden_layers": depth}
    made, real = with_fused_adamw(traced(config)), traced(config, optimizer="adamw-fused")
    assert made is not None
    assert with_fused_adamw(real) is None  # there is nothing to replace
    run = replace(RUN, optimizer="adamw-fused")
    ours, theirs = (PricedStep(s, run, profile).forecast() for s in (made, real))
    assert ours.device_seconds == pytest.approx(theirs.device_seconds, rel=1e-3)
    assert ours.host_seconds == pytest.approx(theirs.host_seconds, rel=1e-3)
    assert ours.kernels == theirs.kernels


def test_each_alternative_is_the_forecast_of_its_option(small: tuple[Stream, Explanation]) -> None:
    stream, found = small
    profile = find_profile("nvidia-h200")
    advice = {a.option: a for a in advise(PricedStep(stream, Run(), profile))}
    assert {"--host none", "--optimizer adamw-fused", "--attention sdpa-flash"} <= set(advice)
    bound = advice["--host none"]
    assert bound.kind == "bound"
    assert bound.step_seconds == pytest.approx(PricedStep(stream, Run(), profile, host=NO_HOST).forecast().step_seconds)
    flash = PricedStep(stream, Run(attention="sdpa-flash"), profile).forecast()
    assert advice["--attention sdpa-flash"].device_seconds == pytest.approx(flash.device_seconds)
    gains = [a.gain for a in advice.values() if a.kind == "forecast"]
    assert gains == sorted(gains, key=lambda gain: -(gain or 0.0))
    fused = advice["--optimizer adamw-fused"]
    assert fused.device_seconds is not None
    assert fused.device_seconds < 0.9 * found.forecast.device_seconds  # 28 bytes a parameter instead of 80


def test_what_has_to_be_traced_first_is_named_and_not_guessed() -> None:
    shipped = with_depth(load_config("qwen3-0.6b"), 3)
    config = {**shipped, "hidden_size": 1100}
    stream = get_stream(shipped, Traced())
    profile = find_profile("nvidia-h200")
    advice = {a.option: a for a in advise(PricedStep(stream, Run(), profile), config=config)}
    left = {option for option, a in advice.items() if a.gain is None}
    assert {"--batch 16", "--width 1088", "--width 1152", "--vocab 152064"} <= left
    assert all(advice[option].reason and advice[option].step_seconds is None for option in left)
    assert advice["--width 1024"].gain == pytest.approx(0.0)  # of these the one stream that ships


@given(size=st.integers(1, 200_000))
def test_nearest_multiples_are_near(size: int) -> None:
    found = nearest_multiples(size)
    assert size not in found
    assert all(m > 0 and m % 64 == 0 and abs(m - size) <= max(128, m - size) for m in found)
    assert found or size % 256 == 0
    assert all(m > size for m in nearest_multiples(size, is_vocabulary=True))


def test_a_larger_batch_follows_from_two_that_are_at_hand(
    tiny: dict[str, Any], traced: Callable[..., Stream], profile: Profile
) -> None:
    for batch in BATCHES:
        get_stream(tiny, Traced(batch=batch, seq=32))  # traced, and cached
    stream = traced(tiny)
    step = PricedStep(stream, RUN, profile)
    found, advice = step.forecast(), {a.option: a for a in advise(step, config=tiny)}
    larger = advice["--batch 8"]
    real = PricedStep(traced(tiny, batch=8), replace(RUN, batch=8), profile).forecast()
    assert larger.step_seconds == pytest.approx(real.step_seconds)
    assert larger.gain == pytest.approx(real.tokens_per_second / found.tokens_per_second - 1)
    assert (larger.gain or 0.0) > 1.0  # a step this small is its launches, whatever the batch
