"""A profile as it was last used says what the profile says, and is made again when what it follows from changes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from flopcast.errors import DataError
from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.gpu.library import profile_cache
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import PROFILES, Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.stream.lowering.describe import describe

SHIPPED = PROFILES / "nvidia-h100-sxm.json.gz"  # a ninth of the H200's, which takes 2 s to save
SHAPES = (
    Gemm(m=1000, n=1536, k=520, dtype="bf16", layout="nt"),
    Attention(batch=3, heads=8, kv_heads=4, seq=300, head_dim=128),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def found_anew(gpu: str) -> Profile:
    """As another process finds it."""
    profile_cache._loaded.clear()
    return find_profile(gpu)


def estimates(profile: Profile) -> list[Estimate]:
    return profile.estimate([(describe(s), b, c) for s in SHAPES for b in ("torch", "sdpa") for c in ("cold", "hot")])


@pytest.mark.parametrize("gpu", ["nvidia-h200", "nvidia-l4"])
def test_what_was_kept_says_the_same(gpu: str) -> None:
    first = find_profile(gpu)
    found = estimates(first)
    assert not list(profile_cache.folder().glob("*"))  # looking a profile up writes nothing
    profile_cache.keep(first)
    (kept,) = profile_cache.folder().iterdir()
    again = found_anew(gpu)
    assert sum(surface.cached_parts for surface in again.surfaces.values()) > 0
    assert estimates(again) == found
    assert again == first
    written = kept.stat().st_mtime_ns
    profile_cache.keep(again)
    assert kept.stat().st_mtime_ns == written  # nothing new


def test_a_process_loads_a_profile_once() -> None:
    first = find_profile("nvidia-h200")
    assert find_profile("H200") is first
    assert found_anew("nvidia-h200") is not first


def test_another_content_is_another_profile(tmp_path: Path) -> None:
    path = tmp_path / "own.json.gz"
    Profile.load(SHIPPED).save(path)
    first = find_profile(str(path))
    estimates(first)
    profile_cache.keep(first)
    changed = Profile.load(path)
    Profile(**{**vars(changed), "gpu": "another"}).save(path)
    assert find_profile(str(path)).gpu == "another"
    path.write_bytes(b"no profile")
    with pytest.raises(DataError, match="is not a profile"):
        find_profile(str(path))


@pytest.mark.parametrize("content", [b"", b"torn", b"\x80\x05K\x01."])
def test_a_file_that_cannot_be_read_is_made_again(content: bytes) -> None:
    first = find_profile("nvidia-h200")
    found = estimates(first)
    profile_cache.keep(first)
    (kept,) = profile_cache.folder().iterdir()
    kept.write_bytes(content)
    again = found_anew("nvidia-h200")
    assert estimates(again) == found
    profile_cache.keep(again)
    assert kept.stat().st_size > 10_000


def test_a_cache_that_cannot_be_written_costs_no_answer(cache: Path) -> None:
    (cache / "flopcast").write_text("a file where the folder would be")
    profile = find_profile("nvidia-h200")
    assert estimates(profile)
    profile_cache.keep(profile)


def test_old_files_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_cache, "MOST_FILES", 1)
    for gpu in ("nvidia-l4", "nvidia-h200"):
        profile = find_profile(gpu)
        estimates(profile)
        profile_cache.keep(profile)
    assert len(list(profile_cache.folder().iterdir())) == 1
    kept = found_anew("nvidia-h200")
    assert sum(surface.cached_parts for surface in kept.surfaces.values()) > 0


class Calls:
    """Pickled, it asks the reader to make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_a_file_runs_nothing_and_one_of_others_is_not_read(tmp_path: Path) -> None:
    first = find_profile("nvidia-h200")
    found = estimates(first)
    profile_cache.keep(first)
    (kept,) = profile_cache.folder().iterdir()
    assert sum(surface.cached_parts for surface in found_anew("nvidia-h200").surfaces.values()) > 0
    kept.chmod(0o620)
    assert sum(surface.cached_parts for surface in found_anew("nvidia-h200").surfaces.values()) == 0
    kept.chmod(0o600)
    kept.write_bytes(pickle.dumps(Calls(tmp_path / "ran")))
    assert estimates(found_anew("nvidia-h200")) == found
    assert not (tmp_path / "ran").exists()
