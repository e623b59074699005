"""The measurement file: one JSON object a line, appended as a sweep goes, read back for resuming and fitting.

Pure Python, no torch. What a folder promises:
- a line is one `os.write` to a file opened with O_APPEND: a kill at any moment tears the last line at most;
- rows of two machines never share a folder (a machine is device, power limit, stack, method: device.py);
- one process at a time writes to a folder (`flock`, which the kernel drops when the process dies).
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from flopcast.errors import DataError, RunError, UsageError
from flopcast.files import NO_ROOM, write, write_errors

SCHEMA = 1
METHOD = 1  # raised whenever a change in how things are timed makes old rows incomparable

MEASUREMENTS = "measurements.jsonl"
MACHINE = "machine.json"
LOCK = ".lock"

STATUSES = ("ok", "oom", "unsupported", "incorrect", "error")
# Keys of the scalars that time the host, not the device: of several GPUs' processes only one that had the host to
# itself can tell them.
HOST_SCALARS = ("scalar/launch", "scalar/launch_inplace", "scalar/sync", "scalar/launch_queue")
# What a row says of a measurement, when nothing is known.
EMPTY_FIELDS: dict[str, Any] = {
    "status": "ok", "reason": None, "note": None, "throttled": False, "seconds": None, "kernel_seconds": None,
    "kernels": [], "samples": [], "n": 0, "timer": None, "relative_error": None, "tolerance": None,
    "clock_mhz": None, "memory_clock_mhz": None, "power_w": None, "temperature_c": None,
    "throttle_reasons": [],
}  # fmt: skip
KERNELS = "kernels_of"  # the sources, or the operands, that were measured (`kernel_sources.py`)
# What rows that were measured earlier say of kernels that are still the present ones, and what these are called now.
# Made at commit bbe66647b3c6, where fingerprints of files' names and lines gave way to those of an operation's code:
# the left are of that commit's kernels, unchanged since 427e2051eeb0. A line goes when its kernels do.
EARLIER = {
    "b74df834181b": "12ece3ebb2e9",  # gemm
    "dcd8d4b1357f": "f5eb006da9ef",  # attention
    "612da963ebde": "a45411996e02",  # rms_norm
    "c44a3c5f1233": "0b6753ef7af4",  # rope_qk_norm
    "77ebb4dfc0db": "8f737f637d18",  # swiglu
    "db8fc63faa1b": "de554812951d",  # cross_entropy
}
_REQUIRED = ("key", "status", "machine", "method")

_OPENING = b'{"schema":'  # how every line begins: tells a torn first line from a foreign file

Row = dict[str, Any]


class Identity(NamedTuple):
    """What makes two rows the same measurement; a re-run skips the identities that are done."""

    key: str
    backend: str
    cache: str
    method: int
    machine: str


def identity(row: Mapping[str, Any]) -> Identity:
    return Identity(row["key"], row.get("backend", "torch"), row.get("cache", "cold"), row["method"], row["machine"])


def kernels_in(row: Mapping[str, Any]) -> str | None:
    """Which kernels, or operands, a row is of, as they are told now; None where it does not say."""
    told = row.get(KERNELS)
    return EARLIER.get(told, told) if told else None


def encode(row: Mapping[str, Any]) -> bytes:
    """One line. Raises ValueError on NaN and infinities, which are not JSON: store None and a reason."""
    return (json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n").encode()


# --- reading


@dataclass(frozen=True)
class Measurements:
    """What a measurement file holds. `torn_at`: the byte where a torn last line begins, else None."""

    rows: list[Row]
    warnings: list[str] = field(default_factory=list)
    torn_at: int | None = None

    def latest(self) -> list[Row]:
        """One row per identity, the last one written: an out-of-memory row that was retried gives way."""
        return list({identity(row): row for row in self.rows}.values())


def parse(data: bytes, path: Path) -> Measurements:
    """Rows of a measurement file's bytes.

    A last line that is not whole (a killed run) is left out and reported in `warnings`. Raises DataError,
    with the line number, on any other malformed line, a foreign file, or a newer schema.
    """
    rows: list[Row] = []
    start = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)  # what follows the final newline: empty unless torn
        if line.strip():
            try:
                row = _parse_line(line, number, path, rows)
            except DataError:
                ours = bool(rows) or line.startswith(_OPENING[: len(line)])
                if last and ours and not _is_json(line):
                    warning = (
                        f"{path}, line {number}: the last line is torn ({len(line)} bytes), as a killed run"
                        " leaves it; ignored, it will be measured again"
                    )
                    return Measurements(rows, [warning], torn_at=start)
                raise
            rows.append(row)
        start += len(line) + 1
    return Measurements(rows)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parse_line(line: bytes, number: int, path: Path, rows_before: list[Row]) -> Row:
    foreign = "" if rows_before else " (is it a measurement file? `flopcast bench --out DIR` writes them)"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: not JSON: {error}{foreign}") from None
    if not isinstance(row, dict) or not isinstance(row.get("schema"), int):
        raise DataError(
            f"{path}, line {number}: not a measurement: an object with a `schema` number is expected{foreign}"
        )
    if row["schema"] > SCHEMA:
        raise DataError(
            f"{path}, line {number}: schema {row['schema']} is newer than this flopcast reads ({SCHEMA}):"
            " upgrade flopcast"
        )
    missing = [name for name in _REQUIRED if name not in row]
    if missing:
        raise DataError(f"{path}, line {number}: not a measurement: {', '.join(missing)} missing{foreign}")
    if row["status"] not in STATUSES:
        raise DataError(f"{path}, line {number}: unknown status {row['status']!r}: known are {', '.join(STATUSES)}")
    return row


def file_in(folder: Path) -> Path:
    """The measurement file of a folder: as it is appended to, or gzipped as it is kept."""
    plain, packed = folder / MEASUREMENTS, folder / f"{MEASUREMENTS}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def read(path: Path | str) -> Measurements:
    """The measurements of a file, or of a folder that holds one, gzipped or not. An empty file has no rows.

    Raises DataError as `parse` does, and when the path does not exist or is not UTF-8 text.
    """
    path = Path(path)
    if path.is_dir():
        path = file_in(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: `flopcast bench --out {path.parent}` makes it") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except EOFError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return parse(data, path)


def read_machine(folder: Path | str) -> dict[str, Any]:
    """The machine.json of a folder. Raises DataError when missing, malformed or of a newer schema."""
    path = Path(folder) / MACHINE
    try:
        machine = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: `flopcast bench --out {folder}` makes it") from None
    except NotADirectoryError:
        raise DataError(
            f"{folder} is a file: give the folder that `flopcast bench` wrote its measurements to"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a machine description: {error}") from None
    if not isinstance(machine, dict) or not isinstance(machine.get("schema"), int) or "machine" not in machine:
        raise DataError(f"{path} is not a machine description: `schema` and `machine` are expected")
    if machine["schema"] > SCHEMA:
        raise DataError(
            f"{path}: schema {machine['schema']} is newer than this flopcast reads ({SCHEMA}): upgrade flopcast"
        )
    return machine


# --- writing


def write_line(descriptor: int, line: bytes, path: Path | str) -> None:
    """Append one line in one write; what finds no room is taken back, so that the file ends on a whole row.

    Raises RunError when there is no room.
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


