"""The command line: options in, tables or one JSON document out. What measures a machine is in `cli_measure`, what runs
real steps in `cli_validate`, what says why in `cli_explain`, what costs how many dollars in `cli_cost`.

Exit codes: 0 done, 1 failed, 2 bad use. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopcast.errors import FlopcastError, UsageError
from flopcast.roofline import cli_options as shared
from flopcast.roofline.cli_cost import price_of

if TYPE_CHECKING:
    from flopcast.roofline.profile import Profile

app = typer.Typer(
    name="flopcast",
    help="What a training step costs on a GPU: milliseconds, dollars, memory. Measured on one, forecast without.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130  # what typer makes of Ctrl-C


def main() -> None:
    """Entry point of the `flopcast` command."""
    # a command makes objects and ends: the default looks through them fifty times
    gc.set_threshold(20_000, 20, 50)
    # closed by whoever started this: nobody reads
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        app()
    except FlopcastError as fault:
        print(f"flopcast: {fault}", file=sys.stderr)
        raise SystemExit(fault.exit_code) from None
    except SystemExit as left:
        if left.code != INTERRUPTED:
            raise
        print("flopcast: stopped; finished measurements are kept", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except OSError as fault:
        # a full disk behind stdout, as a rule: what commands read and write they check themselves
        where = "" if fault.filename is None else f"{fault.filename}: "
        print(f"flopcast: {where}{fault.strerror or fault}", file=sys.stderr)
        raise SystemExit(1) from None


def emit(document: Any) -> None:
    """The one JSON document, whole or not at all."""
    text = json.dumps(document, indent=1, default=str, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        import flopcast

        print(f"flopcast {flopcast.__version__}")
        raise typer.Exit


@app.command()
def gpus(
    hosts: Annotated[bool, typer.Option("--hosts", help="The hosts alone, for --host.")] = False,
    as_json: shared.AsJson = False,
) -> None:
    """Profiles and hosts known, and how each came about."""
    from flopcast.roofline import cli_bench, tables
    from flopcast.roofline.lookup import known, known_hosts

    if as_json:
        emit([entry.to_json() for entry in known_hosts()] if hosts else [entry.__dict__ for entry in known()])
        return
    if not hosts:
        tables.print_known(known())
    cli_bench.print_hosts(known_hosts())


@app.command()
def predict(
    context: typer.Context, gpu: shared.Gpu, config: shared.ConfigName = None, module: shared.ModuleName = None,
    width: shared.Width = None, depth: shared.Depth = None, depth_law: shared.DepthLaw = None,
    heads: shared.Heads = None, kv_heads: shared.KvHeads = None, head_dim: shared.HeadDim = None,
    ffn: shared.Ffn = None, vocab: shared.Vocab = None, tied: shared.Tied = None,
    batch: shared.Batch = 4, seq: shared.Seq = 256, accumulate: shared.Accumulate = 1,
    checkpoint: shared.Checkpoint = "none", precision: shared.Precision = "autocast-bf16",
    optimizer: shared.Optimizer = "adamw", mode: shared.Mode = "eager", matmul: shared.Matmul = "torch",
    attention: shared.Attention = "sdpa", fused: shared.Fused = "none", host: shared.Host = None,
    prices: shared.PriceFile = None, price: shared.PriceGiven = None, provider: shared.Provider = None,
    on: shared.PriceDate = None,
    explain: Annotated[bool, typer.Option("--explain", help="As `flopcast explain`.")] = False,
    largest_batch: Annotated[bool, typer.Option(
        "--largest-batch", help="The largest micro-batch that fits, too (traces two: seconds)."
    )] = False,
    as_json: shared.AsJson = False,
) -> None:  # fmt: skip
    """One training step: time, memory, FLOPs, dollars, each with what it rests on."""
    if explain:
        if largest_batch:
            raise UsageError("--largest-batch with --explain: ask for one of the two")
        left_out = ("largest_batch",)
        options = {name: value for name, value in locals().items() if name not in (*left_out, "left_out")}
        from flopcast.roofline import cli_explain

        cli_explain.explain(**options)
        return
    from flopcast.roofline import prepared
    from flopcast.roofline.batch import model_from
    from flopcast.roofline.forecast import Run, forecast, traced_on
    from flopcast.roofline.lookup import find_host, find_profile
    from flopcast.roofline.trace_apart import tracing_apart
    from flopcast.roofline.waiting import waiting

    described = {
        "config": config, "width": width, "depth": depth, "depth_law": depth_law, "heads": heads,
        "kv_heads": kv_heads, "head_dim": head_dim, "ffn": ffn, "vocab": vocab, "tied": tied,
    }  # fmt: skip
    sizes = module_sizes(context, module, fused)
    model = model_from(described) if module is None else {}
    run = Run(batch=batch, seq=seq, accumulate=accumulate, checkpoint=checkpoint, precision=precision,
              optimizer=optimizer, mode=mode, matmul=matmul, attention=attention, fused=fused)  # fmt: skip
    run.check()
    with ExitStack() as stack:
        trace = None
        if module is None and not largest_batch:  # which needs two more traces, in one process with torch
            likely = traced_on(run, "cpu" if gpu == "cpu" else "cuda")
            # another process imports torch while this one looks the profile up
            trace = stack.enter_context(tracing_apart(model, likely))
        profile = find_profile(gpu)
        priced = price_of(profile, prices, price, provider, on)
        own: dict[str, Any] = {"host": find_host(host), "price": priced}
        largest: int | None = None
        stack.enter_context(waiting("forecasting"))
        if module is None:
            result = forecast(model, run, profile, **own, trace=trace)
        else:
            from flopcast.roofline import api
            from flopcast.roofline.forecast import forecast_stream

            api.check_sizes(module, sizes)
            stream = api.module_stream(module, None, run, profile, sizes=sizes)
            run = api.run_of_stream(stream, run)
            result = forecast_stream(stream, run, profile, **own)
        if largest_batch:
            from flopcast.roofline import fits

            if module is None:
                largest = fits.largest_batch(model, run, profile)
            else:
                largest = fits.largest_module_batch(module, run, profile, sizes)
    prepared.keep(profile)
    if as_json:
        emit(result.to_json() if largest is None else {**result.to_json(), "largest_batch": largest})
        return
    from flopcast.roofline import tables

    tables.print_forecast(result, run)
    if largest is not None:
        tables.say(f"largest micro-batch that fits: {tables.batch_words(largest, run.seq, result.unit)}")


def module_sizes(context: typer.Context, module: str | None, fused: str) -> dict[str, int]:
    """The batch and length that a factory is asked for: those of the command line. Raises UsageError where an option
    describes another model."""
    if module is None:
        return {}
    shapes = (
        "config",
        "width",
        "depth",
        "depth_law",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "tied",
    )
    clash = next((name for name in sorted(shapes) if _is_given(context, name)), None)
    if clash is not None:
        raise UsageError(
            f"--module with --{clash.replace('_', '-')}: the factory makes the model, give one of the two"
        )
    if fused != "none":
        raise UsageError(
            f"--module with --fused {fused}: a factory patches its own model, leave one of the two out"
        )
    return {name: context.params[name] for name in ("batch", "seq") if _is_given(context, name)}


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line, not its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


@app.command()
def sweep(
    gpu: shared.Gpu,
    source: Annotated[Path, typer.Option("--from", help="CSV: one step a row, columns as predict's options.")],
    out: Annotated[Path, typer.Option(help="CSV to write.")],
    host: shared.Host = None, prices: shared.PriceFile = None, price: shared.PriceGiven = None,
    provider: shared.Provider = None, on: shared.PriceDate = None, as_json: shared.AsJson = False,
) -> None:  # fmt: skip
    """Many steps, from CSV to CSV. A row that cannot be done keeps its place and says why."""
    from flopcast.roofline import batch, prepared, tables
    from flopcast.roofline.lookup import find_host, find_profile
    from flopcast.roofline.text_files import check_writable

    columns, rows = batch.read_rows(source)
    batch.check_columns(source, columns, ("name", *batch.MODEL_COLUMNS, *batch.RUN_COLUMNS))
    check_writable(out)
    profile = find_profile(gpu)
    priced = price_of(profile, prices, price, provider, on)
    with tables.progress("forecasting") as advance:
        found = batch.sweep(rows, profile, lambda gpu: priced, host=find_host(host), progress=advance)
    prepared.keep(profile)
    batch.write_rows(out, list(dict.fromkeys([*columns, "depth", *batch.SWEEP_OUT])), found)
    _say_done([row.get("step_seconds") for row in found], ("steps", "forecast"), profile, out, as_json)


@app.command()
def kernels(
    gpu: shared.Gpu,
    source: Annotated[
        Path, typer.Option("--from", help="CSV: op,m,n,k,layout or batch,heads,...; see docs/files.md.")
    ],
    out: Annotated[Path, typer.Option(help="CSV to write.")],
    as_json: shared.AsJson = False,
) -> None:
    """Single operations, from CSV to CSV: seconds of the kernel alone, with a range."""
    from flopcast.roofline import batch, prepared
    from flopcast.roofline.lookup import find_profile
    from flopcast.roofline.text_files import check_writable

    columns, rows = batch.read_rows(source)
    batch.check_columns(source, columns, ("name", *batch.KERNELS_IN))
    check_writable(out)
    profile = find_profile(gpu)
    found = batch.kernels(rows, profile)
    prepared.keep(profile)
    batch.write_rows(out, list(dict.fromkeys([*columns, *batch.KERNELS_OUT])), found)
    _say_done([row.get("seconds") for row in found], ("operations", "timed"), profile, out, as_json)


def _say_done(
    seconds: Sequence[Any], words: tuple[str, str], profile: Profile, out: Path, as_json: bool
) -> None:
    """How many rows of a table were done. `words`: what they are, and what was done."""
    from flopcast.roofline import tables

    count, done = len(seconds), sum(1 for value in seconds if value)
    what, verb = words
    if as_json:
        emit({"out": str(out), "rows": count, verb: done, "failed": count - done})
        return
    tables.say(f"{done} of {count} {what} {verb} for {profile.gpu} ({profile.basis}) -> {out}")
    if done < count:
        tables.say(f"{count - done} could not be done: column `reason` says why")


def whole_numbers(option: str, text: str) -> list[int]:
    """Comma-separated integers, one at least. Raises UsageError."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"{option} is {text!r}: valid are integers with commas between")
    return found


def _add_commands() -> None:
    from flopcast.roofline import (
        cli_compare,
        cli_cost,
        cli_explain,
        cli_import,
        cli_measure,
        cli_plan,
        cli_report,
        cli_tune,
        cli_validate,
        cli_widths,
    )

    cli_compare.register(app)
    cli_cost.register(app)
    cli_explain.register(app)
    cli_import.register(app)
    cli_measure.register(app)
    cli_validate.register(app)
    cli_plan.register(app)
    cli_tune.register(app)
    cli_widths.register(app)
    cli_report.register(app)


_add_commands()

if __name__ == "__main__":
    main()
