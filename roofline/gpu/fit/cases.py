"""Turns measured rows into a fit's cases: one time per row with its uncertainty, grouped by surface. numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flopcast.kernels.attention_blocks import is_banded
from flopcast.kernels.shapes import Attention
from flopcast.microbench.records.machine import Device
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.fit.row_seconds import LONG_SECONDS, FitRow, taken_seconds, work_of
from flopcast.roofline.gpu.fit.surface import Points
from flopcast.roofline.stream.lowering.describe import Work
from flopcast.roofline.stream.lowering.variants import SurfaceKey

# Standard deviation of log seconds between two quiet runs of one shape (clocks, memory placement).
REPEAT_NOISE = 0.004
READING_DOUBT = 0.4
MOST_SPREAD = 1.0  # upper bound on the spread assumed for a row's samples
# Kernel time stamps resolve 32 ns; a median of several is more precise than that.
STAMP_SECONDS = 2e-8


@dataclass(frozen=True)
class Case:
    """A measured row, ready to be fitted.

    `seconds`: the duration of its kernels; `noise`: the standard deviation of their logarithm; `kernels`: (name,
    seconds) of each kernel launched; `timer`: as the row names it, "wall" on a processor."""

    key: str
    work: Work
    backend: str
    cache: str
    seconds: float
    noise: float
    is_held_out: bool
    is_throttled: bool
    timer: str | None
    kernels: Sequence[Sequence[Any]]

    @property
    def surface(self) -> SurfaceKey:
        return SurfaceKey(self.backend, self.work.op_class, self.work.variant, self.cache)


@dataclass(frozen=True)
class Group:
    """The cases of one surface. `work`: the first case's; `kind`: of the law; `is_wall`: timed by the wall clock."""

    kind: str
    work: Work
    points: Points
    is_wall: bool


@dataclass(frozen=True)
class Limits:
    """What priors are made from: the device (SM count, L2 bytes; 0 where unknown), peak FLOP/s by dtype, ceilings."""

    device: Device
    peaks: Mapping[str, float]
    ceilings: Mapping[str, Number]

    @property
    def sm_count(self) -> float:
        return float(self.device.get("sm_count") or 0)

    @property
    def l2_bytes(self) -> float:
        return float(self.device.get("l2_bytes") or 0)

    @property
    def floor(self) -> float:
        """Seconds that an empty kernel takes."""
        return self._ceiling(("kernel_floor_cupti", "kernel_floor"), 2e-6)

    def bandwidth(self, cache: str) -> float:
        """Bandwidth in bytes/s of a copy from memory ("cold") or from L2 ("hot")."""
        return self._ceiling(("l2_copy", "hbm_copy") if cache == "hot" else ("hbm_copy", "l2_copy"), 1e12)

    def _ceiling(self, names: Sequence[str], unknown: float) -> float:
        return next((self.ceilings[name].value for name in names if name in self.ceilings), unknown)


def case_of(row: FitRow, gap: float, warnings: list[str]) -> Case | None:
    """Returns the case of a row that has a shape, or None for a row that cannot be fitted.

    A row whose shape cannot be read, or has a size of zero, adds a warning. `gap`: seconds that graph replay adds to a
    kernel's duration."""
    try:
        work = work_of(row)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        warnings.append(f"{row['key']}: left out, its shape cannot be read: {error}")
        return None
    if isinstance(work.shape, Attention) and is_banded(work.shape):
        return None  # of other kernels than the surface's: `studies.shipped.attention_bands` fits these
    seconds = taken_seconds(row, work.op_class, gap)
    if not seconds or not np.isfinite(seconds) or seconds <= 0:
        return None
    if not all(np.isfinite(work.features)):
        warnings.append(f"{row['key']}: left out, a size of it is zero")
        return None
    doubt = 0.0
    if (seen := row.get("kernel_seconds")) and seconds < LONG_SECONDS:  # how far the readings differ is doubt, too
        doubt = min(READING_DOUBT * abs(float(np.log(seconds / seen))), 0.2)
    return Case(
        key=row["key"],
        work=work,
        backend=row.get("backend", "torch"),
        cache=row.get("cache", "cold"),
        seconds=seconds,
        noise=float(np.hypot(_noise(row, seconds), doubt)),
        is_held_out=row.get("role", "fit") == "holdout",
        is_throttled=bool(row.get("throttled")),
        timer=row.get("timer"),
        kernels=row.get("kernels") or (),
    )


def points_of(cases: Sequence[Case]) -> Points:
    """Collects the cases into arrays, one entry per case."""
    return Points(
        np.array([case.work.features for case in cases], float),
        np.array([case.work.bytes for case in cases], float),
        np.array([case.work.flops for case in cases], float),
        np.array([case.seconds for case in cases], float),
        np.array([case.noise for case in cases], float),
    )


def _noise(row: FitRow, seconds: float) -> float:
    """Standard deviation of the log of a row's median from run to run: a floor, the time stamps' resolution, and a
    part of the samples' spread.

    The part is a quarter where samples agree (samples of one run share clock and memory placement, which more samples
    do not average out), and all of it where they differ twofold: the median may then be of either mode."""
    spread = min(log_spread(row.get("samples") or []), MOST_SPREAD)
    part = spread * float(np.clip(spread / 0.7, 0.25, 1.0))
    return float(np.sqrt(REPEAT_NOISE**2 + (STAMP_SECONDS / seconds) ** 2 + part**2))


def log_spread(samples: Sequence[float]) -> float:
    """Robust standard deviation of the log of a row's samples; 0 for fewer than four samples."""
    positive = [sample for sample in samples if sample > 0]
    if len(positive) < 4:
        return 0.0
    low, high = np.quantile(np.log(positive), [0.25, 0.75])
    return float((high - low) / 1.349)
