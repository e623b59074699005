"""SwiGLU's activation, silu(gate) * up, in both directions: torch, torch.compile and one fused kernel.

operands_ = operands(shape, device)              # gate, up and, for the backward, dout: [numel]
out = prepare(shape, "triton", operands_)()      # (out,) or (dgate, dup)
error, tolerance = check(out, reference(operands_, shape), operands_, shape)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopcast.kernels.operators import operator
from flopcast.kernels.references import require_known, standard_normal, worst
from flopcast.kernels.rowwise import BACKENDS, Outputs, load_triton, one_direction, widened
from flopcast.kernels.shapes import SwiGlu


@dataclass(frozen=True)
class BlockConfig:
    """Elements (`block`) and warps per program."""

    block: int
    num_warps: int


@lru_cache
def config_for(direction: str = "fwd") -> BlockConfig:
    """8 elements per thread: one 16-byte load of bf16 per operand in flight, by as many threads as fit."""
    return BlockConfig(2048, 8) if direction == "fwd" else BlockConfig(1024, 4)


def candidates(direction: str) -> list[BlockConfig]:
    """The configurations worth timing on a new part."""
    return [BlockConfig(1024 * k, warps) for k in (1, 2, 4) for warps in (4, 8) if 1024 * k >= 256 * warps]


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu takes gate and up alike, got {gate.dtype}{tuple(gate.shape)} and {up.dtype}{tuple(up.shape)}"
        )


def forward(gate: Tensor, up: Tensor, *, config: BlockConfig | None = None) -> Tensor:
    """Triton silu(gate) * up, contiguous; operands that are not contiguous are copied first.

    Raises ValueError on operands that differ in shape or dtype, BackendUnavailable where the kernel cannot run,
    NotImplementedError for bf16 in the interpreter.
    """
    _check(gate, up)
    module = load_triton("swiglu", gate, up)
    out = gate.new_empty(gate.shape)
    if gate.numel():
        module.launch_forward(gate.contiguous(), up.contiguous(), out, config or config_for())
    return out


def backward(dout: Tensor, gate: Tensor, up: Tensor, *, config: BlockConfig | None = None) -> tuple[Tensor, Tensor]:
    """Triton backward: (dgate, dup). Errors as `forward`."""
    _check(gate, up)
    module = load_triton("swiglu", dout, gate, up)
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if gate.numel():
        module.launch_backward(
            dout.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup, config or config_for("bwd")
        )
    return dgate, dup


# --- Registration ---


@operator("flopcast::swiglu")
def swiglu_op(gate: Tensor, up: Tensor) -> Tensor:
    return forward(gate, up)


@operator("flopcast::swiglu_backward")
def swiglu_backward_op(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return backward(dout, gate, up)


@swiglu_op.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@swiglu_backward_op.register_fake
def _(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = swiglu_backward_op(dout, *ctx.saved_tensors)
    return dgate, dup


swiglu_op.register_autograd(_gradients, setup_context=_save)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Differentiable Triton silu(gate) * up; gate and up of one shape and dtype."""
    out: Tensor = swiglu_op(gate, up)
    return out


# --- torch twin and the benchmark interface ---


def swiglu_torch(gate: Tensor, up: Tensor) -> Outputs:
    """(silu(gate) * up,), as transformers' Qwen3MLP computes it."""
    return (F.silu(gate) * up,)


def operands(shape: SwiGlu, device: torch.device | str, seed: int = 0) -> tuple[Tensor, ...]:
    """Standard-normal gate, up and, for the backward, dout, each [numel]. Raises ValueError on a size below 1 and on an
    unknown direction."""
    if shape.numel < 1:
        raise ValueError(f"{shape.key}: numel must be at least 1")
    require_known("direction", shape.direction, ("fwd", "bwd"))
    return standard_normal([(shape.numel,)] * (2 if shape.direction == "fwd" else 3), shape.dtype, device, seed)


def prepare(shape: SwiGlu, backend: str, operands: Sequence[Tensor]) -> Callable[[], Outputs]:
    """A call that runs one direction once: (out,) or (dgate, dup). Errors as `rmsnorm.prepare`."""
    require_known("swiglu backend", backend, BACKENDS)
    if backend == "triton":
        return triton_call(shape, operands, None)
    gradients = operands[2:] if shape.direction == "bwd" else None
    return one_direction(swiglu_torch, operands[:2], gradients, backend == "compile")


def triton_call(shape: SwiGlu, operands: Sequence[Tensor], config: BlockConfig | None) -> Callable[[], Outputs]:
    """As `prepare` for backend triton, with the given configuration (None: the default one)."""
    gate, up = operands[:2]
    if shape.direction == "fwd":
        return lambda: (forward(gate, up, config=config),)
    return lambda: backward(operands[2], gate, up, config=config)


def reference(operands: Sequence[Tensor], shape: SwiGlu) -> Outputs:
    """What `prepare`'s call returns, computed by torch in fp64 for fp32 operands, in fp32 for 16-bit ones."""
    return prepare(shape, "torch", widened(operands))()


def check(out: Outputs, ref: Outputs, operands: Sequence[Tensor], shape: SwiGlu) -> tuple[float, float]:
    """(relative error, tolerance) of the worst output, by `references.worst`."""
    return worst(out, ref, prepare(shape, "torch", operands)())
