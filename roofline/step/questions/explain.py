"""Explains where a step's time goes and what bounds it: by operation class, by module, against the speed of light.

The speed of light of a step is its time on a part that wastes nothing: each class of operations is one perfect kernel,
which takes the time of its FLOPs at the sustained matrix rate of their dtype or, if that is longer, of its unavoidable
bytes at the bandwidth of a copy. Unavoidable bytes, each counted once, are what the class reads that another class
wrote or that existed before the step (parameters, optimizer states, inputs), and what it leaves to another class or to
the next step (activations, gradients, parameters, states). Traffic between kernels of one class is not counted, nor are
launches, gaps and the host. A class whose forecast is faster still (its operands lie in the cache, or the clock is a
burst's) counts with its forecast, so that the speed of light is never slower than the forecast.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.library.attention_band import visited_flops
from flopcast.roofline.step.device_work import TimedOp, bound_seconds, matrix_seconds
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.simulation import is_synchronous
from flopcast.roofline.stream.lowering.classes import PRODUCTS
from flopcast.roofline.stream.lowering.describe import Work
from flopcast.roofline.stream.ops.op_stream import PHASES, Stream, packet

OUTSIDE = "(outside modules)"
OPTIMIZER = "(optimizer)"
COUNTED = (
    "each class of operations as one perfect kernel: its FLOPs at the sustained matrix rate of their dtype or, if "
    "longer, at copy bandwidth, once each, what it reads that another class wrote or that lay there before the step "
    "(parameters, optimizer states, inputs) and what it leaves to another class or the next step (activations, "
    "gradients, parameters, states); no launches, gaps or host; a class that is forecast faster (cache, burst clock) "
    "counts with its forecast"
)
# Ops that write without reading what was there.
_OVERWRITING = {"copy_", "fill_", "zero_"}


@dataclass(frozen=True)
class ClassPart:
    """One operation class of a step. `bound`: what bounds most of its time; `bound_seconds`: its time by what bounds
    each operation; `needed_bytes`: its unavoidable bytes; `light_seconds`: its time at the speed of light."""

    op_class: str
    seconds: float
    share: float
    bound: str
    bound_seconds: dict[str, float]
    light_seconds: float
    calls: int
    kernels: int
    flops: int
    bytes: int
    needed_bytes: int

    @property
    def gap_seconds(self) -> float:
        return self.seconds - self.light_seconds


@dataclass(frozen=True)
class ModulePart:
    """Device seconds of one module path, summed over layers (`model.layers.*.mlp.down_proj`), by phase and class."""

    module: str
    seconds: float
    share: float
    forward: float
    backward: float
    optimizer: float
    bound: str
    classes: dict[str, float]
    calls: int


@dataclass(frozen=True)
class Sync:
    """One place where the host waits for the device. `step_seconds`: how much shorter the step is without the wait."""

    op: str
    module: str
    phase: str
    calls: int
    step_seconds: float


@dataclass(frozen=True)
class Windows:
    """The attention calls in which sliding windows hide keys. FLOPs: of the pairs that queries see (`flops`), of the
    blocks that the kernels visit, what they recompute included, and of those of the whole triangle."""

    calls: int
    seconds: float
    flops: int
    flops_visited: int
    flops_causal: int


@dataclass(frozen=True)
class Explanation:
    """A forecast and its parts.

    `gap_seconds` pass between kernels (one gap per kernel, at most what the step takes beyond its kernels), and
    `idle_seconds` is the rest of the time that the device waits for the host; these two and the forecast's
    `device_seconds`, `power_seconds`, `contention_seconds`, `exposed_communication_seconds` and `bubble_seconds` add up
    to the step, but where the collectives hide the host's waits. `light_seconds`: the step at the speed of light,
    summed over classes; `fused_seconds`: the same with everything but products, convolutions and attention as one
    class.
    """

    forecast: Forecast
    classes: tuple[ClassPart, ...]
    modules: tuple[ModulePart, ...]
    syncs: tuple[Sync, ...]
    gap_seconds: float
    idle_seconds: float
    device_only_seconds: float
    light_seconds: float
    fused_seconds: float
    windows: Windows | None = None

    def to_json(self) -> dict[str, Any]:
        """SI units; `forecast` as `predict --json` prints it."""
        found = self.forecast
        return {
            "forecast": found.to_json(),
            "step": {
                "seconds": found.step_seconds,
                "device_seconds": found.device_seconds,
                "power_seconds": found.power_seconds,
                **_of_several(found),
                "gap_seconds": self.gap_seconds,
                "idle_seconds": self.idle_seconds,
                "host_seconds": found.host_seconds,
                "device_only_seconds": self.device_only_seconds,
                "bound": found.bound,
            },
            "speed_of_light": {
                "seconds": self.light_seconds,
                "fused_seconds": self.fused_seconds,
                "share_of_device": _ratio(self.light_seconds, found.device_seconds),
                "share_of_step": _ratio(self.light_seconds, found.step_seconds),
                "counted": COUNTED,
            },
            "classes": [_renamed(asdict(part) | {"gap_seconds": part.gap_seconds}) for part in self.classes],
            "modules": [asdict(part) for part in self.modules],
            "synchronisations": [asdict(sync) for sync in self.syncs],
            **({} if self.windows is None else {"windows": asdict(self.windows)}),
        }


def _of_several(found: Forecast) -> dict[str, float]:
    names = ("contention_seconds", "exposed_communication_seconds", "bubble_seconds", "communication_seconds")
    return {name: getattr(found, name) for name in names} if found.num_gpus > 1 else {}


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    return {"class": record.pop("op_class"), **record}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def explain_step(step: PricedStep) -> Explanation:
    """Forecasts a step and breaks its time down. Raises as `PricedStep.forecast` does."""
    found, timeline, profile = step.forecast(), step.timeline, step.profile
    classes = class_parts(step)
    busy = found.device_seconds + found.power_seconds + found.contention_seconds + found.exposed_communication_seconds
    busy += found.bubble_seconds
    if is_synchronous(profile):
        gap, alone = 0.0, busy
    else:
        gap = min(found.kernels * timeline.gap_seconds, max(found.step_seconds - busy, 0.0))
        alone = timeline.without_host.step_seconds()
    light = sum(part.light_seconds for part in classes)
    return Explanation(
        forecast=found,
        classes=classes,
        modules=module_parts(step),
        syncs=syncs_of(step),
        gap_seconds=gap,
        idle_seconds=max(found.step_seconds - busy - gap, 0.0),
        device_only_seconds=alone,
        light_seconds=light,
        fused_seconds=min(light, fused_seconds(step)),
        windows=windows_of(step),
    )


def windows_of(step: PricedStep) -> Windows | None:
    """None where no call of the Triton attention has a window."""
    found = Windows(0, 0.0, 0, 0, 0)
    for op in step.ops:
        shape = None if op.work is None else op.work.shape
        if isinstance(shape, Attention) and shape.window:
            visited, causal = (op.count * visited_flops(one, step.profile) for one in (shape, replace(shape, window=0)))
            found = Windows(
                found.calls + op.count, found.seconds + op.seconds, found.flops + op.flops,
                found.flops_visited + visited, found.flops_causal + causal,
            )  # fmt: skip
    return found if found.calls else None


# --- by class


def class_parts(step: PricedStep) -> tuple[ClassPart, ...]:
    """Returns each class's time, what bounds it, and its time at the speed of light."""
    profile, total = step.profile, step.timeline.device_seconds
    copy = profile.ceiling("hbm_copy", 0.0)
    needed = crossing_bytes(step.stream, step.ops, lambda op_class: op_class)
    parts = []
    for share in step.breakdown:
        ops = step.by_class[share.op_class]
        bounds = bound_seconds(ops, profile)
        moving = needed.get(share.op_class, 0) / copy if copy else 0.0  # clipped below, as its bytes are
        parts.append(
            ClassPart(
                op_class=share.op_class,
                seconds=share.seconds,
                share=share.seconds / total if total else 0.0,
                bound=max(bounds, key=lambda name: bounds[name]),
                bound_seconds=bounds,
                light_seconds=min(share.seconds, max(sum(matrix_seconds(op, profile) for op in ops), moving)),
                calls=share.calls,
                kernels=sum(op.launches for op in ops),
                flops=share.flops,
                bytes=share.bytes,
                needed_bytes=min(needed.get(share.op_class, 0), share.bytes),
            )
        )
    return tuple(parts)


