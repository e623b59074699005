"""Fits a profile to a folder of measurements, and reports how well it fits.

Surfaces are fitted to rows of role "fit"; rows of role "holdout" are only compared with them. Throttled rows are used,
because a step throttles too, and counted. The predicted quantity is `kernel_seconds`, the sum of kernel durations.

Ceilings, by name: matrix_burst/<dtype>, matrix_sustained/<dtype> (FLOP/s); hbm_copy, hbm_read, hbm_write,
l2_copy, copy/<bytes> (bytes/s); kernel_floor, kernel_floor_cupti, kernel_gap, kernel_gap_tiny, graph_gap, launch,
launch_inplace, sync (seconds); queue_depth (launches).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flopcast.errors import DataError
from flopcast.microbench.records.machine import Device, Machine
from flopcast.microbench.records.rows import Row, is_busy
from flopcast.roofline.base.numbers import Z_90, Number
from flopcast.roofline.gpu.catalogue.device import attention_alias, device_peaks, gpu_name
from flopcast.roofline.gpu.fit.cards import read_folder, with_cards
from flopcast.roofline.gpu.fit.cases import MOST_SPREAD, Case, Limits, case_of, log_spread
from flopcast.roofline.gpu.fit.convolution import with_products
from flopcast.roofline.gpu.fit.host import fit_host, with_origin
from flopcast.roofline.gpu.fit.quality import FitReport, Quality, quality_report
from flopcast.roofline.gpu.fit.row_seconds import FitRow, graph_gap_of
from flopcast.roofline.gpu.fit.surface import DOUBT_FACTOR
from flopcast.roofline.gpu.fit.surfaces import fit_surfaces
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.variants import SurfaceKey

__all__ = ["FitReport", "Quality", "fit", "fit_rows"]


def fit(folder: Path | str, *, counts: Mapping[str, Mapping[str, float]] | None = None) -> tuple[Profile, FitReport]:
    """Fits the profile of the machine whose measurements lie in `folder`; with several GPUs, each in a subfolder of its
    own (`cards.py`), the profile of the median card.

    `counts`: ops by kind ({"launch", "view", "host", "tensors"}) by key of host rows, where the rows do not carry
    them. Raises DataError when the folder holds no usable rows, or as `records.read` does.
    """
    found = read_folder(folder)
    profile, report = fit_rows(found.rows, found.machine, counts=counts, warnings=found.warnings, name=str(folder))
    return with_cards(profile, found), report


def fit_rows(
    rows: Sequence[FitRow],
    machine: Machine,
    *,
    counts: Mapping[str, Mapping[str, float]] | None = None,
    warnings: Sequence[str] = (),
    name: str = "measurements",
) -> tuple[Profile, FitReport]:
    """As `fit`, from rows in memory; `machine` is the content of machine.json."""
    warnings = list(warnings)
    usable = [row for row in rows if row["status"] == "ok"]
    unused = Counter(str(row["status"]) for row in rows if row["status"] != "ok")
    ceilings = ceilings_of(usable)
    gap = graph_gap_of(usable)
    if gap is not None:
        ceilings["graph_gap"] = gap
    shaped = [row for row in usable if row.get("shape")]
    cases = [case for row in shaped if (case := case_of(row, gap.value if gap else 0.0, warnings)) is not None]
    fitted = [case for case in cases if not case.is_held_out]
    held = [case for case in cases if case.is_held_out]
    if not fitted:
        raise DataError(
            f"{name}: none of {len(rows)} rows can be fitted (role fit, status ok, a shape, a time):"
            " `flopcast bench` measures them"
        )
    device: Device = machine["device"]
    peaks = device_peaks(device, ceilings)
    limits = Limits(device, {dtype: number.value for dtype, number in peaks.items()}, ceilings)
    surfaces, doubtful = fit_surfaces(fitted, limits)
    if doubtful:
        warnings.append(
            f"{doubtful} rows timed by the wall clock are {DOUBT_FACTOR:g} times off what their neighbours"
            " say and were given no weight: the machine was busy with something else"
        )
    host = fit_host(usable, counts or {}, ceilings, machine.get("host", {}), warnings)
    host = with_origin(host, machine, usable)
    others = others_share(usable)
    if is_busy(others, device["type"]):
        warnings.append(
            f"other processes kept {others:.0%} of the cores busy while this was measured: the times are those of a "
            "busy machine; measure again when it is quiet, into another folder"
        )
    times = [time for row in usable if (time := row.get("time"))]
    n_throttled = sum(case.is_throttled for case in fitted)
    profile = Profile(
        gpu=gpu_name(device),
        basis="measured",
        device=device,
        peaks=peaks,
        ceilings=ceilings,
        surfaces=with_launches(surfaces, fitted),
        host=host,
        stack=dict(machine.get("stack", {})),
        provenance={
            "machine": machine["machine"],
            "method": max((row.get("method", 1) for row in usable), default=1),
            "suites": sorted({suite for row in shaped if (suite := row.get("suite"))}),
            "rows": len(fitted),
            "rows_throttled": n_throttled,
            **({} if others is None else {"others_share": others}),
            "rows_held_out": len(held),
            "from": min(times, default=None),
            "to": max(times, default=None),
        },
        aliases=attention_alias(device, machine.get("stack", {}), {case.backend for case in fitted}),
    )
    report = quality_report(profile, with_products(fitted, surfaces), held, n_throttled, dict(unused), warnings)
    return profile, report


# --- rows ---------------------------------------------------------------------------------------------------


def ceilings_of(rows: Iterable[Row]) -> dict[str, Number]:
    """The ceilings by name, from the scalar rows. The interval is that of the samples relative to their median."""
    found: dict[str, Number] = {}
    for row in rows:
        if row["key"].startswith("scalar/") and (value := row.get("value")) is not None:
            half = float(np.exp(Z_90 * min(log_spread(row.get("samples") or []), MOST_SPREAD)))
            source = f"{row['key']}, {row.get('n') or len(row.get('samples') or [])} samples"
            found[row["key"].removeprefix("scalar/")] = Number(
                float(value), value / half, value * half, "measured", source
            )
    if "launch_queue" in found:
        found["queue_depth"] = found.pop("launch_queue")
    return found


def others_share(rows: Iterable[Row]) -> float | None:
    """The median share of the cores that other processes kept busy while rows were measured; None where none tells."""
    known = [share for row in rows if (share := row.get("others_share")) is not None]
    return round(float(np.median(known)), 3) if known else None


def with_launches(surfaces: Mapping[SurfaceKey, Surface], cases: Iterable[Case]) -> dict[SurfaceKey, Surface]:
    """The surfaces with how many kernels a call of each of their points launched; those of which no case tells stay.
    Those of products of matrices have to be among them where 1x1 convolutions are."""
    seen: dict[SurfaceKey, dict[tuple[float, ...], int]] = defaultdict(dict)
    for case in with_products(list(cases), surfaces):
        if case.kernels:
            seen[case.surface][case.work.features] = len(case.kernels)
    found = dict(surfaces)
    for key in surfaces.keys() & seen.keys():
        surface = surfaces[key]
        known = zip(surface.features, surface.launches or [0] * len(surface.features), strict=True)
        counts = tuple([seen[key].get(sizes, count) for sizes, count in known])
        found[key] = replace(surface, launches=counts).solved(surface.weights)
    return found
