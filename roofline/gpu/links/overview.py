"""What `flopcast gpus --links` tells of each link: an all-reduce's latency and bus bandwidth, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flopcast.roofline.gpu.links.catalogue import find_link, links
from flopcast.roofline.gpu.links.choice import Kind, wire
from flopcast.roofline.gpu.links.fitted import CollectiveTime
from flopcast.roofline.gpu.links.library import Interconnect, interconnect_of, known_links
from flopcast.roofline.gpu.links.profile import LinkProfile

KIND: Kind = "all_reduce"
GPUS = (2, 4, 8)
SIZES = (1024, 1024**2, 256 * 1024**2)  # the smallest stands for the latency
HOST_LINK = "nvlink4"  # of the hosts that a network joins


@dataclass(frozen=True)
class Cell:
    """An all-reduce of `bytes` among `gpus`, on as many hosts for a network."""

    gpus: int
    bytes: int
    time: CollectiveTime

    @property
    def bus_bytes_per_second(self) -> float:
        """As nccl-tests counts it: what passes through each link."""
        return wire(KIND, self.gpus) * self.bytes / self.time.seconds

    def to_json(self) -> dict[str, Any]:
        time = self.time
        return {
            "collective": KIND, "gpus": self.gpus, "bytes": self.bytes, "seconds": time.seconds,
            "seconds_low": time.low, "seconds_high": time.high, "bus_bytes_per_second": self.bus_bytes_per_second,
            "regime": None if time.regime is None else str(time.regime), "blocks": time.blocks, "basis": time.basis,
        }  # fmt: skip


@dataclass(frozen=True)
class LinkOverview:
    """A link and its cells. `kind` and `bytes_per_second`: of a measured one, those of its datasheet's link, None where
    that is not known."""

    name: str
    kind: str | None
    basis: str
    bytes_per_second: float | None
    gpus: tuple[str, ...]
    source: str
    cells: Sequence[Cell]

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "cells"}
        return {**fields, "gpus": list(self.gpus), "rates": [cell.to_json() for cell in self.cells]}


def overviews() -> list[LinkOverview]:
    """All links: measured ones first, then those within a host, then networks, of hosts with a GPU each."""
    inside = [_overview(found, nodes=False) for found in known_links()]
    joining = [link for link in links().values() if link.kind == "network"]
    between = [_overview(Interconnect(find_link(HOST_LINK), network=link), nodes=True) for link in joining]
    return [*inside, *between]


def overview(profile: LinkProfile) -> LinkOverview:
    """A link that was measured, by the numbers of GPUs that were."""
    return _overview(interconnect_of(profile), nodes=False, gpus=profile.measured_gpus())


def _overview(found: Interconnect, nodes: bool, gpus: Sequence[int] = GPUS) -> LinkOverview:
    link = found.network if nodes and found.network is not None else found.link
    cells = [Cell(n, size, found.time(KIND, size, n, n if nodes else 1)) for size in SIZES for n in gpus]
    shown = LinkOverview(link.name, link.kind, found.basis, link.bytes_per_second, link.gpus, link.source, cells)
    profile = found.profile
    if profile is None:
        return shown
    measured = f"{profile.gpu}, NCCL {profile.nccl}, NVLS {'on' if profile.nvls else 'off'}, {profile.date}"
    shown = replace(shown, name=profile.name, gpus=(profile.gpu,), source=measured)
    return shown if profile.link else replace(shown, kind=None, bytes_per_second=None)
