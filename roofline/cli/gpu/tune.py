"""`flopcast tune-kernels`: remakes the table of kernel configurations on the GPU at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared.options import AsJson

KERNELS = ("matmul",)


def tune_kernels(
    out: Annotated[Path, Option(help="Folder for the record and the table. An earlier run goes on.")] = Path("tuning"),
    budget: Annotated[float, Option(help="Seconds after which no further shape is begun.")] = 600.0,
    kernel: Annotated[str, Option(help="Kernel to tune: matmul.")] = "matmul",
    again_below: Annotated[
        float, Option(help="Do shapes of the record again whose ratio to cuBLAS is below this.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Remakes the table of kernel configurations: checks each, times each, keeps the fastest of every shape.

    Kill it whenever you like: the same command goes on where it stopped. The table is written to OUT; it takes effect
    when it replaces the one in flopcast/kernels/data.
    """
    if kernel not in KERNELS:
        raise UsageError(f"--kernel {kernel!r}: valid is {', '.join(KERNELS)}")
    if not 0 < budget < float("inf"):
        raise UsageError(f"--budget {budget}: valid are seconds above 0")
    if not again_below >= 0:
        raise UsageError(f"--again-below {again_below}: valid are ratios, 0 or more")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file: valid is a folder, made if there is none")
    from flopcast.microbench.tuning import tune
    from flopcast.microbench.tuning.record import RECORDS
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.stopped import resumable
    from flopcast.roofline.views.terminal import console

    with resumable(out, RECORDS):
        found = tune.tune_matmul(out, budget, console.say, again_below=again_below)
    if as_json:
        emit(found)
    else:
        console.say(f"{found['tuned']} shapes in {found['seconds']} s; table: {found['table']}")
