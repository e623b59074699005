"""Simulates a step on host and device: the host enqueues op by op, and the device drains its queues in order.

A queue is a lane, a CUDA stream: lane 0 computes, and a step on several GPUs has others for what it sends. Ranks that
run the same step come to a collective together, so that one rank's simulation is all ranks'. The stages of a pipeline
run different ones: they are simulated beside each other, and wait for each other where one sends to another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp

# From the host's launch call to the kernel's start on an idle device; a step of a thousand launches shows it
# only where the host waits (a synchronisation).
LAUNCH_LATENCY_SECONDS = 4e-6


# The gap between two nodes of a replayed CUDA graph over that between two launches, which are 1.5 us apart on an H200:
# recorded steps of 800 to 1,800 kernels took from 0.03 us per kernel less than their kernels to 0.5 more, at the median
# 0.3 (`python -m studies.compiled.host`).
NODE_GAP = 0.2


STEPS = 3  # that are simulated, the last of them steady


class Ran(NamedTuple):
    """Seconds of a steady step, of the host until it has enqueued one for an idle device, its waits included, and of
    all steps in a row, from an idle device until it has drained."""

    step: float
    enqueued: float
    in_a_row: float


class Span(NamedTuple):
    """When an op, by its number, ran on the device. Of what stages send: `waited`, for how long since `start` it waited
    for the other stage."""

    op: int
    start: float
    end: float
    waited: float = 0.0

    @property
    def begun(self) -> Span:
        """Without the wait."""
        return self._replace(start=self.start + self.waited, waited=0.0)


class Message(NamedTuple):
    """What is sent to another stage, or received from it, by its number; the seconds that it takes once both are
    there."""

    peer: int
    is_sent: bool
    seconds: float


class Met(NamedTuple):
    """When a kernel that sends and receives has ended, and how long it had waited for other stages."""

    end: float
    waited: float


# (host seconds, kernel seconds, gaps within, launches, sync, number of the op, lane, numbers of the ops that it waits
# for, whether it is a collective, messages of a kernel that sends) of an op that launches kernels or makes the host
# wait; the host seconds include those of the ops before it that do neither. All nodes of a replayed CUDA graph are one
# launch.
_Entry = tuple[float, float, float, int, bool, int, int, tuple[int, ...], bool, tuple[Message, ...]]
# Yields when a kernel that sends begins, with its messages; gets when it has ended. Returns when each step ended and
# when the first was enqueued; None where repetitions have not become steady.
_Rank = Generator[tuple[float, tuple[Message, ...]], Met, "tuple[list[float], float] | None"]


class Simulation:
    """A simulation of a step on host and device, prepared once and run with several speeds.

    The host enqueues op by op; each lane runs its kernels in order with a gap between them, and each kernel after those
    of other lanes that it waits for; at most `queue_depth` launches are outstanding; a sync stops the host until lane 0
    has drained its queue. Other lanes begin a step when lane 0 has ended the one before. Operations that repeat
    (`TimedOp.count`) are simulated until a repetition shifts all times by the same amount; all later repetitions then
    do the same and are skipped.
    """

    def __init__(self, ops: Sequence[TimedOp], queue_depth: int, steps: int = STEPS) -> None:
        if steps < 2:
            raise ValueError("a steady step is the difference of two: steps must be at least 2")
        self._steps, self._queue_depth = steps, queue_depth
        alike = groupby(enumerate(ops), lambda one: (one[1].replay, one[1].replay or one[1].count))
        self._parts = [_part(list(run)) for _, run in alike]
        self._lanes = 1 + max((op.lane for op in ops), default=0)
        self._most = max((count for _, count in self._parts), default=1)
        self._prepared: dict[int, tuple[list[tuple[list[_Entry], int]], list[int]]] = {}

    def _prepare(self, most: int) -> tuple[list[tuple[list[_Entry], int]], list[int]]:
        """Returns the entries of a step in runs, where at most `most` repetitions are simulated and the last of them
        carries the number of repetitions left out; and the result of `_waiting` for the entries of all steps."""
        if most not in self._prepared:
            runs = []
            for entries, count in self._parts:
                times = min(count, most)
                runs += [(entries, 0)] * (times - 1) + [(entries, count - times)]
            self._prepared[most] = runs, self._waiting([entry[3] for run, _ in runs for entry in run])
        return self._prepared[most]

    def _waiting(self, step: Sequence[int]) -> list[int]:
        """Returns, for each entry of all steps, the entry that has to finish before the host goes on; -1 for none.

        Once launch n is enqueued, launch n - queue_depth must have finished; which entry holds it does not depend on
        times.
        """
        counts = list(step) * self._steps
        waits = []
        enqueued = finished = 0
        first = -1  # the entry that holds launch `enqueued - queue_depth`
        for count in counts:
            enqueued += count
            while finished < enqueued - self._queue_depth:
                first += 1
                finished += counts[first]
            waits.append(first if count else -1)
        return waits

    def run(
        self,
        *,
        gap_seconds: float,
        sync_seconds: float,
        host_factor: float = 1.0,
        device_factor: float = 1.0,
        link_factor: float = 1.0,
        spans: list[Span] | None = None,
    ) -> Ran:
        """Returns the seconds of one steady step when steps follow each other without waiting, and those in which the
        host enqueues the first. Kernels take `device_factor` times their seconds, collectives `link_factor` times.
        `spans` gets those of the last step."""
        speeds = gap_seconds, sync_seconds, host_factor, device_factor, link_factor
        most = min(self._most, _LEAST_RUNS)
        while (found := _alone(self.rank(most, *speeds, spans))) is None:
            most = min(self._most, 2 * most)
        (*_, before, last), enqueued = found
        return Ran(last - before, enqueued, last)

    def rank(
        self,
        most: int,
        gap_seconds: float,
        sync_seconds: float,
        host_factor: float,
        device_factor: float,
        link_factor: float,
        spans: list[Span] | None,
    ) -> _Rank:
        """As `run`, with at most `most` repetitions simulated, beside other stages."""
        host = 0.0
        lanes = [0.0] * self._lanes  # when each is free
        ended: dict[int, float] = {}  # when each op of a step on several lanes last ended, by its number
        follows = self._lanes > 1
        finish: list[float] = []
        finished = finish.append
        ends: list[float] = []
        enqueued = 0.0
        runs, all_waits = self._prepare(most)
        waits = iter(all_waits)
        latest = -1  # the last entry that the host waited for
        before = (0.0, 0.0)
        for step in range(self._steps):
            lanes[1:] = [max(lanes[0], free) for free in lanes[1:]]
            is_shown = spans is not None and step == self._steps - 1
            for entries, more_times in runs:
                if more_times:
                    before = host, lanes[0]
                for (own, seconds, more, launches_, is_sync, number, lane, others, is_sent, messages), wait in zip(
                    entries, waits, strict=False
                ):
                    host += own * host_factor
                    device = lanes[lane]
                    if launches_:
                        start = host + LAUNCH_LATENCY_SECONDS
                        if start < device + gap_seconds:
                            start = device + gap_seconds
                        for other in others:
                            if start < ended.get(other, 0.0):
                                start = ended[other]
                        waited = 0.0
                        if messages:
                            device, waited = yield start, messages
                        else:
                            device = start + seconds * (link_factor if is_sent else device_factor) + gap_seconds * more
                        lanes[lane] = device
                        if follows:
                            ended[number] = device
                        if is_shown and spans is not None:
                            spans.append(Span(number, start, device, waited))
                    finished(device)
                    if wait >= 0:
                        latest = wait
                        if finish[wait] > host:
                            host = finish[wait]
                    if is_sync:
                        host = (device if device > host else host) + sync_seconds
                if more_times:
                    moved = lanes[0] - before[1]
                    first = max(latest, 0)  # nothing before it will be waited for
                    earlier = first - len(entries)
                    if earlier < len(finish) - most * len(entries):
                        return None
                    pairs = zip(finish[first:], finish[earlier:], strict=False)
                    if not _agree([moved, host - before[0], *(now - then for now, then in pairs)]):
                        return None
                    skipped = moved * more_times
                    host += skipped
                    lanes = [free + skipped for free in lanes]
                    ended |= {
                        number: ended[number] + skipped for _, _, _, _, _, number, *_ in entries if number in ended
                    }
                    finish[first:] = [seconds + skipped for seconds in finish[first:]]
            ends.append(max(host, *lanes))
            enqueued = enqueued or host
        return ends, enqueued


_LEAST_RUNS = 4


def _alone(rank: _Rank) -> tuple[list[float], float] | None:
    """Runs a rank that sends to no other stage."""
    try:
        next(rank)
    except StopIteration as ended:
        found: tuple[list[float], float] | None = ended.value
        return found
    raise ValueError("a stage of a pipeline is simulated beside the others")


class Stages:
    """The simulations of a pipeline's stages, run beside each other: as `Simulation`, of the last stage."""

    def __init__(self, stages: Sequence[Sequence[TimedOp]], queue_depth: int, steps: int = 3) -> None:
        self._stages = [Simulation(ops, queue_depth, steps) for ops in stages]

    def run(
        self,
        *,
        gap_seconds: float,
        sync_seconds: float,
        host_factor: float = 1.0,
        device_factor: float = 1.0,
        link_factor: float = 1.0,
        spans: Sequence[list[Span]] | None = None,
    ) -> Ran:
        """As `Simulation.run`; a step takes until the latest stage has ended. `spans` gets those of each stage."""
        speeds = gap_seconds, sync_seconds, host_factor, device_factor, link_factor
        ranks = [
            stage.rank(1, *speeds, None if spans is None else spans[number])
            for number, stage in enumerate(self._stages)
        ]
        ended = _meet(ranks, link_factor)
        before, last = (max(ends[step] for ends, _ in ended) for step in (-2, -1))
        return Ran(last - before, ended[-1][1], last)


