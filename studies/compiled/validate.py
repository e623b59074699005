"""One call on a GPU that measures what compiled forecasts are judged by: hosts, times and kernels of 26 compiled steps.

    python -m studies.compiled.validate OUT --seconds 560            all of it, in this order
    python -m studies.compiled.validate OUT --seconds 560 --skip host,warm
    flopcast validate --gpu GPU --steps-from OUT/compile             compares them, anywhere

1. host: `flopcast bench --suite host` into OUT/host, which measures compiled tiny models too.
2. warm: compiles every step in both modes, several at once, into inductor's cache in the temporary folder. Whatever
   runs on a GPU has it for itself, so that Triton's choices among configurations are those of an idle one.
3. compile, compile-graphs: `flopcast validate --mode MODE --run-only` into OUT/MODE, from that cache.

On a host of several GPUs each mode has one of its own, and the two run side by side.

Each stage takes up where an earlier call ended; rows are kept as they are measured. A stage that has less than
LEAST_SECONDS left is not begun. It has not run on a GPU yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import BoundedSemaphore

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.validation.step_plans import validation_plans
from studies.command import parser_of

MODES = ("compile", "compile-graphs")
STAGES = ("host", "warm", *MODES)
LEAST_SECONDS = 20.0
CACHE = Path(tempfile.gettempdir()) / "compiled-validate"
AT_ONCE = 8
GIGABYTES = 120  # of a GPU, that steps take side by side; in units of UNIT
UNIT = 8
COMPILE_THREADS = 4


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, help="folder for the measurements")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many seconds")
    parser.add_argument("--skip", default="", help=f"stages, with commas between: {', '.join(STAGES)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the warming of a step")
    parser.add_argument("--plan", type=int, help="what a child process compiles, by number")
    parser.add_argument("--mode", choices=MODES, help="how")
    given = parser.parse_args()
    if unknown := set(filter(None, given.skip.split(","))) - set(STAGES):
        parser.error(f"--skip {', '.join(sorted(unknown))}: valid are {', '.join(STAGES)}")
    if given.plan is not None:
        warm(plans_of(given.mode or MODES[0])[given.plan], given.device)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds
    gpus = gpus_of_this_host()
    stages = [stage for stage in STAGES if stage not in given.skip.split(",")]
    for stage in (stage for stage in stages if stage not in MODES):
        _begin(stage, given.out, end, gpus)
    modes = [stage for stage in stages if stage in MODES]
    with ThreadPoolExecutor(len(gpus)) as pool:
        for done in [pool.submit(_begin, mode, given.out, end, gpus, modes) for mode in modes]:
            done.result()


def gpus_of_this_host() -> list[str]:
    """Their numbers; of a host without one, a single empty name."""
    import torch

    return [str(number) for number in range(torch.cuda.device_count())] or [""]


def gpu_of(mode: str, gpus: Sequence[str]) -> str:
    """The GPU that a mode's steps are compiled for and run on: a mode keeps its own, if there are two."""
    return gpus[MODES.index(mode) % len(gpus)]


def _begin(stage: str, out: Path, end: float, gpus: Sequence[str], modes: Sequence[str] = ()) -> None:
    left = end - time.monotonic()
    if left < LEAST_SECONDS:
        print(f"{stage}: not begun, {left:.0f} s left", flush=True)
    elif stage == "warm":
        _warm_all(out, left, gpus)
    else:
        # on one GPU, the first mode leaves the second its half
        shared = len(gpus) == 1 and len(modes) == 2 and stage == modes[0]
        gpu = gpu_of(stage, gpus) if stage in MODES else gpus[0]
        _run(stage, command_of(stage, out, left / 2 if shared else left), left, gpu)


def plans_of(mode: str) -> list[StepPlan]:
    return validation_plans("cuda", "standard", mode)


