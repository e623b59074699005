"""The two sides of `flopcast compare`: what each measured, as times with their noise. numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flopcast.kernels.shapes import shape_from_json
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.fit.cards import read_folder
from flopcast.roofline.gpu.fit.row_seconds import graph_gap_of, taken_seconds
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import describe

# one standard deviation of a run's own
RUN_LOG, GAP_SECONDS, SCALAR_GAP_SECONDS = 0.002, 0.018e-6, 0.1e-6
HOST_LOG = 0.24  # from run to run, of each
MEDIAN_LOSS = 1.2533  # standard error of a median over that of a mean
_SIZED = ("copy", "l2_read")  # scalars whose name says how many bytes


@dataclass(frozen=True)
class Reading:
    """One measurement: seconds (of a rate the seconds of a unit of work), its own deviation and what is common to its
    class (standard deviations of the logarithm). `common` None: by RUN_LOG and GAP_SECONDS."""

    group: str
    seconds: float
    own: float
    common: float | None = None
    name: str = ""


@dataclass(frozen=True)
class Side:
    """One of the two that are compared. `readings` by key; `kind`: "measurements" or "profile"."""

    label: str
    kind: str
    gpu: str
    device: Mapping[str, Any]
    stack: Mapping[str, Any]
    readings: Mapping[str, Reading]
    profile: Profile | None = None

    @property
    def cards(self) -> frozenset[str]:
        """The cards measured, by uuid."""
        made = self.profile.provenance if self.profile is not None else {}
        several = ((made.get("gpus") or {}).get("cards") or {}).values()
        found = [card.get("uuid") for card in several] or [self.device.get("uuid")]
        return frozenset(str(uuid) for uuid in found if uuid)


def side_of(name: str) -> Side:
    """Of a folder of measurements, a profile file or a known GPU. Raises as `read_folder` and `find_profile` do."""
    path = Path(name)
    return folder_side(path) if path.is_dir() else profile_side(find_profile(name), name)


def folder_side(folder: Path) -> Side:
    found = read_folder(folder)
    rows = [row for row in found.rows if row["status"] == "ok"]
    gap = graph_gap_of(rows)
    readings: dict[str, Reading] = {}
    for row in rows:
        made = _row_reading(row, 0.0 if gap is None else gap.value)
        if made is not None:
            readings[f"{row['key']}/{row.get('backend', 'torch')}/{row.get('cache', 'cold')}"] = made
    device = found.machine["device"]
    stack = {**found.machine.get("stack", {}), "host": (found.machine.get("host") or {}).get("cpu")}
    return Side(str(folder), "measurements", str(device.get("name")), device, stack, readings)


def _row_reading(row: Mapping[str, Any], gap: float) -> Reading | None:
    backend, cache = row.get("backend", "torch"), row.get("cache", "cold")
    own = _own_noise(row.get("samples") or ())
    if row.get("shape"):
        try:
            op_class = describe(shape_from_json(row["shape"]), backend).op_class
        except (KeyError, TypeError, ValueError, IndexError):
            op_class = "unknown"
        seconds = taken_seconds(row, op_class, gap)
        return Reading(group_of(op_class, backend, cache), seconds, own, name=row["key"]) if seconds else None
    value = row.get("value")
    return _scalar(row["key"].removeprefix("scalar/"), value, own) if value and value > 0 else None


def _own_noise(samples: Sequence[float]) -> float:
    """Standard error of the samples' median, of the logarithm."""
    values = np.array([value for value in samples if value and value > 0])
    if len(values) < 3:
        return 0.0
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(MEDIAN_LOSS * (high - low) / 1.349 / middle / math.sqrt(len(values)))


def group_of(op_class: str, backend: str, cache: str) -> str:
    return ", ".join([op_class, *([backend] if backend != "torch" else []), *(["hot"] if cache == "hot" else [])])


def _scalar(name: str, value: float, own: float) -> Reading | None:
    """A ceiling or a host cost as a time; what is neither a time nor a rate is left out."""
    head, _, tail = name.partition("/")
    if head == "host":
        return Reading(f"host, {name.rpartition('/')[2]}", value, own, HOST_LOG, name)
    if head in ("launch", "launch_inplace", "sync"):
        return Reading("host, launches", value, own, HOST_LOG, name)
    if head.startswith("matrix"):
        kind = head.removeprefix("matrix_")
        # of sustained ones temperature decides: two cards, and two runs, differ by up to 2.5%
        return Reading(f"ceiling, matrix {kind}", 1.0 / value, own, 0.009 if kind == "sustained" else 0.0035, name)
    if head.startswith("hbm_"):
        return Reading("ceiling, memory", 1.0 / value, own, 0.0035, name)
    if head in _SIZED and tail.isdigit():
        seconds = float(tail) / value
        return Reading("ceiling, working sets", seconds, max(own, 0.02), _of_scalar(seconds), name)
    if head in ("kernel_floor", "kernel_floor_cupti", "kernel_gap", "kernel_gap_tiny", "graph_gap"):
        return Reading("ceiling, floor and gaps", value, own, _of_scalar(value), name)
    return None


def _of_scalar(seconds: float) -> float:
    return math.hypot(RUN_LOG, SCALAR_GAP_SECONDS / seconds)


def profile_side(profile: Profile, label: str) -> Side:
    """Of a profile: its measured points, ceilings and host."""
    readings = {}
    for key, surface in profile.own_surfaces.items():
        group = group_of(key.op_class, key.backend, key.cache)
        for features, seconds, noise in zip(surface.features, surface.seconds, surface.noise, strict=True):
            sizes = " x ".join(f"{2**size:.0f}" for size in features)
            readings[f"{key}/{features}"] = Reading(group, seconds, noise, None, f"{key}: {sizes}")
    for name, number in profile.ceilings.items():
        own = math.log(number.high / number.low) / 2 / Z_90 if 0 < number.low <= number.high else 0.0
        made = _scalar(name, number.value, own) if number.value > 0 else None
        if made is not None:
            readings[f"scalar/{name}"] = made
    if profile.host is not None:
        for phase in ("forward", "backward", "optimizer"):
            for kind, value in getattr(profile.host, phase).items():
                if value and kind in ("launch", "view"):
                    readings[f"host/{phase}/{kind}"] = Reading(
                        f"host, {phase}", value, 0.0, max(HOST_LOG, profile.host.sigma), f"host/{phase}/{kind}"
                    )
    return Side(label, "profile", profile.gpu, profile.device, profile.stack, readings, profile)


def as_points(side: Side) -> Side:
    """A folder's measurements by the points that a profile would make of them."""
    if side.kind == "profile":
        return side
    from flopcast.roofline.step.profile_of_folder import fit_folder

    return profile_side(fit_folder(Path(side.label))[0], side.label)


def common_of(reading: Reading) -> float:
    if reading.common is not None:
        return reading.common
    return math.hypot(RUN_LOG, GAP_SECONDS / reading.seconds)


_DEVICE = ("name", "uuid", "driver", "clock_mhz", "memory_clock_mhz", "memory_bytes", "sm_count", "power_limit_w")


def differences(a: Side, b: Side) -> list[tuple[str, Any, Any]]:
    """(what, of a, of b) of devices and stacks, where they differ."""
    pairs: Iterable[tuple[str, Any, Any]] = [
        *((name, a.device.get(name), b.device.get(name)) for name in _DEVICE),
        *((name, a.stack.get(name), b.stack.get(name)) for name in dict.fromkeys([*a.stack, *b.stack])),
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]
