"""Measures collectives in the processes of a session: what NCCL picks, times, host cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import nan
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flopcast.microbench.collectives.cases import KINDS, Case, Members
from flopcast.microbench.collectives.clock import Call, Clock, Samples
from flopcast.microbench.collectives.nccl_log import LogReader, choices, send_channels
from flopcast.microbench.collectives.operations import TOLERANCE, Group, Operation, fill, operation, relative_error
from flopcast.microbench.collectives.session import Session
from flopcast.microbench.records.rows import CollectiveRow, LaunchCostRow, RegimeRow, rounded
from flopcast.microbench.sweep.work import first_line, is_out_of_memory, status_of
from flopcast.microbench.timing.cuda_timer import CudaTimer

SMALL = 1024  # bytes of the collectives whose launch is timed
LAUNCHES, ROUNDS = 200, 7


class Buffers:
    """Two buffers of the largest case and random data of one, allocated once. `most` is what all processes have room
    for."""

    def __init__(self, session: Session, wanted: int) -> None:
        self.most = wanted
        if session.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(session.device)
            room = min(session.gathered(free // 4))  # three buffers, and what NCCL takes
            while self.most > room:
                self.most //= 2
        self.first, self.second, self._random = (self._make(session.device) for _ in range(3))
        half: Tensor = self._random.view(torch.bfloat16)
        half.normal_()

    def _make(self, device: torch.device) -> Tensor:
        return torch.empty(self.most, dtype=torch.uint8, device=device)

    def random(self, made: Operation) -> Call:
        """Writes normal data to what an operation reads: zeros take less power, and sums in place overflow."""
        data = self._random[: made.source.numel() * made.source.element_size()].view(made.source.dtype)
        return lambda: made.source.copy_(data)


def run_collectives(session: Session, cases: Sequence[Case], buffers: Buffers, clock: Clock) -> None:
    """Times each case that the folder lacks. Each is checked first; one that is wrong is not timed."""
    for index in session.each("collectives", [f"collective/{case.name}" for case in cases]):
        case = cases[index]
        group = session.group(case.members)
        if group is None:
            continue
        fields = time_case(case, group, clock, buffers)
        session.record(CollectiveRow, f"collective/{case.name}", case.members, {"bytes": case.bytes, **fields})


def time_case(case: Case, group: Group, clock: Clock, buffers: Buffers) -> dict[str, Any]:
    """The fields of a case's row. All members must come to the same end: one that failed is told to all."""
    if case.bytes > buffers.most:
        return {"status": "oom", "reason": f"three buffers of {case.bytes} bytes do not fit"}
    made = operation(case, group, buffers.first, buffers.second)
    fault, error = _checked(case, group, made)
    if group.longest(float(fault is not None)):
        return fault or {"status": "error", "reason": "another member failed"}
    worst = group.longest(error)
    if not worst <= TOLERANCE:
        return {"status": "incorrect", "relative_error": worst, "tolerance": TOLERANCE,
                "reason": f"off by {worst:.3g} of the largest value"}  # fmt: skip
    found = clock.time(made.call, group, buffers.random(made))
    each = group.all_of(found.median)
    slowest = max(each)
    return {
        "seconds": slowest, "value": slowest, "unit": "seconds", "fastest_seconds": min(each),
        "relative_error": worst, "tolerance": TOLERANCE, **sample_fields(found),
    }  # fmt: skip


def _checked(case: Case, group: Group, made: Operation) -> tuple[dict[str, Any] | None, float]:
    """(why it could not be run, its error) of one call on the known pattern."""
    try:
        made.result.fill_(nan)
        fill(made.source, group.number)
        made.call()
        return None, relative_error(case, group, made)
    except (RuntimeError, NotImplementedError) as error:
        lacking = "not support" in str(error) or "not implemented" in str(error).lower()
        status = "unsupported" if lacking and not is_out_of_memory(error) else status_of(error)
        return {"status": status, "reason": first_line(error)}, 0.0


