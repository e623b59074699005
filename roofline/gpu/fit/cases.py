"""Measured rows as a fit sees them: one time each and how far it may be off, in groups of one surface. numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flopcast.microbench.records.machine import Device
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.fit.row_seconds import LONG_SECONDS, FitRow, taken_seconds, work_of
from flopcast.roofline.gpu.fit.surface import Points
from flopcast.roofline.stream.lowering.describe import Work
from flopcast.roofline.stream.lowering.variants import SurfaceKey

# What two runs of one shape differ by although each was quiet (clocks, memory placement): log seconds.
REPEAT_NOISE = 0.004
READING_DOUBT = 0.4
MOST_SPREAD = 1.0  # that a row's samples are taken to have
# Kernel time stamps resolve 32 ns, and a median of some is better than that.
STAMP_SECONDS = 2e-8


@dataclass(frozen=True)
class Case:
    """A measured row. `seconds` of the kernels, `noise`: standard deviation of their log; `kernels`: (name, seconds) of
    each that was launched; `timer`: as the row tells it, "wall" on a processor."""

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
    """The cases of one surface. `work`: of the first; `kind`: of their law; `is_wall`: timed by the wall clock."""

    kind: str
    work: Work
    points: Points
    is_wall: bool


@dataclass(frozen=True)
class Limits:
    """What beliefs are made of: SMs and bytes of L2 (0 where unknown), peak FLOP/s by dtype, the ceilings measured."""

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
        """Seconds of a kernel that does nothing."""
        return self._ceiling(("kernel_floor_cupti", "kernel_floor"), 2e-6)

    def bandwidth(self, cache: str) -> float:
        """bytes/s of a copy out of memory ("cold") or L2 ("hot")."""
        return self._ceiling(("l2_copy", "hbm_copy") if cache == "hot" else ("hbm_copy", "l2_copy"), 1e12)

    def _ceiling(self, names: Sequence[str], unknown: float) -> float:
        return next((self.ceilings[name].value for name in names if name in self.ceilings), unknown)


def case_of(row: FitRow, gap: float, warnings: list[str]) -> Case | None:
    """The case of a row of a shape; None, and a warning where it should have one, for a row that cannot be fitted.

    `gap`: seconds that graph replay adds to a kernel's duration."""
    try:
        work = work_of(row)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        warnings.append(f"{row['key']}: left out, its shape cannot be read: {error}")
        return None
    seconds = taken_seconds(row, work.op_class, gap)
    if not seconds or not np.isfinite(seconds) or seconds <= 0:
        return None
    if not all(np.isfinite(work.features)):
        warnings.append(f"{row['key']}: left out, a size of it is zero")
        return None
    doubt = 0.0
    if (seen := row.get("kernel_seconds")) and seconds < LONG_SECONDS:  # the two readings' difference is doubt, too
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
    """The cases' columns."""
    return Points(
        np.array([case.work.features for case in cases], float),
        np.array([case.work.bytes for case in cases], float),
        np.array([case.work.flops for case in cases], float),
        np.array([case.seconds for case in cases], float),
        np.array([case.noise for case in cases], float),
    )


def _noise(row: FitRow, seconds: float) -> float:
    """Standard deviation of the log of a row's median, from run to run: a floor, the stamps' resolution,
    and a part of the samples' spread. A quarter where they agree (samples of one sitting share clock and
    placement: more of them do not average that out), all of it where they differ twofold: then the median
    may be either kind."""
    spread = min(log_spread(row.get("samples") or []), MOST_SPREAD)
    part = spread * float(np.clip(spread / 0.7, 0.25, 1.0))
    return float(np.sqrt(REPEAT_NOISE**2 + (STAMP_SECONDS / seconds) ** 2 + part**2))


def log_spread(samples: Sequence[float]) -> float:
    """Robust standard deviation of the log of a row's samples; 0 with fewer than four."""
    positive = [sample for sample in samples if sample > 0]
    if len(positive) < 4:
        return 0.0
    low, high = np.quantile(np.log(positive), [0.25, 0.75])
    return float((high - low) / 1.349)
