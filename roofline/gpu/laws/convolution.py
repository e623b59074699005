"""How long a convolution takes: the products that it amounts to, and moving its tensors. numpy only.

cuDNN multiplies matrices (implicit GEMM): a product for the result, one for the gradient of the input and one for that
of the weights, each of the same FLOPs. Its 16-bit kernels require channels last: other tensors it converts before and
after, in kernels of their own, of which the weights' have few blocks. A window of one place needs no conversion where
an image's places are a multiple of 8, so that its rows are aligned. None of this overlaps, so the times add up.

Depthwise convolutions have no product: cuDNN's kernels (channels last) and torch's (else) take a time for each number
and for each multiplication. For the gradient of the weights torch runs a block per weight, whose eight warps take an
image each and 32 of its places at a time.

How full the last round of blocks is shows in none of the 427 fitted rows of an H200, as a factor on the FLOPs (with it
errors left out are 20% at the 90th percentile of dense ones instead of 16%) or as an input of the residual: small calls
divide their sums, which a floor and a rate describe as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopcast.kernels.shapes import DTYPE_BYTES
from flopcast.roofline.gpu.laws.law import Law, Params
from flopcast.roofline.gpu.laws.smooth import Array, soft_max, trailing_zeros
from flopcast.roofline.stream.lowering.variants import ConvVariant

PADDED = 8.0  # fewer channels are padded to so many
OVERLAP = 2.0  # exponent of the smooth maximum of a product's FLOPs and its bytes
WARPS, LANES = 8.0, 32.0  # of a block of torch's kernel for the weights of depthwise convolutions


@dataclass(frozen=True)
class Sizes:
    """The sizes of convolutions, an array of each: `places` are those of an image, `taps` those of a window."""

    images: Array
    channels: Array
    results: Array  # channels of the result
    places: Array
    result_places: Array
    taps: Array
    groups: Array
    has_bias: Array

    @classmethod
    def of(cls, features: Array) -> Sizes:
        """features[rows, sizes], in log2 but for the last."""
        images, channels, results, places, result_places, taps, groups = np.exp2(features[:, :-1]).T
        return cls(images, channels, results, places, result_places, taps, groups, features[:, -1])

    @property
    def input(self) -> Array:
        """How many numbers the input has, its channels padded."""
        return self.images * np.maximum(self.channels, PADDED) * self.places

    @property
    def met(self) -> Array:
        """How many of them a window meets: of windows of one place every second way, a quarter."""
        return self.input * np.minimum(self.taps * self.result_places / self.places, 1.0)

    @property
    def output(self) -> Array:
        return self.images * self.results * self.result_places

    @property
    def weights(self) -> Array:
        return self.results * np.maximum(self.channels / self.groups, PADDED) * self.taps


def log_seconds(variant: ConvVariant, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
    """log of seconds. features: log2 of images, channels, channels of the result, places of either, taps and groups,
    and whether there is a bias; bytes and FLOPs follow from them."""
    sizes, item = Sizes.of(features), DTYPE_BYTES.get(variant.dtype, 2)
    work = _depthwise if variant.form.startswith("depthwise") else _products
    passes = 2.0 if variant.direction == "fwd" else 1.0  # a bias is added in place, its gradient is a sum
    bias = sizes.has_bias * sizes.output * item * passes / params["bias_bandwidth"]
    return np.asarray(np.log(params["floor"] + work(variant, params, sizes, item) + bias))


def _products(variant: ConvVariant, params: Params, sizes: Sizes, item: int) -> Array:
    computing = 2.0 * sizes.output * sizes.weights / sizes.results / params["rate"]
    seconds: Array = np.zeros(len(computing))
    products = {"bwd": ("dgrad", "wgrad")}.get(variant.direction, (variant.direction,))
    for product in products:
        read = sizes.input if product == "dgrad" else sizes.met
        moving = item * (read + sizes.output + sizes.weights) / params["bandwidth"]
        seconds = seconds + soft_max(computing, moving, OVERLAP)
    if variant.layout == "nhwc":
        return seconds
    converting = 2.0 * item * (sizes.input + sizes.output) / params["conversion_bandwidth"]
    if variant.form.startswith("point"):
        is_aligned = trailing_zeros(np.log2(sizes.places)) >= 3.0
        return np.asarray(seconds + len(products) * np.where(is_aligned, 0.0, params["conversion_floor"] + converting))
    return seconds + len(products) * (converting + 2.0 * item * sizes.weights / params["weight_bandwidth"])


def _depthwise(variant: ConvVariant, params: Params, sizes: Sizes, item: int) -> Array:
    given, made = sizes.images * sizes.channels * sizes.places, sizes.output
    seconds = item * (given + made) / params["bandwidth"]
    # cuDNN's kernels take a stride's share of what they read again, torch's a thread for each result
    each = np.sqrt(given * made) if variant.layout == "nhwc" else made
    seconds = seconds + each / params["result_rate"]
    if variant.direction == "fwd":
        return np.asarray(seconds + sizes.taps * each / params["tap_rate"])
    weights = sizes.results * sizes.taps
    seconds = seconds + given * (1.0 / params["input_rate"] + sizes.taps / params["input_tap_rate"])
    seconds = seconds + weights * params["each"]
    if variant.layout == "nhwc":
        return np.asarray(seconds + sizes.taps * each / params["tap_rate"])
    turns = np.ceil(sizes.images / WARPS) * np.ceil(sizes.result_places / LANES)
    return np.asarray(seconds + soft_max(weights * turns * WARPS * LANES / params["tap_rate"], turns * params["turn"]))


def inputs(variant: ConvVariant, params: Params, features: Array) -> Array:
    """The residual's inputs: images, channels and how many more the result has, places of the result, stride, taps."""
    images, channels, results, places, result_places, taps, _, _ = features.T
    return np.column_stack([images, channels, results - channels, result_places, places - result_places, taps])


def is_rising(params: Params) -> bool:
    return True


LAW = Law(frozenset({"floor", "bandwidth", "bias_bandwidth"}), log_seconds, inputs, is_rising=is_rising)