class Recorder:
    """The measurements of one folder, open for appending by this process alone. Use as a context manager.

        with Recorder(folder, machine) as recorder:
            if not recorder.is_done(key, backend, cache): recorder.append(row)

    `rows` holds what the folder had and what was appended since; `warnings` what was odd about the file.
    """

    def __init__(self, folder: Path | str, machine: Mapping[str, Any], *, fsync_seconds: float = 2.0) -> None:
        """Raises UsageError when the folder cannot be written, is in use, or holds another machine's rows;
        DataError when its file is malformed; RunError when the disk is full."""
        self.folder = Path(folder)
        self.path = self.folder / MEASUREMENTS
        self.machine_id: str = machine["machine"]
        # which process wrote a row, by when it began: kernels of a graph follow closer in one that has not trained
        self.run = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._fsync_seconds = fsync_seconds
        self._lock = lock_folder(self.folder)
        self._descriptor = -1
        try:
            self._open(machine)
        except BaseException:
            self.close()
            raise

    def _open(self, machine: Mapping[str, Any]) -> None:
        if (self.folder / MACHINE).exists():
            self._refuse_other([read_machine(self.folder)["machine"]])
        found = read(self.path) if self.path.exists() else Measurements([])
        self._refuse_other(row["machine"] for row in found.rows)
        self.rows: list[Row] = found.rows
        self.warnings: list[str] = found.warnings
        self._status: dict[Identity, str] = {identity(row): row["status"] for row in found.rows}
        self._kernels: dict[Identity, str | None] = {identity(row): kernels_in(row) for row in found.rows}
        if not (self.folder / MACHINE).exists():
            with write_errors(self.folder / MACHINE):
                write(self.folder / MACHINE, json.dumps(dict(machine), indent=1) + "\n")
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}: give another --out") from error
        size = os.fstat(self._descriptor).st_size
        if found.torn_at is not None:
            os.ftruncate(self._descriptor, found.torn_at)
        elif size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            write_line(self._descriptor, b"\n", self.path)  # whole, but its newline was lost
        self._synced = time.monotonic()

    def _refuse_other(self, machines: Iterable[str]) -> None:
        for other in machines:
            if other != self.machine_id:
                raise UsageError(
                    f"{self.folder} holds measurements of machine {other}, this is machine {self.machine_id}"
                    f" (another device, power limit or software stack; see {MACHINE}): give another --out"
                )

    def status(self, key: str, backend: str = "torch", cache: str = "cold") -> str | None:
        """The status of the last row of this measurement; None when it was not made."""
        return self._status.get(Identity(key, backend, cache, METHOD, self.machine_id))

    def is_done(
        self,
        key: str,
        backend: str = "torch",
        cache: str = "cold",
        *,
        retry: Collection[str] = (),
        kernels: str | None = None,
    ) -> bool:
        """Whether the measurement was made, with whatever result but those of `retry` ("oom", "error"), and of these
        `kernels` where they are told apart."""
        status = self.status(key, backend, cache)
        if kernels is not None:
            known = self._kernels.get(Identity(key, backend, cache, METHOD, self.machine_id))
            return known == kernels and status not in retry
        return status is not None and status not in retry

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; schema, machine, method, run, time are filled in. Raises RunError without room."""
        full = {
            "schema": SCHEMA,
            **row,
            "method": METHOD,
            "machine": self.machine_id,
            "run": self.run,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_line(self._descriptor, encode(full), self.path)
        self.rows.append(full)
        self._status[identity(full)] = full["status"]
        self._kernels[identity(full)] = kernels_in(full)
        if time.monotonic() - self._synced > self._fsync_seconds:  # at most 2 s of rows lost to a power cut
            self._sync(self._descriptor)

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno in NO_ROOM:  # file systems that allocate late say so only here
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
        """Bring the rows to disk and release the folder; idempotent."""
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
    """Make the folder and take its lock: the descriptor that holds it until closed. Raises UsageError where another
    process holds it or it cannot be written, RunError on a full disk."""
    import fcntl  # POSIX only: on Windows flopcast runs under WSL

    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise RunError(_no_room(folder, error)) from error
        raise UsageError(f"{folder} cannot be written: {error.strerror}: give another --out") from error
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
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # the name of the holder is a courtesy; the lock is held without it
    return descriptor
