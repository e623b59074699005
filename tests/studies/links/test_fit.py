"""The study of collectives: tables that the law itself made are fitted, judged and written."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

from flopcast.decode import load
from flopcast.roofline.gpu.links import fitted as shipped
from flopcast.roofline.gpu.links.catalogue import find_link
from flopcast.roofline.gpu.links.choice import Group
from flopcast.roofline.gpu.links.law import Collective
from studies.links import __main__ as study
from studies.links.tables import KINDS, LINKS, rows_of

SIZES = [2**power for power in range(10, 30, 2)]


def _write(path: Path, lines: list[str]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def _seconds(kind: str, size: int, group: Group) -> float:
    return shipped.projected(Collective(KINDS[kind], size, group)).seconds


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    one_host = ["system,stack,stack_version,collective,nccl_dtype,num_gpus,bytes,latency_ms"]
    for system, link in LINKS.items():
        for kind in ("all_gather", "all_reduce", "alltoall"):
            for gpus in (2, 4):
                group = Group(gpus, find_link(link), nvls=False, nccl=(2, 27, 3))
                for size in SIZES:
                    cells = f"{system},nccl,2.27.3,{kind},half,{gpus},{size},{_seconds(kind, size, group) * 1e3}"
                    one_host.append(cells)
    _write(tmp_path / "collectives_one_host.csv.gz", one_host)
    eight = ["system,nodes,gpus_per_node,gpus,collective,algorithm,bytes,busbw_gbs"]
    group = Group(8, find_link("nvlink4"), nccl=(2, 27, 7))
    for size in SIZES:
        rate = 1.75 * size / _seconds("all_reduce", size, group) / 1e9
        eight.append(f"8xH200 (HGX),1,8,8,all_reduce,default,{size},{rate}")
    eight.append('"4 nodes, example output",4,8,32,all_reduce,default,1048576,17.13')
    _write(tmp_path / "collectives_h200_a100_8gpu.csv.gz", eight)
    nodes = ["system,collective,num_workers,devices_per_node,bytes,median_ms"]
    pair = Group(2, find_link("nvlink3"), nvls=False, nccl=(2, 18))
    nodes += [f"a100_dgx,send_recv,2,2,{size},{_seconds('send_recv', size, pair) * 1e3}" for size in SIZES]
    nodes.append("a100_dgx,send_recv,2,1,2048,0.024")
    _write(tmp_path / "collectives_a100_nodes.csv.gz", nodes)
    shares = ["table,bytes,setting,fraction_of_line_rate"]
    shares += [
        f"{table},{2**30},{hosts}(NIC),0.9"
        for table in ("nic", "ata", "nvlink")
        for hosts in ("4Node-32GPU", "16Node-128GPU")
    ]
    _write(tmp_path / "collectives_scaling_nodes.csv.gz", [*shares, f"nic,{2**30},1 Node(NVLinkx),0.77"])
    return tmp_path


def test_rows_of_a_network_that_is_not_told_are_left_out(tables: Path) -> None:
    rows = rows_of(tables)
    several = [row for row in rows if row.asked.group.nodes > 1]
    assert {row.machine for row in several} == {"SimAI, as all_gather", "SimAI, as all_reduce", "SimAI, as all_to_all"}
    assert len(rows) - len(several) == len(SIZES) * (4 * 3 * 2 + 1 + 1)
    for row in several:
        assert 2**30 / 400e9 < row.seconds < 2**30 / 40e9


def test_a_fit_finds_the_law_that_made_the_tables(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terms, report = tmp_path / "collectives.json", tmp_path / "reports" / "README.md"
    monkeypatch.setattr(study, "FILE", terms)
    monkeypatch.setattr(sys, "argv", ["links", str(tables), "--out", str(report), "--write"])
    study.main()
    assert capsys.readouterr().out == report.read_text()
    known = load(shipped.Fitted, terms, "a law", hint="")
    for row in rows_of(tables):
        if study.is_fitted(row):
            assert shipped.projected(row.asked, known).seconds == pytest.approx(
                row.seconds, rel=0.2
            )  # ten sizes, held to NCCL's figures
    assert known.sigma["nvlink large"] < 0.1
    assert "| a100_sxm | nvlink3 | 2 |" in report.read_text()
    assert "| nvidia-h200, measured | nvlink4 | 2 |" in report.read_text()
    assert report.with_name("pair.png").read_bytes().startswith(b"\x89PNG")
