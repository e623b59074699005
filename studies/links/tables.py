"""Reads published tables of collectives' times: a folder with

    collectives_one_host.csv.gz        nccl-tests of ai-dynamo/aiconfigurator: A100 SXM, L40S, RTX PRO 6000, B300
    collectives_h200_a100_8gpu.csv.gz  stas00/ml-engineering: eight H200s, eight A100s, several hosts
    collectives_a100_nodes.csv.gz      microsoft/vidur: A100s within a host and across hosts
    collectives_scaling_nodes.csv.gz   aliyun/SimAI: shares of the line rate by hosts and bytes

The tables themselves do not ship: what is fitted to them does, and figures of how far it is off. Beside them stand the
links that were measured here, whose profiles ship (`measured_rows`).
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flopcast.roofline.gpu.links.catalogue import find_link
from flopcast.roofline.gpu.links.choice import Group, Kind, wire
from flopcast.roofline.gpu.links.law import Collective
from flopcast.roofline.gpu.links.library import SHIPPED
from flopcast.roofline.gpu.links.profile import LinkProfile

KINDS: dict[str, Kind] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "send_recv": "send_recv",
}  # fmt: skip
LINKS = {"a100_sxm": "nvlink3", "b300_sxm": "nvlink5", "l40s": "pcie4", "rtx_pro_6000_server": "pcie5"}
SIMAI_KINDS: dict[str, tuple[Kind, ...]] = {"nic": ("all_gather", "all_reduce"), "ata": ("all_to_all",)}
Timed = Literal["tests", "python", "graph"]
SUMS_OF_BYTES = "int8"  # dtypes that no training sums: their rows are counted apart


@dataclass(frozen=True)
class Row:
    """A time. `machine` names the host or hosts that it is of. `timed`: by nccl-tests; from Python, which below 1 MiB
    is the host's time; or by replaying a CUDA graph."""

    machine: str
    asked: Collective
    seconds: float
    dtype: str = ""
    timed: Timed = "tests"


def rows_of(folder: Path) -> list[Row]:
    """All rows of one host, and those of several whose network is told or that do not depend on it."""
    return [*_one_host(folder), *_ml_engineering(folder), *_vidur(folder), *_simai(folder)]


def measured_rows() -> list[Row]:
    """All rows of the links that ship as they were measured, of each as "GPU, measured" for two GPUs, and as "4 GPU,
    measured" for more."""
    rows = []
    for path in sorted(SHIPPED.glob("*.json")):
        profile = LinkProfile.load(path)
        link, version = find_link(profile.link), tuple(map(int, profile.nccl.split(".")))
        for point in profile.points:
            group = Group(point.gpus, link, nvls=profile.nvls, nccl=version)
            asked = Collective(point.kind, point.bytes, group)
            name = profile.gpu if point.gpus == 2 else f"{point.gpus} {profile.gpu}"
            rows.append(Row(f"{name}, measured", asked, point.seconds, point.dtype, "graph"))
    return rows


def _read(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def is_whole(version: str) -> bool:
    """Whether a version of NCCL is one that the tables' collector wrote, which asks torch and writes three numbers. Any
    other is the name of a folder, in whose place stands the version of the same system's other folder. There is one,
    "2.27" of B300s. From 1 MiB on its times are those of "2.29.2", to 0.7% at the median. Its all-to-alls leave LL at
    16 KiB to a peer, as NCCL does since 2.29 (before, at 512); and its rings go from LL to Simple, where 2.27 counts on
    twice the rate for LL128 and would take that between them."""
    return version.count(".") == 2


def _one_host(folder: Path) -> Iterator[Row]:
    # one host's NCCL below another library is left out: the same, timed thrice
    rows = [row for row in _read(folder / "collectives_one_host.csv.gz") if row["stack"] == "nccl"]
    versions = {row["system"]: row["stack_version"] for row in rows if is_whole(row["stack_version"])}
    for row in rows:
        told = row["stack_version"]
        version = tuple(map(int, (told if is_whole(told) else versions.get(row["system"], told)).split(".")))
        # B300: its eight GPUs' all-reduce runs at the ring's rate; A100, PCI Express: no NVLS
        group = Group(int(row["num_gpus"]), find_link(LINKS[row["system"]]), nvls=False, nccl=version)
        asked = Collective(KINDS[row["collective"]], int(row["bytes"]), group)
        yield Row(row["system"], asked, float(row["latency_ms"]) / 1e3, row["nccl_dtype"])


def _ml_engineering(folder: Path) -> Iterator[Row]:
    for row in _read(folder / "collectives_h200_a100_8gpu.csv.gz"):
        if (int(row["nodes"]) > 1 and "EFA" not in row["system"]) or row["algorithm"] == "NVLSTree":
            continue  # a network that is not told; an algorithm that NCCL did not choose
        link = find_link("nvlink3" if "A100" in row["system"] else "nvlink4")
        gpus, nodes = int(row["gpus"]), int(row["nodes"])
        network = find_link("ethernet-400", network=True) if nodes > 1 else None  # p5en: 16 x 200 Gbit/s for 8 GPUs
        is_ring = row["algorithm"].startswith("Ring")
        group = Group(gpus, link, nodes, network, nvls=not is_ring, nccl=(2, 27, 7))
        asked = Collective(KINDS[row["collective"]], int(row["bytes"]), group)
        rate = float(row["busbw_gbs"]) * 1e9 / wire(asked.kind, gpus)
        name = "h200, 4 hosts" if nodes > 1 else "a100, second host" if "A100" in row["system"] else "h200"
        yield Row(name, asked, asked.bytes / rate, timed="python")


def _vidur(folder: Path) -> Iterator[Row]:
    for row in _read(folder / "collectives_a100_nodes.csv.gz"):
        gpus = int(row["num_workers"])
        if gpus != int(row["devices_per_node"]) or (row["system"] == "a100_pairwise_nvlink" and gpus > 2):
            continue  # a network that is not told; pairs of NVLink that are joined by PCI Express
        group = Group(gpus, find_link("nvlink3"), nvls=False, nccl=(2, 18))
        name = "a100, third host" if row["system"] == "a100_dgx" else "a100, a pair"
        asked = Collective(KINDS[row["collective"]], int(row["bytes"]), group)
        yield Row(name, asked, float(row["median_ms"]) / 1e3, timed="python")


def _simai(folder: Path) -> Iterator[Row]:
    """Shares of the line rate are taken as those of hosts of eight H100s with 400 Gbit/s each; the network's as those
    of a ring, which an all-gather is, and of an all-reduce."""
    network = find_link("ib-400", network=True)
    for row in _read(folder / "collectives_scaling_nodes.csv.gz"):
        hosts = re.match(r"(\d+)Node-(\d+)GPU", row["setting"])
        if hosts is None:
            continue
        for kind in SIMAI_KINDS.get(row["table"], ()):
            nodes, gpus = int(hosts[1]), int(hosts[2])
            asked = Collective(kind, int(row["bytes"]), Group(gpus, find_link("nvlink4"), nodes, network))
            line = network.bytes_per_second * (1 if kind == "all_to_all" else gpus // nodes)
            rate = float(row["fraction_of_line_rate"]) * line
            yield Row(f"SimAI, as {kind}", asked, wire(kind, gpus) * asked.bytes / rate)
