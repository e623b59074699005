"""Products and convolutions in bf16 on processors without instructions for them, by way of fp32.

There torch multiplies one element after another: a product of 512 x 256 by 256 x 1024 takes 206 ms where fp32's takes
6 (two cores with AVX2), and a step of ResNet-18 on two images of 32 x 32 1.2 s for 0.13. The result is the same but for
the order of the sum, which is in fp32 either way. Only the process that asks is quickened; a module that is to run in
one of its own is run by `python -m tests.quick_bf16 MODULE ARGUMENTS`.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

_LIBRARY: list[torch.library.Library] = []  # lives as long as the process


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x


def _product(a: Tensor, b: Tensor, added: Tensor | None = None, beta: float = 0, alpha: float = 1) -> Tensor:
    """Of batches of matrices, by an operator that no model calls: those that are replaced would be called again, and a
    profiler would count others beside a model's own."""
    out = a.new_empty(len(a), a.shape[1], b.shape[2], dtype=_wide(a).dtype)
    onto = out if added is None else _wide(added)
    return torch.baddbmm(onto, _wide(a), _wide(b), beta=beta, alpha=alpha, out=out).to(a.dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _product(a[None], b[None])[0]


def _addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _product(a[None], b[None], added, beta, alpha)[0]


def _conv(x: Tensor, weight: Tensor, size: Any, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
    if x.dtype != torch.bfloat16:
        return torch.ops.aten._slow_conv2d_forward.output(x, weight, size, bias, stride, padding, output=x.new_empty(0))
    wide = torch.convolution(_wide(x), _wide(weight), _wide(bias), stride, padding, (1, 1), False, (0, 0), 1)
    return wide.to(x.dtype)


def _conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, size: Any, stride: Any, padding: Any, wanted: Any
) -> tuple[Tensor | None, ...]:
    if x.dtype == torch.bfloat16:
        bias = weight.shape[:1] if wanted[2] else None
        found = torch.ops.aten.convolution_backward(
            _wide(grad), _wide(x), _wide(weight), bias, stride, padding, (1, 1), False, (0, 0), 1, wanted
        )
        return tuple(None if one is None else one.to(x.dtype) for one in found)
    made = [like.new_empty(shape) for like, shape in ((x, x.shape), (weight, weight.shape), (x, weight.shape[:1]))]
    names = ("grad_input", "grad_weight", "grad_bias")
    torch.ops.aten._slow_conv2d_backward.grad_input(
        grad, x, weight, size, stride, padding, **dict(zip(names, made, strict=True))
    )
    return tuple(one if is_wanted else None for one, is_wanted in zip(made, wanted, strict=True))


OWN = (
    ("mm", _mm), ("bmm", _product), ("addmm", _addmm), ("_slow_conv2d_forward", _conv),
    ("_slow_conv2d_backward.output_mask", _conv_backward),
)  # fmt: skip


def quicken() -> None:
    """Does nothing where the processor multiplies in bf16."""
    if _LIBRARY or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's own are overridden
        for name, own in OWN:
            library.impl(name, own, "CPU")
    _LIBRARY.append(library)


if __name__ == "__main__":
    quicken()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
