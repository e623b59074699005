"""Sets a step's modes side by side: eager, compiled, and with CUDA graphs; and says what breaking a graph costs.

A mode is another op stream. One that is neither shipped nor cached has to be compiled or traced first, which takes up
to a minute: a mode without its stream is named without a forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flopcast.errors import FlopcastError, UsageError
from flopcast.microbench.recipe.settings import MODES
from flopcast.roofline.step.forecast import usd_per_million
from flopcast.roofline.step.graph_launches import shares
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.simulation import is_synchronous
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

StreamOf = Callable[[Run], Stream | None]  # None: it has to be traced or compiled first
LARGE_BYTES = 2**20  # of zeros that are worth a line

# What to do about a graph break or a wait, by words of dynamo's reason or of the line; the last is for any other.
_EXPERTS = "grouped_mm_fallback"  # transformers' operator of experts in fp32
_REMEDIES = (
    ((_EXPERTS,), "weights in bf16 keep transformers' experts within the graphs: --precision bf16"),
    (("item()", ".item", "tolist", "nonzero", "data-dependent", "data dependent", "_local_scalar_dense"),
     "keep the value on the GPU (torch.where, masks), or read it once after the step"),
    (("print", "logg", "warn"), "write it outside of the model, or every so many steps"),
    (("disable", "skip"), "the callee opts out of compilation: update it, or write the call in torch operations"),
    ((), "write the line in torch operations; TORCH_LOGS=graph_breaks says more"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModeStep:
    """The step in one mode; all figures are None where it was not forecast (`reason` says why).

    `waiting_seconds`: the device waits for the host. `launches`: what the host enqueues; a replayed graph is one.
    `bytes`: what the kernels move.
    """

    mode: str
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    device_seconds: float | None = None
    host_seconds: float | None = None
    waiting_seconds: float | None = None
    kernels: int | None = None
    launches: int | None = None
    bytes: int | None = None
    peak_bytes: int | None = None
    fits: bool | None = None
    usd_per_million: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """A place where the compiled code ends, a graph break, or where the host waits for the device. `step_seconds`: how
    much shorter the step is without it."""

    kind: str
    where: str
    reason: str
    step_seconds: float
    remedy: str


@dataclass(frozen=True)
class Modes:
    """A step's modes, the eager one first; what interrupts its compiled code, of the mode that was asked for or else of
    the first that is compiled; and the seconds that filling gradients of unused results with zeros, and reading
    them, takes there."""

    steps: tuple[ModeStep, ...]
    interruptions: tuple[Interruption, ...] = ()
    zeros_seconds: float = 0.0
    zeros_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def modes_of(step: PricedStep, stream_of: StreamOf) -> Modes | None:
    """Forecasts the step in all modes; None on a processor, which no mode is modelled on."""
    if is_synchronous(step.profile):
        return None
    found, compiled = [], step if step.stream.meta.get("graphs") else None
    for mode in MODES:
        try:
            other = step if mode == step.run.mode else _in_mode(step, mode, stream_of)
            found.append(_figures(mode, other))
        except FlopcastError as fault:
            found.append(ModeStep(mode=mode, reason=str(fault)))
        else:
            compiled = compiled or (other if other is not None and mode != "eager" else None)
    if compiled is None:
        return Modes(tuple(found))
    zeros = _zeros(compiled)
    return Modes(tuple(found), tuple(interruptions(compiled)), *zeros)


def _in_mode(step: PricedStep, mode: str, stream_of: StreamOf) -> PricedStep | None:
    if step.stream.meta.get("unit") == "steps":
        raise UsageError("a step function runs as it is written: what it gives torch.compile, and in which mode")
    run = replace(step.run, mode=mode)
    run.check()
    stream = stream_of(run)
    if stream is None:
        return None
    if (own := stream.meta.get("mode", "eager")) != mode:
        raise UsageError(f"the factory compiles what it returns by itself, in mode {own}")
    return replace(step, stream=stream, run=run)


def _figures(mode: str, step: PricedStep | None) -> ModeStep:
    if step is None:
        made = "traced" if mode == "eager" else "compiled"
        return ModeStep(mode=mode, reason=f"its operations have to be {made} first: --what-if")
    found, timeline = step.forecast(), step.timeline
    alone = timeline.without_host.step_seconds()
    waiting = found.step_seconds - alone
    replays = {op.replay for op in step.ops if op.replay}
    return ModeStep(
        mode=mode, step_seconds=found.step_seconds, step_seconds_low=found.step_seconds_low,
        step_seconds_high=found.step_seconds_high, device_seconds=found.device_seconds,
        host_seconds=timeline.host_seconds, waiting_seconds=waiting if waiting > 1e-9 else 0.0, kernels=found.kernels,
        launches=sum(op.launches for op in step.ops if not op.replay) + len(replays),
        bytes=sum(op.bytes for op in step.ops), peak_bytes=found.peak_bytes, fits=found.fits,
        usd_per_million=usd_per_million(found),
    )  # fmt: skip


# --- what interrupts the compiled code


def interruptions(step: PricedStep) -> list[Interruption]:
    """Lists a compiled step's graph breaks and the lines at which the host waits, costliest first. What breaks cost is
    what entering their graphs does, shared evenly; what they keep from being fused is not known."""
    meta = step.stream.meta
    found = []
    waits: Sequence[str] = meta.get("waits", ())
    breaks = _of_one_cause(meta.get("breaks", ()), waits)
    if breaks:
        each = _saved(step, _entered_again(step)) / len(breaks)
        found += [
            Interruption(
                kind="graph break", where=one["where"], reason=one["reason"], step_seconds=each,
                remedy=remedy_for(f"{one['reason']} {one['where']}"),
            )
            for one in breaks
        ]  # fmt: skip
    if waits:
        each = _saved(step, {i: replace(op, kind="launch") for i, op in enumerate(step.ops) if op.kind == "sync"})
        found += [
            Interruption(
                kind="wait", where=line, reason="the host reads a value back from the GPU",
                step_seconds=each / len(waits), remedy=remedy_for(f"{line} .item"),
            )
            for line in waits
        ]  # fmt: skip
    return sorted(found, key=lambda one: -one.step_seconds)


def _of_one_cause(breaks: Sequence[dict[str, str]], waits: Sequence[str]) -> Sequence[dict[str, str]]:
    """Graph breaks, those of experts as one: their operator cannot be in a graph with its gradient, so that each frame
    around it is tried and given up, for which dynamo names the frame's last line and no reason."""
    operator = next((line for line in waits if _EXPERTS in line), None)
    frames = [one for one in breaks if one["reason"] == "step_unsupported"]
    if operator is None or not frames:
        return breaks
    reason = (
        f"inductor cannot trace the gradient of {_EXPERTS}, which reads how many rows each expert has: it breaks the "
        f"graph, and so do the {len(frames)} frames around it"
    )
    return [{"where": operator, "reason": reason}, *(one for one in breaks if one not in frames)]


