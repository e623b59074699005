"""Reads and writes files and folders, and locates the folder where flopcast keeps files between runs."""

from __future__ import annotations

import errno
import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flopcast.errors import RunError, UsageError

MOST_BYTES = 256 * 1024**2  # of a file, decompressed; the largest that is committed has 33 MB
GZIP = b"\x1f\x8b"  # how gzip files begin
# Error numbers that mean "no room": disk full, quota, file-size limit (RLIMIT_FSIZE).
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder(kind: str) -> Path:
    """Returns the user's cache folder for a kind of file ("streams", "profiles", ...). Does not make it."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "flopcast" / kind


@contextmanager
def write_errors(path: Path, option: str = "--out") -> Iterator[None]:
    """Turns an OSError from writing to `path` within the context into one for the user: RunError where there is no
    room, else UsageError, which names the option that chooses another path."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise RunError(
                f"no room to write {path}: {error.strerror}; free some space and run the same command again"
            ) from error
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another {option}") from error


def make_folder(folder: Path) -> None:
    """Makes a folder. Raises UsageError when it cannot be made, or when the existing one cannot be written to."""
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def read(path: Path, most: int = MOST_BYTES) -> bytes:
    """Returns the content of a file, decompressed if it is gzipped. Raises OSError, also for a truncated gzip file and
    for more than `most` bytes: 1.5 MB of gzip may hold 1.5 GB, and a device has no end."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    is_packed = data.startswith(GZIP)
    if is_packed:
        data = _unpack(data, most)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it holds more than {most >> 20} MiB{', decompressed' if is_packed else ''}")
    return data


def read_own(path: Path) -> bytes:
    """Returns the content of a file of the user's cache as it is. Raises OSError, also for a file of another user or
    one that others may write: what it holds is trusted further than a file that was given."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "another user can write it", str(path))
        return file.read(MOST_BYTES)


def _unpack(data: bytes, most: int) -> bytes:
    """The content of gzipped bytes, of one member or several; cut after `most` + 1 bytes."""
    found, size = [], 0
    while data and size <= most:
        member = zlib.decompressobj(wbits=31)
        try:
            found.append(member.decompress(data, most + 1 - size))
        except zlib.error as error:
            raise gzip.BadGzipFile(str(error)) from error
        size += len(found[-1])
        if not member.eof and size <= most:
            raise gzip.BadGzipFile("it ends before its end-of-stream marker: it is torn")
        data = member.unused_data.lstrip(b"\0")
    return b"".join(found)


def write(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Writes a file atomically, and makes its folder where there is none.

    Gzipped where the name ends in .gz, without a time stamp: the same content gives the same bytes. `private`: only
    the user may read it. Raises OSError, which `write_errors` turns into an error for the user.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        mode = 0o600 if private else 0o666
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # with delayed allocation a full disk shows only here
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
