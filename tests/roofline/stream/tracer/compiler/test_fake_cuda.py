"""Standing in for CUDA on the torch of a machine, which may be older than the one that tests run on."""

from __future__ import annotations

import subprocess
import sys

AS_TORCH_2_11 = """
import torch
from torch.nn.functional import scaled_dot_product_attention

torch.library.Library.impl.__kwdefaults__["allow_override"] = False
from flopcast.roofline.stream.tracer.compiler.fake_cuda import be_cuda

be_cuda(scaled_dot_product_attention)
print(torch.cuda.is_available())
"""


def test_a_torch_that_keeps_what_is_registered_is_told_to_replace_it() -> None:
    """torch 2.11 does by default, and refused every compiled step: "there's already a kernel registered"."""
    done = subprocess.run([sys.executable, "-c", AS_TORCH_2_11], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
