"""Calibrates a host in several fresh processes: one process is one draw.

Processes of one machine differ by 16% (standard deviation of the logarithm; 17 processes beyond the first of five
machines), each by itself for as long as it lives: twelve of one H200's host took 3.0 to 5.3 ms per layer of Qwen3. So
several are measured, one after the other, and their spread is that of the next process, the one that trains.

All processes start at once and load torch while others measure nothing yet; then each gets its turn: it builds the tiny
models, measures, and ends. Its rows (key host/<model>/process<N>/depth<D>/<phase>) are kept as soon as it is done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Required

from flopcast.bounds import NonNegative
from flopcast.child import PARENT, end_with_parent
from flopcast.decode import decode
from flopcast.errors import DataError
from flopcast.json_files import parse_json
from flopcast.microbench.recipe.plans import HostPlan, of_process
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import Readings
from flopcast.microbench.sweep.work import Stopwatch, Summary
from flopcast.progress import progress

COUNT, COUNT_COMPILED = 4, 2  # a process that compiles its models takes three times as long
COMMAND = (sys.executable, "-m", "flopcast.microbench.hosts.processes")
ROUNDS = 2  # per process: their samples agree within 10% where processes do not


def run_processes(
    plan: HostPlan, *, recorder: Recorder, device: str, suite: str, retry: Collection[str] = (), count: int = COUNT,
    command: Sequence[str] = COMMAND,
) -> Summary:  # fmt: skip
    """Measures and records the host's cost in each of `count` processes that the folder lacks; those that end badly
    leave a warning and no rows."""
    watch = Stopwatch()
    phases = [plan.row_key(depth, "step") for depth in plan.configs]
    todo = [n for n in range(count) if not all(recorder.is_done(of_process(key, n), retry=retry) for key in phases)]
    statuses = Counter[str]()
    warnings: list[str] = []
    task = json.dumps({"plan": asdict(plan), "device": device, "suite": suite})
    started = {n: _start(command, task) for n in todo}
    try:
        with progress(f"host cost, {plan.model}, {count} processes", len(todo), in_logs=True) as shown:
            for n, process in started.items():
                out, errors = process.communicate("go\n")
                rows = _rows(out) if process.returncode == 0 else []
                for row in rows:
                    recorder.append({**row, "key": of_process(row["key"], n)})
                    statuses[row["status"]] += 1
                if not rows:
                    said = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
                    warnings.append(f"process {n} measured nothing: {said[0]}")
                shown.advance(f"process {n}")
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    return Summary(statuses, skipped=count - len(todo), seconds=watch.seconds, warnings=warnings)


def count_for(plan: HostPlan) -> int:
    """The number of processes that measure the plan's models."""
    return COUNT if plan.mode == "eager" else COUNT_COMPILED


def _start(command: Sequence[str], task: str) -> subprocess.Popen[str]:
    environment = {**os.environ, PARENT: str(os.getpid())}
    return subprocess.Popen(
        [*command, task], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", env=environment,
    )  # fmt: skip


class _Measured(Readings, total=False):
    """What a process tells of a phase, before the recorder adds where and when."""

    key: Required[str]
    value: NonNegative | None


def _rows(out: str) -> list[_Measured]:
    """The rows that a process printed as its last line; none where it printed something else."""
    try:
        return decode(list[_Measured], parse_json(out.strip().rpartition("\n")[2]), "a process")
    except (ValueError, DataError):
        return []


def main(task: str) -> None:
    """One process: loads what it needs, waits for its turn, measures, prints its rows."""
    end_with_parent()
    import torch
    import transformers  # noqa: F401  (loaded before the turn)

    from flopcast.microbench.hosts.host import Kept, run_host
    from flopcast.microbench.recipe.compiling import host_builders

    asked = json.loads(task)
    configs = {int(depth): config for depth, config in asked["plan"].pop("configs").items()}
    plan = HostPlan(**asked["plan"], configs=configs)
    if sys.stdin.readline() != "go\n":
        return
    device = torch.device(asked["device"])
    builders, counts = host_builders(plan, device)
    kept = Kept()
    run_host(
        builders, model=plan.model, recorder=kept, device=device, suite=asked["suite"],
        rounds=min(plan.rounds, ROUNDS), steps_per_round=plan.steps_per_round, counts=counts,
    )  # fmt: skip
    print(json.dumps(kept.rows))


if __name__ == "__main__":
    main(sys.argv[1])
