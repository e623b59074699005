"""Starts a process per GPU by torch's own launcher, and waits for them.

python -m flopcast.microbench.collectives.launch ARGUMENTS     torch.distributed.run that ends with its parent
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from flopcast.child import PARENT, end_with_parent
from flopcast.errors import RunError, UsageError
from flopcast.microbench.collectives.worker import STAGES, Task, as_text, run

WORKER = "flopcast.microbench.collectives.worker"
THREADS = "OMP_NUM_THREADS"


class Fault(TypedDict):
    """What the first process says of its end."""

    message: str
    exit_code: int


def run_here(task: Task, processes: int) -> None:
    """Measures on this host, stage by stage, in so many processes each. Raises what the first of them raised, and
    RunError where one ended badly; finished rows are kept."""
    stages = [stage for stage in STAGES if stage == "times" or task.backend == "nccl"]
    for stage in stages:
        one = replace(task, stages=[stage])
        start(WORKER, partial(_text_of, one), processes, task.out)


def _text_of(task: Task, fault: str) -> str:
    return as_text(replace(task, fault=fault))


def start(worker: str, text_of: Callable[[str], str], processes: int, out: str) -> None:
    """Runs a module in so many processes, which get `text_of` the file for what the first of them raises. Raises that,
    and RunError where one ended badly."""
    with TemporaryDirectory(prefix="flopcast-") as folder:
        fault = Path(folder) / "fault.json"
        command = [sys.executable, "-m", __spec__.name, *arguments(processes, worker), text_of(str(fault))]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, env=_environment(processes), check=False)
        if ended.returncode:
            raise _raised(fault, ended.returncode, out)


def run_as_member(task: Task) -> None:
    """Measures as one of the processes that the user's launcher started: both stages in one, since NCCL reads only once
    what it is to log."""
    run(task)


def arguments(processes: int, worker: str = WORKER) -> list[str]:
    """Of torch.distributed.run, before the task's."""
    return ["--standalone", f"--nproc-per-node={processes}", "-m", worker]


def _environment(processes: int) -> Mapping[str, str]:
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    return {THREADS: threads, **os.environ, PARENT: str(os.getpid())}


def _raised(fault: Path, code: int, out: str) -> Exception:
    if fault.is_file():
        told: Fault = json.loads(fault.read_text(encoding="utf-8"))
        return (UsageError if told["exit_code"] == 2 else RunError)(told["message"])
    return RunError(
        f"a process that measured ended badly (exit code {code}; its last words are above). All finished "
        f"rows are in {out}; run the same command again, it continues there"
    )


def main(given: Sequence[str]) -> None:
    end_with_parent()
    from torch.distributed import run as launcher

    begin: Any = launcher.main
    begin(list(given))


if __name__ == "__main__":
    main(sys.argv[1:])
