"""Calls in processes that are each replaced after a few."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import BrokenExecutor, CancelledError

import pytest

from flopcast.child import end_with_parent
from flopcast.renewed import renewed_processes


def test_a_process_is_replaced_after_so_many_calls() -> None:
    """More than twice as many as the first processes may run: a pool of `max_tasks_per_child` waited forever here."""
    with renewed_processes(2, 2, end_with_parent, (os.getpid(),)) as submit:
        futures = [submit(os.getpid) for _ in range(9)]
        ran = Counter(future.result(timeout=120) for future in futures)
    assert ran.total() == 9
    assert max(ran.values()) <= 2
    assert os.getpid() not in ran


def test_a_killed_process_costs_its_own_call_alone() -> None:
    with renewed_processes(1, 9, end_with_parent, (os.getpid(),)) as submit:
        before, killed, after = submit(os.getpid), submit(os._exit, 1), submit(os.getpid)
        with pytest.raises(BrokenExecutor):
            killed.result(timeout=120)
        assert after.result(timeout=120) != before.result(timeout=120)


def test_what_a_call_raises_comes_back() -> None:
    with renewed_processes(1, 9, end_with_parent, (os.getpid(),)) as submit:
        with pytest.raises(ZeroDivisionError):
            submit(divmod, 1, 0).result(timeout=120)
        assert submit(divmod, 7, 2).result(timeout=120) == (3, 1)


def test_at_the_end_nothing_goes_on() -> None:
    with renewed_processes(1, 9, end_with_parent, (os.getpid(),)) as submit:
        process = submit(os.getpid).result(timeout=120)
        asleep, waiting = submit(time.sleep, 600), submit(os.getpid)
        while not asleep.running():
            time.sleep(0.01)
    assert waiting.cancelled()
    with pytest.raises((BrokenExecutor, CancelledError)):
        asleep.result(timeout=120)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