def sample_fields(found: Samples) -> dict[str, Any]:
    """The fields of a row that say how it was timed."""
    return {"samples": rounded(found.seconds), "n": len(found.seconds), "timer": found.timer,
            "calls_per_sample": found.calls, **found.reading.as_row()}  # fmt: skip


# --- what NCCL picks


def run_regimes(session: Session, cases: Sequence[Case], buffers: Buffers, log: LogReader) -> None:
    """Calls each case once and records what NCCL logged of it: run with `nccl_log.VARIABLES`."""
    sends: dict[str, tuple[int, int] | None] = {}
    for index in session.each("NCCL's choices", [f"regime/{case.name}" for case in cases]):
        case = cases[index]
        group = session.group(case.members)
        if group is None or case.bytes > buffers.most:
            continue
        name = str(case.members)
        operation(case, group, buffers.first, buffers.second).call()
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        text = log.new()
        sends[name] = send_channels(text) or sends.get(name)
        fields = _choice_fields(case, text, sends[name])
        session.record(RegimeRow, f"regime/{case.name}", case.members, {"bytes": case.bytes, **fields})


def _choice_fields(case: Case, text: str, sends: tuple[int, int] | None) -> dict[str, Any]:
    found = [choice for choice in choices(text) if choice.kind == case.kind]
    if found:
        last = found[-1]
        return {"algorithm": last.algorithm, "protocol": last.protocol, "channels": last.channels}
    if case.kind in ("all_to_all", "send_recv") and sends is not None:
        channels = sends[case.kind == "send_recv"]
        return {"algorithm": "", "protocol": "", "channels": channels, "note": "the most that sends may take"}
    return {"status": "unsupported", "reason": "NCCL's log says nothing of it"}


# --- the host


def run_launch_costs(session: Session, members: Sequence[Members], buffers: Buffers, timer: CudaTimer) -> None:
    """Times the host of GPUs: collectives of 1 KiB in a row, launched from Python and as nodes of a graph."""
    wanted = [(some, kind) for some in members for kind in KINDS if kind != "send_recv" or some.gpus % 2 == 0]
    keys = [f"launch_cost/{kind}/{some}" for some, kind in wanted]
    for index in session.each("host cost of collectives", keys):
        some, kind = wanted[index]
        group = session.group(some)
        if group is None:
            continue
        size = max(SMALL, 2 * some.gpus)
        made = operation(Case(kind, "bf16", some, size), group, buffers.first, buffers.second)
        fields = _launch_cost(made, group, timer, buffers.random(made))
        session.record(LaunchCostRow, keys[index], some, fields)


def _launch_cost(made: Operation, group: Group, timer: CudaTimer, again: Call) -> dict[str, Any]:
    device = timer.device
    with torch.cuda.stream(timer.stream):
        again()
        made.call()

        def in_a_row() -> None:
            for _ in range(LAUNCHES):
                made.call()

        python = [_host_seconds(in_a_row, group, device) / LAUNCHES for _ in range(ROUNDS)]
        graph = timer.capture([made.call], LAUNCHES)
        captured: list[float] = []
        if group.longest(float(isinstance(graph, str))) == 0.0 and not isinstance(graph, str):
            graph.replay()
            captured = [_host_seconds(graph.replay, group, device) / LAUNCHES for _ in range(ROUNDS)]
    cost = median(python)
    return {
        "value": cost, "seconds": cost, "unit": "seconds", "samples": rounded(python), "n": len(python),
        "timer": "wall", "captured_seconds": median(captured) if captured else None,
    }  # fmt: skip


def _host_seconds(run: Callable[[], Any], group: Group, device: torch.device) -> float:
    """Until the host has launched what `run` launches, on idle devices."""
    torch.cuda.synchronize(device)
    group.longest(0.0)  # none begins while another is still busy
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
