"""The laws of kernel times by kind. A law is a module with a `Law`, and a line here.

memory      kernels that move bytes: floor + bytes / bandwidth
gemm        matrix products by the matrix library's tiles, learnt or the cheapest; of unaligned rows `gemm_unaligned.py`
tiles       matrix products on GPUs before Hopper, from their datasheets
tuned       products of Triton's kernels, by the configurations that they pick
attention   thread blocks scheduled on the multiprocessors
conv        convolutions as matrix products, and the conversion of their tensors' layouts

Each has a few parameters, fitted per surface (`fit/surface.py`).
"""

from __future__ import annotations

from flopcast.roofline.gpu.laws import attention, convolution, gemm, gemm_before_hopper, gemm_triton, memory
from flopcast.roofline.gpu.laws.law import Law
from flopcast.roofline.stream.lowering.variants import CallVariant, Variant

LAWS: dict[str, Law] = {
    "memory": memory.LAW,
    "gemm": gemm.LAW,
    "tiles": gemm_before_hopper.LAW,
    gemm_triton.KIND: gemm_triton.LAW,
    "attention": attention.LAW,
    "conv": convolution.LAW,
}


def kind_of(op_class: str, variant: Variant | None = None) -> str:
    """The law of an operation class, or of one of its variants: attention of one token reads a cache, and no more."""
    return op_class if op_class in LAWS and not isinstance(variant, CallVariant) else "memory"
