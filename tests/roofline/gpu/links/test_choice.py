"""What NCCL takes for a collective, where it is known that it did."""

from __future__ import annotations

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.links.catalogue import find_link
from flopcast.roofline.gpu.links.choice import (
    KINDS,
    Group,
    Kind,
    Regime,
    choose,
    modelled_seconds,
    p2p_channels,
    p2p_rate,
    steps,
    wire,
)

KIB, MIB = 1024, 1024 * 1024
A100, H200, B200 = (find_link(name) for name in ("nvlink3", "nvlink4", "nvlink5"))


@pytest.mark.parametrize(
    ("kind", "group", "before", "after"),
    [
        # where nccl-tests' times jump on an A100's host and a B300's, in NCCL 2.27 and 2.29
        ("all_reduce", Group(2, A100), 512 * KIB, 1 * MIB),
        ("all_gather", Group(2, A100), 1 * MIB, 2 * MIB),
        ("all_gather", Group(4, A100), 1 * MIB, 2 * MIB),
        ("all_gather", Group(8, A100), 8 * MIB, 16 * MIB),
        ("all_reduce", Group(4, B200, nvls=False, nccl=(2, 29, 2)), 4 * MIB, 8 * MIB),
        ("all_gather", Group(8, B200, nvls=False, nccl=(2, 29, 2)), 8 * MIB, 16 * MIB),
    ],
)
def test_protocols_change_where_the_measured_times_jump(kind: Kind, group: Group, before: int, after: int) -> None:
    assert choose(kind, before, group) != Regime("ring", "Simple")
    assert choose(kind, after, group) == Regime("ring", "Simple")


