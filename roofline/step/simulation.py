"""Simulates a step on host and device: the host enqueues op by op, and the device drains the queue in order.

`Simulation` is given gaps, queue depth and speeds; `Timeline` takes them from a part's profile and adds the time that
the part's power limit costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.power_limit import Draw, draw_of

# From the host's launch call to the kernel's start on an idle device; a step of a thousand launches shows it
# only where the host waits (a synchronisation).
LAUNCH_LATENCY_SECONDS = 4e-6


# The gap between two nodes of a replayed CUDA graph over that between two launches, which are 1.5 us apart on an H200:
# recorded steps of 800 to 1,800 kernels took from 0.03 us per kernel less than their kernels to 0.5 more, at the median
# 0.3 (`python -m studies.compiled.host`).
NODE_GAP = 0.2

# (host seconds, kernel seconds, gaps within, launches, sync) of an op that launches kernels or makes the host wait; the
# host seconds include those of the ops before it that do neither. All nodes of a replayed CUDA graph are one launch.
_Entry = tuple[float, float, float, int, bool]


class Simulation:
    """A simulation of a step on host and device, prepared once and run with several speeds.

    The host enqueues op by op; the device runs kernels in order with a gap between them; at most `queue_depth` launches
    are outstanding; a sync stops the host until the device has drained its queue. Operations that repeat
    (`TimedOp.count`) are simulated until a repetition shifts all times by the same amount; all later repetitions then
    do the same and are skipped.
    """

    def __init__(self, ops: Sequence[TimedOp], queue_depth: int, steps: int = 3) -> None:
        if steps < 2:
            raise ValueError("a steady step is the difference of two: steps must be at least 2")
        self._steps, self._queue_depth = steps, queue_depth
        runs = (
            op for op in ops if op.count
        )  # two compiled layers run the one that stands for those between not at all
        self._parts = [_part(list(run)) for _, run in groupby(runs, lambda op: (op.replay, op.replay or op.count))]
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
        self, *, gap_seconds: float, sync_seconds: float, host_factor: float = 1.0, device_factor: float = 1.0
    ) -> float:
        """Returns the seconds of one steady step when steps follow each other without waiting."""
        most = min(self._most, _LEAST_RUNS)
        while (found := self._run(most, gap_seconds, sync_seconds, host_factor, device_factor)) is None:
            most = min(self._most, 2 * most)
        return found

    def _run(
        self, most: int, gap_seconds: float, sync_seconds: float, host_factor: float, device_factor: float
    ) -> float | None:
        """As `run`, with at most `most` repetitions simulated; None where they have not become steady by then."""
        host = device = 0.0
        finish: list[float] = []
        finished = finish.append
        ends = []
        runs, all_waits = self._prepare(most)
        waits = iter(all_waits)
        latest = -1  # the last entry that the host waited for
        before = (0.0, 0.0)
        for _ in range(self._steps):
            for entries, more_times in runs:
                if more_times:
                    before = host, device
                for (own, seconds, more, launches_, is_sync), wait in zip(entries, waits, strict=False):
                    host += own * host_factor
                    if launches_:
                        start = host + LAUNCH_LATENCY_SECONDS
                        if start < device + gap_seconds:
                            start = device + gap_seconds
                        device = start + seconds * device_factor + gap_seconds * more
                    finished(device)
                    if wait >= 0:
                        latest = wait
                        if finish[wait] > host:
                            host = finish[wait]
                    if is_sync:
                        host = (device if device > host else host) + sync_seconds
                if more_times:
                    moved = device - before[1]
                    first = max(latest, 0)  # nothing before it will be waited for
                    earlier = first - len(entries)
                    if earlier < len(finish) - most * len(entries):
                        return None
                    pairs = zip(finish[first:], finish[earlier:], strict=False)
                    if not _agree([moved, host - before[0], *(now - then for now, then in pairs)]):
                        return None
                    skipped = moved * more_times
                    host, device = host + skipped, device + skipped
                    finish[first:] = [seconds + skipped for seconds in finish[first:]]
            ends.append(max(host, device))
        return ends[-1] - ends[-2]


_LEAST_RUNS = 4


def _part(ops: Sequence[TimedOp]) -> tuple[list[_Entry], int]:
    """Returns the entries of one repetition of ops that follow each other, and how often they are repeated."""
    count = min(op.count for op in ops)  # layers that stand for several run more often than the graph that holds them
    if not ops[0].replay:
        return _entries(ops, count), count
    host, seconds, nodes = (sum(getattr(op, name) for op in ops) for name in ("host_seconds", "seconds", "launches"))
    return [(host / count, seconds / count, NODE_GAP * max(nodes / count - 1, 0.0), 1, False)], count


def _entries(ops: Iterable[TimedOp], count: int) -> list[_Entry]:
    """Returns the entries of one of the operations' `count` repetitions; the host seconds of an operation that neither
    launches nor waits are added to the next one that does."""
    entries: list[_Entry] = []
    host = 0.0
    for op in ops:
        host += op.host_seconds / count
        if op.launches or op.kind == "sync":
            launched = op.launches // count
            entries.append((host, op.seconds / count, max(launched - 1, 0), launched, op.kind == "sync"))
            host = 0.0
    entries.append((host, 0.0, 0, 0, False))
    return entries


def _agree(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= 1e-9 * max(values)


# Defaults for a profile without these measurements: values of the one H200 measured (torch 2.11).
GAP_SECONDS, QUEUE_DEPTH, SYNC_SECONDS = 1e-6, 1024, 2e-5


def is_synchronous(profile: Profile) -> bool:
    """Returns whether an operation is complete when its call returns, as on the CPU as a device."""
    return bool(profile.device.get("type") == "cpu")


@dataclass(frozen=True)
class Timeline:
    """The operations of a step, in order, on the part that `profile` describes."""

    ops: Sequence[TimedOp]
    profile: Profile

    @cached_property
    def host_seconds(self) -> float:
        """The host's seconds to enqueue one step, without waiting."""
        return sum(op.host_seconds for op in self.ops)

    @cached_property
    def device_seconds(self) -> float:
        """The kernels' summed time at full clock."""
        return sum(op.seconds for op in self.ops)

    @cached_property
    def draw(self) -> Draw:
        return draw_of(self.ops, self.profile)

    @property
    def gap_seconds(self) -> float:
        return self.profile.ceiling("kernel_gap", GAP_SECONDS)

    @cached_property
    def _simulation(self) -> Simulation:
        return Simulation(self.ops, round(self.profile.ceiling("queue_depth", QUEUE_DEPTH)))

    def step_seconds(
        self,
        *,
        host_factor: float = 1.0,
        device_factor: float = 1.0,
        gap_factor: float = 1.0,
        power_factor: float = 1.0,
    ) -> float:
        """Returns the seconds of one of many back-to-back steps, with the host's, the kernels' and the gaps' times
        multiplied by their factors, and with work that takes `power_factor` times the energy."""
        if is_synchronous(self.profile):
            return self.host_seconds * host_factor + self.device_seconds * device_factor
        at_full_clock = self._simulation.run(
            gap_seconds=self.gap_seconds * gap_factor, sync_seconds=self.profile.ceiling("sync", SYNC_SECONDS),
            host_factor=host_factor, device_factor=device_factor,
        )  # fmt: skip
        return at_full_clock + self.draw.times(power_factor).added_seconds(at_full_clock)
