"""Says what is measured of a host, or of several: groups of GPUs, collectives, sizes. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flopcast.errors import UsageError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
ITEM_BYTES = {"bf16": 2, "fp32": 4}
SIZES = tuple(2**power for power in range(10, 31))  # 1 KiB to 1 GiB, every power of two: NCCL changes between any two


@dataclass(frozen=True)
class Members:
    """`gpus` GPUs, evenly on the first `nodes` hosts."""

    gpus: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.gpus}x{self.nodes}"

    def ranks(self, per_host: int) -> list[int]:
        """Their ranks, where each host has `per_host` in a row."""
        return [host * per_host + gpu for host in range(self.nodes) for gpu in range(self.gpus // self.nodes)]


@dataclass(frozen=True)
class Case:
    """A collective to measure: its kind, dtype, members, and the whole bytes as nccl-tests counts them."""

    kind: str
    dtype: str
    members: Members
    bytes: int

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.dtype}/{self.members}/{self.bytes}"

    @property
    def items(self) -> int:
        return self.bytes // ITEM_BYTES[self.dtype]


def groups(world: int, hosts: int) -> list[Members]:
    """2, 4, 8, ... GPUs of a host and all of it; then 2, 4, ... hosts and all, with all of their GPUs and one of each.

    Raises UsageError for hosts that do not have as many GPUs each, and where there is no second GPU."""
    if world < 2:
        raise UsageError(f"collectives take 2 GPUs or more: {world} is visible")
    if world % hosts:
        raise UsageError(f"{world} processes on {hosts} hosts: start as many on each")
    per_host = world // hosts
    inside = [Members(gpus, 1) for gpus in _doubled(per_host)]
    across = [Members(nodes * gpus, nodes) for nodes in _doubled(hosts) for gpus in dict.fromkeys((1, per_host))]
    return [*inside, *across]


def _doubled(most: int) -> list[int]:
    found = []
    size = 2
    while size < most:
        found.append(size)
        size *= 2
    return [*found, most] if most >= 2 else []


def cases(members: Iterable[Members], sizes: Sequence[int] = SIZES, kinds: Sequence[str] = KINDS) -> Iterator[Case]:
    """All cases, small sizes first. Sizes that do not divide among the members are left out; sends need pairs."""
    for some in members:
        for kind in kinds:
            if kind == "send_recv" and some.gpus % 2:
                continue
            for dtype, item in ITEM_BYTES.items():
                yield from (Case(kind, dtype, some, size) for size in sizes if size % (item * some.gpus) == 0)
