"""Processes that run calls and are each replaced by a fresh one after so many.

`concurrent.futures` has `max_tasks_per_child` for this, with which calls that wait for a process may wait forever: one
that has done its share is not replaced (github.com/python/cpython/issues/115634, since Python 3.11).
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


@contextmanager
def renewed_processes(
    count: int, calls: int, begin: Callable[..., None], given: tuple[Any, ...]
) -> Iterator[Callable[..., Future[Any]]]:
    """Yields a function that has one of `count` processes call a function with arguments, both picklable.

    Each process calls `begin(*given)` first, and runs at most `calls` calls. A future raises what its call did, and
    BrokenExecutor where its process was killed, of which later calls know nothing: theirs is a fresh one. At the end
    calls that wait are cancelled and processes ended, what they do included."""
    spawning = multiprocessing.get_context("spawn")
    own = threading.local()
    pools: list[ProcessPoolExecutor] = []  # of one process each, which ends with the thread that started it
    starting, ended = threading.Lock(), threading.Event()

    def fresh() -> ProcessPoolExecutor:
        pools.append(ProcessPoolExecutor(1, spawning, initializer=begin, initargs=given))
        return pools[-1]

    def run(call: Callable[..., Result], *arguments: Any) -> Result:
        with starting:
            if ended.is_set():
                raise CancelledError
            if not getattr(own, "left", 0):
                if hasattr(own, "pool"):
                    own.pool.shutdown(wait=False)
                own.pool, own.left = fresh(), calls
            own.left -= 1
            future = own.pool.submit(call, *arguments)
        try:
            result: Result = future.result()
        except BrokenExecutor:
            own.left = 0
            raise
        return result

    threads = ThreadPoolExecutor(count)
    try:
        yield lambda call, *arguments: threads.submit(run, call, *arguments)
    finally:
        with starting:
            ended.set()
            running = [process for pool in pools for process in (pool._processes or {}).values()]
        for process in running:
            process.terminate()
        threads.shutdown(cancel_futures=True)
        for pool in pools:
            pool.shutdown()
