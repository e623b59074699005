"""Makes a link's profile of the rows of `bench --suite collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import log
from pathlib import Path
from statistics import quantiles
from typing import Any, cast

from flopcast.errors import DataError, FlopcastError
from flopcast.files import make_folder
from flopcast.microbench.records import records
from flopcast.microbench.records.machine import Machine
from flopcast.microbench.records.rows import (
    BesideRow,
    CollectiveRow,
    CopyRow,
    LaunchCostRow,
    RegimeRow,
    Row,
    kind_of,
    select,
)
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.catalogue.device import gpu_name
from flopcast.roofline.gpu.links.catalogue import link_of
from flopcast.roofline.gpu.links.contention import Beside
from flopcast.roofline.gpu.links.contention_fit import fit_contention
from flopcast.roofline.gpu.links.library import user_links
from flopcast.roofline.gpu.links.profile import Copy, HostCost, LinkProfile, Point

# NCCL's names of what the law knows; of NVLSTree, CollNet and PAT the channels alone are kept
_ALGORITHMS = {"RING": "ring", "TREE": "tree", "NVLS": "nvls"}
_PROTOCOLS = {"LL": "LL", "LL128": "LL128", "SIMPLE": "Simple"}

OF_GROUPS = (CollectiveRow, RegimeRow, LaunchCostRow, BesideRow, CopyRow)


def is_links(rows: Sequence[Row]) -> bool:
    """Whether rows were measured by `bench --suite collectives`."""
    return any(kind_of(row) in OF_GROUPS for row in rows)


def fit_links(folder: Path) -> LinkProfile:
    """The profile of a folder's rows. Raises DataError where no collective was timed."""
    machine = records.read_machine(folder)
    return profile_of(records.read(folder).latest(), machine, folder)


def profile_of(rows: Sequence[Row], machine: Machine, folder: Path) -> LinkProfile:
    """The profile of rows of one machine."""
    usable = [row for row in rows if row["status"] == "ok"]
    regimes = {row["key"].removeprefix("regime/"): row for row in select(usable, RegimeRow)}
    timed = select(usable, CollectiveRow)
    if not timed:
        raise DataError(
            f"{folder} holds no collective that was timed: `flopcast bench --suite collectives --out {folder}` "
            "measures them"
        )
    gpu = gpu_name(machine["device"])
    link = link_of(gpu)
    first = timed[0]
    beside = [_beside(row, regimes) for row in select(usable, BesideRow)]
    return LinkProfile(
        name=gpu,
        gpu=gpu,
        link="" if link is None else link.name,
        backend=first["backend"],
        nccl=first.get("nccl", ""),
        nvls=first.get("nvls", True),
        points=[_point(row, regimes.get(row["key"].removeprefix("collective/"))) for row in timed],
        host=[
            HostCost(_part(row, 1), row["gpus"], _value(row), row.get("captured_seconds"))
            for row in select(usable, LaunchCostRow)
        ],
        beside=beside,
        contention=fit_contention(beside, machine["device"].get("sm_count", 0)),
        copies=[
            Copy(_part(row, 1), _part(row, 2) == "pinned", row["gpus"], row["bytes"], _value(row))
            for row in select(usable, CopyRow)
        ],
        date=max(row.get("time", "") for row in timed)[:10],
        stack=dict(machine["stack"]),
    )


def save(profile: LinkProfile, path: Path) -> None:
    """Writes the profile, and a copy where its GPU's name finds it. Raises UsageError when it cannot be written."""
    make_folder(path.parent)
    profile.save(path)
    if profile.backend == "nccl":
        with suppress(FlopcastError):  # the home folder may be read-only; the file asked for is written
            make_folder(user_links())
            profile.save(user_links() / f"{profile.name}.json")


def _part(row: Row, place: int) -> Any:
    return row["key"].split("/")[place]


def _value(row: Row) -> float:
    return cast(float, row["value"])


def _point(row: CollectiveRow, regime: RegimeRow | None) -> Point:
    channels = 0 if regime is None else regime.get("channels", 0)
    return Point(
        _part(row, 1), _part(row, 2), row["gpus"], row["nodes"], row["bytes"], _value(row),
        _spread(row.get("samples", ())), _regime(regime), channels,
    )  # fmt: skip


def _regime(row: RegimeRow | None) -> str:
    algorithm = _ALGORITHMS.get("" if row is None else row.get("algorithm", ""))
    protocol = _PROTOCOLS.get("" if row is None else row.get("protocol", ""))
    return f"{algorithm}/{protocol}" if algorithm and protocol else ""


def _spread(samples: Sequence[float]) -> float:
    """The deviation of log seconds from one sample to the next, by the middle nine tenths of them."""
    positive = [value for value in samples if value > 0]
    if len(positive) < 2:
        return 0.0
    cuts = quantiles(positive, n=20, method="inclusive")
    return log(cuts[-1] / cuts[0]) / (2 * Z_90)


def _beside(row: BesideRow, regimes: dict[str, RegimeRow]) -> Beside:
    _, work, kind, members = row["key"].split("/")
    regime = regimes.get(f"{kind}/bf16/{members}/{row.get('collective_bytes')}")
    channels = 0 if regime is None else regime.get("channels", 0)
    return Beside(
        work, kind, row["gpus"], channels, row["alone_seconds"], _value(row), row["collective_alone_seconds"],
        row["collective_beside_seconds"],
    )  # fmt: skip
