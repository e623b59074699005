"""Fits the host costs of a folder without GPU measurements (`flopcast bench --suite host` writes no others), and saves
host costs and profiles."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flopcast.errors import DataError, FlopcastError
from flopcast.files import make_folder
from flopcast.roofline.gpu.fit import host_calibration
from flopcast.roofline.gpu.fit.cards import Found, read_folder
from flopcast.roofline.gpu.fit.host import fit_host, with_origin
from flopcast.roofline.gpu.fit.rows import ceilings_of
from flopcast.roofline.gpu.profile.host import HostCosts

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile

WITH_OPERATORS = 0.4  # standard deviation of costs that include the operators' own time


def is_host_only(found: Found) -> bool:
    """Whether the folder has rows, but none of a shape run on the device."""
    return bool(found.rows) and not any(row.get("shape") for row in found.rows)


def fit_host_folder(folder: Path, found: Found | None = None) -> HostCosts:
    """Fits host costs to the measurements in `folder`. Raises DataError where they include no host rows."""
    found = found or read_folder(folder)
    kind = found.machine["device"]["type"]
    usable = [row for row in found.rows if row["status"] == "ok"]
    counts = host_calibration.calibration_counts(kind)
    host = fit_host(usable, counts, ceilings_of(usable), found.machine.get("host", {}), [])
    if host is None:
        raise DataError(f"{folder} holds no host costs: `flopcast bench --suite host --out {folder}` measures them")
    described = with_origin(host, found.machine, usable)
    assert described is not None
    if kind == "cpu":  # operators run synchronously: the phases include their own time
        described = replace(described, basis="extrapolated", sigma=max(described.sigma, WITH_OPERATORS))
    return described


# --- where profiles and hosts are written


def save_host(host: HostCosts | None, path: Path) -> Path | None:
    """Writes measured host costs to `path`, and a copy where `--host NAME` finds it; None where none were measured.

    No copy is written where the processor is the device: such a host has no launches, and `--host cpu` takes the host
    of that profile.
    """
    from flopcast.roofline.gpu.library.profiles import user_hosts

    if host is None or host.basis != "measured":
        return None
    host.save(path)
    if host.device and host.device != host.cpu:
        with suppress(FlopcastError):  # the home folder may be read-only; the file asked for is written
            host.save(user_hosts() / f"{host.name}.json")
    return path


def host_path(profile: Path, is_default: bool) -> Path:
    """The host file beside a profile: host.json, or named after the profile where the user chose the profile's name."""
    if is_default:
        return profile.with_name("host.json")
    return profile.with_name(f"{profile.name.removesuffix('.gz').removesuffix('.json')}.host.json")


def fit_host_only(folder: Path, found: Found, out: Path | None) -> tuple[HostCosts, Path]:
    """Fits the host of a folder that holds nothing else and writes it to `out` (default FOLDER/host.json)."""
    host = fit_host_folder(folder, found)
    path = out or folder / "host.json"
    host.save(path)
    save_host(host, path)
    return host, path


def save_profile(profile: Profile, path: Path) -> None:
    """Writes the profile, and a copy where `--gpu NAME` finds it. Raises UsageError when it cannot be written."""
    from flopcast.roofline.gpu.library.profiles import user_folder

    make_folder(path.parent)
    profile.save(path)
    with suppress(FlopcastError):  # the home folder may be read-only; the file asked for is written
        profile.save(user_folder() / f"{profile.gpu}.json.gz")