def fused_seconds(step: PricedStep) -> float:
    """Returns the step's seconds at the speed of light where all that is neither product, convolution nor attention is
    one kernel."""
    copy = step.profile.ceiling("hbm_copy", 0.0)
    needed = crossing_bytes(step.stream, step.ops, _matrix_or_rest)
    seconds: dict[str, float] = defaultdict(float)
    matrix: dict[str, float] = defaultdict(float)
    for op in step.ops:
        if op.work is not None:
            group = _matrix_or_rest(op.work.op_class)
            seconds[group] += op.seconds
            matrix[group] += matrix_seconds(op, step.profile)
    return sum(
        min(seconds[group], max(matrix[group], needed.get(group, 0) / copy if copy else 0.0)) for group in seconds
    )


def _matrix_or_rest(op_class: str) -> str:
    return op_class if op_class in PRODUCTS else "rest"


def crossing_bytes(stream: Stream, ops: Sequence[TimedOp], group_of: Callable[[str], str]) -> dict[str, int]:
    """Returns the bytes that cross the border of each group of classes, counting each version of a tensor once: read by
    the group and written by another (or present before the step), or written by the group and read by another (or kept
    for the next step)."""
    total: dict[str, int] = defaultdict(int)
    writer: dict[int, str] = {}
    written: dict[int, int] = {}  # bytes of the version that have yet to leave its writer
    seen: dict[tuple[int, str], int] = {}  # bytes of the version that a group has read
    readers: dict[int, list[str]] = defaultdict(list)
    for op, timed in zip(stream.ops, ops, strict=True):
        if timed.work is None:
            continue
        group = group_of(timed.work.op_class)
        overwrites = packet(op.name).split(".")[-1] in _OVERWRITING
        read = (t for i, t in enumerate(op.inputs) if not (overwrites and i in op.written))
        for storage, size in _touched(stream, read, timed.work).items():
            if writer.get(storage) == group:
                continue
            more = size - seen.get((storage, group), 0)
            if more > 0:
                total[group] += more * timed.count
                seen[storage, group] = size
                readers[storage].append(group)
            if written.get(storage):
                total[writer[storage]] += written.pop(storage) * timed.count
        tensors = (*op.outputs, *(op.inputs[i] for i in op.written))
        for storage, size in _touched(stream, tensors, timed.work).items():
            for reader in readers.pop(storage, ()):
                seen.pop((storage, reader), None)
            writer[storage], written[storage] = group, size
    for storage, size in written.items():
        if stream.storages[storage].kind in ("parameter", "state", "buffer"):
            total[writer[storage]] += size
    return dict(total)


