"""Calls that are replayed launch what they launch as written, whatever the operands' kinds."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest


def test_a_replayed_call_launches_what_an_ordinary_one_does(run_script: Callable[..., str]) -> None:
    """On 80 calls of 17 operations: other dtypes, sizes and strides that 16 does not divide or that are 1, operands
    that begin elsewhere, views, copies, other options, in both orders and at other addresses."""
    pytest.importorskip("triton")
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    told = re.findall(r"^(.+): (\d+) of (\d+) calls replayed", run_script("replayed_launches.py"), re.MULTILINE)
    assert len(told) == 17
    # what is copied first, lies elsewhere, or takes more than launches is not replayed
    assert {name: int(calls) - int(replayed) for name, replayed, calls in told if replayed != calls} == {
        "rms_norm": 1, "rms_norm_backward": 1, "add_rms_norm": 1, "swiglu_backward": 1, "rope": 1,
        "cross_entropy": 2,
    }  # fmt: skip


def test_past_the_dispatcher_as_through_it(run_interpreted: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    run_interpreted("interpreted_direct.py")
