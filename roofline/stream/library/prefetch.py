"""Streams of many steps: traced side by side while others are forecast, and batches from one another.

A trace takes a second of one core, after five for importing torch and transformers. Where several have to be made,
processes make them into the cache; of a model asked for at three batches or more, two are traced (`ops/to_batch.py`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from flopcast.errors import UsageError
from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.stream.library import by_batch
from flopcast.roofline.stream.library.streams import as_traced, get_stream, is_at_hand
from flopcast.roofline.stream.model.models import Config, depth_of, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops import to_batch
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream

if TYPE_CHECKING:
    from concurrent.futures import Future


LEAST_TRACES = 4  # fewer are made sooner than processes start
LEAST_BATCHES = 3  # of one model, not at hand: fewer are traced as they are
PROCESSES = 8

StreamOf = Callable[[Mapping[str, Any], Traced], Stream]


@contextmanager
def prefetched(wanted: Sequence[tuple[Config, Traced]]) -> Iterator[StreamOf]:
    """A function as `get_stream`, for what is `wanted`; it waits for what is being traced."""
    missing = [(config, traced) for config, traced in wanted if not is_at_hand(config, traced)]
    batches: dict[str, set[int]] = defaultdict(set)
    for config, traced in missing:
        batches[_model(config, traced)].add(traced.batch)
    in_line = {model for model, found in batches.items() if len(found) >= LEAST_BATCHES}
    needs: dict[str, list[tuple[Config, Traced]]] = {}
    for config, traced in missing:
        needs.setdefault(_key(config, traced), _needs(config, traced, _model(config, traced) in in_line))
    traces = {_key(*need): need for found in needs.values() for need in found}
    traces = {key: need for key, need in traces.items() if not is_at_hand(*need)}
    with ExitStack() as stack:
        futures: dict[str, Future[None]] = {}
        if len(traces) >= LEAST_TRACES:
            import multiprocessing  # with the pool 15 ms, which a single forecast does not need
            from concurrent.futures import ProcessPoolExecutor

            count = max(1, min(PROCESSES, os.cpu_count() or 1, len(traces) // 2))
            pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            futures = {key: pool.submit(trace_into_cache, *need) for key, need in traces.items()}

        def stream_of(config: Mapping[str, Any], traced: Traced) -> Stream:
            for need in needs.get(_key(config, traced), ()):
                future = futures.get(_key(*need))
                if future is not None:
                    from concurrent.futures.process import BrokenProcessPool

                    with suppress(BrokenProcessPool):  # started where no process can be: traced here
                        future.result()
            is_of_line = _model(config, traced) in in_line
            return (by_batch.stream_of if is_of_line else get_stream)(config, traced)

        yield stream_of


def trace_into_cache(config: Config, traced: Traced) -> None:
    """What cannot be traced is left to whoever asks for it, who gets the reason."""
    with suppress(UsageError):
        get_stream(config, traced)


def _folded(config: Mapping[str, Any]) -> Config:
    """As streams are cached: at the least depth that says all."""
    is_stack = depth_of(config) >= 2 and len(set(config.get("layer_types") or ())) <= 1
    return with_depth(config, FOLDED_DEPTH) if is_stack else dict(config)


def _key(config: Mapping[str, Any], traced: Traced) -> str:
    return canonical_json([_folded(config), asdict(as_traced(traced))])


def _model(config: Mapping[str, Any], traced: Traced) -> str:
    return _key(config, replace(traced, batch=0))


def _needs(config: Config, traced: Traced, is_of_line: bool) -> list[tuple[Config, Traced]]:
    """What has to be traced for one stream."""
    if is_of_line and traced.batch not in (1, *to_batch.BATCHES):
        return [(_folded(config), replace(traced, batch=batch)) for batch in to_batch.BATCHES]
    return [(_folded(config), traced)]
