"""Reads the two sides of `flopcast compare`: the measurements of each, as times with their noise. Uses numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flopcast.microbench.records.machine import Device
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.fit.cards import read_folder
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.validation.measured_rows import MeasuredRow, measured_rows

# standard deviations of one run as a whole
RUN_LOG, GAP_SECONDS, SCALAR_GAP_SECONDS = 0.002, 0.018e-6, 0.1e-6
HOST_LOG = 0.24  # standard deviation of each run's host costs
MEDIAN_LOSS = 1.2533  # standard error of a median over that of a mean
QUARTILES_APART = 1.349  # of a normal distribution, in standard deviations
_SIZED = ("copy", "l2_read")  # scalars whose names hold a number of bytes


@dataclass(frozen=True)
class Timing:
    """One measurement in seconds (for a rate, seconds per unit of work), with two standard deviations of its logarithm:
    `sigma`, its own, and `common_sigma`, shared by its class (None: that of a kernel, `common_of`)."""

    group: str
    seconds: float
    sigma: float
    common_sigma: float | None = None
    name: str = ""


@dataclass(frozen=True)
class Side:
    """One side of a comparison. `timings` are by key; `kind` is "measurements" or "profile"."""

    label: str
    kind: str
    gpu: str
    device: Device
    stack: Mapping[str, Any]
    timings: Mapping[str, Timing]
    profile: Profile | None = None

    @property
    def cards(self) -> frozenset[str]:
        """The UUIDs of the cards measured."""
        made = self.profile.provenance if self.profile is not None else {}
        several = ((made.get("gpus") or {}).get("cards") or {}).values()
        found = [card.get("uuid") for card in several] or [self.device.get("uuid")]
        return frozenset(str(uuid) for uuid in found if uuid)


def side_of(name: str) -> Side:
    """Reads the side named by a folder of measurements, a profile file or a known GPU.

    Raises what `read_folder` and `find_profile` raise.
    """
    path = Path(name)
    return folder_side(path) if path.is_dir() else profile_side(find_profile(name), name)


def folder_side(folder: Path) -> Side:
    found = read_folder(folder)
    timings: dict[str, Timing] = {}
    for key, row in measured_rows(found.rows).items():
        timing = _timing(row) if row.status == "ok" else None
        if timing is not None:
            timings[key] = timing
    device = found.machine["device"]
    stack = {**found.machine.get("stack", {}), "host": (found.machine.get("host") or {}).get("cpu")}
    return Side(str(folder), "measurements", str(device.get("name")), device, stack, timings)


def _timing(row: MeasuredRow) -> Timing | None:
    """The timing of a row; None if the row has no time."""
    sigma = _median_sigma(row.samples)
    if row.is_scalar:
        return _scalar(row.key.removeprefix("scalar/"), row.timer or 0.0, sigma)
    group = group_of(row.op_class, row.backend, row.cache)
    return Timing(group, row.profile, sigma, name=row.key) if row.profile else None


def _median_sigma(samples: Sequence[float]) -> float:
    """Standard error of the logarithm of the samples' median; 0 for fewer than three samples."""
    values = np.array([value for value in samples if value and value > 0])
    if len(values) < 3:
        return 0.0
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(MEDIAN_LOSS * (high - low) / QUARTILES_APART / middle / math.sqrt(len(values)))


def group_of(op_class: str, backend: str, cache: str) -> str:
    return ", ".join([op_class, *([backend] if backend != "torch" else []), *(["hot"] if cache == "hot" else [])])


def _scalar(name: str, value: float, sigma: float) -> Timing | None:
    """A ceiling or a host cost as a time; None if it is neither a time nor a rate, or not above zero."""
    if value <= 0:
        return None
    head, _, tail = name.partition("/")
    if head == "host":
        return Timing(f"host, {name.rpartition('/')[2]}", value, sigma, HOST_LOG, name)
    if head in ("launch", "launch_inplace", "sync"):
        return Timing("host, launches", value, sigma, HOST_LOG, name)
    if head.startswith("matrix"):
        kind = head.removeprefix("matrix_")
        # sustained rates depend on temperature: two cards, or two runs, differ by up to 2.5%
        return Timing(f"ceiling, matrix {kind}", 1.0 / value, sigma, 0.009 if kind == "sustained" else 0.0035, name)
    if head.startswith("hbm_"):
        return Timing("ceiling, memory", 1.0 / value, sigma, 0.0035, name)
    if head in _SIZED and tail.isdigit():
        seconds = float(tail) / value
        return Timing("ceiling, working sets", seconds, max(sigma, 0.02), _of_scalar(seconds), name)
    if head in ("kernel_floor", "kernel_floor_cupti", "kernel_gap", "kernel_gap_tiny", "graph_gap"):
        return Timing("ceiling, floor and gaps", value, sigma, _of_scalar(value), name)
    return None


def _of_scalar(seconds: float) -> float:
    return math.hypot(RUN_LOG, SCALAR_GAP_SECONDS / seconds)


def profile_side(profile: Profile, label: str) -> Side:
    """The side of a profile: its measured points, ceilings and host costs."""
    timings = {}
    for key, surface in profile.own_surfaces.items():
        group = group_of(key.op_class, key.backend, key.cache)
        for features, seconds, noise in zip(surface.features, surface.seconds, surface.noise, strict=True):
            sizes = " x ".join(f"{2**size:.0f}" for size in features)
            timings[f"{key}/{features}"] = Timing(group, seconds, noise, None, f"{key}: {sizes}")
    for name, number in profile.ceilings.items():
        sigma = math.log(number.high / number.low) / 2 / Z_90 if 0 < number.low <= number.high else 0.0
        timing = _scalar(name, number.value, sigma)
        if timing is not None:
            timings[f"scalar/{name}"] = timing
    if profile.host is not None:
        for phase in ("forward", "backward", "optimizer"):
            for kind, value in getattr(profile.host, phase).items():
                if value and kind in ("launch", "view"):
                    timings[f"host/{phase}/{kind}"] = Timing(
                        f"host, {phase}", value, 0.0, max(HOST_LOG, profile.host.sigma), f"host/{phase}/{kind}"
                    )
    return Side(label, "profile", profile.gpu, profile.device, profile.stack, timings, profile)


def as_points(side: Side) -> Side:
    """Converts a folder's measurements to the points of the profile fitted to them; a profile stays as it is."""
    if side.kind == "profile":
        return side
    from flopcast.roofline.step.fit_folder import fit_folder

    return profile_side(fit_folder(Path(side.label))[0], side.label)


def common_of(timing: Timing) -> float:
    """Standard deviation of the logarithm of one run as a whole: clocks, and the residue of the gap between kernels."""
    if timing.common_sigma is not None:
        return timing.common_sigma
    return math.hypot(RUN_LOG, GAP_SECONDS / timing.seconds)


_DEVICE = ("name", "uuid", "driver", "clock_mhz", "memory_clock_mhz", "memory_bytes", "sm_count", "power_limit_w")


def differences(a: Side, b: Side) -> list[tuple[str, Any, Any]]:
    """(what, value of a, value of b) of the devices and stacks, where they differ."""
    pairs: Iterable[tuple[str, Any, Any]] = [
        *((name, a.device.get(name), b.device.get(name)) for name in _DEVICE),
        *((name, a.stack.get(name), b.stack.get(name)) for name in dict.fromkeys([*a.stack, *b.stack])),
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]
