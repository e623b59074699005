"""Traces in a process of its own, for a command that makes one forecast and ends.

    echo '{"config": {...}, "traced": {...}}' | python -m flopcast.roofline.stream.library.trace_process

prints {"stream": ...} or {"refused": "why"}. Such a process may do what a library must not: load only part of torch
and transformers (`tracer/import_stubs.py`), never collect garbage, and end without finalizing the interpreter, which
takes 0.5 to 0.9 s once torch is loaded. It also imports torch while the command looks up its profile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from flopcast import child
from flopcast.errors import DataError, UsageError
from flopcast.roofline.stream.library.streams import Trace, is_at_hand, trace_now
from flopcast.roofline.stream.model.models import Config, check_config
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.ops.op_stream import Stream


@contextmanager
def tracing_apart(config: Config, likely: Traced) -> Iterator[Trace]:
    """Yields a function like `trace_now`, for at most one trace: of `config`, run as `likely` says or otherwise.

    The process is started now where that stream is neither shipped nor cached, else when the trace is asked for. Where
    torch is loaded already, or no process can be started, this process traces. The function raises UsageError when
    transformers refuses the config.
    """
    process = None
    with suppress(UsageError):  # an invalid config: raised again when the stream is asked for
        check_config(config)
        process = None if is_at_hand(config, likely) else _started()

    def trace(config: Config, traced: Traced) -> Stream:
        nonlocal process
        asked, process = process or _started(), None
        if asked is None:
            return trace_now(config, traced)
        request = json.dumps({"config": dict(config), "traced": asdict(traced)})
        with asked:
            try:
                answer = json.loads(asked.communicate(request)[0])
                if "refused" not in answer:
                    return streams.from_json(answer["stream"])
            except (OSError, ValueError, KeyError, TypeError, DataError):
                return trace_now(config, traced)
            except BaseException:
                asked.kill()
                raise
        raise UsageError(answer["refused"])

    try:
        yield trace
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def _started() -> subprocess.Popen[str] | None:
    """Starts a process that imports torch while it waits; None where torch is loaded here or none can start."""
    if "torch" in sys.modules or not sys.executable:
        return None
    with suppress(OSError):
        return child.start(__name__)
    return None


def main() -> None:
    child.answer(_answer)  # an error: the process that asked then traces, and reports it


def _answer(read: Callable[[], Any]) -> dict[str, Any]:
    from flopcast.roofline.stream.tracer.import_stubs import stubbed_imports

    with stubbed_imports():
        request = read()
        config, traced = request["config"], Traced(**request["traced"])
        with suppress(UsageError):  # due to the config or to a stub: a trace without stubs tells which
            return {"stream": streams.to_json(trace_now(config, traced))}
    try:
        return {"stream": streams.to_json(trace_now(config, traced))}
    except UsageError as fault:
        return {"refused": str(fault)}


if __name__ == "__main__":
    main()
