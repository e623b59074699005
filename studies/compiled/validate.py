"""One call on a GPU that measures what compiled forecasts are judged by: hosts, times and kernels of compiled steps.

    python -m studies.compiled.validate OUT --seconds 560            all of it, in this order
    python -m studies.compiled.validate OUT --seconds 170 --skip host --only w768-d2,gpt2:4x256
    flopcast validate --gpu GPU --steps-from OUT/steps               compares them, anywhere

1. host: `flopcast bench --suite host` into OUT/host, which measures compiled tiny models too.
2. steps: those of `flopcast validate --mode compile` and `--mode compile-graphs`, in one process, each step in both
   modes after another, into OUT/steps. Other processes compile them meanwhile; each is measured as soon as its code is
   there, and its rows are kept (`flopcast.microbench.steps.ahead`).

A stage takes up where an earlier call ended. One that has less than LEAST_SECONDS left is not begun.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.validation.run import named
from flopcast.roofline.validation.step_plans import validation_plans
from studies.command import parser_of

MODES = ("compile", "compile-graphs")
STAGES = ("host", "tiny", "steps")
LEAST_SECONDS = 20.0
LAST_SECONDS = 10.0  # of a stage, for the measurement that has begun


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, help="folder for the measurements")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many seconds")
    parser.add_argument("--skip", default="", help=f"stages, with commas between: {', '.join(STAGES)}")
    parser.add_argument("--only", default="", help='names of steps, with commas between: "gpt2" or "gpt2:4x256"')
    parser.add_argument("--modes", default=",".join(MODES), help="with commas between (default: %(default)s)")
    given = parser.parse_args()
    skipped, modes = (set(filter(None, text.split(","))) for text in (given.skip, given.modes))
    for option, unknown, valid in (("skip", skipped - {*STAGES}, STAGES), ("modes", modes - {*MODES}, MODES)):
        if unknown:
            parser.error(f"--{option} {', '.join(sorted(unknown))}: valid are {', '.join(valid)}")
    end = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    if "host" not in skipped and _begins("host", end):
        _run_host(given.out, end - time.monotonic())
    if "steps" not in skipped and _begins("steps", end):
        from flopcast.roofline.validation.run import run_validation_steps

        print(run_validation_steps(
            None, "standard", given.out / "steps", budget=end - time.monotonic() - LAST_SECONDS,
            mode=[mode for mode in MODES if mode in modes], names=names_of(given.only), with_tiny="tiny" not in skipped,
        ), flush=True)  # fmt: skip


def _begins(stage: str, end: float) -> bool:
    left = end - time.monotonic()
    if left < LEAST_SECONDS:
        print(f"{stage}: not begun, {left:.0f} s left", flush=True)
    return left >= LEAST_SECONDS


def names_of(only: str) -> list[str]:
    return [name for name in only.split(",") if name]


def plans_of(mode: str, only: str = "") -> Sequence[StepPlan]:
    return named(validation_plans("cuda", "standard", mode), names_of(only))


def _run_host(out: Path, seconds: float) -> None:
    """Calibrates the host in a process of its own; its end, whatever it is, is told."""
    command = [sys.executable, "-m", "flopcast", "bench", "--suite", "host", "--out", str(out / "host")]
    started = time.monotonic()
    try:
        done = subprocess.run(command, timeout=seconds)
        told = "done" if done.returncode == 0 else f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        told = "out of time"
    print(f"host: {told} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
