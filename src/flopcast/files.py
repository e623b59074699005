"""Folders that are made, and where files of ours are kept between runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from flopcast.errors import UsageError


def make_folder(folder: Path) -> None:
    """Raises UsageError when it cannot be made, or what is there cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as fault:
        raise UsageError(f"{folder} cannot be written: {fault.strerror}; choose another --out") from fault


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "flopcast" / "streams"
