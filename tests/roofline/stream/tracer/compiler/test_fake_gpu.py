"""A GPU that is not there is told to whatever asks torch for it."""

from __future__ import annotations

import subprocess
import sys

DYNAMO_FIRST = """
import torch._dynamo.device_interface as asked
from flopcast.roofline.stream.tracer.compiler.fake_gpu import Card, tell_of

tell_of(Card.of({"name": "NVIDIA H200", "sm_count": 132}))
interface = asked.get_interface_for_device("cuda")
assert interface.get_device_properties(0).multi_processor_count == 132
assert interface.device_count() == 1
with interface.device(0):
    pass
"""


def test_inductor_is_told_where_dynamo_was_imported_before() -> None:
    done = subprocess.run([sys.executable, "-c", DYNAMO_FIRST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
