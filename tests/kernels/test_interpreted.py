"""Triton's kernels in its interpreter: `interpreted_*.py` of this folder, in a process of their own."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


def test_every_kernel_in_the_interpreter(in_own_process: Callable[..., str]) -> None:
    """All files in one process: importing torch, Triton and transformers and warming the interpreter up takes a third
    of their time otherwise."""
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    triton_version, numpy_version = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton_version < (3, 7) and numpy_version >= (2, 4):
        pytest.skip("the interpreter of triton < 3.7 fails on range() with numpy >= 2.4")
    assert len(FILES) >= 7
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "tests.kernels.quicker_interpreter", "--noconftest"]
    # hidden from CUDA: the interpreter works on CPU tensors
    in_own_process(["-m", "pytest", *options, *map(str, FILES)], TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
