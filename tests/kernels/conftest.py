"""Two helpers that need a process of their own: Triton's interpreter is chosen when triton is first imported,
and a process that chose it can neither compile nor launch on a GPU. One that makes many kernels at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def in_subprocess(arguments: list[str], **environment: str) -> str:
    """Standard output of `python arguments`; if it fails, so does the test, with all its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        pytest.fail(f"python {' '.join(arguments)}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}", pytrace=False)
    return done.stdout


@pytest.fixture
def in_own_process() -> Callable[..., str]:
    """`in_subprocess`."""
    return in_subprocess


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., str]:
    """Runs a script of this folder, with a Triton cache of its own; returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        return in_subprocess([str(HERE / name), *arguments], TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")

    return run


@pytest.fixture
def at_once() -> Callable[[Iterable[Callable[[], Any]]], list[Any]]:
    """What calls on a GPU return, made on as many threads as there are cores: a kernel takes Triton a second to
    compile, most of it outside Python's lock."""
    import torch

    def run(calls: Iterable[Callable[[], Any]]) -> list[Any]:
        # the initializer makes the device's context the thread's own
        with ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.synchronize) as pool:
            return [done.result() for done in [pool.submit(call) for call in calls]]

    return run
