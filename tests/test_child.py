"""A child ends with the process that started it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import os, sys, time
from flopcast.child import end_with_parent
end_with_parent(int(sys.argv[1]))
print("told", flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], str(os.getpid())])
"""


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="by a call of Linux")


def test_a_killed_process_takes_its_children_with_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "told\n"
    parent.kill()
    assert parent.communicate(timeout=60)[0] == ""  # both hold this pipe: it ends when both have


def test_a_child_that_comes_too_late_ends_at_once() -> None:
    late = subprocess.run([sys.executable, "-c", CHILD, "1"], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (late.returncode, late.stdout) == (1, "")
