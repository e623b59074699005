"""Reads what NCCL writes to its log (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,TUNING): which algorithm and protocol a
collective got, and how many channels, which are its kernel's blocks. Lines of NCCL 2.26 to 2.30:

    AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..23}
    24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,TUNING"}
_CHOICE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
_SENDS = re.compile(r"(\d+) p2p channels, (\d+) p2p channels per peer")
_NAMES = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
          "Broadcast": "broadcast"}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """What NCCL said of a collective. `bytes`: of one GPU's part, for an all-gather and a reduce-scatter."""

    kind: str
    bytes: int
    algorithm: str
    protocol: str
    channels: int


def choices(text: str) -> list[Choice]:
    """All choices that a piece of the log tells, in order."""
    return [
        Choice(_NAMES.get(name, name), int(size), algorithm, protocol, int(high) - int(low) + 1)
        for name, size, algorithm, protocol, low, high in _CHOICE.findall(text)
    ]


def send_channels(text: str) -> tuple[int, int] | None:
    """Channels of sends to all and to one peer, as the last communicator that was made has them."""
    found = _SENDS.findall(text)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


class LogReader:
    """What a log file says from one reading to the next; nothing where there is no file."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self) -> str:
        """What was written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return ""
        whole = data.rfind(b"\n") + 1  # a line may be half written
        self._at += whole
        return data[:whole].decode(errors="replace")
