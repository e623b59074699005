"""Stretches of kernels are simulated at once, and come out as one operation after the other does, to the last bit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.simulation import LAUNCH_LATENCY_SECONDS, Ran, Simulation, Span
from flopcast.roofline.stream.ops.collectives import Collective

SYNC = 1e-5
microseconds = st.integers(0, 200_000).map(lambda n: n * 1e-9)
SENT = Collective(0, "all_reduce", 1, 2, 1, "fp32", 0)


@st.composite
def steps(draw: st.DrawFn) -> list[TimedOp]:
    """Operations on up to three lanes, some that wait for others, launch nothing, or several kernels, or are waited for
    by the host."""
    ops: list[TimedOp] = []
    for _ in range(draw(st.integers(1, 60))):
        kind = draw(st.sampled_from(["kernel"] * 8 + ["view", "sync", "several", "sent"]))
        one = TimedOp("forward", "sync" if kind == "sync" else "launch", draw(microseconds))
        if kind != "view":
            launches = {"several": draw(st.integers(2, 4)), "sync": draw(st.integers(0, 1))}.get(kind, 1)
            lane = draw(st.sampled_from([0, 0, 0, 0, 1, 2]))
            waits = draw(st.lists(st.integers(0, len(ops) - 1), max_size=2)) if ops and draw(st.booleans()) else []
            one = replace(
                one, seconds=draw(microseconds), launches=launches, lane=lane, waits=tuple(sorted(set(waits))),
                collective=SENT if kind == "sent" else None,
            )  # fmt: skip
        ops.append(one)
    return ops


def op_by_op(
    ops: list[TimedOp], queue: int, gap: float, host_factor: float, device_factor: float, link_factor: float
) -> tuple[Ran, list[Span]]:
    """What `Simulation` does, three steps of it, with nothing left out."""
    host = pending = enqueued = 0.0
    free = [0.0, 0.0, 0.0]
    ended: dict[int, float] = {}
    launched: list[float] = []  # when the operation of each launch ends
    ends: list[float] = []
    spans: list[Span] = []
    several = any(op.lane for op in ops)
    for _ in range(3):
        free[1:] = [max(free[0], one) for one in free[1:]]
        spans = []
        for number, op in enumerate(ops):
            pending += op.host_seconds
            if not op.launches and op.kind != "sync":
                continue
            host, pending = host + pending * host_factor, 0.0
            if op.launches:
                waited = [ended.get(other, 0.0) for other in op.waits] if several else []
                start = max(host + LAUNCH_LATENCY_SECONDS, free[op.lane] + gap, *waited)
                factor = device_factor if op.collective is None else link_factor
                free[op.lane] = ended[number] = start + op.seconds * factor + gap * (op.launches - 1)
                launched += [free[op.lane]] * op.launches
                spans.append(Span(number, start, free[op.lane]))
                if len(launched) > queue:
                    host = max(host, launched[len(launched) - queue - 1])
            if op.kind == "sync":
                host = max(host, free[op.lane]) + SYNC
        host, pending = host + pending * host_factor, 0.0
        ends.append(max(host, *free))
        enqueued = enqueued or host
    return Ran(ends[2] - ends[1], enqueued, ends[2]), spans


factors = st.sampled_from([1.0, 0.7, 1.9])


@given(steps(), st.sampled_from([1, 2, 5, 20, 1024]), st.sampled_from([0.0, 1.5e-6]), factors, factors, factors)
def test_stretches_are_as_one_operation_after_the_other(
    ops: list[TimedOp], queue: int, gap: float, host: float, device: float, link: float
) -> None:
    spans: list[Span] = []
    speeds = {"gap_seconds": gap, "sync_seconds": SYNC, "host_factor": host, "device_factor": device}
    simulation = Simulation(ops, queue)
    found = simulation.run(**speeds, link_factor=link, spans=spans)
    assert (found, spans) == op_by_op(ops, queue, gap, host, device, link)
    assert simulation.run(**speeds, link_factor=link) == found  # no spans are asked for
    slower = [replace(op, seconds=2 * op.seconds) for op in ops]
    assert simulation.taking([op.seconds for op in slower]).run(**speeds, link_factor=link) == Simulation(
        slower, queue
    ).run(**speeds, link_factor=link)
