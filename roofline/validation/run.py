"""Runs the real steps of a suite on this machine, and describes the machine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import MODES
from flopcast.roofline.gpu.suites import check_suite
from flopcast.roofline.validation.architectures import ARCHITECTURES
from flopcast.roofline.validation.random_steps import RANDOM
from flopcast.roofline.validation.step_plans import (
    FINE_TUNE,
    IMAGES,
    INFERENCE,
    OF_FEW_BITS,
    OWN_ADAMW,
    RECOMPUTED,
    SUITES,
)

if TYPE_CHECKING:
    from flopcast.microbench.recipe.plans import StepPlan
    from flopcast.microbench.records.machine import Device

ESTIMATES = ("estimates",)  # of `microbench.steps.run.PARTS`
# Of compiled steps, of which the host bounds many that take 8 ms: a round of five of those was 3 to 6% too long.
COMPILED_ROUND_SECONDS = 0.2


def run_validation_steps(
    device: str | None, suite: str | StepPlan, out: Path, *, retry: tuple[str, ...] = (), budget: float | None = None,
    parts: tuple[str, ...] | None = None, mode: str | Sequence[str] = "eager", names: Collection[str] = (),
    with_tiny: bool = True, seed: int = 0,
) -> str:  # fmt: skip
    """Runs the real steps of a suite, or the one given in its place, or `parts` of them, that `out` lacks; returns a
    line on what was done.

    `mode`: how they run; of several, each step runs in all of them before the next one. `names`: of the steps to run,
    as in `named`. `seed`: of the suite "random". `with_tiny`: whether tiny models are compiled too, to calibrate the
    host. The default parts are times and kernels, and on a GPU torch's estimates of eager training of whole models too.
    Raises UsageError for estimates on a CPU, and for compiled steps there.
    """
    if isinstance(suite, str):
        check_suite(suite, SUITES)
    modes = [mode] if isinstance(mode, str) else list(mode)
    for one in modes:
        check_mode(one)
    if budget is not None and not budget >= 0:
        raise UsageError(f"--budget is {budget:g}: valid are seconds, 0 or more")
    from flopcast.microbench.records.recorder import Recorder
    from flopcast.microbench.steps.run import PARTS as ALL_PARTS
    from flopcast.microbench.steps.run import TIMES_AND_KERNELS, run_steps
    from flopcast.microbench.timing.device import describe, pick_device
    from flopcast.roofline.gpu.fit.host_calibration import compiled_host_plans, host_plan
    from flopcast.roofline.validation.step_plans import validation_plans

    chosen = pick_device(device)
    if parts == ESTIMATES and chosen.type != "cuda":
        raise UsageError(f"--only-estimates on {chosen.type}: torch's RuntimeEstimator reads a CUDA GPU's figures")
    is_eager = modes == ["eager"]
    if not is_eager and chosen.type != "cuda":
        raise UsageError(
            f"--mode {modes[0]} on {chosen.type}: compiled steps are forecast and run on CUDA GPUs; leave it out"
        )
    rounds, steps = (3, 2) if chosen.type == "cpu" else (5, 5)
    # torch's estimator knows neither adapters nor a cache of keys and values
    not_estimated = (FINE_TUNE, INFERENCE, OF_FEW_BITS, IMAGES, ARCHITECTURES, OWN_ADAMW, RECOMPUTED, RANDOM)
    is_estimated = chosen.type == "cuda" and is_eager and isinstance(suite, str) and suite not in not_estimated
    with Recorder(out, describe(chosen)) as recorder:
        if isinstance(suite, str):
            by_mode = [named(validation_plans(chosen.type, suite, one, seed=seed), names) for one in modes]
            plans = [plan for alike in zip(*by_mode, strict=True) for plan in alike]
        else:
            plans = [suite]
        return str(
            run_steps(
                plans,
                device=chosen,
                recorder=recorder,
                rounds=rounds,
                steps_per_round=steps,
                least_round_seconds=0.0 if is_eager else COMPILED_ROUND_SECONDS,
                host=None if chosen.type == "cpu" else host_plan(chosen.type),
                parts=parts or (ALL_PARTS if is_estimated else TIMES_AND_KERNELS),
                compiled=[plan for plan in compiled_host_plans() if with_tiny and plan.mode in modes],
                budget_seconds=budget,
                retry=retry,
            )
        )


def named(plans: Sequence[StepPlan], names: Collection[str]) -> Sequence[StepPlan]:
    """The plans of these names, in their order: "gpt2" for each of that name, "gpt2:4x256" for the one of that batch.
    All of them where no name is given. Raises UsageError for one that no plan has."""
    found = []
    for name in names:
        own = [plan for plan in plans if name in (plan.name, f"{plan.name}:{plan.batch}x{plan.seq}")]
        if not own:
            raise UsageError(f"no step is named {name!r}: valid are {', '.join(dict.fromkeys(p.name for p in plans))}")
        found += own
    return found if names else plans


def check_mode(mode: str) -> None:
    """Raises UsageError for a mode that no step runs in."""
    if mode not in MODES:
        raise UsageError(f"--mode {mode!r}: valid are {', '.join(MODES)}")


def machine_here(device: str | None) -> Device:
    """The description of this machine's device. Raises UsageError if there is no device of that name."""
    from flopcast.microbench.timing.device import describe, pick_device

    return describe(pick_device(device))["device"]


def machine_of(folder: Path) -> Device:
    """The description of the device whose real steps `folder` holds. Raises UsageError if it holds none."""
    from flopcast.microbench.records import records
    from flopcast.roofline.validation.compare_steps import step_folders

    first = step_folders(folder)[0]
    if not records.file_in(first).is_file():
        raise UsageError(f"{folder} holds no real steps: `flopcast validate --out {folder}` runs them")
    return records.read_machine(first)["device"]
