"""Simulates a step on host and device: the host enqueues op by op, and the device drains its queues in order.

A queue is a lane, a CUDA stream: lane 0 computes, and a step on several GPUs has others for what it sends. Ranks that
run the same step come to a collective together, so that one rank's simulation is all ranks'. The stages of a pipeline
run different ones: they are simulated beside each other, and wait for each other where one sends to another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence, Set
from copy import copy
from itertools import accumulate, groupby
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


class _Entry(NamedTuple):
    """An op that launches kernels or makes the host wait. `launches`, of which all but the first follow at `more` gaps;
    `others`: numbers of the ops that it waits for; `sends`: of a kernel that sends, each message's peer, whether it is
    sent, and the op's number. All nodes of a replayed CUDA graph are one launch."""

    number: int
    lane: int = 0
    launches: int = 0
    more: float = 0.0
    is_sync: bool = False
    others: tuple[int, ...] = ()
    is_collective: bool = False
    sends: tuple[tuple[int, bool, int], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is one kernel, for which nobody has to wait here."""
        return self.launches == 1 and not (self.more or self.is_sync or self.sends)


class _Piece(NamedTuple):
    """Entries of a part, from `first` to before `stop`: several single kernels that follow each other on a lane, of
    which the first alone waits for `others`; or where `entry` is not None that one. `awaited`: place among them and
    number of the ops that others wait for; `numbers`: those of all its ops."""

    first: int
    stop: int
    lane: int
    others: tuple[int, ...]
    awaited: tuple[tuple[int, int], ...]
    entry: _Entry | None
    numbers: tuple[int, ...]


class _Part(NamedTuple):
    """Ops that follow each other and are repeated so many `times`: the entries of one repetition, the host seconds of
    each, which include those of the ops before it that launch nothing, and the ops whose seconds are its own."""

    times: int
    entries: list[_Entry]
    host: list[float]
    ops: list[tuple[int, ...]]
    pieces: list[_Piece]


class _Plan(NamedTuple):
    """The order of a step in which at most so many repetitions are simulated, (part, repetitions left out after it);
    for each piece in each of all steps, the entries that have to finish before the host goes on, one for each of its
    own, -1 for none."""

    order: list[tuple[int, int]]
    waits: list[list[int]]


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
        awaited = frozenset(number for op in ops for number in op.waits)
        self._parts = [_part(list(run), awaited) for _, run in alike]
        self._lanes = 1 + max((op.lane for op in ops), default=0)
        self._most = max((part.times for part in self._parts), default=1)
        self._plans: dict[int, _Plan] = {}
        self._host = [_cut(part.host, part) for part in self._parts]
        self._take([op.seconds for op in ops])

    def _take(self, seconds: Sequence[float]) -> None:
        self._of_ops = seconds
        self._seconds = [  # of each part's entries
            [(seconds[ops[0]] if len(ops) == 1 else sum(seconds[op] for op in ops)) / part.times for ops in part.ops]
            for part in self._parts
        ]
        self._kernels = [_cut(of_part, part) for of_part, part in zip(self._seconds, self._parts, strict=True)]

    def taking(self, seconds: Sequence[float]) -> Simulation:
        """The same step with other seconds of its operations' kernels."""
        other = copy(self)
        other._take(seconds)
        return other

    def _plan(self, most: int) -> _Plan:
        if most not in self._plans:
            order = []
            for number, part in enumerate(self._parts):
                times = min(part.times, most)
                order += [(number, 0)] * (times - 1) + [(number, part.times - times)]
            parts = [self._parts[number] for number, _ in order]
            waiting = self._waiting([entry.launches for part in parts for entry in part.entries])
            pieces = [piece.stop - piece.first for part in parts for piece in part.pieces] * self._steps
            ends = list(accumulate(pieces))
            waits = [waiting[end - length : end] for length, end in zip(pieces, ends, strict=True)]
            self._plans[most] = _Plan(order, waits)
        return self._plans[most]

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
        """Runs as `run` does, beside other stages, with at most `most` repetitions of each part simulated. The caller
        answers each kernel that sends (`_Rank`); `_alone` and `_meet` do."""
        host = 0.0
        lanes = [0.0] * self._lanes  # when each is free
        ended: dict[int, float] = {}  # when each op of a step on several lanes last ended, by its number
        follows = self._lanes > 1
        finish: list[float] = []
        finished = finish.append
        ends: list[float] = []
        enqueued = 0.0
        plan = self._plan(most)
        waits = iter(plan.waits)
        latest = -1  # the last entry that the host waited for
        past = 0  # entries that had all finished when the host looked
        before = (0.0, 0.0)
        own_, seconds_ = self._at(host_factor, device_factor, link_factor)
        for step in range(self._steps):
            lanes[1:] = [max(lanes[0], free) for free in lanes[1:]]
            shown = spans if step == self._steps - 1 else None
            for place, more_times in plan.order:
                part, part_own, part_seconds = self._parts[place], own_[place], seconds_[place]
                if more_times:
                    before = host, lanes[0]
                for piece, own, seconds, waited_for in zip(part.pieces, part_own, part_seconds, waits, strict=False):
                    _, _, lane, others, awaited, entry, numbers = piece
                    ready = lanes[lane] + gap_seconds  # the earliest start
                    for other in others:
                        if ready < ended.get(other, 0.0):
                            ready = ended[other]
                    begun = len(finish)
                    last = waited_for[-1]
                    if entry is not None:
                        number, _, launches, more, is_sync, _, _, sends = entry
                        device, waited = lanes[lane], 0.0
                        host += own[0]
                        if launches:
                            start = host + LAUNCH_LATENCY_SECONDS
                            if start < ready:
                                start = ready
                            if sends:
                                messages = [Message(peer, sent, self._of_ops[op]) for peer, sent, op in sends]
                                device, waited = yield start, tuple(messages)
                            else:
                                device = start + seconds[0] + gap_seconds * more
                            lanes[lane] = device
                            if shown is not None:
                                shown.append(Span(number, start, device, waited))
                        finished(device)
                        if last >= 0 and finish[last] > host:
                            host = finish[last]
                        if is_sync:
                            host = (device if device > host else host) + sync_seconds
                    elif shown is None and last < begun and (last < past or max(finish[past : last + 1]) <= host):
                        past = max(past, last + 1)  # the host does not wait
                        for more, kernel in zip(own, seconds):  # noqa: B905  # strict costs a tenth of a run
                            host += more
                            start = host + LAUNCH_LATENCY_SECONDS
                            if start < ready:
                                start = ready
                            device = start + kernel
                            finished(device)
                            ready = device + gap_seconds
                        lanes[lane] = device
                    else:
                        for more, kernel, wait, number in zip(own, seconds, waited_for, numbers):  # noqa: B905
                            host += more
                            start = host + LAUNCH_LATENCY_SECONDS
                            if start < ready:
                                start = ready
                            device = start + kernel
                            finished(device)
                            ready = device + gap_seconds
                            if wait >= 0 and finish[wait] > host:
                                host = finish[wait]
                            if shown is not None:
                                shown.append(tuple.__new__(Span, (number, start, device, 0.0)))
                        lanes[lane] = device
                    if last >= 0:
                        latest = last
                    if follows:
                        for offset, number in awaited:
                            ended[number] = finish[begun + offset]
                if more_times:
                    moved = lanes[0] - before[1]
                    length = len(part.entries)
                    first = max(latest, 0)  # nothing before it will be waited for
                    earlier = first - length
                    if earlier < len(finish) - most * length:
                        return None
                    pairs = zip(finish[first:], finish[earlier:], strict=False)
                    if not _agree([moved, host - before[0], *(now - then for now, then in pairs)]):
                        return None
                    skipped = moved * more_times
                    host += skipped
                    lanes = [free + skipped for free in lanes]
                    ended |= {
                        entry.number: ended[entry.number] + skipped for entry in part.entries if entry.number in ended
                    }
                    finish[first:] = [seconds + skipped for seconds in finish[first:]]
            ends.append(max(host, *lanes))
            enqueued = enqueued or host
        return ends, enqueued

    def _at(
        self, host_factor: float, device_factor: float, link_factor: float
    ) -> tuple[list[list[Sequence[float]]], list[list[Sequence[float]]]]:
        """Returns the seconds of host and kernels at these speeds: by part, by piece, of each of its entries."""
        host, kernels = self._host, self._kernels
        if host_factor != 1.0:
            host = [_cut([one * host_factor for one in part.host], part) for part in self._parts]
        if not device_factor == link_factor == 1.0:
            factors = device_factor, link_factor
            pairs = zip(self._seconds, self._parts, strict=True)
            kernels = [_cut(_times(seconds, part.entries, *factors), part) for seconds, part in pairs]
        return host, kernels


def _cut(values: Sequence[float], part: _Part) -> list[Sequence[float]]:
    """What belongs to the entries of a part, by piece."""
    return [values[piece.first : piece.stop] for piece in part.pieces]


def _times(seconds: Sequence[float], entries: Sequence[_Entry], device: float, link: float) -> list[float]:
    if device == link:
        return [one * device for one in seconds]
    return [one * (link if entry.is_collective else device) for one, entry in zip(seconds, entries, strict=True)]


_LEAST_RUNS = 4  # repetitions that are simulated at first, twice as many as long as they have not become steady


def _alone(rank: _Rank) -> tuple[list[float], float] | None:
    """Runs a rank that sends to no other stage."""
    try:
        next(rank)
    except StopIteration as ended:
        found: tuple[list[float], float] | None = ended.value
        return found
    raise ValueError("a stage of a pipeline is simulated beside the others")


class Stages:
    """The simulations of a pipeline's stages, from the first to the last, run beside each other."""

    def __init__(self, stages: Sequence[Sequence[TimedOp]], queue_depth: int, steps: int = STEPS) -> None:
        self._stages = [Simulation(ops, queue_depth, steps) for ops in stages]

    def taking(self, seconds: Sequence[Sequence[float]]) -> Stages:
        """The same stages with other seconds of their operations' kernels."""
        other = copy(self)
        other._stages = [stage.taking(of_stage) for stage, of_stage in zip(self._stages, seconds, strict=True)]
        return other

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
        """As `Simulation.run`; a step takes until the latest stage has ended, and the host's seconds are those of the
        last stage. `spans` gets those of each stage."""
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


def _part(numbered: Sequence[tuple[int, TimedOp]], awaited: Set[int]) -> _Part:
    """Returns ops that follow each other as a part. `awaited`: ops for which others wait."""
    ops = [op for _, op in numbered]
    count = min(op.count for op in ops)  # layers that stand for several run more often than the graph that holds them
    if ops[0].replay:
        host, nodes = (sum(getattr(op, name) for op in ops) for name in ("host_seconds", "launches"))
        entry = _Entry(numbered[0][0], launches=1, more=NODE_GAP * max(nodes / count - 1, 0.0))
        entries, own, takes = [entry], [host / count], [tuple(number for number, _ in numbered)]
    else:
        entries, own, takes = _entries(numbered, count)
    return _Part(count, entries, own, takes, _pieces(entries, awaited))


def _entries(
    numbered: Iterable[tuple[int, TimedOp]], count: int
) -> tuple[list[_Entry], list[float], list[tuple[int, ...]]]:
    """Returns the entries of one of the operations' `count` repetitions, their host seconds, and the ops whose seconds
    are each one's; the host seconds of an operation that neither launches nor waits are added to the next one that
    does. What is sent and received together is one entry, of the last of these operations. A loop is two, of which the
    first waits and the second launches; what the host spends on going on with it is added to the next one."""
    entries: list[_Entry] = []
    own: list[float] = []
    takes: list[tuple[int, ...]] = []
    host = 0.0
    together = 0
    for number, op in numbered:
        host += (op.host_seconds - op.looped_seconds) / count
        sent = op.collective
        if op.launches or op.kind == "sync":
            launched, others = op.launches // count, op.waits
            sends: tuple[tuple[int, bool, int], ...] = ()
            if sent is not None and sent.peer >= 0:
                sends = ((sent.peer, sent.is_sent, number),)
                if sent.together and sent.together == together:
                    before = entries.pop()
                    takes.pop()
                    host, others, sends = host + own.pop(), (*before.others, *others), (*before.sends, *sends)
            more = max(launched - 1, 0)
            if op.looped_seconds:
                entries.append(_Entry(-1, op.lane, is_sync=True))
                own.append(host)
                takes.append(())
                host = 0.0
            is_sync = op.kind == "sync"
            fields = number, op.lane, launched, more, is_sync, others, sent is not None, sends
            entries.append(tuple.__new__(_Entry, fields))  # as _Entry(*fields), which calls a function first
            own.append(host)
            takes.append((number,))
            host, together = op.looped_seconds / count, sent.together if sent is not None else 0
    return [*entries, _Entry(-1)], [*own, host], [*takes, ()]


def _pieces(entries: Sequence[_Entry], awaited: Set[int]) -> list[_Piece]:
    """Cuts entries into pieces, each as long as can be."""
    pieces: list[_Piece] = []
    first = 0
    plain = [entry.is_plain for entry in entries]
    for place, entry in enumerate(entries):
        if plain[place] and place + 1 < len(entries) and plain[place + 1]:
            after = entries[place + 1]
            if after.lane == entry.lane and not after.others:
                continue
        begun = entries[first]
        alone = None if plain[first] and place > first else begun
        numbers = tuple([one.number for one in entries[first : place + 1]])
        of_others = [(i, number) for i, number in enumerate(numbers) if number in awaited]
        pieces.append(_Piece(first, place + 1, begun.lane, begun.others, tuple(of_others), alone, numbers))
        first = place + 1
    return pieces


def _agree(values: Sequence[float]) -> bool:
    """Whether values are equal but for rounding."""
    return max(values) - min(values) <= 1e-9 * max(values)


def is_synchronous(profile: Profile) -> bool:
    """Returns whether an operation is complete when its call returns, as on the CPU as a device."""
    return bool(profile.device.get("type") == "cpu")
