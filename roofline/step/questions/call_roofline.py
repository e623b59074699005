"""Sets calls of inference, prefills and decodes of several batches, below the roofs of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from flopcast.errors import FlopcastError
from flopcast.microbench.recipe.settings import MOST_TOKENS
from flopcast.roofline.step.inference import Roofs, least_bytes, roofs_for, turning_batch
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

DECODES = (1, 4, 16, 64, 256, 1024)  # batches
PREFILLS = (1, 4, 16)

StreamOf = Callable[[Run], Stream | None]  # None: it has to be traced or compiled first


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call. `flops`: of its products and its attention; `bytes`: the least that they move (`least_bytes`);
    `roof_seconds`: the longer of the two at the roofs' rates; `is_asked`: the call that was asked for."""

    phase: str
    batch: int
    context: int
    flops: int
    bytes: int
    roof_seconds: float
    device_seconds: float
    bound: str
    fits: bool
    is_asked: bool

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.device_seconds


@dataclass(frozen=True)
class CallRoofline:
    """Calls of one model, context and precision, in one mode. `turning_batch`: from which the roofline of a decode is
    bound by the matrix units, None where no batch is."""

    gpu: str
    basis: str
    mode: str
    roofs: Roofs
    calls: tuple[Call, ...]
    turning_batch: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def turns(self) -> str:
        """Where a decode turns, in words."""
        if self.turning_batch is None:
            return "no batch makes a decode matrix-bound: each sequence's cache takes longer to read than its FLOPs"
        return f"a decode is matrix-bound from a batch of {self.turning_batch:,.0f} on, else memory-bound"


def call_roofline(step: PricedStep, stream_of: StreamOf) -> CallRoofline | None:
    """Returns the roofline of the step's calls: the one that was asked for, and decodes and prefills of other batches
    whose streams `stream_of` has. None for a step of training, and where the GPU has no roof of the precision."""
    dtype = step.run.matrix_dtype
    roofs = None if step.run.phase == "train" else roofs_for(dtype, step.profile)
    if roofs is None:
        return None
    found: dict[tuple[str, int], Call] = {}
    turning = None
    wanted = [(step.run.phase, step.run.batch), *(("decode", n) for n in DECODES), *(("prefill", n) for n in PREFILLS)]
    for phase, batch in dict.fromkeys(wanted):
        run = replace(step.run, phase=phase, batch=batch)
        other = step if run == step.run else _step(step, run, stream_of)
        if other is None:
            continue
        found[phase, batch] = _call(other, roofs, is_asked=other is step)
        if phase == "decode":
            turning = turning_batch(other.stream, other.flops, dtype, step.profile)
    calls = sorted(found.values(), key=lambda call: (call.phase, call.batch))
    return CallRoofline(step.profile.gpu, step.profile.basis, step.run.mode, roofs, tuple(calls), turning)


def _step(step: PricedStep, run: Run, stream_of: StreamOf) -> PricedStep | None:
    if run.batch * run.context > MOST_TOKENS:
        return None
    try:
        stream = stream_of(run)
    except FlopcastError:  # of another call than the one that was asked for
        return None
    return None if stream is None else replace(step, stream=stream, run=run)


def _call(step: PricedStep, roofs: Roofs, *, is_asked: bool) -> Call:
    moved = least_bytes(step.stream)
    computing, moving = step.flops / roofs.matrix, moved / roofs.bandwidth
    return Call(
        phase=step.run.phase, batch=step.run.batch, context=step.run.context, flops=step.flops, bytes=moved,
        roof_seconds=max(computing, moving), device_seconds=step.timeline.device_seconds,
        bound="matrix" if computing > moving else "memory", fits=step.fits, is_asked=is_asked,
    )  # fmt: skip
