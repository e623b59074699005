"""One call on a GPU that measures what compiled forecasts are judged by: hosts, times and kernels of compiled steps.

    python -m studies.compiled.validate OUT --seconds 560            all of it, in this order
    python -m studies.compiled.validate OUT --seconds 170 --skip host --only w768-d2,gpt2:4x256
    flopcast validate --gpu GPU --steps-from OUT/compile             compares them, anywhere

1. host: `flopcast bench --suite host` into OUT/host, which measures compiled tiny models too.
2. warm: compiles every step in both modes, and the tiny models that run before them (tiny), several at once, into
   inductor's cache in the temporary folder. Whatever runs on a GPU has it for itself, so that Triton's choices among
   configurations are those of an idle one.
3. compile, compile-graphs: the steps as `flopcast validate --mode MODE --run-only` runs them, into OUT/MODE, from that
   cache.

On a host of several GPUs each mode has one of its own, and the two run side by side.

Each stage takes up where an earlier call ended; rows are kept as they are measured. A stage that has less than
LEAST_SECONDS left is not begun.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.validation.run import named
from flopcast.roofline.validation.step_plans import validation_plans
from studies.command import parser_of

MODES = ("compile", "compile-graphs")
STAGES = ("host", "tiny", "warm", *MODES)
LEAST_SECONDS = 20.0
CACHE = Path(tempfile.gettempdir()) / "compiled-validate"
AT_ONCE = 8
GIGABYTES = 70  # of a GPU, that steps take side by side: one of 80 has room for them; in units of UNIT
UNIT = 8
COMPILE_THREADS = 4
TINY = "tiny"  # models, which calibrate the host of compiled steps, among the names of what is compiled
CHILD = [sys.executable, "-m", "studies.compiled.validate"]


@dataclass(frozen=True)
class Call:
    """One call of this command: where to, until when (`time.monotonic`), on which GPUs, and of which steps."""

    out: Path
    end: float
    gpus: Sequence[str]
    only: str
    with_tiny: bool

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def plans(self, mode: str) -> Sequence[StepPlan]:
        return plans_of(mode, self.only)


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, help="folder for the measurements")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many seconds")
    parser.add_argument("--skip", default="", help=f"stages, with commas between: {', '.join(STAGES)}")
    parser.add_argument("--only", default="", help='names of steps, with commas between: "gpt2" or "gpt2:4x256"')
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the warming of a step")
    parser.add_argument("--warm", help=f'what a child process compiles: a step\'s number, or "{TINY}"')
    parser.add_argument("--mode", choices=MODES, help="how it compiles, or what it runs")
    parser.add_argument("--no-tiny", action="store_true", help="what it runs has no tiny models before it")
    given = parser.parse_args()
    if unknown := set(filter(None, given.skip.split(","))) - set(STAGES):
        parser.error(f"--skip {', '.join(sorted(unknown))}: valid are {', '.join(STAGES)}")
    if given.mode and given.warm:
        warm(given.warm, given.mode, given.only, given.device)
        return
    if given.mode:
        run_mode(given.mode, given.out, given.only, given.seconds, with_tiny=not given.no_tiny)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    stages = [stage for stage in STAGES if stage not in given.skip.split(",")]
    end = time.monotonic() + given.seconds
    call = Call(given.out, end, gpus_of_this_host(), given.only, with_tiny=TINY in stages)
    for stage in (stage for stage in stages if stage not in (TINY, *MODES)):
        _begin(stage, call)
    modes = [stage for stage in stages if stage in MODES]
    with ThreadPoolExecutor(len(call.gpus)) as pool:
        for done in [pool.submit(_begin, mode, call, modes) for mode in modes]:
            done.result()


def gpus_of_this_host() -> list[str]:
    """The names of those that are seen, as CUDA_VISIBLE_DEVICES has them; of a host without one, a single empty one."""
    import torch

    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in seen.split(",") if name] or [str(number) for number in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()] or [""]


def gpu_of(mode: str, gpus: Sequence[str]) -> str:
    """The GPU that a mode's steps are compiled for and run on: a mode keeps its own, if there are two."""
    return gpus[MODES.index(mode) % len(gpus)]


def _begin(stage: str, call: Call, modes: Sequence[str] = ()) -> None:
    left = call.left
    if left < LEAST_SECONDS:
        print(f"{stage}: not begun, {left:.0f} s left", flush=True)
    elif stage == "warm":
        _warm_all(call)
    else:
        # on one GPU, the first mode leaves the second its half
        shared = len(call.gpus) == 1 and len(modes) == 2 and stage == modes[0]
        gpu = gpu_of(stage, call.gpus) if stage in MODES else call.gpus[0]
        command = command_of(stage, call.out, left / 2 if shared else left, call.only, with_tiny=call.with_tiny)
        _run(stage, command, left, gpu)


