"""Where a step's time goes and what bounds it: by operation class, by module, against the speed of light.

The speed of light of a step is that of a part which wastes nothing: each class of operations as one perfect kernel,
which takes its FLOPs at the sustained matrix rate of their dtype or, if that is longer, its unavoidable bytes at the
bandwidth of a copy. Unavoidable are, once each: what the class reads that another wrote or that lies there before the
step (parameters, optimizer states, inputs), and what it leaves to another class or to the next step (activations,
gradients, parameters, states). What passes between kernels of one class is not counted, nor launches, gaps and the
host. A class that is forecast faster still (its operands lie in the cache, or the clock is a burst's) counts with its
forecast, so that the speed of light is never above the forecast.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from flopcast.roofline.gpu.profile.host import NO_HOST
from flopcast.roofline.step.device_work import Backends, device_work
from flopcast.roofline.step.forecast import forecast_items
from flopcast.roofline.step.simulation import Item
from flopcast.roofline.step.uncertainty import GAP_SECONDS, is_synchronous, simulated
from flopcast.roofline.stream.lowering.classes import OP_CLASSES
from flopcast.roofline.stream.lowering.describe import Work
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import PHASES, Stream, packet

if TYPE_CHECKING:
    from flopcast.roofline.gpu.catalogue.prices import Price
    from flopcast.roofline.gpu.profile.host import HostCosts
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.step.forecast import Forecast


BOUNDS = ("matrix", "memory", "launch")
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
    """One class of a step. `bound`: what bounds most of its time; `bound_seconds`: its time by what bounds each op;
    `needed_bytes`: the unavoidable ones; `light_seconds`: its speed of light."""

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
    """Device seconds of one module path, layers together (`model.layers.*.mlp.down_proj`), by phase and class."""

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
    """One place where the host waits for the device. `step_seconds`: how much shorter the step is without it."""

    op: str
    module: str
    phase: str
    calls: int
    step_seconds: float


@dataclass(frozen=True)
class Explanation:
    """A forecast and what it is made of.

    `gap_seconds` pass between kernels, `idle_seconds` is what else the device waits for the host; both with the
    forecast's `device_seconds` and `power_seconds` add up to the step. `light_seconds`: speed of light by class;
    `fused_seconds`: the same with everything but products, convolutions and attention as one class.
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

    def to_json(self) -> dict[str, Any]:
        """SI units; `forecast` as `predict --json` prints it."""
        found = self.forecast
        return {
            "forecast": found.to_json(),
            "step": {
                "seconds": found.step_seconds,
                "device_seconds": found.device_seconds,
                "power_seconds": found.power_seconds,
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
        }


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    return {"class": record.pop("op_class"), **record}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def explain_stream(
    stream: Stream, run: Run, profile: Profile, *, host: HostCosts | None = None, price: Price | None = None
) -> Explanation:
    """Forecasts one step and takes it apart. Raises as `forecast_items` does."""
    costs = host or profile.host or NO_HOST
    items = device_work(stream, profile, costs, Backends(matmul=run.matmul, attention=run.attention))
    found = forecast_items(items, stream, run, profile, host=costs, price=price)
    classes = class_parts(stream, items, profile)
    kernels = sum(item.launches for item in items)
    step, device = found.step_seconds, found.device_seconds + found.power_seconds
    if is_synchronous(profile):
        gap, alone = 0.0, device
    else:
        gap = min(kernels * profile.ceiling("kernel_gap", GAP_SECONDS), max(step - device, 0.0))
        alone = simulated([replace(item, host_seconds=0.0) for item in items], profile)()
    light = sum(part.light_seconds for part in classes)
    return Explanation(
        forecast=found,
        classes=classes,
        modules=module_parts(items, profile),
        syncs=syncs_of(stream, items, profile),
        gap_seconds=gap,
        idle_seconds=max(step - device - gap, 0.0),
        device_only_seconds=alone,
        light_seconds=light,
        fused_seconds=min(light, fused_seconds(stream, items, profile)),
    )


# --- what bounds an op


def matrix_rate(profile: Profile, dtype: str) -> float | None:
    """Sustained FLOP/s of a dtype's products; the burst, then the peak, where that was not measured."""
    for name in (f"matrix_sustained/{dtype}", f"matrix_burst/{dtype}"):
        if name in profile.ceilings:
            return profile.ceilings[name].value
    return profile.peaks[dtype].value if dtype in profile.peaks else None


def matrix_seconds(item: Item, profile: Profile) -> float:
    """FLOPs of a product, a convolution or attention at the sustained rate; 0 of all else."""
    dtype = None if item.work is None else item.work.matrix_dtype
    rate = None if dtype is None else matrix_rate(profile, dtype)
    return item.work.flops * item.count / rate if rate and item.work is not None else 0.0


def bound_of(item: Item, profile: Profile) -> str:
    """What keeps an op from being faster, of its FLOPs, its bytes and the shortest kernel: the longest."""
    assert item.work is not None
    copy = profile.ceiling("hbm_copy", 0.0)
    limits = {
        "matrix": matrix_seconds(item, profile),
        "memory": item.work.bytes * item.count / copy if copy else 0.0,
        "launch": profile.ceiling("kernel_floor", 0.0) * item.launches,
    }
    return max(BOUNDS, key=lambda name: limits[name])


# --- by class


def class_parts(stream: Stream, items: Sequence[Item], profile: Profile) -> tuple[ClassPart, ...]:
    """Each class's time, what bounds it, and its speed of light; in the order of OP_CLASSES."""
    total = sum(item.seconds for item in items)
    copy = profile.ceiling("hbm_copy", 0.0)
    needed = crossing_bytes(stream, items, lambda op_class: op_class)
    members: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        if item.work is not None:
            members[item.work.op_class].append(item)
    parts = []
    for op_class in (*OP_CLASSES, *sorted(set(members) - set(OP_CLASSES))):
        mine = members.get(op_class, [])
        if not mine:
            continue
        seconds = sum(item.seconds for item in mine)
        moved = sum(item.work.bytes * item.count for item in mine if item.work is not None)
        bounds = dict.fromkeys(BOUNDS, 0.0)
        for item in mine:
            bounds[bound_of(item, profile)] += item.seconds
        moving = needed.get(op_class, 0) / copy if copy else 0.0  # clipped below, as its bytes are
        parts.append(
            ClassPart(
                op_class=op_class,
                seconds=seconds,
                share=seconds / total if total else 0.0,
                bound=max(BOUNDS, key=lambda name: bounds[name]),
                bound_seconds=bounds,
                light_seconds=min(seconds, max(sum(matrix_seconds(item, profile) for item in mine), moving)),
                calls=sum(item.count for item in mine),
                kernels=sum(item.launches for item in mine),
                flops=sum(item.work.flops * item.count for item in mine if item.work is not None),
                bytes=moved,
                needed_bytes=min(needed.get(op_class, 0), moved),
            )
        )
    return tuple(parts)


def fused_seconds(stream: Stream, items: Sequence[Item], profile: Profile) -> float:
    """The speed of light where all that is neither product, convolution nor attention is one kernel."""
    copy = profile.ceiling("hbm_copy", 0.0)
    needed = crossing_bytes(stream, items, _matrix_or_rest)
    seconds: dict[str, float] = defaultdict(float)
    matrix: dict[str, float] = defaultdict(float)
    for item in items:
        if item.work is not None:
            group = _matrix_or_rest(item.work.op_class)
            seconds[group] += item.seconds
            matrix[group] += matrix_seconds(item, profile)
    return sum(
        min(seconds[group], max(matrix[group], needed.get(group, 0) / copy if copy else 0.0)) for group in seconds
    )


def _matrix_or_rest(op_class: str) -> str:
    return op_class if op_class in ("gemm", "attention", "conv") else "rest"


def crossing_bytes(stream: Stream, items: Sequence[Item], group_of: Callable[[str], str]) -> dict[str, int]:
    """Bytes that cross the border of each group of classes, each tensor once a version: read by the group and written
    by another (or there before the step), or written by it and read by another (or kept for the next step)."""
    total: dict[str, int] = defaultdict(int)
    writer: dict[int, str] = {}
    written: dict[int, int] = {}  # bytes of the version that have yet to leave its writer
    seen: dict[tuple[int, str], int] = {}  # bytes of the version that a group has read
    readers: dict[int, list[str]] = defaultdict(list)
    for op, item in zip(stream.ops, items, strict=True):
        if item.work is None:
            continue
        group = group_of(item.work.op_class)
        overwrites = packet(op.name).split(".")[-1] in _OVERWRITING
        reads = _touched(
            stream, (t for i, t in enumerate(op.inputs) if not (overwrites and i in op.written)), item.work
        )
        for storage, size in reads.items():
            if writer.get(storage) == group:
                continue
            more = size - seen.get((storage, group), 0)
            if more > 0:
                total[group] += more * item.count
                seen[storage, group] = size
                readers[storage].append(group)
            if written.get(storage):
                total[writer[storage]] += written.pop(storage) * item.count
        tensors = (*op.outputs, *(op.inputs[i] for i in op.written))
        for storage, size in _touched(stream, tensors, item.work).items():
            for reader in readers.pop(storage, ()):
                seen.pop((storage, reader), None)
            writer[storage], written[storage] = group, size
    for storage, size in written.items():
        if stream.storages[storage].kind in ("parameter", "state", "buffer"):
            total[writer[storage]] += size
    return dict(total)


def _touched(stream: Stream, tensors: Any, work: Work) -> dict[int, int]:
    """storage -> bytes, none more than the op moves in all (a table that is looked up counts its rows in use)."""
    sizes: dict[int, int] = {}
    for index in tensors:
        ref = stream.tensors[index]
        sizes[ref.storage] = max(sizes.get(ref.storage, 0), min(ref.operand.bytes, work.bytes))
    return {storage: size for storage, size in sizes.items() if stream.storages[storage].kind != "host"}


# --- by module


def layers_together(module: str) -> str:
    """model.layers.7.mlp.down_proj -> model.layers.*.mlp.down_proj"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def module_parts(items: Sequence[Item], profile: Profile) -> tuple[ModulePart, ...]:
    """Device time by module path, largest first. The optimizer works on all modules at once: a row of its own."""
    members: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        if item.work is not None:
            name = layers_together(item.module) or (OPTIMIZER if item.phase == "optimizer" else OUTSIDE)
            members[name].append(item)
    total = sum(item.seconds for item in items)
    parts = []
    for module, mine in members.items():
        phases = dict.fromkeys(PHASES, 0.0)
        classes: dict[str, float] = defaultdict(float)
        bounds = dict.fromkeys(BOUNDS, 0.0)
        for item in mine:
            assert item.work is not None
            phases[item.phase] += item.seconds
            classes[item.work.op_class] += item.seconds
            bounds[bound_of(item, profile)] += item.seconds
        seconds = sum(item.seconds for item in mine)
        parts.append(
            ModulePart(
                module, seconds, seconds / total if total else 0.0, phases["forward"], phases["backward"],
                phases["optimizer"], max(BOUNDS, key=lambda name: bounds[name]), dict(classes),
                sum(item.count for item in mine),
            )
        )  # fmt: skip
    return tuple(sorted(parts, key=lambda part: -part.seconds))


# --- synchronisations


def syncs_of(stream: Stream, items: Sequence[Item], profile: Profile) -> tuple[Sync, ...]:
    """Each place that stops the host, layers together, costliest first: the step less the step without its wait.

    Costs of several do not add up: without one the host waits at the next.
    """
    if is_synchronous(profile):  # every op waits there
        return ()
    places: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for i, op in enumerate(stream.ops):
        if op.kind == "sync":
            places[packet(op.name), layers_together(op.module) or OUTSIDE, op.phase].append(i)
    step = simulated(items, profile)() if places else 0.0
    found = []
    for (name, module, phase), positions in places.items():
        saved = step - simulated(without_syncs(items, positions), profile)()
        calls = sum(items[i].count for i in positions)
        found.append(Sync(name, module, phase, calls, max(saved, 0.0)))
    return tuple(sorted(found, key=lambda sync: -sync.step_seconds))


def without_syncs(items: Sequence[Item], positions: Sequence[int] | None = None) -> list[Item]:
    """The same step whose ops at `positions` (default: all) are handed over but not waited for."""
    chosen = None if positions is None else set(positions)
    return [
        replace(item, kind="launch") if item.kind == "sync" and (chosen is None or i in chosen) else item
        for i, item in enumerate(items)
    ]
