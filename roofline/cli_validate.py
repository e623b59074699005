"""`flopcast validate`: runs real training steps, or takes those of a folder, and compares them with their forecasts.

It imports `microbench`, and with it torch, only when it runs steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopcast.errors import UsageError
from flopcast.roofline.cli_measure import Device, Json, Retry, Suite, check_suite
from flopcast.roofline.cli_options import refuse_unused

if TYPE_CHECKING:
    from flopcast.roofline.profile import Profile

ESTIMATES = ("estimates",)  # of `microbench.run_steps.PARTS`


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command()(validate)


def validate(
    gpu: Annotated[str | None, typer.Option("--gpu", help="Profile to check; default: this device's own.")] = None,
    device: Device = None, suite: Suite = None,
    out: Annotated[Path | None, typer.Option(
        help="Folder to write to; what it holds already is not done again. Default: out/validate, or --steps-from."
    )] = None,
    retry: Retry = False,
    budget: Annotated[float | None, typer.Option(help="Seconds for the steps; the next run continues.")] = None,
    steps_from: Annotated[Path | None, typer.Option(help="Folder of steps already run, instead of running.")] = None,
    run_only: Annotated[bool, typer.Option("--run-only", help="Run the steps, compare later: --steps-from.")] = False,
    only_estimates: Annotated[bool, typer.Option(
        "--only-estimates", help="Of these steps only what torch's RuntimeEstimator says (a GPU, none of its time)."
    )] = False,
    estimates_from: Annotated[Path | None, typer.Option(
        help="Folder of --only-estimates, of any card of this kind; default: STEPS/estimates where there is one."
    )] = None,
    any_stack: Annotated[bool, typer.Option(
        "--any-stack", help="Compare though the steps ran with other versions than the profile or the streams."
    )] = False,
    any_gpu: Annotated[bool, typer.Option(
        "--any-gpu", help="Compare though the steps ran on another GPU than the profile's."
    )] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Runs real training steps here and compares them with their forecasts, part by part."""
    from flopcast.roofline import baselines, same_stack, tables
    from flopcast.roofline import validate as checks
    from flopcast.roofline.cli import emit
    from flopcast.roofline.fit_device import gpu_name
    from flopcast.roofline.lookup import find_profile
    from flopcast.roofline.tables_validate import print_validation
    from flopcast.roofline.text_files import check_writable

    if steps_from is not None:
        refuse_unused(
            "with --steps-from: those steps have run",
            {"device": device, "suite": suite, "retry": retry, "budget": budget},
        )
    if run_only or only_estimates:
        refuse_unused(
            "with --run-only or --only-estimates: nothing is compared",
            {"gpu": gpu, "any_stack": any_stack, "any_gpu": any_gpu},
        )
    suite = suite or "quick"
    check_suite(suite)
    folder = steps_from or out or Path("out/validate")
    retried = ("oom", "error") if retry else ()
    if only_estimates and run_only:
        raise UsageError("--only-estimates runs no steps and --run-only runs them: leave one of the two out")
    if run_only or only_estimates:
        flag = "--run-only" if run_only else "--only-estimates"
        if steps_from is not None or estimates_from is not None:
            raise UsageError(f"{flag} with folders to compare: it compares nothing; give --out alone")
        parts = ESTIMATES if only_estimates else None
        done = run_validation_steps(device, suite, folder, retry=retried, budget=budget, parts=parts)
        tables.say(f"steps: {done}" if run_only else f"estimates: {done}")
        given = f"--steps-from {folder}" if run_only else f"--steps-from STEPS --estimates-from {folder}"
        tables.say(f"`flopcast validate {given}` compares them, here or elsewhere")
        if as_json:
            emit({"steps": str(folder)})
        return
    described = machine_here(device) if steps_from is None else machine_of(steps_from)
    profile = find_profile(gpu or gpu_name(described))  # before minutes of steps, not after
    same_stack.check_device(described, profile, any_gpu=any_gpu)
    check_writable(out, is_folder=True)
    if steps_from is None:
        if not any_stack:
            from flopcast.microbench.device import describe_stack

            same_stack.check_stack(describe_stack(), profile)
        tables.say(f"steps: {run_validation_steps(device, suite, folder, retry=retried, budget=budget)}")
    rows = compare_folder(folder, profile, any_stack=any_stack, estimates=estimates_from)
    if not rows:
        raise UsageError(f"{folder} holds no real steps: `flopcast validate --out STEPS` runs them")
    table = (out or folder) / "validation.csv"
    checks.write_csv(rows, table)
    if as_json:
        emit({
            "gpu": profile.gpu, "rows": rows, "summary": checks.summary(rows),
            "methods": baselines.compare_methods(rows),
        })  # fmt: skip
    else:
        print_validation(rows, checks.summary(rows))
        tables.say(f"wrote {table}")


