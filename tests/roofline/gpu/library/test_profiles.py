"""Which profile a name means: shipped, then the user's own, then projected; or a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flopcast.errors import DataError, UsageError
from flopcast.roofline.gpu.library import profiles
from flopcast.roofline.gpu.library.profiles import (
    find_host,
    find_profile,
    find_profiles,
    known,
    known_profiles,
    name_meant,
    user_folder,
)
from flopcast.roofline.gpu.profile.host import DEFAULT, NO_HOST, default_host, host_files
from flopcast.roofline.gpu.profile.profile import Profile

SHIPPED = "nvidia-h200"


@pytest.fixture(scope="module")
def small() -> Profile:
    """The shipped profile without its surfaces."""
    return replace(find_profile(SHIPPED), surfaces={})


Keep = Callable[[str], Path]


@pytest.fixture
def keep(small: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keep:
    """keep(name) puts a profile of that name where `flopcast fit` does, in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(name: str) -> Path:
        user_folder().mkdir(parents=True, exist_ok=True)
        path = user_folder() / f"{name}.json.gz"
        replace(small, gpu=name, provenance={"machine": "mine"}).save(path)
        return path

    return put


def is_mine(profile: Profile) -> bool:
    return profile.provenance.get("machine") == "mine"


def test_the_users_profiles_lie_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "flopcast" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_folder() == Path("/somewhere/.cache/flopcast/profiles")


def test_a_shipped_profile_wins_over_the_users_of_the_same_name(keep: Keep) -> None:
    path = keep(SHIPPED)
    assert not is_mine(find_profile(SHIPPED))
    assert is_mine(find_profile(str(path)))
    (source,) = (entry.source for entry in known() if entry.name == SHIPPED)
    assert source.startswith("shipped")


def test_the_users_measurement_wins_over_a_projection(keep: Keep) -> None:
    assert find_profile("nvidia-l4").basis == "projected"
    path = keep("nvidia-l4")
    assert is_mine(find_profile("nvidia-l4"))
    (entry,) = [entry for entry in known() if entry.name == "nvidia-l4"]
    assert (entry.basis, entry.source) == ("measured", str(path))


def test_a_device_of_no_datasheet_is_known_once_measured(keep: Keep) -> None:
    with pytest.raises(UsageError, match="processor"):
        find_profile("cpu")
    assert "cpu" not in profiles.names()
    keep("cpu")
    assert is_mine(find_profile("cpu"))
    assert "cpu" in profiles.names()


def test_measured_ones_are_listed_first_and_each_once(keep: Keep) -> None:
    keep("my-gpu")
    entries = known()
    bases = [entry.basis for entry in entries]
    assert bases == sorted(bases)
    assert len({entry.name for entry in entries}) == len(entries)


def test_every_known_name_finds_a_profile_of_that_name_and_basis(keep: Keep) -> None:
    for entry, profile in zip(known(), find_profiles(profiles.names()), strict=True):
        assert (profile.gpu, profile.basis) == (entry.name, entry.basis)


def test_nothing_is_projected_where_no_measured_profile_ships(monkeypatch: pytest.MonkeyPatch, keep: Keep) -> None:
    keep("my-gpu")
    monkeypatch.setattr(profiles, "SOURCE", "nvidia-h900")
    assert profiles.names() == [*sorted(known_profiles()), "my-gpu"]
    with pytest.raises(UsageError, match=r"unknown GPU 'nvidia-l4'.*flopcast bench"):
        find_profile("nvidia-l4")


def test_a_file_is_found_by_its_path_whatever_it_is_called(
    keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep("my-gpu").rename(tmp_path / "plain")
    assert is_mine(find_profile("plain"))
    assert is_mine(find_profile("./plain"))


@pytest.mark.parametrize("name", ["h300", "", "nvidia", "H300 "])
def test_an_unknown_name_is_told_the_known_ones_and_how_to_measure(keep: Keep, name: str) -> None:
    keep("my-gpu")
    with pytest.raises(UsageError) as fault:
        find_profile(name)
    for part in (repr(name), SHIPPED, "nvidia-l4", "my-gpu", "flopcast bench", "flopcast fit"):
        assert part in str(fault.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a profile"),
        ('{"schema": 2, "surfaces": {}}', "newer"),
        ('{"schema": 1, "surfaces": {}}', "gpu is missing"),
    ],
)
def test_a_kept_profile_that_cannot_be_read_is_named(keep: Keep, text: str, said: str) -> None:
    path = keep("my-gpu")
    path.write_text(text)
    with pytest.raises(DataError, match=said) as fault:
        find_profile("my-gpu")
    assert str(path) in str(fault.value)
    assert find_profile(SHIPPED).gpu == SHIPPED


