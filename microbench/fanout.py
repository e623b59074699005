"""Runs one bench process per GPU of the host, concurrently, each into a folder of its own: OUT/gpu0, OUT/gpu1, ...

There is one process per GPU because a process has one CUDA context, one profiler and one interpreter lock: a fault in
one process does not affect the others. Each folder is what a bench of that GPU alone writes: the bench can be resumed,
survives a kill, and a profile can be fitted from that folder alone.

Host costs are not measured concurrently. Processes that enqueue at the same time contend for cores, clocks, memory and
the driver's locks, so that each would time the others as well: the first GPU's process calibrates the host before the
others begin, and none of them does it again. Kernels can be measured concurrently: their times come from the device
(graph replay, events, CUDA's profiler), and a host whose GPUs are all busy is the condition in which it trains, heat
included.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypedDict

from flopcast.child import PARENT
from flopcast.decode import decode
from flopcast.errors import DataError
from flopcast.json_files import parse_json

COMMAND = (sys.executable, "-m", "flopcast")  # what starts a bench
GRACE_SECONDS = 2.0
LAST_WORDS = 3  # lines of a failed process's stderr that are kept


@dataclass(frozen=True)
class Job:
    """One bench to run: the name of the GPU and of its folder, the arguments of `flopcast bench`, and the variables
    that are added to this process's environment."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a process ended. `parts`: one line per part that it measured; `reason`: why it failed, else ""."""

    returncode: int
    seconds: float
    parts: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_done(self) -> bool:
        return self.returncode == 0


def jobs(devices: Sequence[str], out: Path, arguments: Sequence[str]) -> list[Job]:
    """Returns one bench job per device of `devices` ("cuda:0", ...). `arguments`: those that all benches take besides
    --device, --out and --json.

    Each process sees only its own GPU, so that it cannot place anything on another one.
    """
    found = []
    for i, device in enumerate(devices):
        kind, _, index = device.partition(":")
        environment = {"CUDA_VISIBLE_DEVICES": _visible(int(index))} if index else {}
        arguments_ = ("--device", kind, "--out", str(out / f"gpu{i}"), *arguments, "--json")
        found.append(Job(f"gpu{i}", arguments_, environment))
    return found


def _visible(index: int) -> str:
    """Returns the entry of CUDA_VISIBLE_DEVICES for this process's device number `index`; the variable may already be
    set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index].strip() if visible else str(index)


def run_side_by_side(wanted: Sequence[Job], say: Callable[[str], None]) -> dict[str, Outcome]:
    """Runs all jobs at once and waits for all; each process's stderr is passed on, prefixed with its name.

    A process that fails does not stop the others. None of them outlives this process, however it ends.
    """
    started = [(job, time.monotonic(), _start(job, len(wanted))) for job in wanted]
    listeners = [_Listener(job.name, process, say) for job, _, process in started]
    found = {}
    try:
        for (job, start, process), listener in zip(started, listeners, strict=True):
            code = process.wait()
            listener.join()
            found[job.name] = _outcome(code, time.monotonic() - start, listener)
    finally:
        _stop([process for _, _, process in started])
    return found


def _stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Waits for all processes; those still running after GRACE_SECONDS, which Ctrl-C in a terminal has not reached, are
    sent SIGINT."""
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
    for process in processes:
        process.wait()


def _start(job: Job, count: int) -> subprocess.Popen[str]:
    threads = str(max(1, (os.cpu_count() or 1) // count))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, **job.environment, PARENT: str(os.getpid())}
    return subprocess.Popen(
        [*COMMAND, "bench", *job.arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", env=environment,
    )  # fmt: skip


class _Listener:
    """Reads what a process writes, so that the process never blocks on a full pipe."""

    _one_at_a_time = threading.Lock()  # shared by all listeners, so that lines are passed on whole

    def __init__(self, name: str, process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
        self.out = ""
        self.last: list[str] = []
        assert process.stdout is not None
        assert process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read, args=(process.stdout,), daemon=True),
            threading.Thread(target=self._pass_on, args=(name, process.stderr, say), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _read(self, stream: IO[str]) -> None:
        self.out = stream.read()

    def _pass_on(self, name: str, stream: IO[str], say: Callable[[str], None]) -> None:
        for line in stream:
            if line.strip():
                self.last = [*self.last, line.strip()][-LAST_WORDS:]
                with self._one_at_a_time:
                    say(f"{name}: {line.rstrip()}")


class _Answer(TypedDict, total=False):
    """What a bench prints: a line per part that it measured."""

    parts: dict[str, str]


def _parts(out: str) -> dict[str, str]:
    """The parts that a process printed; none where it printed something else."""
    try:
        return decode(_Answer, parse_json(out), "a bench").get("parts", {})
    except (ValueError, DataError):
        return {}


def _outcome(code: int, seconds: float, listener: _Listener) -> Outcome:
    parts = _parts(listener.out)
    if code == 0:
        return Outcome(code, seconds, parts)
    killed = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Outcome(code, seconds, parts, "; ".join([killed, *listener.last[-1:]]))
