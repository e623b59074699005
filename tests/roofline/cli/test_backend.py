"""bench --backend: the cases of one backend of a suite, and what it is not for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

REFUSED = {
    "unknown": (("--backend", "tritan"), ("'tritan'", "torch, triton, sdpa-flash, sdpa-cudnn")),
    "none in the suite": (("--backend", "triton"), ("--backend triton", "'cpu-quick' has no case of it")),
    "the host": (("--suite", "host", "--backend", "triton"), ("--suite host", "leave one of the two out")),
    "a model": (("--config", "qwen3-0.6b", "--backend", "triton"), ("--backend triton", "--matmul and --attention")),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_backend_that_cannot_be_is_refused(flopcast: Command, tmp_path: Path, name: str) -> None:
    options, said = REFUSED[name]
    found = flopcast("bench", "--device", "cpu", *options, "--out", str(tmp_path / "out"))
    assert found.code == 2
    for text in said:
        assert text in found.err
    assert not (tmp_path / "out").exists()