def test_a_host_by_name(small: Profile, keep: Keep, tmp_path: Path) -> None:
    assert find_host(None) is None
    assert find_host("none") is NO_HOST
    assert find_host(SHIPPED) == small.host
    path = tmp_path / "hostless.json"
    small.with_host(None).save(path)
    with pytest.raises(UsageError, match="no host costs: choose another --host, or `none`"):
        find_host(str(path))
    with pytest.raises(UsageError, match="unknown GPU 'h300'"):
        find_host("h300")


def test_a_host_by_its_own_name_or_file(small: Profile, keep: Keep, tmp_path: Path) -> None:
    """A host is known by its name where it ships or was measured, and told from a profile by what its file holds."""
    assert small.host is not None
    mine = replace(small.host, name="my-host", sigma=0.3)
    for path in (profiles.user_hosts() / "my-host.json", tmp_path / "plain"):
        mine.save(path)
        assert find_host(str(path)) == mine
    assert find_host("my-host") == mine
    for entry in profiles.known_hosts():
        assert find_host(entry.name) == entry.costs
    assert {entry.source for entry in profiles.known_hosts()} == {
        "shipped",
        str(profiles.user_hosts() / "my-host.json"),
    }
    assert find_host(str(keep("my-gpu"))) == small.host  # a GPU's profile: the host it was measured with
    with pytest.raises(UsageError) as fault:
        find_host("my-hots")
    for part in ("unknown host 'my-hots'", "my-host", "bench --suite host"):
        assert part in str(fault.value)


def test_a_shipped_host_wins_over_the_users_of_the_same_name(small: Profile, keep: Keep) -> None:
    assert small.host is not None
    (shipped, *_) = host_files()
    path = profiles.user_hosts() / f"{shipped}.json"
    replace(small.host, sigma=0.77).save(path)
    found, own = find_host(shipped), find_host(str(path))
    assert found is not None
    assert own is not None
    assert found.sigma != 0.77 == own.sigma
    assert [entry.source for entry in profiles.known_hosts() if entry.name == shipped] == ["shipped"]


def test_a_host_file_that_cannot_be_read_is_named(keep: Keep, tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text('{"schema": 1, "kind": "host"}')
    with pytest.raises(DataError, match="not a host: name is missing") as fault:
        find_host(str(path))
    assert str(path) in str(fault.value)


def test_a_name_in_short_finds_the_profile_and_a_users_own_counts_too(keep: Keep) -> None:
    assert find_profile("H200").gpu == "nvidia-h200"
    keep("nvidia-h200-nvl")
    assert name_meant("H200") == "nvidia-h200"  # the whole name, not a part of another
    assert name_meant("h200 nvl") == "nvidia-h200-nvl"


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a folder: give a GPU's name or a profile file.*flopcast fit"):
        find_profile(str(tmp_path))


# --- the host that feeds a GPU


@pytest.mark.parametrize("name", ["nvidia-h200", "nvidia-h100-sxm", "nvidia-l4"])
def test_what_ships_is_fed_by_the_shipped_host(name: str) -> None:
    """Measured, completed and projected profiles alike: the host that is printed is the host that is used."""
    assert find_profile(name).host == find_host(DEFAULT) == default_host()
    assert default_host().n_machines >= 10


def test_a_profile_of_ones_own_keeps_its_host(tmp_path: Path) -> None:
    own = replace(default_host(), sigma=0.07, layers={})
    find_profile("nvidia-h200").with_host(own).save(tmp_path / "mine.json")
    assert find_profile(str(tmp_path / "mine.json")).host == own
