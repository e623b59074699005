"""Processes that this one starts never outlive it, however it ends; some answer one request and end."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from flopcast.errors import INTERRUPTED, FlopcastError

PARENT = "FLOPCAST_PARENT"  # the environment's variable with the process id that a child must not outlive


def end_with_parent(parent: int | None = None) -> None:
    """Makes this process die with `parent`, by default the one that `PARENT` names (none where it names none), even if
    that is killed by kill -9 (Linux): otherwise it would go on for minutes, and hold a folder's lock or a GPU."""
    parent = parent or int(os.environ.pop(PARENT, "0"))
    if not parent or not sys.platform.startswith("linux"):
        return
    import ctypes

    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def start(
    module: str,
    environment: Mapping[str, str] | None = None,
    errors: IO[str] | int | None = None,
    *,
    own_group: bool = False,
) -> subprocess.Popen[str]:
    """Starts a process of `module`, whose `main` calls `answer`. It imports from where this process does, and nothing
    else from the current folder. `environment` is set besides this process's; stderr goes to `errors`, by default to
    this one's. With `own_group` signals reach it together with what it starts (`os.killpg`). Raises OSError where none
    can start."""
    whole = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), PARENT: str(os.getpid())}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module], env={**whole, **(environment or {})}, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=errors, process_group=0 if own_group else None,
    )  # fmt: skip


def answer(make: Callable[[Callable[[], Any]], Any]) -> None:
    """Answers one request and ends this process, at the latest when the one that asks ends. `make` is given a function
    that waits for the request, JSON on stdin, and returns the answer, JSON on stdout; if it raises, the exit code is 1.
    """
    end_with_parent()
    gc.disable()
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to stderr: stdout holds the answer alone
    try:
        made = make(lambda: json.load(sys.stdin))
        with os.fdopen(answers, "w") as file:
            json.dump(made, file)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except Exception:  # for the process that asked to find out
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # without finalizing the interpreter, which takes 0.5 to 0.9 s once torch is loaded


def run_as_worker(run: Callable[[], None], fault: str) -> None:
    """Runs one of the processes that torch's launcher starts. An error of ours is printed, written to the file `fault`
    (message and exit code, as JSON; no file where it is empty), and ends this process at once."""
    end_with_parent(os.getppid())
    try:
        run()
    except FlopcastError as error:
        if fault:
            told = {"message": str(error), "exit_code": error.exit_code}
            Path(fault).write_text(json.dumps(told), encoding="utf-8")
        print(f"flopcast: {error}", file=sys.stderr)
        os._exit(error.exit_code)  # the others wait for this one: its launcher ends them
