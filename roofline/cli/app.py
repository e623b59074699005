"""The command line: takes options, prints tables or one JSON document. One file per command, in folders by question.

Exit codes: 0 done, 1 failed, 2 bad usage. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from flopcast.errors import INTERRUPTED, FlopcastError, UsageError, shortened
from flopcast.roofline.cli.choose.cost import cost
from flopcast.roofline.cli.choose.plan import plan
from flopcast.roofline.cli.choose.prices import prices
from flopcast.roofline.cli.choose.scale import scale
from flopcast.roofline.cli.choose.widths import widths
from flopcast.roofline.cli.gpu.bench import bench
from flopcast.roofline.cli.gpu.compare import compare
from flopcast.roofline.cli.gpu.fit import fit
from flopcast.roofline.cli.gpu.gpus import gpus
from flopcast.roofline.cli.gpu.import_table import import_table
from flopcast.roofline.cli.gpu.kernels import kernels
from flopcast.roofline.cli.gpu.report import report
from flopcast.roofline.cli.gpu.roofline import roofline
from flopcast.roofline.cli.gpu.tune import tune_kernels
from flopcast.roofline.cli.shared import stopped
from flopcast.roofline.cli.shared.characters import never_fail_to_encode
from flopcast.roofline.cli.shared.groups import expanded
from flopcast.roofline.cli.step.explain import explain
from flopcast.roofline.cli.step.finetune import finetune
from flopcast.roofline.cli.step.predict import predict
from flopcast.roofline.cli.step.sweep import sweep
from flopcast.roofline.cli.step.validate import validate

app = typer.Typer(
    name="flopcast",
    help="What a training step costs on a GPU: milliseconds, dollars, memory. Measured on one, forecast without.",
    epilog="Guide: docs/README.md",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LONGEST_ARGUMENT = 4096  # characters, as long as a path may be; typer repeats a wrong one whole


def main() -> None:
    """Entry point of the `flopcast` command."""
    # a command makes objects and ends: with the default thresholds the collector scans them fifty times
    gc.set_threshold(20_000, 20, 50)
    # None where the process that started this one closed them: nobody reads them
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    never_fail_to_encode()
    try:
        _check_lengths(sys.argv[1:])
        _app_for(sys.argv[1:])()
    except FlopcastError as fault:
        print(f"flopcast: {fault}", file=sys.stderr)
        raise SystemExit(fault.exit_code) from None
    except SystemExit as left:
        if left.code != INTERRUPTED:
            raise
        print(f"flopcast: {stopped.told(left)}", file=sys.stderr)
        raise
    except BrokenPipeError:
        raise SystemExit(1) from None
    except OSError as fault:
        # usually a full disk behind stdout: commands check the files that they read and write themselves
        where = "" if fault.filename is None else f"{fault.filename}: "
        print(f"flopcast: {where}{fault.strerror or fault}", file=sys.stderr)
        raise SystemExit(1) from None


def _app_for(arguments: Sequence[str]) -> typer.Typer:
    """The command line with the one command that the arguments begin with, else with all: typer makes the options of
    all of them anew at each call, which takes 25 ms."""
    named = [one for one in app.registered_commands if arguments and one.name == arguments[0]]
    if not named:
        return app
    found = copy.copy(app)
    found.registered_commands = named
    return found


def _check_lengths(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if len(argument) > LONGEST_ARGUMENT:
            raise UsageError(
                f"an argument has {len(argument):,} characters, {shortened(argument)!r}: valid are {LONGEST_ARGUMENT:,}"
            )


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        import flopcast

        print(f"flopcast {flopcast.__version__}")
        raise typer.Exit


# In the order of `flopcast --help`: what a GPU does, what a step costs, what to choose.
for command in (
    gpus, bench, fit, roofline, kernels, compare, report, predict, explain, sweep, finetune, validate, widths, cost,
    prices, plan, scale,
):  # fmt: skip
    app.command(command.__name__)(expanded(command))
app.command("import")(import_table)
app.command("tune-kernels")(tune_kernels)


if __name__ == "__main__":
    main()
