"""Matrix product in the layouts of training: cuBLAS through torch, a Triton kernel, reference and tolerance.

Operands are passed as they lie in memory (m, n, k as in `shapes.Gemm`; the result is c[m, n], same dtype,
accumulated in fp32):
    nt: a[m, k], b[n, k] (forward)    nn: a[m, k], b[k, n] (dgrad)
    tn: a[k, m], b[k, n] (wgrad)      tt: a[k, m], b[n, k]
A batch adds one leading dimension to all three (torch only).

    operands_ = operands(shape, device, seed=0)
    out = prepare(shape, "triton", operands_)()
    error, tolerance = check(out, reference(operands_, shape), operands_, shape)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from flopcast.kernels.references import (
    BackendUnavailable,
    higher_precision,
    matmul_precision,
    max_relative,
    torch_dtype,
)
from flopcast.kernels.shapes import DTYPE_BYTES, Gemm

LAYOUTS = ("nt", "nn", "tn", "tt")

# Shared memory that one block may use, bytes, by compute capability (CUDA programming guide, table of
# technical specifications: the limit per block, 1 KB below the one per multiprocessor).
SHARED_MEMORY = {
    (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376,
    (9, 0): 232448, (10, 0): 232448, (12, 0): 101376,
}  # fmt: skip


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes per block; 99 KB, the least of any part since sm_80, for those not listed."""
    return SHARED_MEMORY.get(capability, 101376)


@dataclass(frozen=True)
class MatmulConfig:
    """Tile sizes and launch options of the Triton kernel. `rate` is what one multiprocessor reaches with
    this tile relative to the largest, an estimate that only ranks tiles."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    rate: float = 1.0

    def shared_bytes(self, element_bytes: int) -> int:
        """Shared memory of the pipelined operand tiles."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * element_bytes


# 16-bit operands. 128x256 is the tile whose operand traffic the matrix units of sm_90 need; small tiles fill
# 132 multiprocessors when there are only 1024 rows. sm_8x: mma.sync reads operands into registers, so a
# thinner k step; the two-stage rows are those that fit the 99 KB of sm_86 and sm_89.
_HALF_SM90 = (
    MatmulConfig(128, 256, 64, 8, 3, rate=1.0),
    MatmulConfig(256, 128, 64, 8, 3, rate=1.0),
    MatmulConfig(128, 128, 64, 8, 4, rate=0.85),
    MatmulConfig(64, 128, 64, 4, 4, rate=0.65),
    MatmulConfig(128, 64, 64, 4, 4, rate=0.65),
    MatmulConfig(64, 64, 64, 4, 5, rate=0.45),
)
_HALF_SM80 = (
    MatmulConfig(128, 256, 32, 8, 3, rate=1.0),
    MatmulConfig(256, 128, 32, 8, 3, rate=1.0),
    MatmulConfig(128, 128, 32, 4, 4, rate=0.95),
    MatmulConfig(64, 128, 32, 4, 4, rate=0.75),
    MatmulConfig(128, 64, 32, 4, 4, rate=0.75),
    MatmulConfig(64, 64, 32, 4, 5, rate=0.5),
)
_TF32 = (
    MatmulConfig(128, 128, 32, 8, 3, rate=1.0),
    MatmulConfig(64, 128, 32, 4, 3, rate=0.8),
    MatmulConfig(64, 64, 32, 4, 3, rate=0.6),
)
# Exact fp32 runs on the ordinary units, where the accumulator's registers set the tile.
_FP32 = (MatmulConfig(64, 64, 16, 8, 2, rate=1.0), MatmulConfig(32, 32, 32, 4, 2, rate=0.5))


def candidates(dtype: str, capability: tuple[int, int] = (9, 0)) -> tuple[MatmulConfig, ...]:
    """Every configuration that `config_for` may return for this dtype on this part."""
    table: tuple[MatmulConfig, ...]
    if dtype == "tf32":
        table = _TF32
    elif dtype == "fp32":
        table = _FP32
    else:
        table = _HALF_SM90 if capability[0] == 9 else _HALF_SM80
    limit = shared_memory_limit(capability)
    return tuple(config for config in table if config.shared_bytes(DTYPE_BYTES[dtype]) <= limit)