class _Kernel:
    """A kernel that sends and receives: it ends when all its messages have gone."""

    def __init__(self, rank: int, start: float, messages: int) -> None:
        self.rank, self.start, self.left = rank, start, messages
        self.end = self.began = start


def _meet(ranks: Sequence[_Rank], link_factor: float) -> list[tuple[list[float], float]]:
    """Runs stages until all have ended. The n-th that one sends to another is the n-th that this one receives from
    it; it goes when both kernels run."""
    ended: dict[int, tuple[list[float], float]] = {}
    waiting: defaultdict[tuple[int, int, bool], list[_Kernel]] = defaultdict(list)  # by sender, receiver, who waits
    ready: list[tuple[int, Met | None]] = [(number, None) for number in range(len(ranks))]
    while ready:
        number, met = ready.pop()
        try:
            start, messages = ranks[number].send(met)  # type: ignore[arg-type]  # None starts it
        except StopIteration as end:
            ended[number] = end.value
            continue
        kernel = _Kernel(number, start, len(messages))
        for peer, is_sent, seconds in messages:
            pair = (number, peer) if is_sent else (peer, number)
            others = waiting[*pair, not is_sent]
            if not others:
                waiting[*pair, is_sent].append(kernel)
                continue
            other = others.pop(0)
            began = max(start, other.start)
            for one in (kernel, other):
                one.left -= 1
                one.began = max(one.began, began)
                one.end = max(one.end, began + seconds * link_factor)
                if not one.left:
                    ready.append((one.rank, Met(one.end, one.began - one.start)))
    if len(ended) < len(ranks):
        raise ValueError("the stages of a pipeline wait for each other: what one sends no other receives")
    return [ended[number] for number in range(len(ranks))]


