"""One of the processes that measure collectives, as torch's launcher starts it:

    python -m torch.distributed.run ... -m flopcast.microbench.collectives.worker TASK

TASK is a `Task` as JSON. The first process writes the folder; what goes wrong there it also writes to `task.fault`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from flopcast.child import run_as_worker
from flopcast.microbench.collectives import nccl_log
from flopcast.microbench.collectives.cases import SIZES, Members, cases, groups

STAGES = ("times", "choices")  # a process whose NCCL logs its choices launches slower: it is another one


@dataclass(frozen=True)
class Task:
    """What to measure into which folder; JSON has the same fields."""

    out: str
    backend: str
    suite: str
    stages: Sequence[str] = STAGES
    sizes: Sequence[int] = SIZES
    budget: float | None = None
    retry: Sequence[str] = ()
    fault: str = ""


def run(task: Task) -> None:
    """Joins the others and measures what the folder lacks. Raises UsageError where the folder cannot be used."""
    import torch.distributed as dist

    from flopcast.microbench.collectives import session as sessions
    from flopcast.microbench.records.recorder import Recorder
    from flopcast.microbench.sweep.work import Stopwatch
    from flopcast.microbench.timing.device import describe

    rank, world, local = sessions.place(os.environ)
    log = nccl_log.LogReader(Path(gettempdir()) / f"flopcast-nccl-{os.getpid()}.log")
    if "choices" in task.stages:
        os.environ.update(nccl_log.VARIABLES, NCCL_DEBUG_FILE=str(log.path))
    device, control = sessions.start(rank, world, local, task.backend)
    try:
        hosts = hosts_of(world, control)
        made = sessions.settings(os.environ)
        facts = {
            "backend": task.backend, "cache": "hot", "suite": task.suite, "role": "fit",
            "nccl": sessions.nccl_version() if task.backend == "nccl" else "",
            "nvls": made.get("NCCL_NVLS_ENABLE") != "0", "settings": made,
        }  # fmt: skip
        session = sessions.Session(rank, world, hosts, device, task.backend, control, facts, retry=tuple(task.retry),
                                   watch=Stopwatch(task.budget))  # fmt: skip
        if rank == 0:
            with Recorder(task.out, describe(device)) as recorder:
                sessions.check_settings(recorder.rows, facts)
                session.recorder = recorder
                _measure(session, task, log)
        else:
            _measure(session, task, log)
    finally:
        log.path.unlink(missing_ok=True)
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def hosts_of(world: int, control: Any) -> int:
    """How many hosts there are, by their names."""
    import torch.distributed as dist

    names: list[Any] = [None] * world
    dist.all_gather_object(names, os.environ.get("SLURMD_NODENAME") or socket.gethostname(), group=control)
    return len(set(names))


def _measure(session: Any, task: Task, log: nccl_log.LogReader) -> None:
    from flopcast.microbench.collectives import beside, measure
    from flopcast.microbench.collectives.clock import Clock

    members = groups(session.world, session.hosts)
    listed = list(cases(members, task.sizes))
    buffers = measure.Buffers(session, max(task.sizes))
    for some in members:  # before the first collective: who is no member only makes the group
        session.group(some)
    if "times" in task.stages:  # what is wanted most comes first: a machine may be lent for minutes
        clock = Clock(session.device)
        measure.run_collectives(session, listed, buffers, clock)
        if clock.timer is not None:  # a processor launches nothing, and has no streams
            measure.run_launch_costs(session, members, buffers, clock.timer)
            largest = max(members, key=lambda some: (some.nodes == 1, some.gpus))
            beside.run_beside(session, largest, buffers, clock.timer)
            beside.run_copies(session, [Members(1, 1), largest])
    if "choices" in task.stages and session.backend == "nccl":
        measure.run_regimes(session, listed, buffers, log)
    session.wait()


def main(text: str) -> None:
    task = Task(**json.loads(text))
    run_as_worker(lambda: run(task), task.fault)


def as_text(task: Task) -> str:
    return json.dumps(asdict(task))


if __name__ == "__main__":
    main(sys.argv[1])
