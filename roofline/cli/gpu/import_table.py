"""`flopcast import`: refines a profile by published tables of operation times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson


def import_table(
    table: Annotated[Path, Argument(help="A CSV file of operation times, plain or gzipped.")],
    *,
    gpu: Annotated[str, Option("--gpu", help="The GPU of the table (`flopcast gpus`), or a profile file of it.")],
    source: Annotated[str, Option(help="Who published it, and where. Kept in the profile.")] = "",
    out: Annotated[Path | None, Option(help="Profile to write. Default: kept under the GPU's name.")] = None,
    hold_out: Annotated[
        bool, Option("--hold-out", help="Fit half of the shapes and report the error of the other half.")
    ] = False,
    skip_refused: Annotated[bool, Option("--skip-refused", help="Leave refused rows out instead of stopping.")] = False,
    as_json: AsJson = False,
) -> None:
    """Refines a projected profile by a table of measured times of matrix products or attention.

    Columns: op, dtype, m, n, k, layout, latency_ms; or op, dtype, batch, seqlen, q_heads, kv_heads, head_dim,
    latency_ms (attention). Times in milliseconds. Or the columns that `flopcast kernels` writes, with measured times
    in `seconds`. At least 20 rows of one kind of operation (a dtype, a layout) are needed.
    """
    from flopcast.files import make_folder
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.gpu.catalogue.datasheets import find_spec
    from flopcast.roofline.gpu.library.profiles import find_profile, user_folder
    from flopcast.roofline.gpu.projection.published_fit import LEAST_ROWS, errors, refine
    from flopcast.roofline.gpu.projection.published_tables import read_table, refusal
    from flopcast.roofline.step.questions.many_gpus import gpu_of
    from flopcast.roofline.views.terminal import console

    if not source.strip():
        raise UsageError("--source is missing: say who published the table and where, as it is kept with the profile")
    spec = find_spec(gpu_of(gpu).gpu)
    if out is None:
        out = user_folder() / f"{spec.name}.json.gz"
    check_writable(out)
    found = read_table(table, spec)
    if found.refused and not skip_refused:
        raise UsageError(f"{refusal(table, found)}; mend them, or give --skip-refused to leave them out")
    if not found.rows:
        raise UsageError(f"{table}: none of its {found.others} rows is of {spec.name}; give --gpu as the table has it")
    if len(found.rows) < LEAST_ROWS:  # said before a profile is read or projected
        raise UsageError(
            f"{table}: {len(found.rows)} rows of {spec.name}: a fit needs {LEAST_ROWS} of one kind of operation "
            "(a dtype, a layout); `flopcast kernels` makes a table to fill in"
        )
    profile = find_profile(gpu)
    with progress("refining"):
        refined, record = refine(profile, spec, found.rows, source.strip(), hold_out=hold_out)
        checked = errors(profile, refined, spec, record, found.rows, hold_out=hold_out)
    make_folder(out.parent)
    refined.save(out)
    document = {
        "gpu": refined.gpu,
        "basis": refined.basis,
        "source": source.strip(),
        "profile": str(out),
        "rows": len(found.rows),
        "refused": [{"line": line, "reason": reason} for line, reason in found.refused],
        "rows_of_other_gpus": found.others,
        "fits": [{"surface": fit["surface"], "rows": fit["rows"], "sigma": fit["sigma"]} for fit in record["fits"]],
        "held_out": hold_out,
        "errors": checked,
    }
    if as_json:
        emit(document)
        return
    for line, reason in found.refused:
        console.say(f"line {line} left out: {reason}")
    if found.others:
        console.say(f"{found.others} rows are of other GPUs")
    rows = "the half of the shapes that was held out" if hold_out else "the rows themselves"
    for check in checked:
        console.say(
            f"{check['surface']}: {check['rows']} rows, mean |error| {check['before']:.1%} as projected, "
            f"{check['after']:.1%} refined ({rows})"
        )
    console.say(f"{refined.gpu}, refined by {source.strip()} -> {out}")
