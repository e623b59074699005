"""A differentiable product that runs, at each call, on the backend that a function names for its shape.

    name = remember(lambda shape: "triton" if shape.m >= 1024 else "torch")
    c = chosen_matmul(a, b, "nt", name)          # its two products in the backward are chosen likewise

The choice is made inside one operator, by the sizes of its operands, so that a graph that torch.compile made holds for
every shape and every GPU. Each shape is asked about once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.flop_counter import register_flop_formula

from flopcast.kernels.matmul import GRADIENTS, gradients_by, matmul_triton, product_flops, save_operands
from flopcast.kernels.matmul import _sizes as sizes_of
from flopcast.kernels.operators import operator, unobserved
from flopcast.kernels.references import require_known
from flopcast.kernels.rowwise import autocast_dtype
from flopcast.kernels.shapes import Gemm

BACKENDS = ("torch", "triton")
Choice = Callable[[Gemm], str]
_CHOICES: dict[str, Choice] = {name: lambda shape, name=name: name for name in BACKENDS}  # type: ignore[misc]
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def remember(choice: Choice) -> str:
    """The name by which graphs refer to a choice; the same one for the same function."""
    name = next((name for name, known in _CHOICES.items() if known is choice), f"choice{len(_CHOICES)}")
    _CHOICES[name] = choice
    return name


@lru_cache(maxsize=4096)
def backend_of(name: str, m: int, n: int, k: int, dtype: torch.dtype, layout: str) -> str:
    """The backend of a product as stored, by the choice of this name. Raises ValueError where the choice names none."""
    if not min(m, n, k) or dtype not in _DTYPES:
        return "torch"
    backend = _CHOICES[name](Gemm(m=m, n=n, k=k, dtype=_DTYPES[dtype], layout=layout))
    require_known("matmul backend", backend, BACKENDS)
    return backend


# As `matmul_torch`, of 2-D operands that fit together: what torch does with them takes the host half the time.
_BY_TORCH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nt": F.linear,
    "nn": torch.mm,
    "tn": lambda a, b: torch.mm(a.t(), b),
    "tt": lambda a, b: torch.mm(a.t(), b.t()),
}


@lru_cache(maxsize=4096)
def _backend(
    name: str, a: torch.Size, b: torch.Size, a_dtype: torch.dtype, b_dtype: torch.dtype, layout: str
) -> str:  # fmt: skip
    """The backend of operands of these sizes. Raises ValueError where they do not fit together."""
    sizes = sizes_of(torch.empty(a, dtype=a_dtype, device="meta"), torch.empty(b, dtype=b_dtype, device="meta"), layout)
    if len(a) != 2:
        raise ValueError(f"chosen_matmul takes 2-D operands, got {tuple(a)} and {tuple(b)}")
    return backend_of(name, *sizes, a_dtype, layout)


@operator("flopcast::chosen_matmul")
def chosen_matmul_op(a: Tensor, b: Tensor, layout: str, choice: str) -> Tensor:
    if _backend(choice, a.shape, b.shape, a.dtype, b.dtype, layout) == "triton":
        return matmul_triton(a, b, layout)
    return _BY_TORCH[layout](a, b)


@chosen_matmul_op.register_fake
def _(a: Tensor, b: Tensor, layout: str, choice: str) -> Tensor:
    return a.new_empty(sizes_of(a, b, layout)[:2])


chosen_matmul_op.register_autograd(gradients_by(chosen_matmul_op), setup_context=save_operands)
register_flop_formula(torch.ops.flopcast.chosen_matmul)(product_flops)


def chosen_matmul(a: Tensor, b: Tensor, layout: str, choice: str) -> Tensor:
    """The product of 2-D operands of one dtype as stored, under autocast in its dtype, on the backend that a choice
    says, by the name from `remember`, "torch" or "triton". Raises ValueError on operands that do not fit together."""
    dtype = autocast_dtype(a)
    if dtype is not None:
        a, b = a.to(dtype), b.to(dtype)
    direct = not is_dynamo_compiling() and unobserved()
    if direct and _all_by_torch(choice, a.shape, b.shape, a.dtype, b.dtype, layout):
        return _BY_TORCH[layout](a, b)
    out: Tensor = chosen_matmul_op(a, b, layout, choice)
    return out


@lru_cache(maxsize=4096)
def _all_by_torch(
    name: str, a: torch.Size, b: torch.Size, a_dtype: torch.dtype, b_dtype: torch.dtype, layout: str
) -> bool:  # fmt: skip
    """Whether the product and both of its backward are torch's, so that torch may differentiate it, too: a call is then
    its own function and this look-up."""
    m, n, _ = sizes_of(
        torch.empty(a, dtype=a_dtype, device="meta"), torch.empty(b, dtype=b_dtype, device="meta"), layout
    )
    gradient = torch.Size((m, n))
    wanted = [(a, b, layout)]
    for other, (of, gradient_first) in zip((b, a), GRADIENTS[layout], strict=True):
        wanted.append((gradient, other, of) if gradient_first else (other, gradient, of))
    return all(_backend(name, one, two, a_dtype, b_dtype, of) == "torch" for one, two, of in wanted)
