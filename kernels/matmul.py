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
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flopcast.kernels import matmul_law, matmul_table
from flopcast.kernels.matmul_configs import GLUON, MatmulConfig, pointer_tiles
from flopcast.kernels.matmul_configs import shared_memory_limit as shared_memory_limit  # for other kernels
from flopcast.kernels.operators import operator
from flopcast.kernels.references import (
    BackendUnavailable,
    higher_precision,
    matmul_precision,
    max_relative,
    require_known,
    standard_normal,
    torch_dtype,
)
from flopcast.kernels.shapes import Gemm

LAYOUTS = ("nt", "nn", "tn", "tt")


def candidates(dtype: str, capability: tuple[int, int] = (9, 0)) -> tuple[MatmulConfig, ...]:
    """Every tile of any kernel that `config_for` may return for this dtype on this part; it may split them."""
    of_copies = matmul_law.fitted().tiles if capability[0] == 9 and dtype in ("bf16", "fp16") else ()
    return of_copies + pointer_tiles(dtype, capability)


def config_for(
    shape: Gemm, sm_count: int, capability: tuple[int, int] = (9, 0), *, tma: bool = False, device: str = ""
) -> MatmulConfig:
    """What `matmul_triton` takes for a shape: from the device's table, else by the law of tiles (`matmul_table`).

    `tma`: the operands allow tensor-memory copies. `device`: as the driver calls it.
    """
    return _chosen(shape, sm_count, capability, tma and capability[0] == 9, device)


@lru_cache(maxsize=4096)
def _chosen(shape: Gemm, sm_count: int, capability: tuple[int, int], tma: bool, device: str) -> MatmulConfig:
    table = matmul_table.find(device, _triton_version()) if tma and device else None
    return matmul_table.choose(shape, sm_count, capability, tma=tma, table=table)


@lru_cache(maxsize=1)
def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


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
    a: Tensor, b: Tensor, layout: str, *, tf32: bool = False, config: MatmulConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The Triton kernels; `config` overrides `config_for`; `out`, contiguous [m, n], is written and returned.

    Raises NotImplementedError on a batch, or bf16 in Triton's interpreter (its tl.dot multiplies raw
    bits), BackendUnavailable without triton or on CPU tensors outside the interpreter, ValueError where `config`
    asks for tensor-memory copies that the operands rule out.
    """
    m, n, k = _sizes(a, b, layout)
    if a.dim() != 2:
        raise NotImplementedError(
            f"the Triton matmul takes 2-D operands, got {a.dim()}-D: use backend torch for batches"
        )
    try:
        from flopcast.kernels import triton_matmul, triton_matmul_tma
    except ImportError as error:
        raise BackendUnavailable(f"backend triton: {error}") from error
    interpreted = triton_matmul.interpreted()
    if interpreted:
        if a.dtype == torch.bfloat16:
            raise NotImplementedError("bf16 is wrong in Triton's interpreter: use fp16 or fp32 there")
    elif not a.is_cuda:
        raise BackendUnavailable(
            "backend triton needs CUDA tensors (or TRITON_INTERPRET=1 set before triton is imported)"
        )
    if out is not None and (out.shape != (m, n) or out.dtype != a.dtype or not out.is_contiguous()):
        raise ValueError(f"out is {out.dtype}{tuple(out.shape)}: valid is {a.dtype}({m}, {n}), contiguous")
    if min(m, n, k) == 0:
        return torch.zeros((m, n), dtype=a.dtype, device=a.device) if out is None else out.zero_()
    sm_count, capability, name = _device_facts(a.device)
    suited = capability[0] == 9 and triton_matmul_tma.suits(a) and triton_matmul_tma.suits(b)
    if config is None:
        names = {torch.float32: "tf32" if tf32 else "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
        if a.dtype not in names:
            raise BackendUnavailable(f"backend triton: {a.dtype} is not supported (bf16, fp16, fp32 are)")
        shape = Gemm(m=m, n=n, k=k, dtype=names[a.dtype], layout=layout)
        # the interpreter runs no kernel in Gluon: there the pointers' kernel is the rule
        config = config_for(shape, sm_count, capability, tma=suited and not interpreted, device=name)
    if config.kind != "pointer":
        if not suited:
            raise ValueError(
                f"{config.key} needs sm_90 and 16-bit operands with contiguous rows at multiples of 16 bytes, got "
                f"{a.dtype} with strides {a.stride()} and {b.stride()}: take a configuration of kind 'pointer'"
            )
        if config.kind in GLUON:
            from flopcast.kernels import triton_matmul_gluon

            return triton_matmul_gluon.launch(a, b, layout, m, n, k, config, sm_count, out)
        return triton_matmul_tma.launch(a, b, layout, m, n, k, config, sm_count, out)
    pdl = triton_matmul_tma.PDL and capability[0] == 9
    return triton_matmul.launch(*_as_written(a, b, layout), config, tf32, out, pdl)


@lru_cache(maxsize=16)
def _device_facts(device: torch.device) -> tuple[int, tuple[int, int], str]:
    """(multiprocessors, compute capability, name); those of an H100, unnamed, for the interpreter."""
    if device.type != "cuda":
        return 132, (9, 0), ""
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, (facts.major, facts.minor), facts.name


# --- Registration: torch.compile, fake tensors, autograd and FLOP counting see one operation


@operator("flopcast::triton_matmul")
def matmul_op(a: Tensor, b: Tensor, layout: str, tf32: bool) -> Tensor:
    return matmul_triton(a, b, layout, tf32=tf32)


@matmul_op.register_fake
def _(a: Tensor, b: Tensor, layout: str, tf32: bool) -> Tensor:
    return a.new_empty(_sizes(a, b, layout)[:2])


def save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keeps what `gradients_by` needs of an operator's arguments: a, b, layout and one more."""
    a, b, ctx.layout, ctx.option = inputs
    ctx.save_for_backward(a, b)


