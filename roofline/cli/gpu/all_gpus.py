"""Implements `bench --all-gpus`: measures all GPUs of a host, each into a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopcast.errors import DataError, RunError, UsageError
from flopcast.microbench.records import records
from flopcast.roofline.gpu.fit import cards
from flopcast.roofline.gpu.links.fit import is_links
from flopcast.roofline.gpu.suites import HOST
from flopcast.roofline.views.terminal import console


def check_out(out: Path, *, all_gpus: bool = False, collectives: bool = False) -> None:
    """Raises UsageError where a folder of one GPU's measurements is to take those of several, or the reverse; and where
    one of kernels is to take collectives, or the reverse: each is fitted to a profile of its own kind."""
    path = records.file_in(out)
    if all_gpus and path.is_file():
        raise UsageError(f"{out} holds measurements of one GPU: give another --out for --all-gpus")
    if not all_gpus and cards.card_folders(out):
        raise UsageError(f"{out} holds measurements of several GPUs: go on with --all-gpus, or give another --out")
    rows = records.read(path).rows if path.is_file() else []
    if rows and is_links(rows) is not collectives:
        what = "collectives" if is_links(rows) else "kernels or hosts"
        raise UsageError(f"{out} holds measurements of {what}: give another --out")


def bench_all_gpus(out: Path, suite: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Measures every GPU of this host into a folder of its own; finished measurements are not repeated.

    `arguments`: what a bench takes besides its device, folder and suite. Returns {"out", "parts" by card, "failed"
    by card, "spread"}. The host is calibrated first, alone, by the first GPU's process (`fanout`). Raises UsageError
    without a GPU, and where another process writes to the folder.
    """
    from flopcast.microbench import fanout
    from flopcast.microbench.records.recorder import lock_folder
    from flopcast.microbench.timing import device

    check_out(out, all_gpus=True)
    devices = device.all_gpus()
    suite_ = () if suite is None else ("--suite", suite)
    lock = lock_folder(out)
    try:
        console.say(f"{len(devices)} GPUs; first the host, by itself")
        again = ("--retry",) if "--retry" in arguments else ()
        first = fanout.jobs(devices[:1], out, ("--suite", HOST, *again))
        calibrated = fanout.run_side_by_side(first, console.say)
        if suite == HOST:
            found = calibrated
        else:
            side_by_side = fanout.jobs(devices, out, (*suite_, *arguments, "--skip-host"))
            found = fanout.run_side_by_side(side_by_side, console.say)
    finally:
        os.close(lock)
    parts = {name: outcome.parts for name, outcome in found.items()}
    parts["gpu0"] = {**calibrated["gpu0"].parts, **parts["gpu0"]}
    failed = {name: outcome.reason for name, outcome in found.items() if not outcome.is_done}
    if not calibrated["gpu0"].is_done and "gpu0" not in failed:
        failed["gpu0"] = f"host calibration: {calibrated['gpu0'].reason}"
    return {"out": str(out), "parts": parts, "failed": failed, "spread": spread_of(out)}


def spread_of(out: Path) -> dict[str, Any] | None:
    """Returns the spread between the cards of a folder; None, and a line on stderr, where it cannot be determined."""
    try:
        found = cards.read_folder(out)
    except DataError as fault:
        console.say(f"no spread between the GPUs: {fault}")
        return None
    return cards.spread(found) if len(cards.counted(found.cards)) > 1 else None


def raise_if_failed(found: dict[str, Any]) -> None:
    """Raises RunError naming the GPUs whose bench failed; all rows finished on any GPU are kept."""
    if found["failed"]:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found["failed"].items())
        raise RunError(
            f"{len(found['failed'])} of {len(found['parts'])} GPUs failed ({reasons}). All finished rows of all "
            f"GPUs are in {found['out']}; run the same command again, it continues where each stopped"
        )
