"""Fits a profile to a folder of measurements and records in it the models that the folder was measured for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from flopcast.roofline.gpu.fit.cards import Found
    from flopcast.roofline.gpu.fit.quality import FitReport
    from flopcast.roofline.gpu.fit.row_seconds import FitRow
    from flopcast.roofline.gpu.profile.profile import Profile


def fit_folder(folder: Path, found: Found | None = None) -> tuple[Profile, FitReport]:
    """Returns the profile of a folder of measurements, host costs included, and the fit's report; for measurements of
    several GPUs the profile is that of the median card."""
    from flopcast.roofline.gpu.fit import cards, host_calibration
    from flopcast.roofline.gpu.fit.rows import fit_rows
    from flopcast.roofline.step import coverage, measured_model

    found = found or cards.read_folder(folder)
    machine = found.machine
    kind = machine["device"]["type"]
    promoted, n_promoted = measured_model.promote(found.rows, measured_model.kept(found.home), machine)
    rows = cast("list[FitRow]", promoted)
    warnings = list(found.warnings)
    if n_promoted:
        warnings.append(f"{n_promoted} held-out rows are what --config asked for: fitted, they judge no more")
    counts = host_calibration.calibration_counts(kind)
    profile, quality = fit_rows(rows, machine, counts=counts, warnings=warnings, name=str(folder))
    if kind == "cpu":
        plan = host_calibration.host_plan(kind)
        profile = profile.with_host(host_calibration.synchronous_host(profile, plan, rows) or profile.host)
    return cards.with_cards(coverage.with_sources(profile, found.home, rows), found), quality
