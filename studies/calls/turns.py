"""Host seconds of the forward and the backward of models that take turns on an idle device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.timing.timer import synchronise

PHASES = ("forward", "backward")
ROUNDS, STEPS, WARM_UP = 8, 5, 3

Forward = Callable[[], torch.Tensor]  # returns the loss
ByDepth = dict[int, dict[str, list[float]]]  # seconds of each round, by depth and phase


def phases_of(forward: Forward, device: torch.device) -> tuple[float, float]:
    """Host seconds of a forward and a backward on an idle device."""
    synchronise(device)
    start = time.perf_counter()
    loss = forward()
    middle = time.perf_counter()
    synchronise(device)
    again = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    synchronise(device)
    return middle - start, end - again


def in_turns(
    made: Mapping[str, Mapping[int, Forward]], device: torch.device,
    after_round: Callable[[dict[str, ByDepth]], None] = lambda found: None,
) -> dict[str, ByDepth]:  # fmt: skip
    """By model and depth the seconds of each phase, of each round the median of its steps after the first.
    `after_round` is given what there is after each."""
    for own in made.values():
        for forward in own.values():
            for _ in range(WARM_UP):
                phases_of(forward, device)
    found: dict[str, ByDepth] = {
        name: {depth: {phase: [] for phase in PHASES} for depth in own} for name, own in made.items()
    }
    for _ in range(ROUNDS):
        for name, own in made.items():
            gc.collect()
            with no_garbage_collection():
                for depth, forward in own.items():
                    steps = [phases_of(forward, device) for _ in range(STEPS)][1:]
                    for i, phase in enumerate(PHASES):
                        found[name][depth][phase].append(round(median(step[i] for step in steps), 8))
        after_round(found)
    return found


def per_layer(by_depth: ByDepth, phase: str) -> list[float]:
    """Seconds that a layer adds from the least depth to the greatest, of each round."""
    (low, few), (high, many) = min(by_depth.items()), max(by_depth.items())
    return [round((more - less) / (high - low), 8) for less, more in zip(few[phase], many[phase], strict=True)]