def plans_of(mode: str, only: str = "") -> Sequence[StepPlan]:
    return named(validation_plans("cuda", "standard", mode), [name for name in only.split(",") if name])


def command_of(stage: str, out: Path, seconds: float, only: str = "", *, with_tiny: bool = True) -> list[str]:
    """The command of a stage that is one process."""
    if stage == "host":
        return [sys.executable, "-m", "flopcast", "bench", "--suite", "host", "--out", str(out / "host")]
    within = f"{max(seconds - LEAST_SECONDS, 1.0):.0f}"
    return [
        *CHILD,
        str(out),
        *([] if with_tiny else ["--no-tiny"]),
        "--mode",
        stage,
        "--only",
        only,
        "--seconds",
        within,
    ]


def run_mode(mode: str, out: Path, only: str, seconds: float, *, with_tiny: bool = True) -> None:
    from flopcast.roofline.validation.run import run_validation_steps

    names = [name for name in only.split(",") if name]
    done = run_validation_steps(
        None, "standard", out / mode, budget=seconds, mode=mode, names=names, with_tiny=with_tiny
    )
    print(done, flush=True)


def _run(stage: str, command: list[str], seconds: float, gpu: str) -> None:
    """A command in a process of its own; its end, whatever it is, is told."""
    started = time.monotonic()
    try:
        done = subprocess.run(command, env=_environment(gpu), timeout=seconds)
        told = "done" if done.returncode == 0 else f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        told = "out of time"
    print(f"{stage}: {told} after {time.monotonic() - started:.0f} s", flush=True)


def _environment(gpu: str) -> dict[str, str]:
    return os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}) | {
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE), "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS),
    }  # fmt: skip


def _warm_all(call: Call) -> None:
    """Compiles all steps in both modes, as many at once as a GPU holds; one that fails is told and ends no other."""
    memory_of = {gpu: BoundedSemaphore(GIGABYTES // UNIT) for gpu in call.gpus}
    admitted_by = {gpu: BoundedSemaphore(1) for gpu in call.gpus}  # one at a time takes memory: none waits for another

    def compile_one(job: tuple[str, str, str, int]) -> None:
        mode, what, label, gigabytes = job
        gpu = gpu_of(mode, call.gpus)
        memory, admitted = memory_of[gpu], admitted_by[gpu]
        units = min(-(-gigabytes // UNIT), GIGABYTES // UNIT)
        with admitted:
            for _ in range(units):
                memory.acquire()
        started = time.monotonic()
        try:
            if call.left < LEAST_SECONDS:
                return
            child = [*CHILD, str(call.out), "--warm", what, "--mode", mode, "--only", call.only]
            done = subprocess.run(child, env=_environment(gpu), capture_output=True, text=True, timeout=call.left)
            told = "compiled" if done.returncode == 0 else f"failed: {done.stderr.strip()[-500:]}"
        except subprocess.TimeoutExpired:
            told = "out of time"
        finally:
            for _ in range(units):
                memory.release()
        print(f"{label} {mode}: {told}, {time.monotonic() - started:.0f} s", flush=True)

    jobs = [
        (mode, str(number), f"{plan.name} {plan.batch}x{plan.seq}", gigabytes_of(plan))
        for mode in MODES  # whose kernels are mostly the same, from the cache for the second one
        for number, plan in enumerate(call.plans(mode))
    ]
    with ThreadPoolExecutor(AT_ONCE * len(call.gpus)) as pool:
        tiny = [(mode, TINY, TINY, UNIT) for mode in MODES if call.with_tiny]
        list(pool.map(compile_one, [*tiny, *jobs]))


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


def warm(what: str, mode: str, only: str, device: str) -> None:
    """Compiles a step, or the tiny models, and runs it as often as it takes to capture its graphs."""
    import torch

    from flopcast.microbench.recipe.compiling import FIRST_STEPS, host_builders
    from flopcast.microbench.steps.build import build_plan
    from flopcast.roofline.gpu.fit.host_calibration import compiled_host_plans
    from studies.compiled.record import first_run, graphs_alone

    if what == TINY:
        for plan in compiled_host_plans():
            if plan.mode == mode:
                builders, _ = host_builders(plan, device)
                with graphs_alone(device):
                    for build in builders.values():
                        build()
        return
    step = build_plan(plans_of(mode, only)[int(what)], torch.device(device))
    first_run(step, device)
    for _ in range(FIRST_STEPS - 1):
        step.run()


if __name__ == "__main__":
    main()
