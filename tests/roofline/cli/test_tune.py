"""`flopcast tune-kernels` where there is no GPU to tune for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kernel", "conv"), ("conv", "matmul")),
        (("--budget", "0"), ("0.0", "above 0")),
        (("--budget", "nan"), ("nan", "above 0")),
        (("--again-below", "-1"), ("-1.0", "0 or more")),
    ],
)
def test_bad_use_says_what_is_valid(
    flopcast: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = flopcast("tune-kernels", "--out", tmp_path / "out", *arguments)
    assert result.code == 2
    assert result.out == ""
    assert all(word in result.err for word in words)
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder(flopcast: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    result = flopcast("tune-kernels", "--out", tmp_path / "out")
    assert result.code == 2
    assert "is a file" in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about having no GPU")
def test_without_a_gpu_nothing_is_written(flopcast: Callable[..., Any], tmp_path: Path) -> None:
    result = flopcast("tune-kernels", "--out", tmp_path / "out", "--json")
    assert result.code == 2
    assert "runs on a GPU" in result.err
    assert not (tmp_path / "out").exists()
