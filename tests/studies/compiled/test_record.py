"""The control flow of the recording: what runs at once, what is kept, what a child does on the CPU."""

from __future__ import annotations

import threading
import time

import pytest

from studies.compiled import record


def test_cases_run_at_once_as_far_as_memory_admits() -> None:
    cases = [record.Case(f"case-{number}", gigabytes=50) for number in range(6)]
    lock, running, most, seen = threading.Lock(), 0, 0, []

    def run(case: record.Case, stage: str) -> None:
        nonlocal running, most
        with lock:
            running += case.gigabytes
            most = max(most, running)
            seen.append((case.name, stage))
        time.sleep(0.02)
        with lock:
            running -= case.gigabytes

    record.in_parallel(cases, "kernels", run)
    assert sorted(seen) == [(case.name, "kernels") for case in cases]
    assert most == 100  # of 128, so two of 50


def test_a_failing_case_frees_its_memory() -> None:
    cases = [record.Case(f"case-{number}", gigabytes=100) for number in range(3)]
    done = []

    def run(case: record.Case, stage: str) -> None:
        done.append(case.name)
        if case.name == "case-0":
            raise RuntimeError("no such model")

    with pytest.raises(RuntimeError, match="no such model"):
        record.in_parallel(cases, "times", run)
    assert sorted(done) == ["case-0", "case-1", "case-2"]


def test_every_case_fits() -> None:
    assert all(case.gigabytes <= min(record.GIGABYTES.values()) for case in record.CASES)
    assert len({case.name for case in record.CASES}) == len(record.CASES)


def test_kernels_are_medians_of_steps_that_launch_the_same() -> None:
    runs = [[("a", 1.0), ("b", 5.0)], [("a", 2.0), ("b", 4.0)], [("a", 9.0), ("b", 4.5)]]
    assert record.steady(runs) == [["a", 2.0], ["b", 4.5]]
    assert record.steady([[("a", 1.0)], [("b", 5.0), ("a", 3.0)]]) == [["b", 5.0], ["a", 3.0]]
