"""What feeding a step its batches costs: loading them on the host, and copying them to the GPU.

Four ways are set side by side, from what a plain loop does to what torch's documentation asks for: copies from pageable
memory; from pinned memory (`pin_memory=True`); pinned and not waited for (`non_blocking=True`); and copied ahead on a
CUDA stream of their own. A copy on the step's own stream is simulated as part of the step: kernels wait for it, and the
host too where it is waited for. One on its own stream uses none of the multiprocessors: it bounds the step only where
it takes longer. Workers load beside the step and bound it likewise; without workers the host loads before each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.gpu.links.library import measured_copies
from flopcast.roofline.gpu.links.profile import copy_seconds
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.timeline import Timeline

TOKENS, IMAGES = "tokens", "images"
WAYS = ("pageable", "pinned", "pinned, non_blocking", "pinned, ahead on a stream")
MOST_BYTES = 2**40


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """How batches come. `bytes`: of a step's batches; `load_seconds`: of one worker for them; `workers`: 0 where the
    training process loads."""

    bytes: int
    load_seconds: float = 0.0
    workers: int = 0


@dataclass(frozen=True, kw_only=True)
class Fed:
    """A step fed in one way. `bound`: "step", "copy" or "loading", what its time is."""

    way: str
    copy_seconds: float
    step_seconds: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class InputReport:
    """A step in every way to feed it. `unfed_seconds`: with its batch on the GPU already."""

    feeding: Feeding
    unfed_seconds: float
    ways: Sequence[Fed]
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.feeding), "unfed_seconds": self.unfed_seconds,
            "ways": [asdict(way) for way in self.ways], "notes": list(self.notes),
        }  # fmt: skip


def feeding_of(asked: str, step: PricedStep, load_seconds: float = 0.0, workers: int = 0) -> Feeding:
    """Reads what was asked for: "tokens" or "images" for what the traced step is called with, or the bytes of one
    sample. `load_seconds`: of one sample.

    Raises UsageError for anything else, and for a step called with nothing."""
    run, stream = step.run, step.stream
    if not 0 <= load_seconds <= 3600:
        raise UsageError(f"load-ms is {load_seconds * 1e3:g}: valid are a sample's milliseconds, 0 or more")
    if not 0 <= workers <= 4096:
        raise UsageError(f"workers is {workers}: valid are 0, where the training process loads, to 4096")
    samples = run.batch * run.accumulate
    if asked in (TOKENS, IMAGES):
        own = sum(storage.bytes for storage in stream.storages if storage.kind == "input")
        if not own:
            raise UsageError(f"input {asked}: the step is called with no tensor; give the bytes of a sample")
        size = own * run.accumulate
    else:
        each = int(asked) if asked.isdecimal() else 0
        if not 1 <= each * samples <= MOST_BYTES:
            raise UsageError(f"input {asked!r}: valid are {TOKENS}, {IMAGES}, or the bytes of a sample from 1 on")
        size = each * samples
    return Feeding(bytes=size, load_seconds=load_seconds * samples, workers=workers)


def fed(step: PricedStep, feeding: Feeding) -> InputReport:
    """Returns the step in every way of WAYS. Raises UsageError for a step on several GPUs."""
    if step.fabric is not None:
        raise UsageError("--input with --parallel: the copies of one GPU alone are modelled; leave one of the two out")
    copies, source = measured_copies(step.profile.gpu)
    notes = [] if source == step.profile.gpu else [
        f"copies to {step.profile.gpu} were not measured: those of {source}'s host stand for them"
    ]  # fmt: skip
    loading = feeding.load_seconds / max(feeding.workers, 1)
    alone = step.timeline.step_seconds()
    launch = step.host_costs.seconds("forward", "launch")
    found = []
    for way in WAYS:
        seconds = copy_seconds(copies, "to_device", feeding.bytes, pinned=way != WAYS[0])
        first = [TimedOp("forward", "host", feeding.load_seconds)] if not feeding.workers and loading else []
        ahead = way == WAYS[3]
        if not ahead:
            first.append(TimedOp("forward", "launch", launch, seconds=seconds, launches=1))
            if way in WAYS[:2]:
                first.append(TimedOp("forward", "sync", 0.0))
        time = Timeline([*first, *step.ops], step.profile).step_seconds() if first else alone
        bounds = {"step": time, "copy": seconds if ahead else 0.0, "loading": loading if feeding.workers else 0.0}
        bound = max(bounds, key=lambda name: bounds[name])
        if bound == "step" and time > 1.05 * alone:
            bound = "loading" if not feeding.workers and feeding.load_seconds > seconds else "copy"
        found.append(Fed(way=way, copy_seconds=seconds, step_seconds=max(bounds.values()), bound=bound))
    return InputReport(feeding=feeding, unfed_seconds=alone, ways=found, notes=notes)
