"""Answers one request for a compiled step's code and ends: JSON of `Asked` on stdin, of `OutputCode` on stdout."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from flopcast.child import end_with_parent
from flopcast.errors import INTERRUPTED, UsageError
from flopcast.roofline.stream.tracer.compiler.asked import Asked


def main() -> None:
    """Answers, at the latest when the process that asks ends; errors of torch are left to stderr's last line."""
    end_with_parent()
    gc.disable()
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to stderr: stdout holds the answer alone
    try:
        answer = _answer(Asked(**json.load(sys.stdin)))
        with os.fdopen(answers, "w") as file:
            json.dump(answer, file)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    sys.stderr.flush()
    os._exit(0)  # without finalizing the interpreter, which takes a second


def _answer(asked: Asked) -> dict[str, Any]:
    try:
        from flopcast.roofline.stream.tracer.compiler.output_code import compiled

        return asdict(compiled(asked))
    except UsageError as fault:
        return {"refused": str(fault)}


if __name__ == "__main__":
    main()
