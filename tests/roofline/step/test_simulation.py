"""The step is simulated: what a user may rely on of host and device timelines, whatever their costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.simulation import LAUNCH_LATENCY_SECONDS, NODE_GAP, Simulation, Stages
from flopcast.roofline.step.timeline import Timeline
from flopcast.roofline.stream.ops.collectives import Collective

GAP, SYNC = 1e-6, 1e-5
PROCESSOR = replace(find_profile("nvidia-h200"), device={"type": "cpu"})


def item(host: float, device: float = 0.0, launches: int | None = None, kind: str = "launch") -> TimedOp:
    count = (1 if device else 0) if launches is None else launches
    return TimedOp("forward", kind, host, seconds=device, launches=count)


def step_of(items: list[TimedOp], *, queue_depth: int = 1024, steps: int = 3, **seconds: float) -> float:
    return Simulation(items, queue_depth, steps).run(**{"gap_seconds": GAP, "sync_seconds": SYNC, **seconds}).step


microseconds = st.integers(1, 200).map(lambda n: n * 1e-6)
kernels = st.builds(item, microseconds, microseconds, st.integers(1, 3))
views = st.builds(item, microseconds)
syncs = st.builds(item, microseconds, microseconds, st.just(1), st.just("sync"))
steps_without_sync = st.lists(st.one_of(kernels, views), min_size=1, max_size=40)
any_steps = st.lists(st.one_of(kernels, views, kernels, syncs), min_size=1, max_size=40)


def host_sum(items: list[TimedOp]) -> float:
    return sum(i.host_seconds for i in items)


def device_sum(items: list[TimedOp]) -> float:
    return sum(i.seconds + GAP * i.launches for i in items)


@given(any_steps)
def test_a_step_takes_what_either_side_takes(items: list[TimedOp]) -> None:
    step = step_of(items)
    assert step >= host_sum(items) * (1 - 1e-9)
    assert step >= device_sum(items) * (1 - 1e-9)
    sync = sum(i.kind == "sync" for i in items)
    assert step <= host_sum(items) + device_sum(items) + len(items) * LAUNCH_LATENCY_SECONDS + sync * SYNC


def test_steps_in_a_row_end_when_the_last_has_drained() -> None:
    """Kernels of 2 ms, which the host enqueues last in its step of 5 ms: five such steps wait for the last two."""
    step = [item(1e-3, 0.1e-3) for _ in range(4)] + [item(1e-3, 2e-3)]
    timeline = Timeline(step, find_profile("nvidia-h200"))
    assert timeline.step_seconds() == pytest.approx(5e-3, rel=0.01)
    assert timeline.seconds_in_a_row(5) == pytest.approx(5e-3 + 2e-3 / 5, rel=0.01)
    assert timeline.seconds_in_a_row(20) == pytest.approx(5e-3 + 2e-3 / 20, rel=0.01)
    assert Timeline(step, PROCESSOR).seconds_in_a_row(5) == Timeline(step, PROCESSOR).step_seconds()


@given(steps_without_sync)
def test_without_a_sync_the_slower_side_is_the_step(items: list[TimedOp]) -> None:
    assert step_of(items, queue_depth=10**6, steps=40) == pytest.approx(
        max(host_sum(items), device_sum(items)), rel=0.05, abs=0
    ) or abs(host_sum(items) - device_sum(items)) < 0.1 * host_sum(items)


@given(any_steps, st.data())
def test_more_of_anything_is_never_faster(items: list[TimedOp], data: st.DataObject) -> None:
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
def test_a_sync_never_helps(items: list[TimedOp], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(items) - 1))
    synced = [*items[:at], replace(items[at], kind="sync"), *items[at + 1 :]]
    assert step_of(synced) >= step_of(items) - 1e-12


@given(any_steps, st.integers(1, 30))
def test_a_shorter_queue_is_never_faster(items: list[TimedOp], depth: int) -> None:
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


def loop(host: float, device: float, launches: int, looped: float) -> TimedOp:
    """A product that is run group by group."""
    one = item(host + looped, device, launches)
    return replace(one, looped_seconds=looped)


def test_a_loop_waits_first_and_launches_while_the_host_goes_on() -> None:
    before = [item(1e-6, 5e-5) for _ in range(40)]  # 2 ms of the device, which the host is far ahead of
    after = [item(1e-6, 5e-5)]
    ahead = step_of([*before, item(1e-6, 1e-3, 10), *after])
    looped = step_of([*before, loop(1e-6, 1e-3, 10, 3e-3), *after])
    assert ahead == pytest.approx(3.05e-3, rel=0.03)
    assert looped == pytest.approx(2e-3 + 3e-3 + 5e-5, rel=0.03), "the loop's kernels run beside its further calls"


@given(any_steps, st.integers(0, 40), microseconds, microseconds)
def test_a_loop_never_helps(items: list[TimedOp], place: int, device: float, looped: float) -> None:
    def beside(one: TimedOp) -> float:
        return step_of([*items[:place], one, *items[place:]])

    assert beside(loop(1e-6, device, 4, looped)) >= beside(item(1e-6, device, 4)) - 1e-12
    assert beside(loop(1e-6, device, 4, 2 * looped)) >= beside(loop(1e-6, device, 4, looped)) - 1e-12


def test_a_sync_takes_the_host_its_time_once_each() -> None:
    items = [item(1e-6, 1e-4), item(1e-6, 1e-6, kind="sync"), item(1e-6, 1e-4), item(1e-6, 1e-6, kind="sync")]
    assert step_of(items, sync_seconds=1e-3) - step_of(items, sync_seconds=0.0) == pytest.approx(2e-3, rel=0.01)


@given(any_steps, st.floats(0.5, 2), st.floats(0.5, 2))
def test_a_processor_runs_each_op_when_it_is_called(items: list[TimedOp], host: float, device: float) -> None:
    step = Timeline(items, PROCESSOR).step_seconds(host_factor=host, device_factor=device)
    assert step == pytest.approx(host * host_sum(items) + device * sum(i.seconds for i in items))


def test_no_steady_step_without_two() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        step_of([item(1e-6, 1e-6)], steps=1)


def in_graph(items: list[TimedOp], replay: int = 1) -> list[TimedOp]:
    return [replace(i, replay=replay) for i in items]


def test_a_replayed_graph_is_one_launch_with_short_gaps() -> None:
    """A hundred kernels of 10 us: replayed, the host enqueues them at once, and a fifth of the gaps is left."""
    kernels = [item(1e-7, 1e-5) for _ in range(100)]
    assert step_of(in_graph(kernels), queue_depth=1) == pytest.approx(100e-5 + NODE_GAP * 99 * GAP + GAP, rel=0.01)
    assert step_of(kernels) == pytest.approx(100 * (1e-5 + GAP), rel=0.01)


@given(st.lists(kernels, min_size=2, max_size=20))
def test_a_replay_starts_when_the_host_has_enqueued_all_of_it(items: list[TimedOp]) -> None:
    """Between two waits nothing overlaps: the host's part of both graphs, then their kernels."""
    waits = item(0.0, 1e-6, kind="sync")
    step = step_of([*in_graph(items), waits, *in_graph(items, 2), waits])
    nodes = sum(i.launches for i in items)
    once = host_sum(items) + sum(i.seconds for i in items) + NODE_GAP * GAP * (nodes - 1)
    assert step == pytest.approx(2 * (once + LAUNCH_LATENCY_SECONDS + GAP + 1e-6 + SYNC), rel=1e-6)


