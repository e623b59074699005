"""What the fused memory-bound operations share: loading their Triton modules, row layouts, calls of one direction.

Each of their modules (rmsnorm, rope, swiglu, cross_entropy, adamw) offers, as matmul does, `operands`, `prepare`,
`reference` and `check` over a shape, on the three BACKENDS: "torch" (eager, as transformers composes it), "compile"
(the same through torch.compile) and "triton" (one fused kernel).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as any_autocast

from flopcast.kernels.references import BackendUnavailable, higher_precision

BACKENDS = ("torch", "compile", "triton")
Outputs = tuple[Tensor, ...]
Returned = TypeVar("Returned")

# The longest row that 32 warps hold in registers. At this length the RMSNorm backward keeps 16 elements per thread of
# four operands and spills 72 bytes; at twice the length it spills 512.
LONGEST_ROW = 16384


@dataclass(frozen=True)
class RowConfig:
    """Launch options of a kernel that takes a tile of `rows` whole rows per step.

    num_warps: warps per program. programs_per_sm: programs per multiprocessor, and num_stages: the steps whose loads
    are in flight at once (1: those of the present step), both of persistent kernels only. max_registers: the limit per
    thread, low enough that `programs_per_sm` programs fit; None: the compiler's choice.
    """

    rows: int
    num_warps: int
    programs_per_sm: int = 1
    num_stages: int = 1
    max_registers: int | None = None


@lru_cache
def _imported(name: str) -> tuple[Any, bool]:
    """The module `triton_{name}`, and whether Triton's kernels run in its interpreter."""
    module = importlib.import_module(f"flopcast.kernels.triton_{name}")
    return module, importlib.import_module("flopcast.kernels.triton_common").interpreted()


def load_triton(name: str, *tensors: Tensor) -> Any:
    """The module `triton_{name}` of this folder, after checking that its kernels run here on these tensors.

    Raises BackendUnavailable without triton, on CPU tensors outside its interpreter and on dtypes other than bf16,
    fp16 and fp32; NotImplementedError on bf16 in the interpreter, which truncates where the device rounds.
    """
    try:
        module, interpreted = _imported(name)
    except ImportError as error:
        raise BackendUnavailable(f"backend triton: {error}") from error
    for x in tensors:
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise BackendUnavailable(f"backend triton: {x.dtype} is not supported (bf16, fp16, fp32 are)")
        if interpreted:
            if x.dtype == torch.bfloat16:
                raise NotImplementedError("bf16 is wrong in Triton's interpreter: use fp16 or fp32 there")
        elif not x.is_cuda:
            raise BackendUnavailable(
                "backend triton needs CUDA tensors (or TRITON_INTERPRET=1 set before triton is imported)"
            )
    return module


# Asking torch takes 2 us, at every call of a kernel.
@lru_cache
def multiprocessors(device: torch.device) -> int:
    """The number of the device's multiprocessors; 3 in the interpreter, so that its programs loop as on a GPU."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability (major, minor); in the interpreter that of an H200, (9, 0)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def rows_in_place(x: Tensor) -> Tensor:
    """A [rows, n] view of x with stride 1 on its last dimension, or a copy where there is no such view."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    return x.reshape(-1, x.shape[-1])


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would cast x before a matrix product; None where autocast is off."""
    if not any_autocast():  # asking for one kind of device takes four times as long
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def persistent_programs(tiles: int, config: RowConfig, device: torch.device) -> int:
    """The number of programs of a persistent kernel over `tiles` tiles.

    It is the configured number, reduced until each program has four tiles, because each leaves a partial sum behind;
    but not below one program per multiprocessor, nor above one per tile.
    """
    sms = multiprocessors(device)
    return max(1, min(tiles, max(sms, min(sms * config.programs_per_sm, tiles // 4))))


def compiled_function(function: Callable[..., Returned]) -> Callable[..., Returned]:
    """`function` by torch.compile for one shape, so that its backward may run repeatedly on one forward's buffers."""
    import torch._functorch.config as functorch_config

    functorch_config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def widened(operands: Sequence[Tensor]) -> list[Tensor]:
    """The operands of a reference: fp64 for fp32 ones, fp32 for 16-bit ones, by the dtype of the first."""
    return [x.to(higher_precision(operands[0].dtype)) for x in operands]


def one_direction(
    function: Callable[..., Outputs], inputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, compiled: bool
) -> Callable[[], Outputs]:
    """A call that runs only the forward of `function` (`gradients` is None), or only its backward, eager or compiled.

    The backward returns the gradients of all `inputs`, for `gradients` of the outputs.
    """
    run = compiled_function(function) if compiled else function
    if gradients is None:

        def forward() -> Outputs:
            with torch.no_grad():
                return run(*inputs)

        return forward
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = run(*leaves)
    return lambda: torch.autograd.grad(outputs, leaves, list(gradients), retain_graph=True)
