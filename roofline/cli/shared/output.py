"""Output of commands: one JSON document on stdout, or a line that says what was done."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def emit(document: Any) -> None:
    """Writes the command's one JSON document to stdout, complete or not at all."""
    text = json.dumps(document, indent=1, default=str, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_done(seconds: Sequence[Any], words: tuple[str, str], gpu: str, out: Path, as_json: bool) -> None:
    """Reports how many rows of a table were done. `words`: a noun for the rows, and a participle for what was done;
    `gpu`: what they are of."""
    from flopcast.roofline.views.terminal import console

    count, done = len(seconds), sum(1 for value in seconds if value)
    what, verb = words
    if as_json:
        emit({"out": str(out), "rows": count, verb: done, "failed": count - done})
        return
    console.say(f"{done} of {count} {what} {verb} for {gpu} -> {out}")
    if done < count:
        console.say(f"{count - done} could not be done: column `reason` says why")
