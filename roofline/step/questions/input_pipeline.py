"""What feeding a step its batches costs: loading them on the host, and copying them to the GPU.

Four ways are set side by side, from what a plain loop does to what torch's documentation asks for: copies from pageable
memory; from pinned memory (`pin_memory=True`); pinned and not waited for (`non_blocking=True`); and copied ahead on a
CUDA stream of their own. A copy on the step's own stream is simulated as part of the step: kernels wait for it, and the
host too where it is waited for. One on its own stream uses none of the multiprocessors: it bounds the step only where
it takes longer. Workers load beside the step and bound it likewise; without workers the host loads before each step.
What torch's DataLoader does with a batch that it has loaded counts too (`HANDING`): a worker puts it into shared
memory, and a thread of the training process copies it into pinned memory, beside the step; without workers the training
process pins it; and a copy from pageable memory reads pages that the process has not touched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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


# Bytes of the smallest batch that was handed over when that was measured.
LEAST_HANDED = 9_633_792


@dataclass(frozen=True)
class Line:
    """What becomes of a batch: so many seconds and so many per byte; of a batch below LEAST_HANDED in proportion."""

    fixed: float
    per_byte: float

    def seconds(self, size: float) -> float:
        return (self.fixed + self.per_byte * max(size, LEAST_HANDED)) * min(size / LEAST_HANDED, 1.0)


@dataclass(frozen=True)
class Handing:
    """What a DataLoader does with a batch that is loaded. `shared`: by a worker, into memory that the training process
    sees; `pinned_from_workers`: by the thread that pins; `pinned`: by the training process, where it loads;
    `copied_from_workers`: what a copy from pageable memory takes longer than one of memory that was touched before."""

    shared: Line
    pinned_from_workers: Line
    pinned: Line
    copied_from_workers: Line


# Of the host of an H200, torch 2.11, batches of 9.6 to 154 MB (`python -m studies.links.handing`).
HANDING = Handing(
    shared=Line(5.0e-3, 1 / 2.94e9),
    pinned_from_workers=Line(1.34e-3, 1 / 2.59e9),
    pinned=Line(0.0, 1 / 26.2e9),
    copied_from_workers=Line(0.0, 1 / 5.42e9),
)


@dataclass(frozen=True, kw_only=True)
class Fed:
    """A step fed in one way. `serial_seconds`: the step with all that it waits for in turn, copies on its own stream
    and what the training process loads; `beside_seconds`: the longest of what runs beside it, workers, the thread that
    pins and a copy ahead; `step_seconds`: the longer of the two. `bound`: "step", "copy", "loading" or "pinning", what
    that is."""

    way: str
    copy_seconds: float
    serial_seconds: float
    beside_seconds: float
    bound: str

    @property
    def step_seconds(self) -> float:
        return max(self.serial_seconds, self.beside_seconds)


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
            "ways": [{**asdict(way), "step_seconds": way.step_seconds} for way in self.ways], "notes": list(self.notes),
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
    alone = step.timeline.step_seconds()
    launch = step.host_costs.seconds("forward", "launch")
    found = []
    for way in WAYS:
        is_pinned, is_ahead = way != WAYS[0], way == WAYS[3]
        copy = copy_seconds(copies, "to_device", feeding.bytes, pinned=is_pinned)
        handed = _handed(feeding, is_pinned)
        copy += handed.copy
        first = [TimedOp("forward", "host", handed.by_process)] if handed.by_process else []
        if not is_ahead:
            first.append(TimedOp("forward", "launch", launch, seconds=copy, launches=1))
            if way in WAYS[:2]:
                first.append(TimedOp("forward", "sync", 0.0))
        time = Timeline([*first, *step.ops], step.profile).step_seconds() if first else alone
        beside = {"copy": copy if is_ahead else 0.0, "loading": handed.by_workers, "pinning": handed.by_thread}
        bound, longest = max(beside.items(), key=lambda one: one[1])
        if time >= longest:
            is_longer = time > 1.05 * alone
            bound = "step" if not is_longer else "loading" if handed.by_process > copy else "copy"
        found.append(Fed(way=way, copy_seconds=copy, serial_seconds=time, beside_seconds=longest, bound=bound))
    return InputReport(feeding=feeding, unfed_seconds=alone, ways=found, notes=notes)


class _Handed(NamedTuple):
    """Seconds of loading a step's batches and handing them over: of each worker's share, of the thread that pins, of
    the training process before the step, and what it adds to the copy."""

    by_workers: float = 0.0
    by_thread: float = 0.0
    by_process: float = 0.0
    copy: float = 0.0


def _handed(feeding: Feeding, is_pinned: bool) -> _Handed:
    """Nothing for batches that lie ready."""
    size, seconds, workers = feeding.bytes, feeding.load_seconds, feeding.workers
    if not seconds:
        return _Handed()
    if not workers:
        return _Handed(by_process=seconds + (HANDING.pinned.seconds(size) if is_pinned else 0.0))
    each = (seconds + HANDING.shared.seconds(size)) / workers
    if is_pinned:
        return _Handed(by_workers=each, by_thread=HANDING.pinned_from_workers.seconds(size))
    return _Handed(by_workers=each, copy=HANDING.copied_from_workers.seconds(size))
