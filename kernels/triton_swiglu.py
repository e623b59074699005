# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""silu(gate) * up in Triton, forward and backward, over contiguous elements. Imports triton: import lazily."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch
from flopcast.kernels.sizes import cdiv


@triton.jit
def swiglu_forward_kernel(gate_ptr, up_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, numel, BLOCK: tl.constexpr):
    """dgate = dout up s (1 + gate (1 - s)), dup = dout gate s, s = sigmoid(gate)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    dout = tl.load(dout_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dout * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + at, (dout * gate * sigmoid).to(dup_ptr.dtype.element_ty), mask=mask)


def launch_forward(gate: Tensor, up: Tensor, out: Tensor, config: Any) -> None:
    numel = gate.numel()
    with torch.cuda.device_of(gate):
        launch(
            swiglu_forward_kernel,
            (cdiv(numel, config.block),),
            gate,
            up,
            out,
            numel,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )


def launch_backward(dout: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, config: Any) -> None:
    numel = gate.numel()
    with torch.cuda.device_of(gate):
        launch(
            swiglu_backward_kernel,
            (cdiv(numel, config.block),),
            dout,
            gate,
            up,
            dgate,
            dup,
            numel,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
