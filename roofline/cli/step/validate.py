"""`flopcast validate`: runs real training steps, or takes those of a folder, and compares them with their forecasts.

It imports `microbench`, and with it torch, only when it runs steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.completion import one_of
from flopcast.roofline.cli.shared.options import AsJson, Budget, Device, Retry, Suite, refuse_unused
from flopcast.roofline.stream.model.run import MODES, Run

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.validation.step_comparison import StepComparison


def validate(
    gpu: Annotated[str | None, Option("--gpu", help="Profile to check. Default: this device's own.")] = None,
    device: Device = None,
    suite: Suite = None,
    out: Annotated[
        Path | None, Option(help="Folder to write to. Default: out/validate, or that of --steps-from.")
    ] = None,
    retry: Retry = False,
    budget: Budget = None,
    mode: Annotated[
        str, Option(help="How the steps run: eager, compile or compile-graphs.", autocompletion=one_of(MODES))
    ] = Run.mode,
    steps_from: Annotated[
        Path | None, Option(help="Folder of steps that ran already, in place of running them.")
    ] = None,
    run_only: Annotated[
        bool, Option("--run-only", help="Run the steps and compare them later with --steps-from.")
    ] = False,
    only_estimates: Annotated[
        bool, Option("--only-estimates", help="Only let torch's RuntimeEstimator estimate the steps.")
    ] = False,
    estimates_from: Annotated[
        Path | None, Option(help="Folder of --only-estimates. Default: STEPS/estimates, where it is.")
    ] = None,
    any_stack: Annotated[bool, Option("--any-stack", help="Compare although software versions differ.")] = False,
    any_gpu: Annotated[bool, Option("--any-gpu", help="Compare although the steps ran on another GPU.")] = False,
    as_json: AsJson = False,
) -> None:
    """Runs real training steps here and compares them with their forecasts, part by part."""
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.stopped import resumable
    from flopcast.roofline.gpu.catalogue.device import gpu_name
    from flopcast.roofline.gpu.library.profiles import find_profile
    from flopcast.roofline.gpu.suites import check_suite
    from flopcast.roofline.validation import comparable
    from flopcast.roofline.validation.run import ESTIMATES, check_mode, machine_here, machine_of, run_validation_steps
    from flopcast.roofline.validation.step_comparison import write_csv
    from flopcast.roofline.validation.step_plans import SUITES
    from flopcast.roofline.validation.summary import compare_methods, summaries
    from flopcast.roofline.views.terminal import console
    from flopcast.roofline.views.terminal.validation import print_validation

    if steps_from is not None:
        refuse_unused(
            "with --steps-from: those steps have run",
            {
                "device": device,
                "suite": suite,
                "retry": retry,
                "budget": budget,
                "mode": mode if mode != Run.mode else None,
            },
        )
    if run_only or only_estimates:
        refuse_unused(
            "with --run-only or --only-estimates: nothing is compared",
            {"gpu": gpu, "any_stack": any_stack, "any_gpu": any_gpu},
        )
    suite = suite or "quick"
    check_suite(suite, SUITES)
    check_mode(mode)
    if only_estimates and mode != Run.mode:
        raise UsageError(f"--only-estimates with --mode {mode}: torch's RuntimeEstimator knows eager steps alone")
    folder = steps_from or out or Path("out/validate")
    retried = ("oom", "error") if retry else ()
    if only_estimates and run_only:
        raise UsageError("--only-estimates runs no steps and --run-only runs them: leave one of the two out")
    if run_only or only_estimates:
        flag = "--run-only" if run_only else "--only-estimates"
        if steps_from is not None or estimates_from is not None:
            raise UsageError(f"{flag} with folders to compare: it compares nothing; give --out alone")
        parts = ESTIMATES if only_estimates else None
        with resumable(folder):
            done = run_validation_steps(device, suite, folder, retry=retried, budget=budget, parts=parts, mode=mode)
        console.say(f"steps: {done}" if run_only else f"estimates: {done}")
        given = f"--steps-from {folder}" if run_only else f"--steps-from STEPS --estimates-from {folder}"
        console.say(f"`flopcast validate {given}` compares them, here or elsewhere")
        if as_json:
            emit({"steps": str(folder)})
        return
    described = machine_here(device) if steps_from is None else machine_of(steps_from)
    profile = find_profile(gpu or gpu_name(described))  # fails before minutes of steps, not after
    comparable.check_device(described, profile, any_gpu=any_gpu)
    check_writable(out, is_folder=True)
    if steps_from is None:
        if not any_stack:
            from flopcast.microbench.timing.device import describe_stack

            comparable.check_stack(describe_stack(), profile)
        with resumable(folder):
            done = run_validation_steps(device, suite, folder, retry=retried, budget=budget, mode=mode)
        console.say(f"steps: {done}")
    rows = compare_folder(folder, profile, any_stack=any_stack, estimates=estimates_from)
    if not rows:
        raise UsageError(f"{folder} holds no real steps: `flopcast validate --out STEPS` runs them")
    table = (out or folder) / "validation.csv"
    write_csv(rows, table)
    if as_json:
        emit({
            "gpu": profile.gpu, "rows": [row.to_json() for row in rows],
            "summary": [entry.to_json() for entry in summaries(rows)],
            "methods": [entry.to_json() for entry in compare_methods(rows)],
        })  # fmt: skip
    else:
        print_validation(rows)
        console.say(f"wrote {table}")


def compare_folder(
    folder: Path, profile: Profile, *, any_stack: bool = False, estimates: Path | None = None
) -> list[StepComparison]:
    """Returns the rows of `validate` for a folder of real steps; `estimates`: folder of torch's estimates of them.

    Raises UsageError for another software stack, unless `any_stack`, and for estimates of another kind of GPU.
    """
    from flopcast.roofline.validation.compare_steps import compare_runs
    from flopcast.roofline.views.terminal.console import warn

    with progress("comparing") as shown:
        return compare_runs(folder, profile, estimates=estimates, any_stack=any_stack, progress=shown.update, warn=warn)
