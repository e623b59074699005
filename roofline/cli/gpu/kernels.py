"""`flopcast kernels`: forecasts the times of single operations, from CSV to CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flopcast.roofline.cli.shared.options import AsJson, Gpu
from flopcast.roofline.cli.shared.output import say_done


def kernels(
    gpu: Gpu,
    source: Annotated[
        Path, Option("--from", help="CSV of operations: op,m,n,k,layout or op,batch,heads,... (docs/files.md).")
    ],
    out: Annotated[Path, Option(help="CSV to write.")],
    as_json: AsJson = False,
) -> None:
    """Forecasts single operations, from CSV to CSV: seconds of the kernel alone, with a range."""
    from flopcast.roofline.base import csv_files
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_profile
    from flopcast.roofline.step.questions import kernel_times

    columns, rows = csv_files.read_rows(source)
    csv_files.check_columns(source, columns, ("name", *kernel_times.KERNELS_IN))
    check_writable(out)
    profile = find_profile(gpu)
    found = kernel_times.kernels(rows, profile)
    profile_cache.keep(profile)
    csv_files.write_rows(out, list(dict.fromkeys([*columns, *kernel_times.KERNELS_OUT])), found)
    say_done(
        [row.get("seconds") for row in found], ("operations", "timed"), f"{profile.gpu} ({profile.basis})", out, as_json
    )
