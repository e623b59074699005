"""Processes that this one starts never outlive it, however it ends."""

from __future__ import annotations

import os
import signal
import sys

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