def config_for(shape: Gemm, sm_count: int, capability: tuple[int, int] = (9, 0)) -> MatmulConfig:
    """The tile that finishes soonest when every wave of `sm_count` tiles takes area / rate.

    A wave costs its tile's area whether it is full or not: this is what sends 1024-token shapes to small
    tiles. Ties go to the larger tile.
    """

    def cost(config: MatmulConfig) -> tuple[float, int]:
        tiles = math.ceil(shape.m / config.block_m) * math.ceil(shape.n / config.block_n)
        area = config.block_m * config.block_n
        return math.ceil(tiles / sm_count) * area / config.rate, -area

    return min(candidates(shape.dtype, capability), key=cost)


def _sizes(a: Tensor, b: Tensor, layout: str) -> tuple[int, int, int]:
    """(m, n, k). Raises ValueError on an unknown layout or operands that do not fit together."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: known are {', '.join(LAYOUTS)}")
    m, k = a.shape[-2:] if layout[0] == "n" else (a.shape[-1], a.shape[-2])
    k_of_b, n = b.shape[-2:] if layout[1] == "n" else (b.shape[-1], b.shape[-2])
    if k != k_of_b or a.dim() != b.dim() or a.dtype != b.dtype:
        raise ValueError(
            f"layout {layout}: operands {a.dtype}{tuple(a.shape)} and {b.dtype}{tuple(b.shape)} do not fit"
        )
    return m, n, k


def _as_written(a: Tensor, b: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Views a[..., m, k] and b[..., k, n] of operands as stored."""
    _sizes(a, b, layout)
    return a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT


def matmul_torch(a: Tensor, b: Tensor, layout: str) -> Tensor:
    """torch.matmul (cuBLAS on CUDA; bmm with a leading batch). fp32 obeys the process's matmul precision."""
    return torch.matmul(*_as_written(a, b, layout))


