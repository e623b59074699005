"""Steps are compiled in processes beside the one that measures: what they hand over, when they stand still and end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from flopcast.microbench.steps.ahead import Ahead, Job, gigabytes_of
from flopcast.roofline.validation.step_plans import validation_plans

WORKER = """
import time
from pathlib import Path
from flopcast.child import answer

def work(ask):
    asked = ask()
    with open(asked["log"], "a", buffering=1) as log:
        for _ in range(asked["ticks"]):
            log.write("tick\\n")
            time.sleep(0.005)
    if asked["ticks"] == 1:
        raise RuntimeError("does not compile")
    return {"value": asked["ticks"]}

answer(work)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stand_in_compiler.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "stand_in_compiler"


def jobs(folder: Path, *ticks: int, gigabytes: int = 1) -> list[Job[int]]:
    logs = [str(folder / f"{number}.log") for number in range(len(ticks))]
    return [
        Job(number, {"ticks": many, "log": logs[number]}, gigabytes) for number, many in enumerate(ticks)
    ]  # fmt: skip


def test_each_is_handed_over_when_it_is_done_and_a_failure_ends_nothing(tmp_path: Path, worker: str) -> None:
    with Ahead(jobs(tmp_path, 100, 2, 1), "cpu", workers=3, gigabytes=8, worker=worker) as ahead:
        found = [(one.what, one.kernels) for one in ahead.ready()]
    assert found[-1] == (0, {"value": 100})  # the first, which takes longest
    assert sorted(found[:-1], key=str) == [(1, {"value": 2}), (2, None)]


def test_compilation_stands_still_while_a_step_is_timed(tmp_path: Path, worker: str) -> None:
    log = tmp_path / "0.log"
    with Ahead(jobs(tmp_path, 10**6), "cpu", workers=1, gigabytes=8, worker=worker) as ahead:
        _wait_for(lambda: log.is_file() and log.stat().st_size > 0)
        with ahead.still():
            time.sleep(0.02)  # for the line that was being written
            before = log.stat().st_size
            time.sleep(0.1)
            assert log.stat().st_size == before
        _wait_for(lambda: log.stat().st_size > before)
        (process,) = ahead._running
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_no_time_left_ends_the_wait(tmp_path: Path, worker: str) -> None:
    with Ahead(jobs(tmp_path, 10**6), "cpu", workers=1, gigabytes=8, worker=worker) as ahead:
        assert list(ahead.ready(lambda: True)) == []


def test_what_is_measured_takes_its_memory_before_more_is_compiled(tmp_path: Path, worker: str) -> None:
    both = jobs(tmp_path, 2, 2, gigabytes=6)
    with Ahead(both, "cpu", workers=2, gigabytes=8, worker=worker) as ahead:
        ready = ahead.ready()
        first = next(ready)
        assert not ahead._running  # the other one does not fit beside it, or has ended
        assert {first.what, next(ready).what} == {0, 1}


def test_every_compiled_step_fits_on_the_gpu() -> None:
    assert all(3 <= gigabytes_of(plan) <= 120 for plan in validation_plans("cuda", "standard", "compile"))


def _wait_for(is_so: Any) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
