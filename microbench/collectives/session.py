"""The processes that measure together: who they are, what they agree on, and the first one's folder.

All run the same code, and every collective must be called by all of its members: so the first process alone reads the
folder and the clock, and tells the others what to do next over a group of its own on the processors (gloo).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flopcast.errors import UsageError
from flopcast.microbench.collectives.cases import Members
from flopcast.microbench.collectives.operations import Group
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS, Fields, Row, merged
from flopcast.microbench.sweep.work import Stopwatch
from flopcast.progress import progress

# A member that hangs is given up after this.
PATIENCE = timedelta(seconds=120)
NOT_SETTINGS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")  # change nothing that is measured
# srun's names of what torchrun calls RANK, WORLD_SIZE and LOCAL_RANK
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def is_member(environment: Mapping[str, str]) -> bool:
    """Whether torchrun or srun started this process as one of several."""
    return "RANK" in environment or int(environment.get("SLURM_NTASKS", "1")) > 1


def place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, processes, number on this host). Raises UsageError where a launcher left one out."""
    found = []
    for name, slurm in _SLURM.items():
        text = environment.get(name, environment.get(slurm))
        if text is None or not text.isdigit():
            raise UsageError(f"{name} is {text!r}: start the processes by torchrun or srun (docs/measure-links.md)")
        found.append(int(text))
    return found[0], found[1], found[2]


def check_address(environment: Mapping[str, str]) -> None:
    """Raises UsageError for srun's processes on several hosts that were not told where the first one is."""
    if int(environment.get("SLURM_NNODES", "1")) > 1 and "MASTER_ADDR" not in environment:
        raise UsageError(
            "MASTER_ADDR is not set: export the first host's name before srun, as "
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)'
        )


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that NCCL obeys."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith("NCCL_") and name not in NOT_SETTINGS
    }


@dataclass
class Session:
    """This process's view. `recorder` is the first process's alone."""

    rank: int
    world: int
    hosts: int
    device: torch.device
    backend: str
    control: Any
    facts: dict[str, Any]  # the fields that every row of a group has
    recorder: Recorder | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)
    retry: Sequence[str] = ()
    _groups: dict[str, Group | None] = field(default_factory=dict)

    # --- agreeing

    def told(self, value: Any = None) -> Any:
        """The first process's value, in all."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.control)
        return found

    def wait(self) -> None:
        """Until all are here."""
        dist.barrier(group=self.control)

    def group(self, members: Members) -> Group | None:
        """The process group of members; None where this process is none. All must ask for it at the same time."""
        name = str(members)
        if name not in self._groups:
            ranks = members.ranks(self.world // self.hosts)
            handle = dist.new_group(ranks, backend=self.backend, timeout=PATIENCE)
            control = dist.new_group(ranks, backend="gloo", timeout=PATIENCE)
            number = ranks.index(self.rank) if self.rank in ranks else -1
            self._groups[name] = Group(handle, control, ranks, number) if number >= 0 else None
        return self._groups[name]

    # --- working through

    def each(self, label: str, keys: Iterable[str]) -> Iterator[int]:
        """The places of the keys that the folder lacks, in turn and to all processes; none once the time is spent. The
        first process shows how far they are."""
        keys = list(keys)
        todo = self.told([i for i, key in enumerate(keys) if not self._is_done(key)] if self.rank == 0 else None)
        with progress(label, len(todo), in_logs=self.rank == 0) as shown:
            for index in todo:
                if self.told(self.watch.is_spent()):
                    return
                yield index
                shown.advance(keys[index])

    def _is_done(self, key: str) -> bool:
        assert self.recorder is not None
        return self.recorder.is_done(key, self.backend, "hot", retry=self.retry)

    def record(self, kind: type[Row], key: str, members: Members, fields: Fields) -> None:
        """Writes a row of the first process's, with what every row of a group has."""
        if self.recorder is not None:
            fixed = {"key": key, "gpus": members.gpus, "nodes": members.nodes}
            self.recorder.append(merged(kind, EMPTY_FIELDS, self.facts, fixed, fields))


def check_settings(rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
    """Raises UsageError where a folder's rows were measured by another NCCL or with other settings of it."""
    for row in rows:
        for name in ("nccl", "settings"):
            known: Any = row.get(name)
            if known is not None and known != facts[name]:
                raise UsageError(
                    f"the folder's collectives were measured with {name} {known}, these would be with {facts[name]}: "
                    "give another --out"
                )


def start(rank: int, world: int, local: int, backend: str) -> tuple[torch.device, Any]:
    """Joins the processes; this one's device, and the group of all processors. The launcher's variables say where."""
    device = torch.device("cpu")
    check_address(os.environ)
    if backend == "nccl":
        device = torch.device("cuda", local % torch.cuda.device_count())  # srun may show each process its own alone
        torch.cuda.set_device(device)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    # Not bound to the device (`device_id`): NCCL would then make a group by dividing the first one, for which its
    # members wait at once, while torch 2.11 lets the others go on to the next group: of four GPUs two waited for ever.
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=PATIENCE)
    return device, dist.new_group(backend="gloo", timeout=PATIENCE)


def nccl_version() -> str:
    """NCCL's version as torch links it: "2.28.9"."""
    version: Any = torch.cuda.nccl.version
    return ".".join(map(str, version()))
