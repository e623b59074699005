"""Reading a working set repeatedly: the bandwidth of the cache level that holds it, free of the launch.

    call, bytes_read = prepare(x, least_bytes=1 << 28, programs=528)

There is one backend, Triton: torch has no operation that reads its input more than once from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from flopcast.kernels.references import BackendUnavailable

BLOCK = 4096  # floats; `triton_read.BLOCK`, which cannot be imported without triton


def prepare(x: Tensor, *, least_bytes: int, programs: int) -> tuple[Callable[[], Tensor], int]:
    """(a call, the bytes that it reads): `programs` programs read x[n], fp32, n a multiple of 4096, in blocks by turns.

    The bytes are the fewest from `least_bytes` on for which every program reads equally many blocks. The call returns
    the sum of each program, fp32 [programs]. Raises BackendUnavailable without triton, or on CPU tensors outside its
    interpreter; ValueError for a length that does not divide.
    """
    if x.dim() != 1 or x.dtype != torch.float32 or not len(x) or len(x) % BLOCK:
        raise ValueError(f"x is {x.dtype} of shape {tuple(x.shape)}: valid is fp32[n], n a multiple of {BLOCK}")
    try:
        from flopcast.kernels import triton_read
    except ImportError as error:
        raise BackendUnavailable(f"backend triton: {error}") from error
    if not (x.is_cuda or triton_read.interpreted()):
        raise BackendUnavailable("backend triton needs CUDA tensors (or TRITON_INTERPRET=1 set before it is imported)")
    rounds = ceil(least_bytes / (programs * BLOCK * 4))
    out = torch.empty(programs, device=x.device)

    def call() -> Tensor:
        triton_read.launch(x, out, rounds)
        return out

    return call, programs * rounds * BLOCK * 4
