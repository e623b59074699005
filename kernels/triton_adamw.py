# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""AdamW over a list of tensors in one Triton launch. Imports triton: import this module inside functions only.

`table` is int64 [tensors, 5]: the addresses of parameter, gradient, first and second moment, and the number of
elements. Program i works on chunk `chunk_index[i]` of tensor `chunk_tensor[i]`. Only the last block of a tensor is
masked: a mask by a size that is not known to divide by 4 would cost the 16-byte accesses.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch as launch_kernel


@triton.jit
def _address(table_ptr, ALIGNED: tl.constexpr):
    pointer = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update(
    param, grad, first, second, at, numel, scale, decay, beta1, rest1, beta2, rest2, step_size, root2, eps,
    SCALED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """torch's fused formula: p (1 - lr wd) - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)."""
    if MASKED:
        mask = at < numel
        g = tl.load(grad + at, mask=mask, other=0.0)
        p = tl.load(param + at, mask=mask, other=0.0)
        m = tl.load(first + at, mask=mask, other=0.0)
        v = tl.load(second + at, mask=mask, other=0.0)
    else:
        g = tl.load(grad + at)
        p = tl.load(param + at)
        m = tl.load(first + at)
        v = tl.load(second + at)
    if SCALED:
        g = g * scale
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p = p * decay - step_size * m / (tl.sqrt(v) / root2 + eps)
    if MASKED:
        mask = at < numel
        tl.store(param + at, p, mask=mask)
        tl.store(first + at, m, mask=mask)
        tl.store(second + at, v, mask=mask)
    else:
        tl.store(param + at, p)
        tl.store(first + at, m)
        tl.store(second + at, v)


@triton.jit
def adamw_kernel(
    table_ptr, chunk_tensor_ptr, chunk_index_ptr, norm_ptr, max_norm,
    decay, beta1, rest1, beta2, rest2, step_size, root2, eps,
    SCALED: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SCALED: gradients are scaled as torch's clip_grad_norm_ does, by max_norm / (norm + 1e-6) where that is below 1;
    a norm that is no number makes them none."""
    scale = 1.0
    if SCALED:
        fits = max_norm / (tl.load(norm_ptr) + 1e-6)
        scale = tl.where(fits >= 1.0, 1.0, fits)
    row = table_ptr + tl.load(chunk_tensor_ptr + tl.program_id(0)) * 5
    start = tl.load(chunk_index_ptr + tl.program_id(0)).to(tl.int64) * CHUNK
    numel = tl.load(row + 4)
    param = _address(row, ALIGNED)
    grad = _address(row + 1, ALIGNED)
    first = _address(row + 2, ALIGNED)
    second = _address(row + 3, ALIGNED)
    within = tl.arange(0, BLOCK)
    for offset in range(0, CHUNK, BLOCK):
        begin = start + offset
        if begin + BLOCK <= numel:
            _update(
                param, grad, first, second, begin + within, numel, scale, decay, beta1, rest1, beta2, rest2, step_size,
                root2, eps, SCALED, False,
            )  # fmt: skip
        elif begin < numel:
            _update(
                param, grad, first, second, begin + within, numel, scale, decay, beta1, rest1, beta2, rest2, step_size,
                root2, eps, SCALED, True,
            )  # fmt: skip


def launch(table: Any, scalars: tuple[float, ...], norm: Tensor | None = None, max_norm: float = 0.0) -> None:
    """One step over a `flopcast.kernels.adamw.Table`; scalars in the kernel's order, decay to eps. With the `norm` of
    all gradients, fp32 [1], these are clipped to `max_norm`."""
    pointers: Tensor = table.pointers
    with torch.cuda.device_of(pointers):
        launch_kernel(
            adamw_kernel, (table.chunk_tensor.numel(),),
            pointers, table.chunk_tensor, table.chunk_index, pointers if norm is None else norm, max_norm, *scalars,
            SCALED=norm is not None, ALIGNED=table.aligned, CHUNK=table.config.chunk, BLOCK=table.config.block,
            num_warps=table.config.num_warps,
        )  # fmt: skip
