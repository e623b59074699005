"""What the shell is offered at TAB, as its script asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("line", "offered", "others"),
    [
        ("pre", {"predict"}, {"plan"}),
        ("predict --gpu h", {"h200", "h100-sxm"}, {"l4"}),
        ("predict --gpu nvidia-h2", {"nvidia-h200"}, {"h200"}),
        ("cost --gpus nvidia-h200,l4", {"nvidia-h200,l4", "nvidia-h200,l40s"}, {"l4"}),
        ("predict --config qwen3-0", {"qwen3-0.6b"}, {"gpt2"}),
        ("plan --precision tf", {"tf32"}, {"fp32"}),
    ],
)
def test_names_are_completed(line: str, offered: set[str], others: set[str]) -> None:
    words = {
        "COMP_WORDS": f"flopcast {line}",
        "COMP_CWORD": str(len(line.split())),
        "_FLOPCAST_COMPLETE": "complete_bash",
    }
    code = "import sys; sys.argv = ['flopcast']; from flopcast.roofline.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True, timeout=60
    )
    found = set(done.stdout.split())
    assert offered <= found, done.stderr
    assert not others & found