def test_a_layer_that_stands_for_several_is_replayed_with_its_graph() -> None:
    layer = [item(1e-6, 2e-5) for _ in range(5)]
    whole = in_graph([item(1e-6, 1e-5), *layer * 10, item(1e-6, 1e-5)])
    several = [replace(i, count=10, host_seconds=1e-5, seconds=2e-4, launches=10) for i in layer]
    assert step_of(in_graph([item(1e-6, 1e-5), *several, item(1e-6, 1e-5)])) == pytest.approx(step_of(whole))


# --- several lanes


def on_lane(lane: int, host: float, device: float, *waits: int) -> TimedOp:
    return replace(item(host, device), lane=lane, waits=waits)


@given(any_steps, st.integers(1, 3))
def test_a_lane_that_nobody_waits_for_costs_nothing(items: list[TimedOp], lane: int) -> None:
    """A short kernel beside each of the others: only the host's share of it is paid."""
    beside = [one for kernel in items for one in (kernel, on_lane(lane, 0.0, 1e-9))]
    assert step_of(beside) == pytest.approx(step_of(items), rel=1e-6, abs=2 * LAUNCH_LATENCY_SECONDS)


def test_a_kernel_starts_when_those_that_it_waits_for_have_ended() -> None:
    """Two lanes of 1 ms each side by side, and one after the other where the second waits for the first."""
    beside = [item(1e-6, 1e-3), on_lane(1, 1e-6, 1e-3)]
    in_turn = [item(1e-6, 1e-3), on_lane(1, 1e-6, 1e-3, 0), replace(item(1e-6, 1e-6), waits=(1,))]
    assert step_of(beside) == pytest.approx(1e-3, rel=0.02)
    assert step_of(in_turn) == pytest.approx(2e-3, rel=0.02)


def test_a_step_begins_on_other_lanes_when_lane_0_has_ended_the_one_before() -> None:
    """What is sent first is what the step before has written."""
    sent = [on_lane(1, 1e-6, 1e-3), replace(item(1e-6, 1e-3), waits=(0,))]
    assert step_of(sent) == pytest.approx(2e-3, rel=0.02)


