"""`flopcast fit`: turns a folder of measurements into a profile, or into a link's."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson


def fit(
    folder: Annotated[Path, Argument(help="Folder that `flopcast bench` wrote.")],
    out: Annotated[Path | None, Option(help="Profile to write. Default: FOLDER/profile.json.gz.")] = None,
    repeat: Annotated[
        Path | None, Option(help="Folder of a second run, to compare row by row in repeatability.csv.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turns measurements into a profile and prints how well it fits, on rows it never saw too."""
    from dataclasses import asdict

    _one_blas_thread()
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.gpu.fit import cards
    from flopcast.roofline.gpu.fit import folder as fitted
    from flopcast.roofline.step import coverage
    from flopcast.roofline.step.fit_folder import fit_folder
    from flopcast.roofline.validation import repeatability
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.fit import print_fit, print_repeatability, print_spread
    from flopcast.roofline.views.terminal.gpus import print_host

    check_writable(out)
    if _fit_links(folder, out, repeat, as_json):
        return
    with progress("reading"):
        found = cards.read_folder(folder)
    if fitted.is_host_only(found):
        host, path = fitted.fit_host_only(folder, found, out)
        if as_json:
            emit({"profile": None, "host_file": str(path), "host": asdict(host)})
        else:
            print_host(host)
            kept = f", or as --host {host.name} unless that ships" if host.basis == "measured" else ""
            say(f"wrote {path}; use it as --host {path}{kept}")
        return
    with progress("fitting"):
        repeated = None if repeat is None else repeatability.compare_folders(folder, repeat)
        profile, quality = fit_folder(folder, found)
    path = out or folder / "profile.json.gz"
    fitted.save_profile(profile, path)
    host_file = fitted.save_host(profile.host, fitted.host_path(path, is_default=out is None))
    if repeated is not None:
        repeatability.write_csv(repeated, path.with_name("repeatability.csv"))
    gpus = profile.provenance.get("gpus")
    if as_json:
        holds = {name: profile.provenance[name] for name in ("shapes", "sources")}
        host_name = None if profile.host is None else profile.host.name
        emit({
            "profile": str(path), "gpu": profile.gpu, "host_file": host_file and str(host_file), "host": host_name,
            "gpus": gpus, "repeatability": repeated and repeated.to_json(), **holds, **quality.to_json(),
        })  # fmt: skip
    else:
        print_fit(quality)
        if gpus:
            print_spread(gpus)
        if profile.host is not None and profile.host.layers:
            print_host(profile.host)
        if repeated is not None:
            print_repeatability(repeated)
        say(coverage.holdings(profile))
        if host_file is not None:
            say(f"wrote {host_file}: this host, for --host")
        say(f"wrote {path}; use it as --gpu {path}, or as --gpu {profile.gpu} unless that ships")


def _fit_links(folder: Path, out: Path | None, repeat: Path | None, as_json: bool) -> bool:
    """Whether the folder holds collectives, of which the link's profile is made."""
    from flopcast.errors import UsageError
    from flopcast.microbench.records import records
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.gpu.links import fit as links
    from flopcast.roofline.gpu.links.overview import overview
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.links import print_links

    if not records.file_in(folder).is_file() or not links.is_links(records.read(folder).rows):
        return False
    if repeat is not None:
        raise UsageError(f"--repeat {repeat} of collectives: fit each folder and compare what `gpus --links` says")
    profile = links.fit_links(folder)
    path = out or folder / "link.json"
    links.save(profile, path)
    shown = overview(profile)
    if as_json:
        emit({"link_file": str(path), "points": len(profile.points), **shown.to_json()})
        return True
    print_links([shown])
    or_by_name = f", or as {profile.name} unless that ships" if profile.backend == "nccl" else ""
    say(f"{len(profile.points)} collectives; wrote {path}; use it as link {path}{or_by_name}")
    return True


def _one_blas_thread() -> None:
    """Loads numpy and scipy with one BLAS thread each, unless the environment sets a number or numpy is loaded already.

    A fit is thousands of products and factorisations of tens of points, between which OpenBLAS's threads spin: with two
    threads on two cores, 194 surfaces took 63 s of CPU time, with one thread 11 s."""
    name = "OPENBLAS_NUM_THREADS"
    if "numpy" in sys.modules or name in os.environ or "OMP_NUM_THREADS" in os.environ:
        return
    os.environ[name] = "1"
    try:
        importlib.import_module("scipy.optimize")
    finally:
        del os.environ[name]  # child processes choose for themselves