def test_eight_h200s_go_over_to_nvls_from_2_mib_and_four_do_not() -> None:
    """As NCCL 2.27.7 logs it there (stas00/ml-engineering)."""
    assert choose("all_reduce", 1 * MIB, Group(8, H200)) == Regime("ring", "LL")
    assert choose("all_reduce", 2 * MIB, Group(8, H200)) == Regime("nvls", "Simple")
    assert choose("all_reduce", 2 * MIB, Group(8, H200, nvls=False)).algorithm == "ring"
    assert choose("all_reduce", 256 * MIB, Group(4, H200)).algorithm == "ring"
    assert choose("all_gather", 256 * MIB, Group(8, H200)).algorithm == "ring"


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "broadcast", "all_reduce"])
def test_two_h200s_go_over_to_simple_where_nccl_logged_it(kind: Kind) -> None:
    """At the powers of two that NCCL 2.28.9 logged; LL and Simple are modelled alike there."""
    after = {"all_gather": 4 * MIB, "reduce_scatter": 4 * MIB}.get(kind, 2 * MIB)
    pair = Group(2, H200, nvls=False)
    assert choose(kind, after // 2, pair) == Regime("ring", "LL")
    assert choose(kind, after, pair) == Regime("ring", "Simple")


@pytest.mark.parametrize(
    ("kind", "group", "last"),
    [
        # four H200s send 1 MiB faster than 512 KiB, in 13.8 and 14.7 us; from there on two A100s take 19 and 25
        ("send_recv", Group(4, H200, nccl=(2, 28, 9)), 512 * KIB),
        ("all_to_all", Group(2, A100, nccl=(2, 27, 3)), 1 * MIB),
        # B300s take as long for 256 KiB as for 2 MiB
        ("all_to_all", Group(2, B200, nccl=(2, 29, 2)), 32 * KIB),
        # four L40S take 54 and 55 us, eight RTX PRO 6000s 45 and 29
        ("all_to_all", Group(4, find_link("pcie4"), nccl=(2, 27, 3)), 128 * KIB),
        ("all_to_all", Group(8, find_link("pcie5"), nccl=(2, 29, 2)), 128 * KIB),
        ("all_to_all", Group(16, H200, 2, find_link("ib-400", network=True)), 512 * KIB),
    ],
)
def test_sends_leave_ll_where_the_measured_times_do(kind: Kind, group: Group, last: int) -> None:
    assert choose(kind, last, group) == Regime("p2p", "LL")
    assert choose(kind, 2 * last, group) == Regime("p2p", "Simple")


@pytest.mark.parametrize(
    ("kind", "gpus", "whole", "channels"),
    [
        ("send_recv", 2, 32 * KIB, 1), ("send_recv", 2, 256 * KIB, 4), ("send_recv", 2, 64 * MIB, 16),
        ("send_recv", 2, 256 * MIB, 16), ("send_recv", 2, 512 * MIB, 32), ("send_recv", 2, 2048 * MIB, 32),
        ("send_recv", 4, 128 * MIB, 8), ("send_recv", 4, 256 * MIB, 16), ("all_to_all", 8, 64 * MIB, 4),
        ("all_to_all", 2, 1024 * MIB, 32),
    ],
)  # fmt: skip
def test_channels_of_a_peer_are_those_that_nccl_takes(kind: Kind, gpus: int, whole: int, channels: int) -> None:
    assert p2p_channels(kind, whole, Group(gpus, H200), "Simple") == channels


def test_a_gpu_sends_to_all_by_all_channels_but_those_of_its_own_part() -> None:
    of_one = p2p_rate("all_to_all", 64 * MIB, Group(2, H200), "Simple") / 16
    assert of_one == pytest.approx(36.7e9 / 2)
    for gpus, channels in ((4, 24), (8, 28)):
        assert p2p_rate("all_to_all", 64 * MIB, Group(gpus, H200), "Simple") == pytest.approx(channels * of_one)
    assert p2p_rate("all_to_all", 1024 * MIB, Group(2, H200), "Simple") == pytest.approx(32 * of_one)


def test_a_broadcast_is_one_step_for_any_number_of_gpus() -> None:
    assert steps("broadcast", Group(8, H200)) == (1, 0)
    assert steps("broadcast", Group(16, H200, 2, find_link("ib-400", network=True))) == (0, 1)


def test_no_ll128_over_pci_express_and_trees_between_many_hosts() -> None:
    pcie = Group(4, find_link("pcie4"))
    assert {choose("all_reduce", 2**power, pcie).protocol for power in range(10, 31)} == {"LL", "Simple"}
    hosts = Group(256, H200, 32, find_link("ib-400", network=True))
    assert choose("all_reduce", 1 * MIB, hosts).algorithm == "tree"
    assert choose("all_gather", 1 * MIB, hosts).algorithm == "ring"


@pytest.mark.parametrize("kind", KINDS)
def test_bus_factors_are_those_of_nccl_tests(kind: Kind) -> None:
    expected = {"all_reduce": 1.75, "broadcast": 1.0, "send_recv": 1.0}
    assert wire(kind, 8) == expected.get(kind, 0.875)


def test_a_network_of_an_adapter_per_gpu_is_as_fast_as_all_of_them() -> None:
    network = find_link("ib-400", network=True)
    assert Group(16, H200, 2, network).carried == H200.carried_bytes_per_second  # 8 x 50 GB/s are more
    assert Group(2, H200, 2, network).carried == 50e9
    slow = modelled_seconds("all_reduce", 2**30, Group(2, H200, 2, network), Regime("ring", "Simple"))
    assert slow > 4 * modelled_seconds("all_reduce", 2**30, Group(2, H200), Regime("ring", "Simple"))


@pytest.mark.parametrize(
    ("gpus", "nodes", "network", "told"),
    [(1, 1, None, "2 or more"), (8, 3, "ib-400", "divides"), (8, 2, None, "network"), (8, 1, "ib-400", "network")],
)
def test_groups_that_cannot_be_are_refused(gpus: int, nodes: int, network: str | None, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Group(gpus, H200, nodes, find_link(network, network=True) if network else None)


def test_a_regime_is_read_back() -> None:
    assert Regime.parse(str(Regime("tree", "LL128"))) == Regime("tree", "LL128")
    with pytest.raises(ValueError, match="no algorithm"):
        Regime.parse("ring")
