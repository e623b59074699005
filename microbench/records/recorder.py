"""Appends rows to a folder of measurements, and tells which measurements it already holds. Does not import torch.

These rules hold for a folder:
- a line is one `os.write` to a file opened with O_APPEND: a kill at any moment tears the last line at most;
- rows of two machines never share a folder (a machine is device, power limit, stack, method: machine.py);
- one process at a time writes to a folder (`flock`, which the kernel drops when the process dies).
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import cast

from flopcast.errors import RunError, UsageError
from flopcast.files import NO_ROOM, write, write_errors
from flopcast.microbench.records.kernel_sources import kernels_in
from flopcast.microbench.records.machine import Machine
from flopcast.microbench.records.records import MACHINE, MEASUREMENTS, Measurements, read, read_machine
from flopcast.microbench.records.rows import METHOD, SCHEMA, Identity, Row, identity

LOCK = ".lock"


def encode(row: Mapping[str, object]) -> bytes:
    """A row as one line of JSON. Raises ValueError on NaN and infinities, which are not JSON: store None and a
    reason."""
    return (json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n").encode()


def write_line(descriptor: int, line: bytes, path: Path | str) -> None:
    """Appends one line in one write. A line cut short by a full disk is removed again, so that the file ends on a whole
    row.

    Raises RunError when the disk is full.
    """
    try:
        written = os.write(descriptor, line)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise RunError(_no_room(path, error)) from error
        raise RunError(f"{path} cannot be written: {error.strerror}; the rows in it are whole") from error
    if written != len(line):
        size = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, size - written)
        raise RunError(_no_room(path, OSError(errno.ENOSPC, f"{written} of {len(line)} bytes written")))


def _no_room(path: Path | str, error: OSError) -> str:
    return (
        f"no room to write {path}: {error.strerror}. All finished rows are in it;"
        " free some space and run the same command again, it continues where it stopped"
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Recorder:
    """The measurements of one folder, open for appending by this process only. Use as a context manager.

        with Recorder(folder, machine) as recorder:
            if not recorder.is_done(key, backend, cache): recorder.append(row)

    `rows` are those that the folder held when opened and those appended since; `warnings` say what was wrong with the
    file.
    """

    def __init__(self, folder: Path | str, machine: Machine, *, fsync_seconds: float = 2.0) -> None:
        """Raises UsageError when the folder cannot be written, is in use, or holds another machine's rows;
        DataError when its file is malformed; RunError when the disk is full."""
        self.folder = Path(folder)
        self.path = self.folder / MEASUREMENTS
        self.machine_id: str = machine["machine"]
        # Identifies the process that wrote a row: consecutive kernels of a graph start sooner in a process that has not
        # trained.
        self.run = _now()
        self._fsync_seconds = fsync_seconds
        self._lock = lock_folder(self.folder)
        self._descriptor = -1
        try:
            self._open(machine)
        except BaseException:
            self.close()
            raise

    def _open(self, machine: Machine) -> None:
        if (self.folder / MACHINE).exists():
            self._refuse_other([read_machine(self.folder)["machine"]])
        found = read(self.path) if self.path.exists() else Measurements([])
        self._refuse_other(row["machine"] for row in found.rows)
        self.rows: list[Row] = found.rows
        self.warnings: list[str] = found.warnings
        self._last: dict[Identity, Row] = {identity(row): row for row in found.rows}
        if not (self.folder / MACHINE).exists():
            with write_errors(self.folder / MACHINE):
                write(self.folder / MACHINE, json.dumps(dict(machine), indent=1) + "\n")
        with write_errors(self.path):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        if found.torn_at is not None:
            os.ftruncate(self._descriptor, found.torn_at)
        elif size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            write_line(self._descriptor, b"\n", self.path)  # the last line is whole, but its newline was lost
        self._synced = time.monotonic()

    def _refuse_other(self, machines: Iterable[str]) -> None:
        for other in machines:
            if other != self.machine_id:
                raise UsageError(
                    f"{self.folder} holds measurements of machine {other}, this is machine {self.machine_id}"
                    f" (another device, power limit or software stack; see {MACHINE}): give another --out"
                )

    def status(self, key: str, backend: str = "torch", cache: str = "cold") -> str | None:
        """The status of the last row of this measurement; None if it was not measured."""
        row = self._last_of(key, backend, cache)
        return None if row is None else row["status"]

    def _last_of(self, key: str, backend: str, cache: str) -> Row | None:
        return self._last.get(Identity(key, backend, cache, METHOD, self.machine_id))

    def is_done(
        self,
        key: str,
        backend: str = "torch",
        cache: str = "cold",
        *,
        retry: Collection[str] = (),
        kernels: str | None = None,
    ) -> bool:
        """Whether the folder holds this measurement with a status that is not in `retry` ("oom", "error") and, where
        `kernels` is given, with kernels of that fingerprint."""
        row = self._last_of(key, backend, cache)
        return row is not None and row["status"] not in retry and (kernels is None or kernels_in(row) == kernels)

    def append(self, row: Mapping[str, object]) -> None:
        """Writes one row with schema, machine, method, run and time filled in. Raises RunError on a full disk."""
        told = {"method": METHOD, "machine": self.machine_id, "run": self.run, "time": _now()}
        full = cast(Row, {"schema": SCHEMA, **row, **told})
        write_line(self._descriptor, encode(full), self.path)
        self.rows.append(full)
        self._last[identity(full)] = full
        if time.monotonic() - self._synced > self._fsync_seconds:  # at most 2 s of rows lost to a power cut
            self._sync(self._descriptor)

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno in NO_ROOM:  # file systems that allocate late report a full disk only here
                raise RunError(_no_room(self.path, error)) from error
            raise RunError(f"{self.path} could not be brought to disk: {error.strerror}") from error
        self._synced = time.monotonic()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Flushes the rows to disk and releases the folder. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        lock, self._lock = self._lock, -1
        try:
            if descriptor >= 0:
                self._sync(descriptor)
        finally:
            for number in (descriptor, lock):
                if number >= 0:
                    os.close(number)


def lock_folder(folder: Path) -> int:
    """Creates and locks the folder; returns the descriptor that holds the lock until it is closed. Raises UsageError
    where another process holds the lock or the folder cannot be written, and RunError on a full disk."""
    import fcntl  # POSIX only: on Windows flopcast runs under WSL

    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise UsageError(
                f"{folder} cannot be locked: {error.strerror}: give an --out on another file system"
            ) from error
        raise UsageError(
            f"{folder} is being written by another process{f' ({holder})' if holder else ''}:"
            " wait for it to finish, or give another --out"
        ) from error
    with suppress(OSError):  # the name of the holder is a courtesy; the lock is held without it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
    return descriptor