# layout -> how a's gradient comes of (g, b) and b's of (g, a): (layout, whether g stands first)
GRADIENTS = {
    "nt": (("nn", True), ("tn", True)),
    "nn": (("nt", True), ("tn", False)),
    "tn": (("nt", False), ("nn", False)),
    "tt": (("tt", False), ("tt", True)),
}


def gradients_by(product: Callable[..., Any]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of an operator product(a, b, layout, option), by the same operator."""

    def gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        found: list[Tensor | None] = []
        for needed, other, (layout, g_first) in zip(
            ctx.needs_input_grad[:2], (b, a), GRADIENTS[ctx.layout], strict=True
        ):
            pair = (g, other) if g_first else (other, g)
            found.append(product(*pair, layout, ctx.option) if needed else None)
        return found[0], found[1], None, None

    return gradients


matmul_op.register_autograd(gradients_by(matmul_op), setup_context=save_operands)


@register_flop_formula(torch.ops.flopcast.triton_matmul)
def product_flops(
    a_shape: Sequence[int], b_shape: Sequence[int], layout: str, option: Any, out_shape: Any = None, **_: Any
) -> int:
    m, k = a_shape if layout[0] == "n" else reversed(a_shape)
    return 2 * m * k * (b_shape[1] if layout[1] == "n" else b_shape[0])


def triton_matmul(a: Tensor, b: Tensor, layout: str = "nn", *, tf32: bool = False) -> Tensor:
    """Differentiable `matmul_triton`, of 2-D operands as stored. Errors as it has."""
    out: Tensor = matmul_op(a, b, layout, tf32)
    return out


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
    require_known("layout", shape.layout, LAYOUTS)
    batch = (shape.batch,) if shape.batch > 1 else ()
    size_a = (shape.m, shape.k) if shape.layout[0] == "n" else (shape.k, shape.m)
    size_b = (shape.k, shape.n) if shape.layout[1] == "n" else (shape.n, shape.k)
    a, b = standard_normal((batch + size_a, batch + size_b), shape.dtype, device, seed)
    return a, b


def prepare(shape: Gemm, backend: str, operands: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A call without arguments that runs the product once, for c. Capturable in a CUDA graph once warm.

    Raises ValueError on an unknown backend, NotImplementedError or BackendUnavailable where it cannot run.
    """
    require_known("matmul backend", backend, BACKENDS)
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