def test_a_sync_waits_for_the_lane_that_it_is_on() -> None:
    sync = item(1e-6, 1e-6, kind="sync")
    assert step_of([on_lane(1, 1e-6, 5e-3), sync, item(1e-3)]) == pytest.approx(5e-3, rel=0.02)
    assert step_of([item(1e-6, 5e-3), sync, item(1e-3)]) == pytest.approx(6e-3, rel=0.02)


@given(st.lists(kernels, min_size=2, max_size=20), st.integers(2, 30))
def test_micro_batches_that_wait_within_themselves_repeat(items: list[TimedOp], count: int) -> None:
    """Each sends what its kernels made, and goes on when that is there; folded, it is one that counts for all."""
    last = len(items) - 1
    part = [*items, on_lane(1, 1e-6, 5e-5, last), replace(item(1e-6, 1e-6), waits=(last + 1,))]
    whole = [replace(op, waits=tuple(n + i * len(part) for n in op.waits)) for i in range(count) for op in part]
    several = [
        replace(op, count=count, host_seconds=op.host_seconds * count, seconds=op.seconds * count,
                launches=op.launches * count)
        for op in part
    ]  # fmt: skip
    assert step_of(several) == pytest.approx(step_of(whole), rel=1e-6)


FORWARD, BACKWARD = 1e-3, 2e-3


def stage(number: int, stages: int, micro_batches: int, schedule: str) -> list[TimedOp]:
    """A stage whose forwards and backwards take FORWARD and BACKWARD, in the order in which torch runs them; what it
    sends before it turns from the one to the other goes together with what it then receives."""
    warm = micro_batches if schedule == "gpipe" else min(stages - number, micro_batches)
    order = "F" * warm + "BF" * (micro_batches - warm) + "B" * warm
    ops: list[TimedOp] = []
    for before, what in zip(" " + order, order + " ", strict=True):
        sent = {"F": number + 1, "B": number - 1}.get(before, -1)
        received = {"F": number - 1, "B": number + 1}.get(what, -1)
        together = len(ops) + 1 if sent == received and schedule == "1f1b" else 0
        for peer, is_sent in ((sent, True), (received, False)):
            if 0 <= peer < stages:
                message = Collective(0, "send_recv", 1024, 2, 1, "fp32", 1, peer, is_sent, together)
                waits = (len(ops) - 1,) if ops and ops[-1].lane == 0 else ()
                ops.append(replace(on_lane(1, 1e-9, 1e-9, *waits), collective=message))
        if what != " ":
            waits = (len(ops) - 1,) if ops and ops[-1].lane == 1 else ()
            ops.append(replace(item(1e-9, FORWARD if what == "F" else BACKWARD), waits=waits))
    return ops


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 4), (4, 12)])
def test_a_pipeline_waits_for_as_many_micro_batches_as_it_has_other_stages(
    schedule: str, stages: int, micro_batches: int
) -> None:
    """Both schedules take (micro-batches + stages - 1) turns (Narayanan et al., arXiv 2104.04473)."""
    all_stages = [stage(number, stages, micro_batches, schedule) for number in range(stages)]
    ran = Stages(all_stages, 1024).run(gap_seconds=0.0, sync_seconds=0.0)
    turn = FORWARD + BACKWARD
    assert ran.step == pytest.approx((micro_batches + stages - 1) * turn, rel=0.02)
    shares = Timeline(all_stages[-1], find_profile("nvidia-h200"), None, all_stages[:-1]).shares
    assert shares.bubble < (stages - 1) * turn * 1.02


def test_what_two_ranks_exchange_is_one_kernel() -> None:
    """Both send 1 ms and receive 1 ms at once; in turn it would be 2 ms."""

    def of(peer: int) -> list[TimedOp]:
        both = (Collective(0, "send_recv", 1, 2, 1, "fp32", 1, peer, is_sent, 1) for is_sent in (True, False))
        return [replace(on_lane(1, 1e-6, 1e-3), collective=one) for one in both]

    ran = Stages([of(1), of(0)], 1024).run(gap_seconds=0.0, sync_seconds=0.0)
    assert ran.step == pytest.approx(1e-3, rel=0.02)


def test_stages_that_wait_for_each_other_are_told() -> None:
    received = replace(on_lane(1, 1e-6, 1e-3), collective=Collective(0, "send_recv", 1, 2, 1, "fp32", 1, 1, False))
    with pytest.raises(ValueError, match="what one sends no other receives"):
        Stages([[received], [item(1e-6, 1e-3)]], 1024).run(gap_seconds=0.0, sync_seconds=0.0)


def test_the_host_is_known_by_itself() -> None:
    items = [*(item(1e-5, 1e-3) for _ in range(10))]
    ran = Simulation(items, 1024).run(gap_seconds=GAP, sync_seconds=SYNC)
    assert ran.step == pytest.approx(10e-3, rel=0.01)
    assert ran.enqueued == pytest.approx(1e-4)