def _part(numbered: Sequence[tuple[int, TimedOp]]) -> tuple[list[_Entry], int]:
    """Returns the entries of one repetition of ops that follow each other, and how often they are repeated."""
    ops = [op for _, op in numbered]
    count = min(op.count for op in ops)  # layers that stand for several run more often than the graph that holds them
    if not ops[0].replay:
        return _entries(numbered, count), count
    host, seconds, nodes = (sum(getattr(op, name) for op in ops) for name in ("host_seconds", "seconds", "launches"))
    gaps = NODE_GAP * max(nodes / count - 1, 0.0)
    return [(host / count, seconds / count, gaps, 1, False, numbered[0][0], 0, (), False, ())], count


def _entries(numbered: Iterable[tuple[int, TimedOp]], count: int) -> list[_Entry]:
    """Returns the entries of one of the operations' `count` repetitions; the host seconds of an operation that neither
    launches nor waits are added to the next one that does. What is sent and received together is one entry, of the last
    of these operations."""
    entries: list[_Entry] = []
    host = 0.0
    together = 0
    for number, op in numbered:
        host += op.host_seconds / count
        sent = op.collective
        if op.launches or op.kind == "sync":
            launched, others = op.launches // count, op.waits
            messages: tuple[Message, ...] = ()
            if sent is not None and sent.peer >= 0:
                messages = (Message(sent.peer, sent.is_sent, op.seconds),)
                if sent.together and sent.together == together:
                    before = entries.pop()
                    host, others, messages = host + before[0], (*before[7], *others), (*before[9], *messages)
            where = number, op.lane, others, sent is not None, messages
            entries.append((host, op.seconds / count, max(launched - 1, 0), launched, op.kind == "sync", *where))
            host, together = 0.0, sent.together if sent is not None else 0
    entries.append((host, 0.0, 0, 0, False, -1, 0, (), False, ()))
    return entries


def _agree(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= 1e-9 * max(values)


def is_synchronous(profile: Profile) -> bool:
    """Returns whether an operation is complete when its call returns, as on the CPU as a device."""
    return bool(profile.device.get("type") == "cpu")
