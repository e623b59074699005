"""`flopcast sweep`: forecasts many steps, from CSV to CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson, Gpu, Host, PriceOptions
from flopcast.roofline.cli.shared.output import say_done
from flopcast.roofline.cli.shared.price_book import price_of


def sweep(
    gpu: Gpu,
    *,
    source: Annotated[
        Path, Option("--from", help="CSV of steps, one per row, its columns named as predict's options.")
    ],
    out: Annotated[Path, Option(help="CSV to write.")],
    host: Host = None,
    price: PriceOptions,
    as_json: AsJson = False,
) -> None:
    """Forecasts many steps, from CSV to CSV. A row that cannot be done keeps its place and says why."""
    from flopcast.roofline.base import csv_files
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step import sweep as step_sweep
    from flopcast.roofline.stream.model import models

    columns, rows = csv_files.read_rows(source)
    csv_files.check_columns(source, columns, ("name", *models.MODEL_COLUMNS, *step_sweep.RUN_COLUMNS))
    check_writable(out)
    profile = find_profile(gpu)
    priced = price_of(profile, price)
    with progress("forecasting") as shown:
        found = step_sweep.sweep(rows, profile, lambda gpu: priced, host=find_host(host), progress=shown.update)
    profile_cache.keep(profile)
    csv_files.write_rows(out, list(dict.fromkeys([*columns, "depth", *step_sweep.SWEEP_OUT])), found)
    say_done([row.get("step_seconds") for row in found], ("steps", "forecast"), profile, out, as_json)
