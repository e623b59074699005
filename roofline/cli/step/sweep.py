"""`flopcast sweep`: forecasts many steps on one GPU or several, to CSV or a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.gpus import asked_gpus, prices_of
from flopcast.roofline.cli.shared.options import AsJson, Host, ModelOptions, OneGpu, PriceOptions, SeveralGpus, given
from flopcast.roofline.cli.shared.output import emit, say_done
from flopcast.roofline.cli.step.asked import check_module_options
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.roofline.step.questions.many_gpus import Gpu

MOST_BATCHES = 1000


def sweep(
    typed: Context,
    gpu: OneGpu = None,
    *,
    gpus: SeveralGpus = None,
    source: Annotated[
        Path | None, Option("--from", help="CSV of steps, one per row, its columns named as predict's options.")
    ] = None,
    batches: Annotated[
        str | None, Option(help="Batches to forecast the step at, such as 1..20 or 8,16,32. Traced twice for all.")
    ] = None,
    model: ModelOptions,
    run: Run,
    out: Annotated[Path | None, Option(help="CSV to write. Default: a table on the terminal.")] = None,
    host: Host = None,
    price: PriceOptions,
    as_json: AsJson = False,
) -> None:
    """Forecasts many steps, those of a CSV or one model's at several batches, on one GPU or several.

    What is given as an option holds for all rows. A row that cannot be done keeps its place and says why.
    """
    from flopcast.roofline.base import csv_files
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.gpu.library.profiles import find_host
    from flopcast.roofline.step.questions import sweep as step_sweep
    from flopcast.roofline.stream.library.modules import Module
    from flopcast.roofline.stream.model import models

    if model.module is not None:
        check_module_options(typed, model, run)
    fixed = {name: _cell(value) for name, value in given(typed, model, run).items() if name != "module"}
    columns, rows = list[str](), [dict[str, str]()]
    if source is not None:
        columns, rows = csv_files.read_rows(source)
        of_model = ("name",) if model.module else ("name", *models.MODEL_COLUMNS)
        csv_files.check_columns(source, columns, (*of_model, *step_sweep.RUN_COLUMNS))
    elif model.module is None and not models.MODEL_COLUMNS.keys() & fixed.keys():
        raise UsageError("which steps? give --from with a CSV, or --config, --width or --module with --batches")
    if batches is not None:
        clash = "--batch" if "batch" in fixed else f"the column batch of {source}" if "batch" in columns else None
        if clash:
            raise UsageError(f"--batches {batches} with {clash}: give one of the two")
        rows = [{**row, "batch": str(batch)} for row in rows for batch in numbers("--batches", batches)]
    twice = sorted(fixed.keys() & set(columns))
    if twice:
        raise UsageError(f"--{twice[0].replace('_', '-')} and the column {twice[0]} of {source}: give one of the two")
    check_writable(out)
    module = None if model.module is None else Module(model.module)
    asked = asked_gpus(gpu, gpus)
    price_of = prices_of(asked, price)
    with progress("forecasting") as shown:
        found = step_sweep.sweep(
            [{**row, **fixed} for row in rows], asked, price_of, module=module, host=find_host(host),
            progress=shown.update,
        )  # fmt: skip
    if out is None:
        _show(found, as_json=as_json)
        return
    first = [*columns, *(["batch"] if batches else []), *fixed]
    last = step_sweep.PARALLEL_OUT if any(row.get("num_gpus") for row in found) else ()
    csv_files.write_rows(out, list(dict.fromkeys([*first, "depth", *step_sweep.SWEEP_OUT, *last])), found)
    say_done([row.get("step_seconds") for row in found], ("steps", "forecast"), _words(asked, found), out, as_json)


def _show(found: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        emit(found)
        return
    from flopcast.roofline.views.terminal.sweep import print_sweep

    print_sweep(found)


def numbers(option: str, text: str) -> list[int]:
    """Parses whole numbers and ranges with commas between: "1..4,8" -> 1, 2, 3, 4, 8, each once. Raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*(?:\.\.|-)\s*(\d{1,9}))?\s*", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high or high - low + len(found) >= MOST_BATCHES:
            raise UsageError(
                f"{option} is {text!r}: valid are numbers of at least 1 and ranges with commas between, such as 1..20 "
                f"or 8,16,32, at most {MOST_BATCHES}"
            )
        found += range(low, high + 1)
    return list(dict.fromkeys(found))


def _cell(value: Any) -> str:
    """Writes an option's value as a row's cell."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(gpus: Sequence[Gpu], rows: Sequence[dict[str, Any]]) -> str:
    """Names the GPU that the rows are of, with the basis of its profile where one was done, or counts several."""
    if len(gpus) > 1:
        return f"{len(gpus)} GPUs"
    basis = next((row["profile_basis"] for row in rows if row.get("profile_basis")), None)
    return f"{gpus[0].gpu} ({basis})" if basis else gpus[0].gpu