def command_of(stage: str, out: Path, seconds: float) -> list[str]:
    """flopcast's command for a stage that is one."""
    if stage == "host":
        return ["bench", "--suite", "host", "--out", str(out / "host")]
    return ["validate", "--mode", stage, "--suite", "standard", "--run-only", "--out", str(out / stage), "--budget",
            f"{max(seconds - LEAST_SECONDS, 1.0):.0f}"]  # fmt: skip


def _run(stage: str, arguments: list[str], seconds: float, gpu: str) -> None:
    """A command of flopcast in a process of its own; its end, whatever it is, is told."""
    started = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-m", "flopcast", *arguments], env=_environment(gpu), timeout=seconds)
        told = "done" if done.returncode == 0 else f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        told = "out of time"
    print(f"{stage}: {told} after {time.monotonic() - started:.0f} s", flush=True)


def _environment(gpu: str) -> dict[str, str]:
    return os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}) | {
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE), "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS),
    }  # fmt: skip


def _warm_all(out: Path, seconds: float, gpus: Sequence[str]) -> None:
    """Compiles all steps in both modes, as many at once as a GPU holds; one that fails is told and ends no other."""
    end = time.monotonic() + seconds
    memory_of = {gpu: BoundedSemaphore(GIGABYTES // UNIT) for gpu in gpus}
    admitted_by = {gpu: BoundedSemaphore(1) for gpu in gpus}  # one at a time takes memory: no two wait for each other's

    def compile_one(job: tuple[str, int]) -> None:
        mode, number = job
        plan, gpu = plans_of(mode)[number], gpu_of(mode, gpus)
        memory, admitted = memory_of[gpu], admitted_by[gpu]
        units = min(-(-gigabytes_of(plan) // UNIT), GIGABYTES // UNIT)
        with admitted:
            for _ in range(units):
                memory.acquire()
        started = time.monotonic()
        try:
            left = end - started
            if left < LEAST_SECONDS:
                return
            child = [sys.executable, "-m", "studies.compiled.validate", str(out), "--plan", str(number), "--mode", mode]
            done = subprocess.run(child, env=_environment(gpu), capture_output=True, text=True, timeout=left)
            told = "compiled" if done.returncode == 0 else f"failed: {done.stderr.strip()[-500:]}"
        except subprocess.TimeoutExpired:
            told = "out of time"
        finally:
            for _ in range(units):
                memory.release()
        print(f"{plan.name} {plan.batch}x{plan.seq} {mode}: {told}, {time.monotonic() - started:.0f} s", flush=True)

    jobs = [(mode, number) for number in range(len(plans_of(MODES[0]))) for mode in MODES]
    with ThreadPoolExecutor(AT_ONCE * len(gpus)) as pool:
        list(pool.map(compile_one, jobs))


def gigabytes_of(plan: StepPlan) -> int:
    """More than the step takes on the GPU: parameters with gradients and states at 16 bytes, activations and logits."""
    config = plan.config
    if plan.module:
        return 16
    width = int(config.get("hidden_size", config.get("n_embd", 0)))
    layers = int(config.get("num_hidden_layers", config.get("n_layer", 0)))
    vocabulary, tokens = int(config["vocab_size"]), plan.batch * plan.seq
    experts = int(config.get("num_experts") or 1)
    inner = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * width)
    parameters = 2 * vocabulary * width + layers * width * (4 * width + 3 * inner * experts)
    return 3 + (16 * parameters + tokens * (12 * vocabulary + 60 * layers * width)) // 10**9


def warm(plan: StepPlan, device: str) -> None:
    """Compiles a step and runs it as often as it takes to capture its graphs."""
    import torch

    from flopcast.microbench.recipe.compiling import FIRST_STEPS
    from flopcast.microbench.steps.build import build_plan
    from studies.compiled.record import first_run

    step = build_plan(plan, torch.device(device))
    first_run(step, device)
    for _ in range(FIRST_STEPS - 1):
        step.run()


if __name__ == "__main__":
    main()
