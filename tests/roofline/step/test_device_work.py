"""What each operation of a stream costs device and host, and which of its operands lie in L2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import hypot, inf
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Attention, Operand
from flopcast.roofline.gpu.fit import host_calibration
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import HostCosts, default_host
from flopcast.roofline.gpu.profile.host_graphs import GIVEN, GRADIENT, GraphCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import CHECKPOINTED, HEAVIER, backend_of, device_work, l2_shares
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.uncertainty import spreads
from flopcast.roofline.stream.library.modules import module_stream
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.lowering.variants import KernelKind
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import PHASES, Op, Storage, Stream, TensorRef, packet
from flopcast.roofline.stream.ops.to_depth import to_depth

Tracing = Callable[..., Stream]


def chain(sizes: list[int]) -> Stream:
    """Op n reads tensor n and writes tensor n + 1; bytes as given."""
    operands = [Operand((size,), (1,), "uint8") for size in sizes]
    return Stream(
        ops=tuple(Op("aten.neg.default", "forward", (i,), (i + 1,), args='[{"t":0}]') for i in range(len(sizes) - 1)),
        tensors=tuple(TensorRef(operand, i) for i, operand in enumerate(operands)),
        storages=tuple(Storage(size, "activation") for size in sizes),
        n_params=0,
    )


def test_what_was_just_written_is_in_l2() -> None:
    stream = chain([1000, 1000, 1000, 1000])
    runs = [True, True, True]
    # 2000 bytes hold an op's input, written by the one before, but not what the step before wrote
    assert l2_shares(stream, runs, 2000)[1:] == [0.5, 0.5]
    assert l2_shares(stream, runs, 10**9) == [1.0, 1.0, 1.0]  # a step that fits whole: warm from the one before
    assert l2_shares(stream, runs, 0) == [0.0, 0.0, 0.0]
    assert l2_shares(chain([10**6, 10**6]), [True], 10**5) == [0.0]


def test_what_runs_nothing_touches_nothing() -> None:
    stream = chain([1000, 1000, 1000])
    assert l2_shares(stream, [False, False], 10**9) == [0.0, 0.0]


@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=2, max_size=12),
    capacities=st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)),
)
def test_more_cache_never_holds_less(sizes: list[int], capacities: tuple[int, int]) -> None:
    stream = chain(sizes)
    low, high = sorted(capacities)
    runs = [True] * len(stream.ops)
    for small, large in zip(l2_shares(stream, runs, low), l2_shares(stream, runs, high), strict=True):
        assert 0 <= small <= large <= 1


def test_shares_of_a_real_step(tiny: dict[str, Any], traced: Tracing) -> None:
    stream = traced(tiny)
    runs = [lower(stream, op) is not None for op in stream.ops]
    before = [0.0] * len(runs)
    for capacity in (10**4, 10**6, 10**8, inf):
        shares = l2_shares(stream, runs, capacity)
        assert all(0 <= a <= b <= 1 for a, b in zip(before, shares, strict=True))
        before = shares
    ran = [share for share, is_running in zip(before, runs, strict=True) if is_running]
    assert sum(ran) / len(ran) > 0.9  # with a cache without end a steady step misses nothing but what is new


# --- from stream to items


def test_every_op_is_an_item(tiny: dict[str, Any], traced: Tracing, profile: Profile) -> None:
    stream = traced(tiny)
    assert profile.host is not None
    items = device_work(stream, Run(), profile, profile.host)
    assert len(items) == len(stream.ops)
    for op, found in zip(stream.ops, items, strict=True):
        assert (found.phase, found.kind) == (op.phase, op.kind)
        assert (found.work is None) == (lower(stream, op) is None)
        assert (found.seconds > 0) == (found.work is not None)
        assert (found.launches > 0) == (found.work is not None)
        assert found.host_seconds > 0


def test_host_costs_are_counted_as_they_were_calibrated(
    tiny: dict[str, Any], traced: Tracing, profile: Profile
) -> None:
    """The forecast charges what `count_ops` counts; a mean of kernels a call, of other lists, changes nothing."""
    calls = {"launch": 1e-5, "view": 4e-6}
    costs = {**calls, "host_op": 3e-6, "per_tensor": 1e-6}
    host = HostCosts("h", calls, calls, costs, step_fixed=0.0, sigma=0.1, basis="measured")
    kinds = map(KernelKind.parse, ("optimizer/_foreach_mul_|fp32", "optimizer/_foreach_sqrt|fp32"))
    counts = dict(zip(kinds, (20.0, 22.0), strict=True))
    odd = replace(profile, launch_counts=counts)
    for optimizer in ("adamw", "adamw-fused"):
        stream = to_depth(traced(tiny, optimizer=optimizer), 6)
        items = device_work(stream, Run(), odd, host)
        for phase, counts in host_calibration.count_ops(stream).items():
            charged = sum(i.host_seconds for i in items if i.phase == phase)
            expected = sum(
                counts.get(kind, 0.0) * costs[cost]
                for kind, cost in (
                    ("launch", "launch"),
                    ("view", "view"),
                    ("host", "host_op"),
                    ("tensors", "per_tensor"),
                )
            )
            assert charged == pytest.approx(expected, rel=1e-9), (optimizer, phase)


@pytest.mark.parametrize("waits", [True, False])
def test_a_models_python_around_its_layers_is_paid_for_once_a_phase(
    tiny: dict[str, Any], traced: Tracing, profile: Profile, waits: bool
) -> None:
    """After the model has waited for the device; where it waits for nothing, as on our attention, when it begins."""
    stream = traced(tiny)
    assert any(op.kind == "sync" for op in stream.ops)
    if not waits:
        stream = replace(
            stream, ops=tuple(op._replace(kind="host" if op.kind == "sync" else op.kind) for op in stream.ops)
        )
    assert profile.host is not None
    fixed = {"forward": 1.0, "backward": 2.0, "optimizer": 4.0}
    costs: dict[str, Any] = {phase: {**getattr(profile.host, phase), "fixed": own} for phase, own in fixed.items()}
    host = replace(profile.host, **costs)
    items = device_work(stream, Run(), profile, host)
    beside = [number for number, item in enumerate(items) if item.host_seconds >= 1.0]
    assert {items[number].phase: int(items[number].host_seconds) for number in beside} == fixed
    assert (beside[0] == 0) is not waits


def test_hot_operands_are_never_slower(tiny: dict[str, Any], traced: Tracing, profile: Profile) -> None:
    stream = traced(tiny)
    assert profile.host is not None
    without = replace(profile, device={**profile.device, "l2_bytes": 0})
    hot = device_work(stream, Run(), profile, profile.host)
    cold = device_work(stream, Run(), without, profile.host)
    assert all(a.seconds <= b.seconds * (1 + 1e-9) for a, b in zip(hot, cold, strict=True))


def test_backends_are_asked_for_by_class(tiny: dict[str, Any], traced: Tracing) -> None:
    stream = traced(tiny)
    works = {w.op_class: w for op in stream.ops if (found := lower(stream, op)) and (w := describe(*found))}
    run = Run(matmul="triton", attention="sdpa")
    assert backend_of(works["gemm"], run, "sdpa-cudnn") == "triton"
    assert backend_of(works["attention"], run, "sdpa-cudnn") == "sdpa-cudnn"
    assert backend_of(works["attention"], Run(attention="sdpa-flash"), "sdpa-cudnn") == "sdpa-flash"
    assert backend_of(works["pointwise"], run, "sdpa-cudnn") == "torch"


@pytest.mark.parametrize(
    ("shape", "on_hopper", "elsewhere"),
    [
        ({}, "sdpa-cudnn", "sdpa-flash"),
        ({"dtype": "fp32"}, "sdpa-efficient", "sdpa-efficient"),
        ({"head_dim": 192, "value_dim": 128}, "sdpa-cudnn", "sdpa-efficient"),
    ],
)
def test_torch_picks_attention_by_its_operands(shape: dict[str, Any], on_hopper: str, elsewhere: str) -> None:
    work = describe(replace(Attention(batch=2, heads=4, kv_heads=4, seq=64, head_dim=128), **shape))
    assert backend_of(work, Run(), "sdpa-cudnn") == on_hopper
    assert backend_of(work, Run(), "sdpa-flash") == elsewhere
    assert backend_of(work, Run(), "sdpa-cpu") == "sdpa-cpu"


@pytest.mark.parametrize("attention", ["triton", "sdpa-flash"])
def test_attention_that_lacks_a_kernel_for_narrow_values_is_refused(attention: str) -> None:
    work = describe(Attention(batch=2, heads=4, kv_heads=4, seq=64, head_dim=192, value_dim=128))
    with pytest.raises(UsageError, match="queries of 192 columns and values of 128"):
        backend_of(work, Run(attention=attention), "sdpa-cudnn")


@pytest.mark.parametrize("mode", ["compile", "compile-graphs"])
def test_graphs_cost_the_host_their_launches_and_entries(
    tiny: dict[str, Any], traced: Tracing, profile: Profile, mode: str
) -> None:
    """Of a stream whose forward is one compiled graph and the backward two; the rest of the step is eager. Launched one
    by one, tensors that the forward is given and gradients cost, too."""
    eager = traced(tiny)
    phases = [op.phase for op in eager.ops]
    forward, both = phases.count("forward"), phases.index("optimizer")
    calls = [("0_forward", 0, forward - 1), ("0_backward", forward, both - 9), ("1_backward", both - 8, both - 1)]
    stream = replace(eager, meta={**eager.meta, "mode": mode, "graphs": calls})
    costs = GraphCosts(launch=1e-6, forward=1e-3, backward=2e-3, sigma=0.4)
    assert profile.host is not None
    host = replace(profile.host, compiled={mode: costs})
    items, before = (device_work(one, Run(), profile, host) for one in (stream, eager))
    charged = {phase: sum(i.host_seconds for i in items if i.phase == phase) for phase in PHASES}
    read = {eager.tensors[tensor].storage for op in eager.ops[:forward] for tensor in op.inputs}
    kinds = Counter(eager.storages[storage].kind for storage in read)
    assert kinds["parameter"] > 20
    handed = 0.0 if mode == "compile-graphs" else GIVEN * (kinds["parameter"] + kinds["buffer"] + kinds["input"])
    made = sum(storage.kind == "gradient" for storage in eager.storages)
    gradients = 0.0 if mode == "compile-graphs" else GRADIENT * made
    assert charged["forward"] == pytest.approx((forward + handed) * 1e-6 + 1e-3)
    assert charged["backward"] == pytest.approx((both - forward + gradients) * 1e-6 + 2 * 2e-3)
    assert items[both:] == before[both:]
    replays = [1] * forward + [2] * (both - 8 - forward) + [3] * 8
    assert [i.replay for i in items[:both]] == (replays if mode == "compile-graphs" else [0] * both)
    assert [i.seconds for i in items] == [i.seconds for i in before]
    # the host's own deviation, and what forecasts of compiled steps were off on hosts measured in the same run
    assert PricedStep(stream, Run(), profile, host).host_sigma == hypot(0.4, spreads(mode).host_same_run)


def test_a_window_is_timed_as_an_h200_took_it(golden: ModuleType, traced: Tracing) -> None:
    """transformers hands torch the mask of a sliding window. 88 us were recorded; without the mask 64 are forecast."""
    record = golden.read("mistral_window")
    meta = record["meta"]
    stream = traced(meta["config"], batch=meta["batch"], seq=meta["seq"], optimizer=meta["optimizer"])
    profile = find_profile("nvidia-h200")
    assert profile.host is not None
    items = device_work(stream, Run(), profile, profile.host)
    found = [item for item in items if item.work is not None and item.work.op_class == "attention"]
    recorded = sum(seconds for name, seconds in record["seconds"].items() if "attention" in name)
    assert len(found) == 6
    assert sum(item.seconds for item in found) == pytest.approx(recorded, rel=0.05)


def test_a_forward_that_checkpoints_costs_the_host_more_and_what_is_recomputed_what_a_forward_does(
    tiny: dict[str, Any], traced: Callable[..., Stream], profile: Profile
) -> None:
    host = profile.host
    assert host is not None
    plain, recomputing = (traced(tiny, checkpoint=checkpoint) for checkpoint in ("none", "full"))

    def costs(stream: Stream, chosen: Callable[[Op], bool]) -> set[float]:
        timed = zip(stream.ops, device_work(stream, Run(), profile, host), strict=True)
        return {one.host_seconds for op, one in timed if op.kind == "launch" and op.layer == 1 and chosen(op)}

    [forward] = costs(plain, lambda op: op.phase == "forward")
    [hooked] = costs(recomputing, lambda op: op.phase == "forward")
    [again] = costs(recomputing, lambda op: op.is_recomputed)
    assert hooked == pytest.approx(CHECKPOINTED * forward)
    assert again == forward


@pytest.mark.parametrize("is_last", [False, True])
def test_convolutions_and_batch_norms_cost_the_host_more_than_other_calls(is_last: bool) -> None:
    import torch
    from torch import nn

    memory = torch.channels_last if is_last else torch.contiguous_format
    layers = (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    images = torch.randn(2, 8, 16, 16).to(memory_format=memory)
    stream = module_stream(nn.Sequential(*layers), Run(), "cuda", batch=images, loss_fn=lambda out: out.float().sum())
    host = default_host()
    timed = device_work(stream, Run(), find_profile("nvidia-h200"), host)
    beyond = {
        packet(op.name): one.host_seconds / host.seconds(op.phase, op.kind) - 1
        for op, one in zip(stream.ops, timed, strict=True)
        if packet(op.name) in HEAVIER and op.phase != "optimizer"
    }
    assert len(beyond) == 4
    for name, calls in beyond.items():
        # the first call of a backward also has the phase's own cost, none of these
        assert calls == pytest.approx(HEAVIER[name][int(is_last)])
    others = [one for op, one in zip(stream.ops, timed, strict=True) if packet(op.name) == "aten.relu"]
    assert [one.host_seconds for one in others] == [host.seconds("forward", "launch")]


@pytest.mark.parametrize(("precision", "is_looped"), [("autocast-bf16", True), ("bf16", False)])
def test_experts_in_fp32_are_launched_one_by_one(traced: Tracing, precision: str, is_looped: bool) -> None:
    """torch multiplies fp32 weights of experts in a loop, and all in one kernel in bf16."""
    config = with_depth(load_config("qwen3-moe"), 1)
    run = Run(precision=precision)
    profile = find_profile("nvidia-h200")
    host = default_host()
    stream = traced(config, batch=run.batch, seq=run.seq, precision=precision)
    work = device_work(stream, run, profile, host)
    grouped = [one for op, one in zip(stream.ops, work, strict=True) if op.name == "aten._grouped_mm.default"]
    assert len(grouped) == 6  # gate with up, and down: forward, and two gradients of each
    for one in grouped:
        assert (one.launches >= config["num_experts"]) == is_looped
        assert one.looped_seconds == pytest.approx((config["num_experts"] - 1) * host.bare_call() * is_looped)
        assert one.host_seconds > one.looped_seconds