def matmul_triton(
    a: Tensor, b: Tensor, layout: str, *, tf32: bool = False, config: MatmulConfig | None = None
) -> Tensor:
    """The Triton kernel; `config` overrides `config_for`.

    Raises NotImplementedError on a batch, or bf16 in Triton's interpreter (its tl.dot multiplies raw
    bits), BackendUnavailable without triton or on CPU tensors outside the interpreter.
    """
    m, n, k = _sizes(a, b, layout)
    if a.dim() != 2:
        raise NotImplementedError(
            f"the Triton matmul takes 2-D operands, got {a.dim()}-D: use backend torch for batches"
        )
    try:
        from flopcast.kernels import triton_matmul
    except ImportError as error:
        raise BackendUnavailable(f"backend triton: {error}") from error
    if triton_matmul.interpreted():
        if a.dtype == torch.bfloat16:
            raise NotImplementedError("bf16 is wrong in Triton's interpreter: use fp16 or fp32 there")
    elif not a.is_cuda:
        raise BackendUnavailable(
            "backend triton needs CUDA tensors (or TRITON_INTERPRET=1 set before triton is imported)"
        )
    if config is None:
        names = {torch.float32: "tf32" if tf32 else "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
        if a.dtype not in names:
            raise BackendUnavailable(f"backend triton: {a.dtype} is not supported (bf16, fp16, fp32 are)")
        shape = Gemm(m=m, n=n, k=k, dtype=names[a.dtype], layout=layout)
        config = config_for(shape, *_device_facts(a.device))
    return triton_matmul.launch(*_as_written(a, b, layout), config, tf32)


def _device_facts(device: torch.device) -> tuple[int, tuple[int, int]]:
    """(multiprocessors, compute capability); those of an H100 for the interpreter."""
    if device.type != "cuda":
        return 132, (9, 0)
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, (facts.major, facts.minor)


def matmul_reference(a: Tensor, b: Tensor, layout: str) -> Tensor:
    """The product in float64."""
    return torch.matmul(*_as_written(a.double(), b.double(), layout))


def _torch_backend(a: Tensor, b: Tensor, shape: Gemm) -> Tensor:
    if a.is_cuda and a.dtype == torch.float32:
        with matmul_precision(tf32=shape.dtype == "tf32"):
            return matmul_torch(a, b, shape.layout)
    if shape.dtype == "tf32":
        raise BackendUnavailable("tf32 exists on CUDA only: use fp32 on the CPU")
    return matmul_torch(a, b, shape.layout)


def _triton_backend(a: Tensor, b: Tensor, shape: Gemm) -> Tensor:
    return matmul_triton(a, b, shape.layout, tf32=shape.dtype == "tf32")


BACKENDS: Mapping[str, Callable[[Tensor, Tensor, Gemm], Tensor]] = MappingProxyType(
    {"torch": _torch_backend, "triton": _triton_backend}
)


def operands(shape: Gemm, device: torch.device | str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Standard-normal operands as stored. Zeros would flatter: 13% on an H200, through its clock."""
    if min(shape.m, shape.n, shape.k, shape.batch) < 1:
        raise ValueError(f"{shape.key}: m, n, k and batch must be at least 1")
    if shape.layout not in LAYOUTS:
        raise ValueError(f"unknown layout {shape.layout!r}: known are {', '.join(LAYOUTS)}")
    generator = torch.Generator(device=device).manual_seed(seed)
    batch = (shape.batch,) if shape.batch > 1 else ()
    size_a = (shape.m, shape.k) if shape.layout[0] == "n" else (shape.k, shape.m)
    size_b = (shape.k, shape.n) if shape.layout[1] == "n" else (shape.n, shape.k)
    dtype = torch_dtype(shape.dtype)
    return (
        torch.randn(batch + size_a, dtype=dtype, device=device, generator=generator),
        torch.randn(batch + size_b, dtype=dtype, device=device, generator=generator),
    )


def prepare(shape: Gemm, backend: str, operands: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A call without arguments that runs the product once, for c. Capturable in a CUDA graph once warm.

    Raises ValueError on an unknown backend, NotImplementedError or BackendUnavailable where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown matmul backend {backend!r}: known are {', '.join(BACKENDS)}")
    a, b = operands
    if backend == "triton" and shape.batch > 1:
        raise NotImplementedError("the Triton matmul has no batch: use backend torch for bmm")
    function = BACKENDS[backend]
    return lambda: function(a, b, shape)


def reference(operands: Sequence[Tensor], shape: Gemm) -> Tensor:
    """The product in fp64 for fp32 operands, in exact fp32 for 16-bit ones (their products are exact in fp32,
    and a sum over k = 16384 errs by 1e-5: 100 times under bf16's rounding)."""
    a, b = operands
    wider = higher_precision(a.dtype)
    with matmul_precision(tf32=False):
        return matmul_torch(a.to(wider), b.to(wider), shape.layout)


def tolerance(shape: Gemm) -> float:
    """Largest admissible max|c - ref| / max|ref| for operands of either sign around zero.

    Two ulp of the result's dtype (half an ulp is its own rounding; cuBLAS's split-K adds bf16 partial sums),
    4 of tf32's 2^-10 (inputs may be truncated), and fp32 accumulation over k. One lost term of a k = 1024 sum
    shows as 0.06 of max|ref|: bf16's 0.016 still catches it.
    """
    ulps, ulp = (4, 2.0**-10) if shape.dtype == "tf32" else (2, torch.finfo(torch_dtype(shape.dtype)).eps)
    return ulps * ulp + 8 * math.sqrt(shape.k) * 2.0**-24


def check(out: Tensor, ref: Tensor, operands: Sequence[Tensor], shape: Gemm) -> tuple[float, float]:
    """(relative error, tolerance); correct when error <= tolerance. A NaN or a wrong shape is infinite."""
    del operands  # the same call as attention.check, which needs them
    return max_relative(out, ref), tolerance(shape)
