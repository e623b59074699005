"""1x1 convolutions of stride 1: the matrix products that they are, and the ways in which cuDNN runs each.

A window of one place sums over the channels of that place, so that the result is a product of matrices: channels last
of one with a row for each place of all images, channels first of one of each image. So are the gradients of the input
and of the weights. cuDNN hands such a product to cuBLAS ("direct"), or runs a kernel that requires channels last and
converts the tensors before and after ("converted"). Which of the two, its heuristics decide for each product, and not
always for the faster: on an H200 512 results of 2,048 channels and 49 places take 60 us for 12 images, which stay as
they lie, and 16 us for 16, which are converted. They are also called pointwise, here the word for element-wise kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.stream.lowering.variants import ConvVariant, Variant

DIRECT, CONVERTED = ALGORITHMS = ("direct", "converted")
FORMS = ("point", "unaligned", "pooled", "pooled-few")
SIZES = 8  # features of a convolution; those of a direct product have one more, log2 of the matrix product's seconds


def is_1x1(variant: Variant) -> TypeGuard[ConvVariant]:
    """Whether work of this variant is a whole 1x1 convolution of stride 1."""
    return isinstance(variant, ConvVariant) and variant.form in FORMS and not variant.algorithm


def directions(variant: ConvVariant) -> tuple[str, ...]:
    """The products that a convolution amounts to, in the order in which torch asks cuDNN for them."""
    return ("dgrad", "wgrad") if variant.direction == "bwd" else (variant.direction,)


def ways_of(variant: ConvVariant) -> list[list[ConvVariant]]:
    """The variants of each product of a convolution, one for each algorithm."""
    return [
        [replace(variant, direction=direction, algorithm=algorithm) for algorithm in ALGORITHMS]
        for direction in directions(variant)
    ]


def wholes_of(variant: Variant) -> list[Variant]:
    """The variants that are measured where this one is: of a product of a convolution those that it is a part of."""
    if not isinstance(variant, ConvVariant) or not variant.algorithm:
        return [variant]
    whole = replace(variant, algorithm="")
    return [whole] if variant.direction == "fwd" else [whole, replace(whole, direction="bwd")]


def product_of(variant: ConvVariant, features: tuple[float, ...]) -> Gemm:
    """The product of matrices, [m, k] by [k, n], that a convolution's result or one of its gradients is."""
    images, channels, results, places = (max(round(2**size), 1) for size in features[:4])
    if variant.layout == "nchw" and places > 1:  # of each image, [channels, places]
        m, n, k, layout = {
            "fwd": (results, places, channels, "nn"),
            "dgrad": (channels, places, results, "tn"),
            "wgrad": (results, channels, places, "nt"),
        }[variant.direction]
        return Gemm(m=m, n=n, k=k, layout=layout, dtype=variant.dtype, batch=images)
    rows = images * places
    m, n, k, layout = {
        "fwd": (rows, results, channels, "nt"),
        "dgrad": (rows, channels, results, "nn"),
        "wgrad": (results, channels, rows, "tn"),
    }[variant.direction]
    return Gemm(m=m, n=n, k=k, layout=layout, dtype=variant.dtype)
