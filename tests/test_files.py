"""Files are written whole or not at all; what goes wrong is said to the user."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import pytest

from flopcast import files
from flopcast.errors import RunError, UsageError


def test_a_file_is_written_whole_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    files.write(path, "first\n")
    files.write(path, b"second\n")
    assert path.read_text() == "second\n"
    assert [each.name for each in path.parent.iterdir()] == ["a.txt"]


def test_the_same_content_gives_the_same_gzip(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        files.write(tmp_path / name, "text")
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"text"
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_who_may_read_it(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        files.write(tmp_path / "shared", "")
        files.write(tmp_path / "own", "", private=True)
    finally:
        os.umask(mask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("shared", "own")] == [0o644, 0o600]


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(tmp_path / "a", "first")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flopcast.files.os.fsync", full)
    with pytest.raises(RunError, match=r"no room to write .*a: No space left"), files.write_errors(tmp_path / "a"):
        files.write(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_place_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "below"
    expected = pytest.raises(UsageError, match=r"cannot be written: .*; choose another --figure")
    with expected, files.write_errors(path, "--figure"):
        files.write(path, "")
    with pytest.raises(UsageError, match="choose another --out"):
        files.make_folder(path)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert files.cache_folder("streams") == Path("/somewhere/flopcast/streams")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder("streams") == Path.home() / ".cache/flopcast/streams"
