"""Finds the line of a user's own code in a stack of calls, for messages."""

from __future__ import annotations

import linecache
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

import flopcast

_PACKAGES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})
# Code that is never the user's; other packages are where nothing nearer is.
_MACHINERY = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(flopcast.__file__) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
    "<",
)


# The file that calls the user's code: what calls it is none of the step.
_CALLER = os.path.join(os.path.dirname(__file__), "trace.py")


def line_of(source: FrameType | TracebackType | None) -> str:
    """Returns "train.py:57, in step: loss = model(x)" of the innermost line of the user's own code among the callers
    of a frame, up to the tracer, or in an error's traceback; "" where there is none."""
    places = list(_inward(source) if isinstance(source, TracebackType) else _outward(source))
    for is_own in (_is_users, _is_packages):
        for frame, line in places:
            file = frame.f_code.co_filename
            if is_own(file):
                text = linecache.getline(file, line).strip()
                return f"{_short(file)}:{line}, in {frame.f_code.co_name}{f': {text[:100]}' if text else ''}"
    return ""


def users_line(frame: FrameType | None) -> str:
    """Returns what `line_of` does where the user's own code asks torch directly; "" where another package does."""
    asks = next((frame for frame, _ in _outward(frame) if not frame.f_code.co_filename.startswith(_MACHINERY)), None)
    packages = _is_packages(asks.f_code.co_filename) if asks is not None else True
    return "" if packages else line_of(asks)


def packages_in(trace: TracebackType | None) -> Iterator[list[str]]:
    """Yields the files of installed packages that an error's traceback passes through, innermost first, each as the
    parts of its path: ["torch", "nested", "__init__.py"]."""
    for frame, _ in _inward(trace):
        file = frame.f_code.co_filename
        for folder in _PACKAGES:
            if file.startswith(folder):
                yield file[len(folder) :].split(os.sep)


def _outward(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None and frame.f_code.co_filename != _CALLER:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _inward(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return reversed(found)


def _is_packages(file: str) -> bool:
    """Whether a file is of a package other than torch and flopcast."""
    return file.startswith(_PACKAGES) and not file.startswith(_MACHINERY[:2])


def _is_users(file: str) -> bool:
    return not file.startswith((*_PACKAGES, *_MACHINERY))


def _short(file: str) -> str:
    """Returns the path from the folder of packages where the file is one's, else from the current folder where it is
    below that."""
    for folder in _PACKAGES:
        if file.startswith(folder):
            return file[len(folder) :]
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