def _touched(stream: Stream, tensors: Iterable[int], work: Work) -> dict[int, int]:
    """Returns {storage: bytes}, each at most the bytes that the operation moves in all, so that a lookup table counts
    only the rows in use."""
    sizes: dict[int, int] = {}
    for index in tensors:
        ref = stream.tensors[index]
        sizes[ref.storage] = max(sizes.get(ref.storage, 0), min(ref.operand.bytes, work.bytes))
    return {storage: size for storage, size in sizes.items() if stream.storages[storage].kind != "host"}


# --- by module


def layers_together(module: str) -> str:
    """model.layers.7.mlp.down_proj -> model.layers.*.mlp.down_proj"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def module_parts(step: PricedStep) -> tuple[ModulePart, ...]:
    """Returns device time by module path, largest first. The optimizer works on all modules at once and so has a row of
    its own."""
    members: dict[str, list[TimedOp]] = defaultdict(list)
    for op, timed in zip(step.stream.ops, step.ops, strict=True):
        if timed.work is not None:
            members[layers_together(op.module) or (OPTIMIZER if op.phase == "optimizer" else OUTSIDE)].append(timed)
    total = step.timeline.device_seconds
    parts = []
    for module, ops in members.items():
        phases = dict.fromkeys(PHASES, 0.0)
        classes: dict[str, float] = defaultdict(float)
        for timed in ops:
            assert timed.work is not None
            phases[timed.phase] += timed.seconds
            classes[timed.work.op_class] += timed.seconds
        bounds = bound_seconds(ops, step.profile)
        seconds = sum(timed.seconds for timed in ops)
        parts.append(
            ModulePart(
                module, seconds, seconds / total if total else 0.0, phases["forward"], phases["backward"],
                phases["optimizer"], max(bounds, key=lambda name: bounds[name]), dict(classes),
                sum(timed.count for timed in ops),
            )
        )  # fmt: skip
    return tuple(sorted(parts, key=lambda part: -part.seconds))


# --- synchronisations


def syncs_of(step: PricedStep) -> tuple[Sync, ...]:
    """Returns each place where the host waits for the device, layers merged, costliest first; its cost is the step's
    time less that of the step without the wait.

    The costs of several places do not add up: without one wait the host waits at the next.
    """
    if is_synchronous(step.profile):  # every operation waits there
        return ()
    places: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for i, op in enumerate(step.stream.ops):
        if op.kind == "sync":
            places[packet(op.name), layers_together(op.module) or OUTSIDE, op.phase].append(i)
    found = []
    for (name, module, phase), positions in places.items():
        without = list(step.ops)
        for i in positions:  # enqueued, but not waited for
            without[i] = replace(without[i], kind="launch")
        saved = step.interval.value - replace(step.timeline, ops=without).step_seconds()
        found.append(Sync(name, module, phase, sum(step.ops[i].count for i in positions), max(saved, 0.0)))
    return tuple(sorted(found, key=lambda sync: -sync.step_seconds))
