"""Provides the streams of many steps: missing ones are traced in parallel, into the cache, while others are used.

A trace takes one second of one core, after five seconds for importing torch and transformers. Compiled steps are
compiled first (`ahead`).
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from flopcast.child import end_with_parent
from flopcast.errors import UsageError
from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.stream.library.streams import Vary, as_traced, folded, get_stream, is_at_hand, sources_of
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import Stream

if TYPE_CHECKING:
    from concurrent.futures import Future

LEAST_TRACES = 4  # fewer traces take less time than starting processes
IMPORT_TRACES = 5  # that a process makes while another one imports torch and transformers
LEAST_BATCHES = 3  # of one model, neither shipped nor cached; fewer are each traced directly
PROCESSES = 8

StreamOf = Callable[[Config, Traced], Stream]


@contextmanager
def prefetched(
    wanted: Sequence[tuple[Config, Traced]],
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    vary: Vary | None = None,
) -> Iterator[StreamOf]:
    """Yields a function like `get_stream` for the streams that are `wanted`; it waits for those that are being traced.

    For a model wanted at LEAST_BATCHES batches or more, two batches are traced and the others derived from them; for
    every model where the caller is going to `vary` the batch.
    `progress`: of the compilations, which come first.
    """
    if any(traced.mode != "eager" for _, traced in wanted):
        from flopcast.roofline.stream.library.ahead import compile_ahead

        compile_ahead(wanted, progress)
    missing = [(config, traced) for config, traced in wanted if not is_at_hand(config, traced, vary=vary)]
    batches: dict[str, set[int]] = defaultdict(set)
    for config, traced in missing:
        batches[_model(config, traced)].add(traced.batch)
    varied = {model for model, found in batches.items() if vary == "batch" or len(found) >= LEAST_BATCHES}
    sources: dict[str, list[str]] = {}  # keys of the traces that each missing stream needs, by its own key
    traces: dict[str, tuple[Config, Traced]] = {}
    for config, traced in missing:
        found = sources_of(config, traced, "batch") if _model(config, traced) in varied else []
        needed = {_key(*source): source for source in found or [(folded(config, traced), as_traced(traced))]}
        sources[_key(config, traced)] = list(needed)
        traces |= {key: source for key, source in needed.items() if not is_at_hand(*source)}
    with ExitStack() as stack:
        futures: dict[str, Future[None]] = {}
        count = max(1, min(PROCESSES, os.cpu_count() or 1, len(traces) // 2))
        # where this process has imported torch already it begins at once
        is_ahead = "torch" in sys.modules and len(traces) <= IMPORT_TRACES + len(traces) / count
        if len(traces) >= LEAST_TRACES and not is_ahead:
            import multiprocessing  # takes 15 ms together with the pool, which a single forecast does not need
            from concurrent.futures import ProcessPoolExecutor

            spawning = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(count, spawning, initializer=end_with_parent, initargs=(os.getpid(),))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            futures = {key: pool.submit(trace_into_cache, *source) for key, source in traces.items()}

        def stream_of(config: Config, traced: Traced) -> Stream:
            for source in sources.get(_key(config, traced), ()):
                if (future := futures.get(source)) is not None:
                    from concurrent.futures.process import BrokenProcessPool

                    with suppress(BrokenProcessPool):  # no process can be started: this one traces
                        future.result()
            return get_stream(config, traced, vary=vary or ("batch" if _model(config, traced) in varied else None))

        yield stream_of


def trace_into_cache(config: Config, traced: Traced) -> None:
    """Traces a step into the cache. Skips one that cannot be traced: the caller that asks for it gets the reason."""
    with suppress(UsageError):
        get_stream(config, traced)


def _key(config: Config, traced: Traced) -> str:
    """Returns the key shared by all depths and numbers of micro-batches that one trace serves."""
    return canonical_json([folded(config, traced), asdict(as_traced(traced))])


def _model(config: Config, traced: Traced) -> str:
    """Returns the key shared by all batches of a model."""
    return _key(config, replace(traced, batch=0))
