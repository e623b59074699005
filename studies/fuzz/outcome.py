"""Runs a command in this process and judges what it left: done, refused in words, or a defect."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

MOST_SECONDS = 30.0  # of processor time; no command on files of this size takes three
MOST_BYTES = 1 << 30  # of memory beyond what the process had
MOST_WORDS = 8_000  # characters of a message
# What cannot be negative, by the names of fields and columns.
QUANTITIES = re.compile(
    r"(^|_)(seconds|usd|bytes|flops|watts|tokens|batch|steps|days|share|sigma)($|_)|_per_(hour|second|dollar|step)"
)
SIGNED = re.compile(r"error|change|difference|saved|saving|slack|over|gap|signed|gain|delta|bias|delta|spread|cost_of")
ESCAPE = "\x1b"


@dataclass(frozen=True)
class Outcome:
    """`kind`: "done", "refused" (exit code 2), "failed" (1, with a message) or "defect"; `why` of a defect."""

    kind: str
    why: str = ""

    @property
    def is_defect(self) -> bool:
        return self.kind == "defect"


class _TooLong(BaseException):
    """Not an Exception: nothing that is run may catch it."""


def outcome(arguments: Sequence[str], written: Sequence[Path] = ()) -> Outcome:
    """Runs `flopcast ARGUMENTS` and judges its exit code, its output and the files of `written`."""
    from flopcast.roofline.cli import app

    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    argv, code = sys.argv, 0
    sys.argv = ["flopcast", *arguments]
    before, started = _peak_bytes(), time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited():
            app.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except _TooLong:
        return Outcome("defect", f"not done after {MOST_SECONDS:g} s")
    except BaseException as fault:
        return Outcome("defect", f"{type(fault).__name__} in {_place(fault)}: {str(fault)[:200]}")
    finally:
        sys.argv = argv
    shown, told = _text(out), _text(err)
    if (more := _peak_bytes() - before) > MOST_BYTES:
        return Outcome("defect", f"took {more / 1e9:.1f} GB of memory")
    if time.process_time() - started > MOST_SECONDS:
        return Outcome("defect", f"took {time.process_time() - started:.0f} s")
    if "Traceback" in shown + told:
        return Outcome("defect", "a traceback in its output")
    if ESCAPE in shown + told:
        return Outcome("defect", "a terminal escape in its output")
    if len(told) > MOST_WORDS and code:
        return Outcome("defect", f"a message of {len(told):,} characters")
    if code in (1, 2):
        return Outcome("refused" if code == 2 else "failed") if told.strip() else Outcome("defect", "no message")
    if code not in (0, 3):  # 3: `compare` found something slower
        return Outcome("defect", f"exit code {code}")
    wrong = next(_impossible(shown, written), None)
    return Outcome("defect", f"silent: {wrong}") if wrong else Outcome("done")


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(errors="replace")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raises _TooLong in what runs within it longer than it should: in processor time, so that a busy machine is no
    defect."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _place(fault: BaseException) -> str:
    """The innermost line of ours that the fault passed."""
    frames = [f for f in traceback.extract_tb(fault.__traceback__) if f"{Path('flopcast')}" in f.filename]
    last = [frame for frame in frames if "studies" not in frame.filename][-1:]
    return f"{'/'.join(Path(last[0].filename).parts[-3:])}:{last[0].lineno}" if last else "another library"


def _impossible(shown: str, written: Sequence[Path]) -> Iterator[str]:
    """What a successful command cannot have said: numbers that are none, negative quantities."""
    if shown.lstrip().startswith("{"):
        try:
            document = json.loads(shown, parse_constant=lambda name: float(name.replace("Infinity", "inf")))
        except ValueError:
            yield "its JSON is none"
            return
        yield from _wrong_in(document, "")
    else:
        yield from (f"{word} on the screen" for word in re.findall(r"(?<![\w-])(?:nan|-?inf)(?![\w-])", shown))
    for path in written:
        if path.suffix == ".csv" and path.is_file():
            for row in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))):
                made = {name: _number(cell) for name, cell in row.items() if name and QUANTITIES.search(name)}
                yield from _wrong_in(made, path.name)  # other cells are repeated as they were given


def _number(cell: Any) -> Any:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell


def _wrong_in(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _wrong_in(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _wrong_in(item, name)
    elif isinstance(value, float | int) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is {value}"
        elif value < 0 and QUANTITIES.search(name) and not SIGNED.search(name):
            yield f"{name} is {value:g}"
