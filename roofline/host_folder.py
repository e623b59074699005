"""The host of a folder of measurements, without its GPU: what `flopcast bench --suite host` leaves is enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flopcast.errors import DataError
from flopcast.roofline import calibration
from flopcast.roofline.cards import Found, read_folder
from flopcast.roofline.fit import ceilings_of
from flopcast.roofline.fit_host import fit_host, with_origin
from flopcast.roofline.profile import HostCosts

WITH_OPERATORS = 0.4  # deviation of costs that hold the time of the operators themselves


def is_host_only(found: Found) -> bool:
    """Whether nothing of the device was measured."""
    return bool(found.rows) and not any(row.get("shape") for row in found.rows)


def fit_host_folder(folder: Path, found: Found | None = None) -> HostCosts:
    """The host costs of the machine whose measurements lie in `folder`. Raises DataError where it holds no host."""
    found = found or read_folder(folder)
    kind = found.machine["device"]["type"]
    usable = [row for row in found.rows if row["status"] == "ok"]
    counts = calibration.host_counts(calibration.host_plan(kind), kind)
    host = fit_host(usable, counts, ceilings_of(usable), found.machine.get("host", {}), [])
    if host is None:
        raise DataError(
            f"{folder} holds no host costs: `flopcast bench --suite host --out {folder}` measures them"
        )
    described = with_origin(host, found.machine, usable)
    assert described is not None
    if kind == "cpu":  # an op runs when it is called: its own time is in the phases
        described = replace(described, basis="extrapolated", sigma=max(described.sigma, WITH_OPERATORS))
    return described
