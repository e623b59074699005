"""The timeline of a step on the part that a profile describes: `simulation` with that part's gaps, queue and waits, the
time that kernels and collectives lose to each other, and the time that the part's power limit costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

from flopcast.roofline.gpu.links.contention import Contended
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.communication import Fabric, slowed
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.power_limit import Draw, Power, draw_of, seconds_after_rest
from flopcast.roofline.step.simulation import STEPS, Ran, Simulation, Span, Stages, is_synchronous
from flopcast.roofline.stream.ops.collectives import Collective

# Defaults for a profile without these measurements: values of the one H200 measured (torch 2.11).
GAP_SECONDS, QUEUE_DEPTH, SYNC_SECONDS = 1e-6, 1024, 2e-5


# The gap between kernels of a rank of several GPUs over that of one. On two H200s it was 1.5 us in some steps, as on
# one, and 2.5 us in others, through the whole step and of all kinds of layout; by what rule is not known. This is the
# mean of seven steps of small models that the device bounds (w* of `python -m studies.parallel.overlap`: 2.2 us).
RANKS_GAP = 1.47

# Turns in which kernels and collectives find the times that they take beside each other, and the part of the step that
# one may then still change.
_MOST_TURNS, _SETTLED = 12, 1e-3


class Factors(NamedTuple):
    """On the times of gaps, host, kernels and collectives."""

    gap_factor: float = 1.0
    host_factor: float = 1.0
    device_factor: float = 1.0
    link_factor: float = 1.0


_AS_IT_IS = Factors()


class Shares(NamedTuple):
    """Of a step on several GPUs: seconds in which collectives run, those of them in which no kernel does, and by how
    many seconds kernels take longer because of collectives beside them. `bubble`: of a pipeline's last stage, seconds
    in which neither runs and it waits for another stage to send or to receive."""

    communication: float
    exposed: float
    contention: float
    bubble: float


@dataclass(frozen=True)
class Timeline:
    """The operations of a step, in order, on the part that `profile` describes; of a rank of several with what joins
    them, of a pipeline's last stage with those of the stages before it. `known_draw`: what the operations draw, where
    it is known."""

    ops: Sequence[TimedOp]
    profile: Profile
    fabric: Fabric | None = None
    before: Sequence[Sequence[TimedOp]] = ()
    known_draw: Draw | None = None

    @property
    def without_host(self) -> Timeline:
        """The device alone."""
        ops, *before = (
            [replace(op, host_seconds=0.0, looped_seconds=0.0) for op in stage] for stage in (self.ops, *self.before)
        )
        return replace(self, ops=ops, before=before)

    @cached_property
    def host_seconds(self) -> float:
        """The host's seconds to enqueue one step, without waiting."""
        return sum(op.host_seconds for op in self.ops)

    @cached_property
    def device_seconds(self) -> float:
        """The kernels' summed time at full clock, without collectives, as if each ran by itself."""
        return sum(op.seconds for op in self.ops if op.collective is None)

    @cached_property
    def draw(self) -> Draw:
        return draw_of(self.ops, self.profile) if self.known_draw is None else self.known_draw

    @cached_property
    def power(self) -> Power:
        """Of back-to-back steps."""
        return self.draw.power(0.0 if is_synchronous(self.profile) else self._ran(_AS_IT_IS).step)

    @cached_property
    def seconds_after_rest(self) -> Sequence[float]:
        """Device seconds of each operation in a single step on a device that has rested, as a profiler reads them: at
        full clock but for long steps, in which a power limit begins to act."""
        if not self.power.seconds:
            return [op.seconds for op in self.ops]
        return seconds_after_rest(self.ops, self.profile, self.draw.clock(self._ran(_AS_IT_IS).step))

    @property
    def gap_seconds(self) -> float:
        gap = self.profile.ceiling("kernel_gap", GAP_SECONDS)
        return gap if self.fabric is None else gap * RANKS_GAP

    def _simulated(self, stages: Sequence[Sequence[TimedOp]], steps: int = STEPS) -> Simulation | Stages:
        depth = round(self.profile.ceiling("queue_depth", QUEUE_DEPTH))
        return Stages(stages, depth, steps) if len(stages) > 1 else Simulation(stages[0], depth, steps)

    def _run(
        self,
        simulation: Simulation | Stages,
        gap_factor: float = 1.0,
        spans: Sequence[list[Span]] | None = None,
        **factors: float,
    ) -> Ran:
        gap, sync = self.gap_seconds * gap_factor, self.profile.ceiling("sync", SYNC_SECONDS)
        if isinstance(simulation, Stages):
            return simulation.run(gap_seconds=gap, sync_seconds=sync, spans=spans, **factors)
        return simulation.run(gap_seconds=gap, sync_seconds=sync, spans=spans[0] if spans else None, **factors)

    @cached_property
    def _settled(self) -> tuple[Simulation | Stages, Sequence[float], Sequence[Span]]:
        """The simulation in which kernels and collectives that run beside each other take as long as they then do, the
        seconds of its operations, and when each ran in the last step; of a pipeline those of the last stage.

        How long they take depends on what runs beside them, and that on how long they take: simulated in turn, from
        the second time on half of the way, until step and kernels change no more. The whole way leads back and forth,
        where what is slowed then runs beside something else: steps of FSDP by 3 to 4%. Then they keep these times,
        whatever the speeds."""
        stages = [*self.before, self.ops]
        seconds = [[op.seconds for op in ops] for ops in stages]
        simulation = self._simulated(stages)
        spans: list[list[Span]] = [[] for _ in stages]
        now = 0.0, 0.0
        for turn in range(1, _MOST_TURNS + 1 if self.fabric is not None else 1):
            spans = [[] for _ in stages]
            ran = self._run(simulation, spans=spans)
            before, now = now, (ran.step, sum(seconds[-1]))
            is_settled = all(abs(new - old) <= _SETTLED * new for old, new in zip(before, now, strict=True))
            if is_settled or turn == _MOST_TURNS:
                self._known_runs[_AS_IT_IS] = ran
                break
            found = [slowed(ops, of_stage, self._beside) for ops, of_stage in zip(stages, spans, strict=True)]
            pairs = zip(seconds, found, strict=True)
            seconds = [new if turn == 1 else list(map(_halfway, old, new)) for old, new in pairs]
            simulation = simulation.taking(seconds) if isinstance(simulation, Stages) else simulation.taking(seconds[0])
        return simulation, seconds[-1], spans[-1]

    @cached_property
    def _known_runs(self) -> dict[Factors, Ran]:
        return {}

    def _ran(self, factors: Factors) -> Ran:
        """The settled simulation at other speeds."""
        simulation = self._settled[0]
        if factors not in self._known_runs:
            self._known_runs[factors] = self._run(simulation, **factors._asdict())
        return self._known_runs[factors]

    def _beside(self, op: TimedOp, sent: Collective) -> Contended:
        of_op = id(op), id(sent)  # these live as long as the timeline, and works as long as ops
        found = self._known_beside.get(of_op)
        if found is None:
            alike = id(op.work), op.seconds, op.hot_seconds, op.launches, op.count, sent
            found = self._known_beside.get(alike)
            if found is None:
                assert self.fabric is not None
                found = self._known_beside[alike] = self.fabric.beside(op, sent, self.profile)
            self._known_beside[of_op] = found
        return found

    @cached_property
    def _known_beside(self) -> dict[tuple[Any, ...], Contended]:
        return {}

    @property
    def spans(self) -> Sequence[Span]:
        """When each operation ran on the device in a steady step."""
        return self._settled[2]

    def is_sent(self, span: Span) -> bool:
        return self.ops[span.op].collective is not None

    @cached_property
    def shares(self) -> Shares:
        """How a step's time is shared between kernels and collectives."""
        _, seconds, spans = self._settled
        ops = self.ops
        kernels = _union((span.start, span.end) for span in spans if ops[span.op].collective is None)
        sent = _union((span.start + span.waited, span.end) for span in spans if ops[span.op].collective is not None)
        busy = _union([*kernels, *sent])
        both = _length(kernels) + _length(sent) - _length(busy)
        slower = sum(took for took, op in zip(seconds, ops, strict=True) if op.collective is None) - self.device_seconds
        waits = [(span.start, span.start + span.waited) for span in spans if span.waited]
        bubble = _length(_union([*busy, *waits])) - _length(busy)
        return Shares(_length(sent), _length(sent) - both, slower, bubble)

    @cached_property
    def enqueue_seconds(self) -> float:
        """The host's seconds until it has enqueued a step for an idle device, with what it waits for."""
        return self.host_seconds if is_synchronous(self.profile) else self._ran(_AS_IT_IS).enqueued

    def seconds_in_a_row(self, steps: int) -> float:
        """Returns the seconds per step of so many steps on one GPU that begin on an idle device and end when it has
        drained, as real steps are timed: of few short ones the wait for the last lengthens each."""
        if steps < STEPS or is_synchronous(self.profile):
            return self.step_seconds()
        at_full_clock = self._run(self._simulated([self.ops], steps)).in_a_row / steps
        return at_full_clock + self.draw.added_seconds(at_full_clock)

    def step_seconds(
        self,
        *,
        host_factor: float = 1.0,
        device_factor: float = 1.0,
        link_factor: float = 1.0,
        gap_factor: float = 1.0,
        power_factor: float = 1.0,
    ) -> float:
        """Returns the seconds of one of many back-to-back steps, with the host's, the kernels' and the gaps' times
        multiplied by their factors, and with work that takes `power_factor` times the energy."""
        if is_synchronous(self.profile):
            return self.host_seconds * host_factor + self.device_seconds * device_factor
        at_full_clock = self._ran(Factors(gap_factor, host_factor, device_factor, link_factor)).step
        return at_full_clock + self.draw.times(power_factor).added_seconds(at_full_clock)


def _halfway(one: float, other: float) -> float:
    return one if one == other else (one + other) / 2


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the time that spans, each from start to end, cover, as spans that do not touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans, key=itemgetter(0)):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
