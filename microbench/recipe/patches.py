"""Runs a real step on other kernels: Triton's in place of cuBLAS's, or a chosen SDPA backend.

Matrix products are replaced at the dispatcher, where `aten::mm` meets the device: autograd, autocast and every
other operation stay as they are, so that a patched step launches the same op stream as a plain one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopcast.kernels.matmul import matmul_op
from flopcast.kernels.matmul_chosen import BACKENDS as MATMULS
from flopcast.kernels.matmul_chosen import Choice, backend_of, remember

ATTENTIONS = ("sdpa", "sdpa-flash", "sdpa-cudnn", "triton")
_SDPA = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}


def attention_implementation(attention: str) -> str:
    """Returns transformers' name for this attention; Triton's is registered with transformers first.

    Raises ValueError for an unknown name.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention {attention!r}: valid are {', '.join(ATTENTIONS)}")
    if attention == "triton":
        from flopcast.kernels.attention_transformers import register_with_transformers

        return register_with_transformers()
    return "sdpa"


@contextmanager
def patched(matmul: str | Choice = "torch", attention: str = "sdpa", device_type: str = "cuda") -> Iterator[None]:
    """Runs the body of the `with` statement on these kernels, in every thread of the process; then restores the former
    ones.

    `matmul` may be a function that names the backend of each product (the profile's: `gpu.library.fastest`).
    `attention` "triton" needs a model built with `attention_implementation`. Raises ValueError for unknown names.
    """
    if isinstance(matmul, str) and matmul not in MATMULS:
        raise ValueError(f"matmul {matmul!r}: valid are {', '.join(MATMULS)}, or a function of a product's shape")
    attention_implementation(attention)
    with ExitStack() as stack:
        if attention in _SDPA:
            stack.enter_context(sdpa_kernel([_SDPA[attention]]))
        if matmul != "torch":
            choice = matmul if isinstance(matmul, str) else remember(matmul)
            library = torch.library.Library("aten", "IMPL")
            stack.callback(library._destroy)
            with warnings.catch_warnings():  # torch warns that a kernel is overridden, as intended
                warnings.simplefilter("ignore", UserWarning)
                library.impl("mm", partial(_mm, choice), device_type.upper())
        yield


def _mm(choice: str, a: Tensor, b: Tensor) -> Tensor:
    """Runs aten::mm on the backend of the choice for 16-bit operands, and on the library's for others (rotary tables in
    fp32)."""
    layout = ("n" if _is_row_major(a) else "t") + ("n" if _is_row_major(b) else "t")
    is_for_triton = a.dtype in (torch.bfloat16, torch.float16)
    if not is_for_triton or backend_of(choice, a.shape[0], b.shape[1], a.shape[1], a.dtype, layout) == "torch":
        return torch.mm(a, b, out=a.new_empty((a.shape[0], b.shape[1])))  # `mm.out` is not overridden
    a, b = a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT
    return _triton_product(a, b, layout)


def _triton_product(a: Tensor, b: Tensor, layout: str) -> Tensor:
    product: Tensor = matmul_op.replayed(a, b, layout, False)  # where the operator would call it: autograd is done with
    return product


def _is_row_major(x: Tensor) -> bool:
    """Whether an operand is row-major, by the rule of `lower`; an operand that is neither row- nor column-major is also
    classified by its strides."""
    return x.stride(1) == 1 or not (x.stride(0) == 1 or x.shape[0] == 1)
