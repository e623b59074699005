"""Times alternatives of one operation in turn: A B C A B C ..., each a CUDA graph over rotating operands.

The ratio of two kernels' times is needed to 1%, while the GPU's clock drifts by more within a second: alternating
readings see the same clock. Long calls are graphs too, so that all alternatives have the same launch cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flopcast.microbench.timing.cuda_timer import LEAD_SECONDS, CudaTimer, between_events, seconds_between
from flopcast.microbench.timing.operands import Call, clone_operands

SAMPLE_SECONDS = 0.4e-3  # device time of one graph, from which the event pair's own few us stay near 0.5%
MAX_CALLS = 128


@dataclass
class Contender:
    """One alternative: its graph of `count` calls, and its readings in seconds per call."""

    graph: torch.cuda.CUDAGraph
    count: int
    readings: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.readings)


def calls_in_graph(estimate_seconds: float) -> int:
    return max(1, min(MAX_CALLS, math.ceil(SAMPLE_SECONDS / max(estimate_seconds, 1e-7))))


def operand_sets(
    operands: Sequence[Tensor], cache_bytes: int, count: int, factor: float = 3.0
) -> list[tuple[Tensor, ...]]:
    """The operands (an output may be among them) and copies: together `factor` times the cache, at most `count`."""
    footprint = sum(x.numel() * x.element_size() for x in operands)
    wanted = min(count, math.ceil(factor * cache_bytes / footprint))
    return [tuple(operands), *(clone_operands(operands) for _ in range(wanted - 1))]


def contender(timer: CudaTimer, calls: Sequence[Call], count: int) -> Contender:
    """Captures `count` calls, taken round-robin, and replays them once. Raises RuntimeError where that fails."""
    graph = timer.capture(calls, count)
    if isinstance(graph, str):
        raise RuntimeError(graph)
    graph.replay()
    return Contender(graph, count)


def read(timer: CudaTimer, contenders: Sequence[Contender], rounds: int) -> None:
    """Adds `rounds` readings to each contender, in turn."""
    timer.spin(LEAD_SECONDS)
    replays = [(each, between_events(each.graph.replay)) for _ in range(rounds) for each in contenders]
    torch.cuda.synchronize(timer.device)
    for each, pair in replays:
        each.readings.append(seconds_between(pair) / each.count)


def interleaved(
    timer: CudaTimer,
    ways: Mapping[str, Callable[[Sequence[Tensor]], Call]],
    sets: Sequence[Sequence[Tensor]],
    count: int,
    rounds: int,
) -> dict[str, Contender]:
    """Times each alternative over the operand sets, `rounds` readings of `count` calls, on the timer's stream."""
    with torch.cuda.stream(timer.stream):
        found = {name: contender(timer, [way(x) for x in sets], count) for name, way in ways.items()}
        read(timer, list(found.values()), rounds)
    return found
