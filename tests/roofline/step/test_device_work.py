"""The step is simulated: what a user may rely on of host and device timelines, whatever their costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.kernels.shapes import Operand
from flopcast.roofline.gpu.fit import host_calibration
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import Backends, device_work, l2_shares
from flopcast.roofline.step.simulation import LAUNCH_LATENCY_SECONDS, Item, simulate
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.lowering.variants import KernelKind
from flopcast.roofline.stream.ops.op_stream import Op, Storage, Stream, TensorRef
from flopcast.roofline.stream.ops.to_depth import to_depth

Tracing = Callable[..., Stream]

GAP, SYNC = 1e-6, 1e-5


def item(host: float, device: float = 0.0, launches: int | None = None, kind: str = "launch") -> Item:
    count = (1 if device else 0) if launches is None else launches
    return Item("forward", kind, "", host, seconds=device, launches=count)


def step_of(items: list[Item], **options: Any) -> float:
    defaults: dict[str, Any] = {"gap_seconds": GAP, "queue_depth": 1024, "sync_seconds": SYNC, "is_synchronous": False}
    return simulate(items, **{**defaults, **options})


microseconds = st.integers(1, 200).map(lambda n: n * 1e-6)
kernels = st.builds(item, microseconds, microseconds, st.integers(1, 3))
views = st.builds(item, microseconds)
syncs = st.builds(item, microseconds, microseconds, st.just(1), st.just("sync"))
steps_without_sync = st.lists(st.one_of(kernels, views), min_size=1, max_size=40)
any_steps = st.lists(st.one_of(kernels, views, kernels, syncs), min_size=1, max_size=40)


def host_sum(items: list[Item]) -> float:
    return sum(i.host_seconds for i in items)


def device_sum(items: list[Item]) -> float:
    return sum(i.seconds + GAP * i.launches for i in items)


@given(any_steps)
def test_a_step_takes_what_either_side_takes(items: list[Item]) -> None:
    step = step_of(items)
    assert step >= host_sum(items) * (1 - 1e-9)
    assert step >= device_sum(items) * (1 - 1e-9)
    sync = sum(i.kind == "sync" for i in items)
    assert step <= host_sum(items) + device_sum(items) + len(items) * LAUNCH_LATENCY_SECONDS + sync * SYNC


@given(steps_without_sync)
def test_without_a_sync_the_slower_side_is_the_step(items: list[Item]) -> None:
    assert step_of(items, queue_depth=10**6, steps=40) == pytest.approx(
        max(host_sum(items), device_sum(items)), rel=0.05, abs=0
    ) or abs(host_sum(items) - device_sum(items)) < 0.1 * host_sum(items)


@given(any_steps, st.data())
def test_more_of_anything_is_never_faster(items: list[Item], data: st.DataObject) -> None:
    step = step_of(items)
    at = data.draw(st.integers(0, len(items) - 1))
    more = data.draw(microseconds)
    slower_host = [*items[:at], replace(items[at], host_seconds=items[at].host_seconds + more), *items[at + 1 :]]
    assert step_of(slower_host) >= step - 1e-12
    if items[at].launches:
        slower_kernel = [*items[:at], replace(items[at], seconds=items[at].seconds + more), *items[at + 1 :]]
        assert step_of(slower_kernel) >= step - 1e-12
    assert step_of([*items[:at], item(more, more), *items[at:]]) >= step - 1e-12
    for option, value in (("gap_seconds", GAP + more), ("sync_seconds", SYNC + more)):
        assert step_of(items, **{option: value}) >= step - 1e-12


@given(steps_without_sync, st.data())
def test_a_sync_never_helps(items: list[Item], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(items) - 1))
    synced = [*items[:at], replace(items[at], kind="sync"), *items[at + 1 :]]
    assert step_of(synced) >= step_of(items) - 1e-12


@given(any_steps, st.integers(1, 30))
def test_a_shorter_queue_is_never_faster(items: list[Item], depth: int) -> None:
    assert step_of(items, queue_depth=depth) >= step_of(items, queue_depth=depth + 1) - 1e-12
    assert step_of(items, queue_depth=depth + 1) >= step_of(items, queue_depth=10**6) - 1e-12


def test_the_host_waits_where_the_queue_is_full() -> None:
    """Ten slow kernels, then host work: with a queue of 10 they overlap, with a queue of 1 the host waits for nine."""
    items = [*(item(1e-6, 1e-3) for _ in range(10)), item(9e-3)]
    assert step_of(items, queue_depth=10) == pytest.approx(10e-3, rel=0.01)
    assert step_of(items, queue_depth=1) == pytest.approx(18e-3, rel=0.01)


def test_a_sync_drains_the_device_every_step() -> None:
    """Device-bound but for the sync: the host cannot run ahead from step to step, its lead is paid anew."""
    kernels = [item(1e-5, 2e-5) for _ in range(100)]
    free = step_of([item(1e-3), *kernels])
    synced = step_of([item(1e-3), *kernels, item(1e-6, 1e-6, kind="sync")])
    assert free == pytest.approx(100 * 2.1e-5, rel=0.01)
    assert synced == pytest.approx(1e-3 + 100 * 2.1e-5, rel=0.03)


@given(any_steps, st.floats(0.5, 2), st.floats(0.5, 2))
def test_a_processor_runs_each_op_when_it_is_called(items: list[Item], host: float, device: float) -> None:
    step = step_of(items, is_synchronous=True, host_factor=host, device_factor=device)
    assert step == pytest.approx(host * host_sum(items) + device * sum(i.seconds for i in items))


def test_no_steady_step_without_two() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        step_of([item(1e-6, 1e-6)], steps=1)


# --- L2


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
    items = device_work(stream, profile, profile.host, Backends())
    assert len(items) == len(stream.ops)
    for op, found in zip(stream.ops, items, strict=True):
        assert (found.phase, found.kind, found.module) == (op.phase, op.kind, op.module)
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
        items = device_work(stream, odd, host, Backends())
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


def test_hot_operands_are_never_slower(tiny: dict[str, Any], traced: Tracing, profile: Profile) -> None:
    stream = traced(tiny)
    assert profile.host is not None
    without = replace(profile, device={**profile.device, "l2_bytes": 0})
    hot = device_work(stream, profile, profile.host, Backends())
    cold = device_work(stream, without, profile.host, Backends())
    assert all(a.seconds <= b.seconds * (1 + 1e-9) for a, b in zip(hot, cold, strict=True))


def test_backends_are_asked_for_by_class(tiny: dict[str, Any], traced: Tracing, profile: Profile) -> None:
    stream = traced(tiny)
    works = {w.op_class: w for op in stream.ops if (found := lower(stream, op)) and (w := describe(*found))}
    backends = Backends(matmul="triton", attention="sdpa")
    assert backends.of(works["gemm"], profile) == "triton"
    assert backends.of(works["attention"], profile) == "sdpa-cudnn"
    assert Backends(attention="sdpa-flash").of(works["attention"], profile) == "sdpa-flash"
    assert backends.of(works["pointwise"], profile) == "torch"
