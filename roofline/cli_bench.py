"""What `bench` and `fit` do beyond one GPU: all GPUs of a host, hosts by themselves, two runs compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flopcast.errors import DataError, RunError, UsageError
from flopcast.microbench import records
from flopcast.roofline import cards, hosts, tables
from flopcast.roofline.profile import HostCosts

HOST_SUITE = "host"


def check_out(out: Path, *, all_gpus: bool) -> None:
    """A folder is of one GPU or of several. Raises UsageError for one of the other kind."""
    if all_gpus and records.file_in(out).is_file():
        raise UsageError(f"{out} holds measurements of one GPU: give another --out for --all-gpus")
    if not all_gpus and cards.card_folders(out):
        raise UsageError(
            f"{out} holds measurements of several GPUs: go on with --all-gpus, or give another --out"
        )


def bench_all_gpus(out: Path, suite: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Measures every GPU of this host into a folder of its own; what is done is not done again.

    `arguments`: what a bench takes besides its device, folder and suite. Returns {"out", "parts" by card, "failed"
    by card, "spread"}. The host is calibrated first, alone, by the first GPU's process (`fanout`). Raises UsageError
    without a GPU, and where another process writes to the folder.
    """
    from flopcast.microbench import device, fanout

    check_out(out, all_gpus=True)
    devices = device.all_gpus()
    suite_ = () if suite is None else ("--suite", suite)
    lock = records.lock_folder(out)
    try:
        tables.say(f"{len(devices)} GPUs; first the host, by itself")
        again = ("--retry",) if "--retry" in arguments else ()
        first = fanout.jobs(devices[:1], out, ("--suite", HOST_SUITE, *again))
        calibrated = fanout.run_side_by_side(first, tables.say)
        if suite == HOST_SUITE:
            found = calibrated
        else:
            side_by_side = fanout.jobs(devices, out, (*suite_, *arguments, "--skip-host"))
            found = fanout.run_side_by_side(side_by_side, tables.say)
    finally:
        os.close(lock)
    parts = {name: outcome.parts for name, outcome in found.items()}
    parts["gpu0"] = {**calibrated["gpu0"].parts, **parts["gpu0"]}
    failed = {name: outcome.reason for name, outcome in found.items() if not outcome.is_done}
    if not calibrated["gpu0"].is_done and "gpu0" not in failed:
        failed["gpu0"] = f"host calibration: {calibrated['gpu0'].reason}"
    return {"out": str(out), "parts": parts, "failed": failed, "spread": spread_of(out)}


def spread_of(out: Path) -> dict[str, Any] | None:
    """How far the cards of a folder lie apart; None where that cannot be told, with a word."""
    try:
        found = cards.read_folder(out)
    except DataError as fault:
        tables.say(f"no spread between the GPUs: {fault}")
        return None
    return cards.spread(found) if len(cards.counted(found.cards)) > 1 else None


def raise_if_failed(found: dict[str, Any]) -> None:
    """Raises RunError naming the GPUs whose bench failed: the others' rows, and theirs so far, are kept."""
    if found["failed"]:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found["failed"].items())
        raise RunError(
            f"{len(found['failed'])} of {len(found['parts'])} GPUs failed ({reasons}). All finished rows of all "
            f"GPUs are in {found['out']}; run the same command again, it continues where each stopped"
        )


def print_spread(spread: dict[str, Any]) -> None:
    title = f"{len(spread['cards'])} cards, row by row"
    tables.console().print(tables.table(title, cards.TABLE_COLUMNS, cards.table_rows(spread)))


# --- hosts


def save_host(host: HostCosts | None, path: Path) -> Path | None:
    """Writes a measured host to `path`, and a copy where `--host NAME` finds it; None where none was measured.

    The processor as a device leaves no copy: its host has no launches, `--host cpu` is its profile's.
    """
    from flopcast.roofline.lookup import user_hosts

    if host is None or host.basis != "measured":
        return None
    hosts.save(host, path)
    if host.device and host.device != host.cpu:
        with suppress(UsageError):  # a read-only home: the file asked for is written
            hosts.save(host, user_hosts() / f"{host.name}.json")
    return path


def host_path(profile: Path, is_default: bool) -> Path:
    """Beside the profile: host.json, or after the profile's own name where that was chosen."""
    if is_default:
        return profile.with_name("host.json")
    return profile.with_name(f"{profile.name.removesuffix('.gz').removesuffix('.json')}.host.json")


def print_host(host: HostCosts) -> None:
    depths = ", ".join(map(str, host.layers.get("depths", ())))
    title = f"Host {host.name}: {host.layers.get('model', 'no model')}, eager" + (
        f", depths {depths}" * bool(depths)
    )
    caption = (
        f"single runs differ by {host.sigma:.0%} (standard deviation); {host.basis}, {host.date or 'no date'}"
    )
    tables.console().print(tables.table(title, hosts.LAYER_COLUMNS, hosts.layer_rows(host), caption))


def print_hosts(found: Sequence[Any]) -> None:
    if not found:
        return
    rows = [[entry.name, *hosts.summary(entry.costs), entry.source] for entry in found]
    columns = ("--host", "forward", "backward", "optimizer", "machines", "deviation", "day", "source")
    caption = (
        "machines: how many of this CPU model were measured, with their ms a layer of a whole step; the host is their "
        "mean, and yours may be any of them: `flopcast bench --suite host` measures it in half a minute"
    )
    title = "Known hosts, ms a layer of Qwen3 in eager mode"
    tables.console().print(tables.table(title, columns, rows, caption))


def fit_host_only(folder: Path, found: cards.Found, out: Path | None) -> tuple[HostCosts, Path]:
    """The host of a folder that holds nothing else, written to `out`, default FOLDER/host.json."""
    from flopcast.roofline.host_folder import fit_host_folder

    host = fit_host_folder(folder, found)
    path = out or folder / "host.json"
    hosts.save(host, path)
    save_host(host, path)
    return host, path
