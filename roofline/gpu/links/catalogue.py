"""Reads the links between GPUs from `data/links.csv`: one row per link, with its source.

A rate is that of one direction of one GPU: of all its NVLinks together, of its PCI Express slot, of its network
adapter. `carried` is what of it NCCL counts on for data; where nothing says, the rate itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal, get_args

from flopcast.errors import UsageError
from flopcast.roofline.base.shipped import DATA, parsed_rows

LINKS_FILE = DATA / "links.csv"
Medium = Literal["nvlink", "pcie", "network"]
Arch = Literal["", "ampere", "hopper", "blackwell"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link's datasheet. `arch`: the generation of the GPUs on it, by which NCCL bounds its protocols. `gpus`: those
    that are usually joined by it."""

    name: str
    kind: Medium
    arch: Arch
    bytes_per_second: float
    carried_bytes_per_second: float
    gpus: tuple[str, ...]
    source: str


@cache
def links() -> MappingProxyType[str, Link]:
    """All links by name, in the file's order."""
    return MappingProxyType({link.name: link for link in parsed_rows(LINKS_FILE, _parse)})


def _parse(row: dict[str, str]) -> Link:
    if row["kind"] not in get_args(Medium) or row["arch"] not in get_args(Arch):
        raise ValueError(f"kind {row['kind']!r}, arch {row['arch']!r}")
    return Link(
        name=row["link"],
        kind=row["kind"],  # type: ignore[arg-type]  # checked above
        arch=row["arch"],  # type: ignore[arg-type]
        bytes_per_second=float(row["bytes_per_second"]),
        carried_bytes_per_second=float(row["carried_bytes_per_second"]),
        gpus=tuple(filter(None, row["gpus"].split("|"))),
        source=row["source"],
    )


def find_link(name: str, *, network: bool = False) -> Link:
    """The link of that name within a host, or with `network` between hosts. Raises UsageError for any other."""
    valid = [link.name for link in links().values() if (link.kind == "network") is network]
    if name not in valid:
        where = "between hosts" if network else "within a host"
        raise UsageError(f"unknown link {name!r} {where}: valid are {', '.join(valid)}")
    return links()[name]


def link_of(gpu: str) -> Link | None:
    """The link that usually joins GPUs of this name; None where none is known."""
    return next((link for link in links().values() if gpu in link.gpus), None)
