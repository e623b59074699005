"""Traces in a process of its own, for a command that makes one forecast and ends.

    echo '{"config": {...}, "traced": {...}}' | python -m flopcast.roofline.trace_apart

answers {"stream": ...} or {"refused": "why"}. Such a process may do what no library may: load less than the whole of
torch and transformers (`trace_lean`), never collect garbage, and leave without tearing the interpreter down, which
takes 0.5 to 0.9 s after torch. On a 2-core machine a second and a half of a cold forecast.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flopcast.errors import DataError, UsageError
from flopcast.roofline import stream as streams
from flopcast.roofline import stream_cache
from flopcast.roofline.stream import Stream
from flopcast.roofline.stream_cache import Traced

_INTERRUPTED = 130


def trace_apart(config: Mapping[str, Any], traced: Traced) -> Stream:
    """As `stream_cache.trace_now`; here, where torch is loaded already or no process can be started.

    Raises UsageError when transformers refuses the config.
    """
    if "torch" in sys.modules or not sys.executable:
        return stream_cache.trace_now(config, traced)
    request = json.dumps({"config": dict(config), "traced": asdict(traced)})
    # imports as this process does, and nothing from the current folder besides
    command = [sys.executable, "-P", "-m", __name__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, input=request.encode(), env=environment, stdout=subprocess.PIPE, check=True
        )
        answer = json.loads(done.stdout)
        if "refused" in answer:
            raise UsageError(answer["refused"])
        return streams.from_json(answer["stream"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError, DataError):
        return stream_cache.trace_now(config, traced)


def main() -> None:
    """Answers one request and ends the process."""
    gc.disable()
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        answer = _answer(json.load(sys.stdin))
        with os.fdopen(answers, "w") as file:
            json.dump(answer, file)
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)
    sys.stderr.flush()
    os._exit(0)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    config, traced = request["config"], Traced(**request["traced"])
    from flopcast.roofline import trace_lean

    with trace_lean.stand_ins():
        try:
            return {"stream": streams.to_json(stream_cache.trace_now(config, traced))}
        except UsageError:  # by the config, or by what is standing in: the whole of torch tells
            pass
    try:
        return {"stream": streams.to_json(stream_cache.trace_now(config, traced))}
    except UsageError as fault:
        return {"refused": str(fault)}


if __name__ == "__main__":
    main()