def remedy_for(words: str) -> str:
    """What to do about a graph break of this reason and line."""
    lower = words.lower()
    return next(remedy for signs, remedy in _REMEDIES if not signs or any(sign in lower for sign in signs))


def _entered_again(step: PricedStep) -> dict[int, Any]:
    """The operations that enter a graph after the first of their phase, without what entering costs."""
    costs = step.host_costs.graph_costs(step.stream.meta["mode"])
    changed: dict[int, Any] = {}
    entered: set[str] = set()
    for (_, first, last), share in zip(step.stream.meta["graphs"], shares(step.stream), strict=True):
        op = step.ops[first]
        if op.phase in entered and first <= last:
            entering = share * costs.entry(op.phase) * op.count
            changed[first] = replace(op, host_seconds=op.host_seconds - entering)
        entered.add(op.phase)
    return changed


def _saved(step: PricedStep, changed: dict[int, Any]) -> float:
    ops = [changed.get(i, op) for i, op in enumerate(step.ops)]
    return max(step.timeline.step_seconds() - replace(step.timeline, ops=ops).step_seconds(), 0.0) if changed else 0.0


def _zeros(step: PricedStep) -> tuple[float, int]:
    """(seconds, bytes) of the zeros that AOTAutograd fills for gradients of results that the loss does not depend on,
    such as logits that the model returns: they are written, and the backward's first kernels read them."""
    copy = step.profile.ceiling("hbm_read", 0.0)
    seconds, filled = 0.0, 0
    for op, timed in zip(step.stream.ops, step.ops, strict=True):
        if op.phase == "backward" and op.name == "aten.full.default" and timed.bytes >= LARGE_BYTES:
            seconds += timed.seconds + (timed.bytes / copy if copy else 0.0)
            filled += timed.bytes
    return seconds, filled
