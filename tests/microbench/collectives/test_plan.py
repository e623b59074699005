"""What is measured of a host: groups, cases, what NCCL logs, who the processes are. No process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from flopcast.errors import UsageError
from flopcast.microbench.collectives.cases import KINDS, SIZES, Case, Members, cases, groups
from flopcast.microbench.collectives.clock import MOST_CALLS, counts
from flopcast.microbench.collectives.nccl_log import LogReader, choices, send_channels
from flopcast.microbench.collectives.session import check_address, check_settings, is_member, place, settings
from flopcast.microbench.records.rows import Row

LOG = """host:1:9 [0] NCCL INFO 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 16 p2p channels per peer
host:1:9 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..23}
host:1:9 [0] NCCL INFO AllGather: 512 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
"""  # noqa: E501  (as NCCL writes it)


@pytest.mark.parametrize(
    ("world", "hosts", "expected"),
    [(2, 1, ["2x1"]), (4, 1, ["2x1", "4x1"]), (6, 1, ["2x1", "4x1", "6x1"]),
     (16, 2, ["2x1", "4x1", "8x1", "2x2", "16x2"]), (2, 2, ["2x2"])],
)  # fmt: skip
def test_groups_double_within_a_host_and_across(world: int, hosts: int, expected: list[str]) -> None:
    assert [str(members) for members in groups(world, hosts)] == expected


@pytest.mark.parametrize(("world", "hosts"), [(1, 1), (5, 2)])
def test_a_single_gpu_and_uneven_hosts_are_refused(world: int, hosts: int) -> None:
    with pytest.raises(UsageError):
        groups(world, hosts)


def test_members_are_the_first_gpus_of_the_first_hosts() -> None:
    assert Members(4, 1).ranks(8) == [0, 1, 2, 3]
    assert Members(2, 2).ranks(8) == [0, 8]
    assert Members(16, 2).ranks(8) == list(range(16))


def test_two_gpus_have_every_power_of_two_of_six_collectives_in_two_dtypes() -> None:
    found = list(cases(groups(2, 1)))
    assert len(found) == len(KINDS) * 2 * len(SIZES) == 252
    assert len({case.name for case in found}) == len(found)
    assert (min(SIZES), max(SIZES)) == (2**10, 2**30)
    odd = list(cases([Members(3, 1)], sizes=(1024, 1536)))
    assert {case.kind for case in odd} == set(KINDS) - {"send_recv"}
    assert {case.bytes for case in odd} == {1536}


def test_a_case_is_named_by_all_that_tells_it_apart() -> None:
    assert Case("all_gather", "bf16", Members(8, 2), 1024).name == "all_gather/bf16/8x2/1024"


def test_the_log_tells_algorithm_protocol_and_channels(tmp_path: Path) -> None:
    first, second = choices(LOG)
    assert (first.kind, first.algorithm, first.protocol, first.channels) == ("all_reduce", "RING", "LL128", 24)
    assert (second.kind, second.bytes, second.channels) == ("all_gather", 512, 1)
    assert send_channels(LOG) == (32, 16)
    assert send_channels("") is None
    path = tmp_path / "nccl.log"
    reader = LogReader(path)
    assert reader.new() == ""
    path.write_text(LOG + "host:1:9 [0] NCCL INFO AllRed")
    assert reader.new() == LOG
    with path.open("a") as file:
        file.write("uce: 4 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}\n")
    assert choices(reader.new())[0].bytes == 4


def test_processes_are_known_by_torchrun_or_srun() -> None:
    assert place({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (3, 8, 1)
    slurm = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
    assert place(slurm) == (9, 16, 1)
    assert is_member(slurm)
    assert is_member({"RANK": "0"})
    assert not is_member({"SLURM_NTASKS": "1"})
    check_address({"SLURM_NNODES": "2", "MASTER_ADDR": "node0"})
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        check_address({"SLURM_NNODES": "2"})
    with pytest.raises(UsageError, match="LOCAL_RANK"):
        place({"RANK": "0", "WORLD_SIZE": "2"})


def test_a_folder_keeps_to_one_nccl_and_its_settings() -> None:
    made = settings({"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO", "HOME": "/root"})
    assert made == {"NCCL_NVLS_ENABLE": "0"}
    rows = cast(list[Row], [{"nccl": "2.28.9", "settings": made}, {"key": "scalar/launch"}])
    facts: dict[str, Any] = {"nccl": "2.28.9", "settings": made}
    check_settings(rows, facts)
    others: tuple[dict[str, Any], ...] = ({"nccl": "2.29.2"}, {"settings": {}})
    for other in others:
        with pytest.raises(UsageError, match="another --out"):
            check_settings(rows, {**facts, **other})


def test_short_calls_are_many_and_long_ones_few() -> None:
    assert counts(5e-6) == (MOST_CALLS, 20)
    calls, samples = counts(10e-3)
    assert calls == 1
    assert samples == 9
    assert counts(10.0) == (1, 5)
