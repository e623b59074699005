"""From a folder of measurements to a profile, and a report of how well it fits.

Rows of role "fit" make the surfaces; rows of role "holdout" are only compared with them. Throttled rows
are used, because a step throttles too, and counted. What is predicted is `kernel_seconds`, the sum of
kernel durations.

Ceilings, by name: matrix_burst/<dtype>, matrix_sustained/<dtype> (FLOP/s); hbm_copy, hbm_read, hbm_write,
l2_copy, copy/<bytes> (bytes/s); kernel_floor, kernel_floor_cupti, kernel_gap, kernel_gap_tiny, graph_gap, launch,
launch_inplace, sync (seconds); queue_depth (launches).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flopcast.errors import DataError
from flopcast.kernels.shapes import Shape, shape_from_json
from flopcast.microbench.records.machine import Device
from flopcast.roofline.base.numbers import Z_90, Number
from flopcast.roofline.gpu.catalogue.device import attention_alias, device_peaks, gpu_name
from flopcast.roofline.gpu.fit.cards import read_folder, with_cards
from flopcast.roofline.gpu.fit.host import fit_host, with_origin
from flopcast.roofline.gpu.fit.quality import FitReport, Quality, quality_report
from flopcast.roofline.gpu.fit.row_seconds import LONG_SECONDS, graph_gap_of, taken_seconds
from flopcast.roofline.gpu.fit.surface import DOUBT_FACTOR
from flopcast.roofline.gpu.fit.surfaces import Case, fit_surfaces
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import KernelKind

__all__ = ["FitReport", "Quality", "fit", "fit_rows"]

# What two runs of one shape differ by although each was quiet (clocks, memory placement): log seconds.
REPEAT_NOISE = 0.004
READING_DOUBT = 0.4
# Kernel time stamps resolve 32 ns, and a median of some is better than that.
STAMP_SECONDS = 2e-8


def fit(
    folder: Path | str,
    *,
    counts: Mapping[str, Mapping[str, float]] | None = None,
    describe_shape: Callable[[Shape, str], Work] = describe,
) -> tuple[Profile, FitReport]:
    """The profile of the machine whose measurements lie in `folder`; of several GPUs, each in a folder of its own
    below it (`cards.py`), that of the median card.

    `counts`: ops by kind for the keys of host rows, {"launch", "view", "host", "tensors"}, where the rows
    do not carry them. Raises DataError when the folder holds no usable rows, or as `records.read` does.
    """
    found = read_folder(folder, describe_shape)
    profile, report = fit_rows(
        found.rows, found.machine, counts=counts, describe_shape=describe_shape,
        warnings=found.warnings, name=str(folder),
    )  # fmt: skip
    return with_cards(profile, found, describe_shape), report


def fit_rows(
    rows: Sequence[Mapping[str, Any]],
    machine: Mapping[str, Any],
    *,
    counts: Mapping[str, Mapping[str, float]] | None = None,
    describe_shape: Callable[[Shape, str], Work] = describe,
    warnings: Sequence[str] = (),
    name: str = "measurements",
) -> tuple[Profile, FitReport]:
    """As `fit`, from rows in memory; `machine` is what machine.json holds."""
    warnings = list(warnings)
    usable = [dict(row) for row in rows if row["status"] == "ok"]
    unused = Counter(row["status"] for row in rows if row["status"] != "ok")
    ceilings = ceilings_of(usable)
    gap = graph_gap_of(usable)
    if gap is not None:
        ceilings["graph_gap"] = gap
    shaped = [row for row in usable if row.get("shape")]
    cases = [case for row in shaped if (case := _case(row, describe_shape, gap, warnings)) is not None]
    fitted = [case for case in cases if case.row.get("role", "fit") != "holdout"]
    held = [case for case in cases if case.row.get("role", "fit") == "holdout"]
    if not fitted:
        raise DataError(
            f"{name}: none of {len(rows)} rows can be fitted (role fit, status ok, a shape, a time):"
            " `flopcast bench` measures them"
        )
    device: Device = machine["device"]
    peaks = device_peaks(device, ceilings)
    surfaces, doubtful = fit_surfaces(fitted, device, peaks, ceilings)
    if doubtful:
        warnings.append(
            f"{doubtful} rows timed by the wall clock are {DOUBT_FACTOR:g} times off what their neighbours"
            " say and were given no weight: the machine was busy with something else"
        )
    host = fit_host(usable, counts or {}, ceilings, machine.get("host", {}), warnings)
    host = with_origin(host, machine, usable)
    n_throttled = sum(bool(case.row.get("throttled")) for case in fitted)
    profile = Profile(
        gpu=gpu_name(device),
        basis="measured",
        device=device,
        peaks=peaks,
        ceilings=ceilings,
        surfaces=surfaces,
        launch_counts=_launch_counts(fitted),
        host=host,
        stack=dict(machine.get("stack", {})),
        provenance={
            "machine": machine["machine"],
            "method": max((row.get("method", 1) for row in usable), default=1),
            "suites": sorted({str(row.get("suite")) for row in shaped if row.get("suite")}),
            "rows": len(fitted),
            "rows_throttled": n_throttled,
            "rows_held_out": len(held),
            "from": min((row["time"] for row in usable if row.get("time")), default=None),
            "to": max((row["time"] for row in usable if row.get("time")), default=None),
        },
        aliases=attention_alias(device, machine.get("stack", {}), {case.backend for case in fitted}),
    )
    report = quality_report(profile, fitted, held, n_throttled, dict(unused), warnings)
    return profile, report


# --- rows ---------------------------------------------------------------------------------------------------


def _case(
    row: dict[str, Any], describe_shape: Callable[[Shape, str], Work], gap: Number | None, warnings: list[str]
) -> Case | None:
    backend = row.get("backend", "torch")
    try:
        work = describe_shape(shape_from_json(row["shape"]), backend)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        warnings.append(f"{row['key']}: left out, its shape cannot be read: {error}")
        return None
    seconds = taken_seconds(row, work.op_class, gap.value if gap else 0.0)
    if not seconds or not np.isfinite(seconds) or seconds <= 0:
        return None
    if not all(np.isfinite(work.features)):
        warnings.append(f"{row['key']}: left out, a size of it is zero")
        return None
    if row.get("kernel_seconds") and seconds < LONG_SECONDS:  # the two readings' difference is doubt, too
        doubt = min(READING_DOUBT * abs(float(np.log(seconds / row["kernel_seconds"]))), 0.2)
    else:
        doubt = 0.0
    noise = float(np.hypot(_noise(row, seconds), doubt))
    return Case(row, work, backend, row.get("cache", "cold"), seconds, noise)


def _noise(row: Mapping[str, Any], seconds: float) -> float:
    """Standard deviation of the log of a row's median, from run to run: a floor, the stamps' resolution,
    and a part of the samples' spread. A quarter where they agree (samples of one sitting share clock and
    placement: more of them do not average that out), all of it where they differ twofold: then the median
    may be either kind."""
    spread = log_spread(row)
    part = spread * float(np.clip(spread / 0.7, 0.25, 1.0))
    return float(np.sqrt(REPEAT_NOISE**2 + (STAMP_SECONDS / seconds) ** 2 + part**2))


def log_spread(row: Mapping[str, Any]) -> float:
    """Robust standard deviation of the log of a row's samples; 0 with fewer than four."""
    samples = np.array([s for s in row.get("samples") or [] if s > 0])
    if len(samples) < 4:
        return 0.0
    low, high = np.quantile(np.log(samples), [0.25, 0.75])
    return float(min((high - low) / 1.349, 1.0))


def ceilings_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Number]:
    """From the scalar rows. The interval is the samples' own, relative to their median."""
    found: dict[str, Number] = {}
    for row in rows:
        if row["key"].startswith("scalar/") and row.get("value") is not None:
            half = float(np.exp(Z_90 * log_spread(row)))
            value = float(row["value"])
            source = f"{row['key']}, {row.get('n') or len(row.get('samples') or [])} samples"
            found[row["key"].removeprefix("scalar/")] = Number(value, value / half, value * half, "measured", source)
    if "launch_queue" in found:
        found["queue_depth"] = found.pop("launch_queue")
    return found


def _launch_counts(cases: Iterable[Case]) -> dict[KernelKind, float]:
    counts: dict[KernelKind, list[int]] = defaultdict(list)
    for case in cases:
        kernels = case.row.get("kernels")
        if kernels:
            counts[KernelKind(case.work.op_class, case.work.variant)].append(len(kernels))
    return {kind: float(np.mean(counts[kind])) for kind in sorted(counts, key=str)}
