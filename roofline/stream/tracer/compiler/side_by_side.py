"""Compiles many steps for one GPU: several processes, each of which compiles one step after the other.

A step takes such a process 6 to 10 s; in a process of its own, which imports torch first, 15 to 20 s.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flopcast.child import end_with_parent
from flopcast.errors import UsageError
from flopcast.roofline.stream.tracer.compiler.apart import environment
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode

if TYPE_CHECKING:
    from concurrent.futures import Future

    from flopcast.roofline.stream.tracer.compiler.output_code import Compiler

PROCESSES = 8  # of about 1 GB each
STEPS = 24  # that a process compiles: torch keeps 10 MB and more of each

_compiler: Compiler | None = None  # of a process of the pool


@contextmanager
def compilers(gpu: Mapping[str, Any], cudnn: int, steps: int) -> Iterator[Callable[[Asked], Future[OutputCode]]]:
    """Yields a function that has a step for this GPU compiled; the future raises UsageError for one that torch cannot
    compile. `steps`: how many will be asked for, at least. Those that have not begun at the end are given up."""
    from flopcast.renewed import renewed_processes  # takes 15 ms, which a cached forecast does not need

    count = max(1, min(PROCESSES, os.cpu_count() or 1, steps))
    with tempfile.TemporaryDirectory(prefix="flopcast-compiled-") as folder:
        given = (os.getpid(), folder, dict(gpu), cudnn)
        with renewed_processes(count, STEPS, _begin, given) as submit:
            yield lambda asked: submit(_code, asked)


def _begin(parent: int, folder: str, gpu: Mapping[str, Any], cudnn: int) -> None:
    """Makes this process a compiler."""
    global _compiler
    end_with_parent(parent)
    gc.disable()
    os.environ.update(environment(folder))
    from flopcast.roofline.stream.tracer.compiler.output_code import Compiler

    _compiler = Compiler(gpu, cudnn)


def _code(asked: Asked) -> OutputCode:
    assert _compiler is not None
    try:
        return _compiler.code(asked)
    except UsageError:
        raise
    except Exception as fault:  # of a torch that is made otherwise
        told = f"{type(fault).__name__}: {' '.join(str(fault).split())}"
        raise UsageError(f"the step cannot be compiled here: {told}") from None
    finally:
        gc.collect()
        gc.freeze()  # what torch keeps of this step the next collection need not look through, half a second of it
