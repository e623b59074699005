"""Implements `bench --suite collectives`: measures what joins the GPUs of this host, or of all hosts that the user's
launcher started it on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flopcast.errors import UsageError

# On processors, by gloo, it is the machinery that is tried, not a link.
ON_PROCESSORS = tuple(2**power for power in (10, 20))


def bench_collectives(out: Path, device: str | None, budget: float | None, retry: Sequence[str], as_json: bool) -> None:
    """Measures what `out` lacks and says how much that was. Under torchrun or srun this process is one of several, of
    which the first alone writes and speaks.

    Raises UsageError for a device of which there are not two, and where the folder cannot be used; RunError where a
    process ended badly."""
    from flopcast.microbench.collectives import cases, launch, session
    from flopcast.microbench.collectives.worker import Task
    from flopcast.microbench.timing.device import all_gpus, pick_device
    from flopcast.roofline.cli.gpu.all_gpus import check_out
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.stopped import resumable
    from flopcast.roofline.gpu.suites import COLLECTIVES
    from flopcast.roofline.views.terminal.console import say

    if device not in (None, "cuda", "cpu"):
        raise UsageError(f"--device {device} with --suite {COLLECTIVES}: valid are cuda, all GPUs of the host, and cpu")
    if budget is not None and not budget >= 0:
        raise UsageError(f"--budget is {budget:g}: valid are seconds, 0 or more")
    check_out(out, collectives=True)
    is_member = session.is_member(os.environ)
    on_gpus = device == "cuda" or (device is None and pick_device().type == "cuda")
    sizes, backend = (cases.SIZES, "nccl") if on_gpus else (ON_PROCESSORS, "gloo")
    task = Task(str(out), backend, COLLECTIVES, sizes=sizes, budget=budget, retry=tuple(retry))
    before = _statuses(out)
    with resumable(out):
        if is_member:
            launch.run_as_member(task)
            if session.place(os.environ)[0]:
                return
        else:
            count = len(all_gpus()) if on_gpus else 2
            cases.groups(count, 1)  # refuses a single GPU
            launch.run_here(task, count)
    found = _statuses(out)
    found.subtract(before)
    rows = {status: count for status, count in sorted(found.items()) if count}
    if as_json:
        emit({"out": str(out), "rows": rows})
        return
    told = ", ".join(f"{count} {status}" for status, count in rows.items()) or "nothing: all of it was done before"
    say(f"collectives: measured {told}")
    say(f"`flopcast fit {out}` makes a profile of the link")


def _statuses(folder: Path) -> Counter[str]:
    """The rows of a folder by status; none where there is no folder yet."""
    from flopcast.microbench.records import records

    path = records.file_in(folder)
    return Counter(row["status"] for row in records.read(path).rows) if path.is_file() else Counter()
