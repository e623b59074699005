"""Whether other processes kept the cores busy: of real processes, and of counters made up."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from flopcast.microbench.records.rows import is_busy
from flopcast.microbench.timing.contention import OthersShare, machine_seconds


def test_the_share_of_others_is_what_the_machine_used_and_this_process_did_not() -> None:
    now = {"clock": 0.0, "machine": 100.0, "own": 7.0}
    share = OthersShare(lambda: now["machine"], lambda: now["own"], lambda: now["clock"], cores=4)
    now.update(clock=2.0, machine=107.0, own=10.0)  # 7 s used in 2 s of 4 cores, 3 of them here
    assert share() == 0.5
    now.update(clock=2.01)  # too soon to tell
    assert share() == 0.5
    now.update(clock=4.0, machine=108.0, own=11.0)
    assert share() == 0.0
    assert OthersShare(lambda: None, lambda: 0.0, lambda: 0.0)() is None


@pytest.mark.skipif(machine_seconds() is None, reason="Linux alone tells")
def test_a_process_beside_this_one_is_seen() -> None:
    share = OthersShare()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(1.0)
        seen = share()
        other.kill()
    assert seen is not None
    assert seen > 0.3 / (os.cpu_count() or 1)


def test_a_processor_is_busy_sooner_than_a_host_of_a_gpu() -> None:
    shares = (None, 0.0, 0.05, 0.3, 0.9)
    assert [is_busy(share, "cpu") for share in shares] == [False, False, False, True, True]
    assert [is_busy(share, "cuda") for share in shares] == [False, False, False, False, True]