def run_validation_steps(
    device: str | None, suite: str, out: Path, *, retry: tuple[str, ...] = (), budget: float | None = None,
    parts: tuple[str, ...] | None = None,
) -> str:  # fmt: skip
    """Runs what `out` lacks of the validation ladder's real steps, or of `parts` of them; a line of what was done.

    Default: times and kernels, on a GPU torch's estimates too. Raises UsageError for these on a processor.
    """
    check_suite(suite)
    if budget is not None and not budget >= 0:
        raise UsageError(f"--budget is {budget:g}: valid are seconds, 0 or more")
    from flopcast.microbench.device import describe, pick_device
    from flopcast.microbench.records import Recorder
    from flopcast.microbench.run_steps import PARTS as ALL_PARTS
    from flopcast.microbench.run_steps import TIMES_AND_KERNELS, run_steps
    from flopcast.roofline.calibration import host_plan
    from flopcast.roofline.ladders import validation_plans

    chosen = pick_device(device)
    if parts == ESTIMATES and chosen.type != "cuda":
        raise UsageError(
            f"--only-estimates on {chosen.type}: torch's RuntimeEstimator reads a CUDA GPU's figures"
        )
    rounds, steps = (3, 2) if chosen.type == "cpu" else (5, 5)
    with Recorder(out, describe(chosen)) as recorder:
        plans = validation_plans(chosen.type, suite)
        return str(
            run_steps(
                plans,
                device=chosen,
                recorder=recorder,
                rounds=rounds,
                steps_per_round=steps,
                host=None if chosen.type == "cpu" else host_plan(chosen.type),
                parts=parts or (TIMES_AND_KERNELS if chosen.type == "cpu" else ALL_PARTS),
                budget_seconds=budget,
                retry=retry,
            )
        )


def machine_here(device: str | None) -> dict[str, Any]:
    """The description of this machine's device. Raises UsageError when there is none of that name."""
    from flopcast.microbench.device import describe, pick_device

    found: dict[str, Any] = describe(pick_device(device))["device"]
    return found


def machine_of(folder: Path) -> dict[str, Any]:
    """The description of the device whose real steps `folder` holds. Raises UsageError when it holds none."""
    from flopcast.microbench import records
    from flopcast.roofline.validate import step_folders

    first = step_folders(folder)[0]
    if not records.file_in(first).is_file():
        raise UsageError(f"{folder} holds no real steps: `flopcast validate --out {folder}` runs them")
    found: dict[str, Any] = records.read_machine(first)["device"]
    return found


def compare_folder(
    folder: Path, profile: Profile, *, any_stack: bool = False, estimates: Path | None = None
) -> list[dict[str, Any]]:
    """The rows of `validate` for a folder of real steps; with `estimates`, torch's of that folder count for them.

    Raises UsageError for another stack, unless `any_stack`, and for estimates of another kind of GPU.
    """
    from flopcast.roofline import validate as checks
    from flopcast.roofline.tables import progress

    with progress("comparing") as advance:
        return checks.compare_runs(
            folder, profile, estimates=estimates, any_stack=any_stack, progress=advance
        )
