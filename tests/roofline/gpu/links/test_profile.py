"""Links that were measured: found by name, exact where measured, NCCL's switches kept between, the law beyond."""

from __future__ import annotations

from math import exp
from pathlib import Path

import pytest

from flopcast.errors import DataError, UsageError
from flopcast.roofline.gpu.links import library
from flopcast.roofline.gpu.links.choice import KINDS, Kind
from flopcast.roofline.gpu.links.library import find_interconnect, known_links
from flopcast.roofline.gpu.links.profile import HostCost, LinkProfile, Point

MIB = 1024 * 1024
LAW = find_interconnect("nvlink3")


def _profile(times: float = 1.1, gpus: tuple[int, ...] = (2,)) -> LinkProfile:
    """All-reduces and all-gathers of every second power of two, longer than projected."""
    points = []
    kinds: tuple[Kind, ...] = ("all_reduce", "all_gather")
    for kind in kinds:
        for n in gpus:
            for power in range(10, 31, 2):
                found = LAW.time(kind, 2**power, n)
                points.append(Point(kind, "bf16", n, 1, 2**power, found.seconds * times, 0.01, str(found.regime), 8))
    return LinkProfile(
        name="my-host", gpu="nvidia-a100-80gb-sxm", link="nvlink3", backend="nccl", nccl="2.28.9", nvls=False,
        points=points, host=(HostCost("all_reduce", 2, 2e-5, 1e-6),), date="2026-11-23",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def own_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "user_links", lambda: tmp_path / "links")
    (tmp_path / "links").mkdir()
    return tmp_path / "links"


def test_a_measured_size_is_as_measured(own_links: Path) -> None:
    profile = _profile()
    profile.save(own_links / "my-host.json")
    for name in ("my-host", str(own_links / "my-host.json"), "A100-80GB-SXM"):
        found = find_interconnect(name)
        assert found.profile == LinkProfile.load(own_links / "my-host.json")
        time = found.time("all_reduce", 4 * MIB, 2)
        assert time.basis == "measured"
        assert time.seconds == pytest.approx(1.1 * LAW.time("all_reduce", 4 * MIB, 2).seconds, rel=1e-12)
        assert time.blocks == 8
        assert time.high / time.low < exp(0.13)
    assert found.host_cost("all_gather", 4) == profile.host[0]
    assert LAW.host_cost("all_gather", 4).python_seconds == library.UNMEASURED_LAUNCH
    assert [link.name for link in known_links()][:3] == ["nvidia-h100-sxm", "nvidia-h200", "my-host"]


def test_a_link_that_ships_wins_over_the_users_of_the_same_name(own_links: Path) -> None:
    _profile().save(own_links / "nvidia-h200.json")
    assert library.measured_links()["nvidia-h200"] == library.SHIPPED / "nvidia-h200.json"
    assert find_interconnect("h200").time("all_reduce", 4 * MIB, 2).basis == "measured"


@pytest.mark.parametrize("power", range(11, 30, 2))
def test_between_sizes_the_regime_counts(power: int) -> None:
    time = library.Interconnect(LAW.link, _profile(), nvls=False).time("all_gather", 2**power, 2)
    expected = 1.1 * LAW.time("all_gather", 2**power, 2).seconds
    assert time.basis == "interpolated"
    assert time.seconds == pytest.approx(expected, rel=0.06)
    assert time.low < expected < time.high


def test_beyond_what_was_measured_the_law_carries_on() -> None:
    measured = library.Interconnect(LAW.link, _profile(), nvls=False)
    for kind in KINDS:
        for whole, gpus, kept in ((2**34, 2, 1.0), (100, 2, 1.0), (64 * MIB, 4, 0.5), (64 * MIB, 8, 0.25)):
            time = measured.time(kind, whole, gpus)
            by_law = library.Interconnect(LAW.link, nvls=False).time(kind, whole, gpus)
            assert time.basis == "extrapolated"
            assert time.seconds == pytest.approx(1.1**kept * by_law.seconds, rel=0.04)
    assert measured.time("all_reduce", MIB, 16, nodes=2).basis == "projected"
    assert measured.time("all_reduce", 4 * MIB, 2, dtype="fp32").basis == "measured"


def test_bad_names_and_bad_files_say_what_is_valid(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bench --suite collectives"):
        find_interconnect("nvlink7")
    with pytest.raises(UsageError, match="ethernet-25"):
        find_interconnect("nvlink4", "carrier-pigeon")
    path = tmp_path / "broken.json"
    path.write_text('{"schema": 1, "kind": "link", "name": "x"}')
    with pytest.raises(DataError, match="is not a link"):
        find_interconnect(str(path))
    with pytest.raises(DataError, match="does not exist"):
        find_interconnect(str(tmp_path / "none.json"))


@pytest.mark.parametrize(("kind", "whole"), [("all_scatter", 1), ("all_reduce", 0), ("all_reduce", 2**60)])
def test_what_cannot_be_asked_is_refused(kind: Kind, whole: float) -> None:
    with pytest.raises(UsageError, match="valid"):
        LAW.time(kind, whole, 2)
