"""`flopcast validate`: runs real training steps, of a suite or the one asked for, or takes those of a folder, and
compares them with their forecasts.

It imports `microbench`, and with it torch, only when it runs steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.groups import Only
from flopcast.roofline.cli.shared.options import (
    AsJson,
    Budget,
    Device,
    ModelOptions,
    Retry,
    Suite,
    given,
    refuse_unused,
)
from flopcast.roofline.cli.step.asked import asked_step
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.microbench.recipe.plans import StepPlan
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.validation.step_comparison import StepComparison

_MODEL = (
    "config", "module", "width", "depth", "depth_law", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied",
)  # fmt: skip
_RUN = (
    "batch", "seq", "accumulate", "checkpoint", "precision", "optimizer", "mode", "matmul", "attention", "fused",
    "clip", "finetune", "lora_rank", "lora_targets", "base_dtype", "phase", "context", "cache",
)  # fmt: skip


def validate(
    typed: Context,
    *,
    gpu: Annotated[str | None, Option("--gpu", help="Profile to check. Default: this device's own.")] = None,
    device: Device = None,
    suite: Suite = None,
    seed: Annotated[
        int | None,
        Option(help="Number that draws the steps of --suite random, the same ones anywhere. Default: 0.", min=0),
    ] = None,
    out: Annotated[
        Path | None, Option(help="Folder to write to. Default: out/validate, or that of --steps-from.")
    ] = None,
    retry: Retry = False,
    budget: Budget = None,
    parallel: Annotated[
        list[str] | None,
        Option(
            help="Run steps over several GPUs in this layout, such as fsdp=2: of this host, or of several by "
            "torchrun or srun. May be repeated. Suites: quick, standard; or --config or --width."
        ),
    ] = None,
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
    model: Annotated[ModelOptions, Only(*_MODEL)],
    run: Annotated[Run, Only(*_RUN)],
    as_json: AsJson = False,
) -> None:
    """Runs real training steps here and compares them with their forecasts, part by part.

    With --config, --width or --module it runs one step of that model, as its options say, in place of a suite.
    """
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.stopped import resumable
    from flopcast.roofline.gpu.catalogue.device import gpu_name
    from flopcast.roofline.gpu.library.profiles import find_profile
    from flopcast.roofline.gpu.suites import check_suite
    from flopcast.roofline.validation import comparable
    from flopcast.roofline.validation.random_steps import RANDOM
    from flopcast.roofline.validation.run import ESTIMATES, check_mode, machine_here, machine_of, run_validation_steps
    from flopcast.roofline.validation.step_comparison import write_csv
    from flopcast.roofline.validation.step_plans import SUITES
    from flopcast.roofline.validation.summary import compare_methods, summaries
    from flopcast.roofline.views.terminal import console
    from flopcast.roofline.views.terminal.validation import print_validation

    mode, named = run.mode, given(typed, model)
    if steps_from is not None:
        ran = "with --steps-from: those steps have run"
        refuse_unused(ran, {"device": device, "suite": suite, "seed": seed, "retry": retry, "budget": budget})
        refuse_unused(ran, {name: value for name, value in {**named, **given(typed, run)}.items() if name != "module"})
    if parallel and model.module is not None:
        raise UsageError("--parallel with --module: steps of configs alone are timed on several GPUs; leave one out")
    own = _own_step(typed, model, run, device) if named and steps_from is None else None
    if not named:
        of_step = {name: value for name, value in given(typed, run).items() if name != "mode"}
        refuse_unused("without a model (--config, --width or --module): a suite's steps have their own", of_step)
    if own is not None:
        refuse_unused(
            "with a model: its step is run, no suite's",
            {"suite": suite, "seed": seed, "only_estimates": only_estimates},
        )
    if run_only or only_estimates:
        refuse_unused(
            "with --run-only or --only-estimates: nothing is compared",
            {"gpu": gpu, "any_stack": any_stack, "any_gpu": any_gpu},
        )
    if parallel or (steps_from is not None and _is_parallel(steps_from)):
        refuse_unused(
            "with steps on several GPUs",
            {"only_estimates": only_estimates, "estimates_from": estimates_from, "seed": seed},
        )
        _validate_parallel(
            parallel or [], gpu, device, own or suite or "quick", out, steps_from,
            retry=("oom", "error") if retry else (),
            budget=budget, run_only=run_only, any_gpu=any_gpu, as_json=as_json, mode=mode,
        )  # fmt: skip
        return
    suite = suite or "quick"
    check_suite(suite, SUITES)
    check_mode(mode)
    steps = own or suite
    if suite != RANDOM:
        refuse_unused(f"with --suite {suite}: its steps are listed, not drawn", {"seed": seed})
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
            done = run_validation_steps(
                device, steps, folder, retry=retried, budget=budget, parts=parts, mode=mode, seed=seed or 0
            )
        console.say(f"steps: {done}" if run_only else f"estimates: {done}")
        folders = f"--steps-from {folder}" if run_only else f"--steps-from STEPS --estimates-from {folder}"
        console.say(f"`flopcast validate {folders}` compares them, here or elsewhere")
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
            done = run_validation_steps(device, steps, folder, retry=retried, budget=budget, mode=mode, seed=seed or 0)
        console.say(f"steps: {done}")
    rows = compare_folder(folder, profile, any_stack=any_stack, estimates=estimates_from, own=model.module or "")
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


def _own_step(context: Context, model: ModelOptions, run: Run, device: str | None) -> StepPlan:
    """Returns the step of the model that the options name. Raises UsageError for one that cannot run."""
    from flopcast.microbench.recipe.plans import StepPlan
    from flopcast.roofline.gpu.library.fastest import BEST
    from flopcast.roofline.stream.model.models import name_of
    from flopcast.roofline.validation.run import machine_here
    from flopcast.roofline.validation.step_plans import OWN

    if BEST in (run.matmul, run.attention):
        raise UsageError(f"--matmul or --attention {BEST} picks by a profile: give the backend that is to run")
    step = asked_step(context, model, run)
    if model.module is None:
        name = name_of(model.config, model.width, model.depth)
        return StepPlan(**step.run.settings, name=name, config=dict(step.config or {}), group=OWN)
    described = machine_here(device)
    with progress("tracing"):
        stream, traced = step.traced(step.run.device_of(described), gpu=described)
    if stream.meta["unit"] == "steps" or traced.mode != run.mode:
        raise UsageError(
            f"--module {model.module}: a step function, or one that compiles itself, runs by itself and is not timed; "
            "give a factory that returns (module, batch)"
        )
    # a factory is given again what it was given here, whatever its batch shows of that
    sizes = {name: value for name, value in given(context, run).items() if name in ("batch", "seq")}
    name = model.module.rpartition(":")[2]
    return StepPlan(**{**traced.settings, **sizes}, name=name, config={}, module=model.module, group=OWN)


def _is_parallel(folder: Path) -> bool:
    from flopcast.roofline.validation.parallel import holds_parallel

    return holds_parallel(folder)


def _validate_parallel(
    layouts: list[str],
    gpu: str | None,
    device: str | None,
    suite: str | StepPlan,
    out: Path | None,
    steps_from: Path | None,
    *,
    retry: Sequence[str],
    budget: float | None,
    run_only: bool,
    any_gpu: bool,
    as_json: bool,
    mode: str,
) -> None:
    """Runs steps on several GPUs, of a suite or the one given in its place, and compares them, or only one of the two.
    Of several processes that a launcher started the first one compares."""
    from flopcast.roofline.base.csv_files import write_rows
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.stopped import resumable
    from flopcast.roofline.gpu.catalogue.device import gpu_name
    from flopcast.roofline.gpu.library.profiles import find_profile
    from flopcast.roofline.validation import comparable
    from flopcast.roofline.validation.parallel import compare_parallel, own_plans, parallel_plans, run_parallel_steps
    from flopcast.roofline.validation.run import machine_of
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.several_gpus import print_parallel

    folder = steps_from or out or Path("out/validate-parallel")
    if steps_from is None:
        if budget is not None and not budget >= 0:
            raise UsageError(f"--budget is {budget:g}: valid are seconds, 0 or more")
        plans = parallel_plans(layouts, suite, mode) if isinstance(suite, str) else own_plans(suite, layouts)
        with resumable(folder):
            speaks = run_parallel_steps(plans, folder, device, retry=retry, budget=budget)
        if not speaks:
            return
        if run_only:
            say(f"`flopcast validate --steps-from {folder}` compares them, here or elsewhere")
            if as_json:
                emit({"steps": str(folder)})
            return
    described = machine_of(folder)
    profile = find_profile(gpu or gpu_name(described))
    comparable.check_device(described, profile, any_gpu=any_gpu)
    with progress("comparing") as shown:
        found = compare_parallel(folder, profile, progress=shown.update)
    if not found:
        raise UsageError(f"{folder} holds no steps on several GPUs: `flopcast validate --parallel fsdp=2` runs them")
    rows = [one.to_json() for one in found]
    table = (out or folder) / "parallel-validation.csv"
    write_rows(table, list(rows[0]), rows)
    if as_json:
        emit({"gpu": profile.gpu, "rows": rows})
    else:
        print_parallel(found)
        say(f"wrote {table}")


def compare_folder(
    folder: Path, profile: Profile, *, any_stack: bool = False, estimates: Path | None = None, own: str = ""
) -> list[StepComparison]:
    """Returns the rows of `validate` for a folder of real steps; `estimates`: folder of torch's estimates of them;
    `own`: the user's factory, which may be imported.

    Raises UsageError for another software stack, unless `any_stack`, and for estimates of another kind of GPU.
    """
    from flopcast.roofline.validation.compare_steps import compare_runs
    from flopcast.roofline.views.terminal.console import warn

    with progress("comparing") as shown:
        return compare_runs(
            folder, profile, estimates=estimates, any_stack=any_stack, own=own, progress=shown.update, warn=warn
        )
