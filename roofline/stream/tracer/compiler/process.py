"""Answers one request for a compiled step's code and ends: JSON of `Asked` on stdin, of `OutputCode` on stdout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from flopcast import child
from flopcast.errors import UsageError
from flopcast.roofline.stream.tracer.compiler.asked import Asked


def main() -> None:
    child.answer(_answer)


def _answer(read: Callable[[], Any]) -> dict[str, Any]:
    try:
        from flopcast.roofline.stream.tracer.compiler.output_code import compiled

        return asdict(compiled(Asked(**read())))
    except UsageError as fault:
        return {"refused": str(fault)}
    except Exception as fault:  # of a torch that is made otherwise
        return {"refused": f"the step cannot be compiled here: {type(fault).__name__}: {' '.join(str(fault).split())}"}


if __name__ == "__main__":
    main()
