"""How long a convolution takes: the products that it amounts to, and moving its tensors. numpy only.

cuDNN multiplies matrices (implicit GEMM): a product for the result, one for the gradient of the input and one for that
of the weights, each of the same FLOPs. Its 16-bit kernels require channels last: other tensors it converts before and
after, in kernels of their own, of which the weights' have few blocks. None of this overlaps, so the times add up.

Of a 1x1 convolution the result is a product of matrices as the tensors lie, of which a profile has the law. cuDNN
converts some and not others, so each way has surfaces of its own (`profile/conv_1x1.py`). The gradient of the
weights of images that lie as they are leaves a sum in fp32 for each, which a kernel adds up: of 48 images and 384 x
2,304 channels 170 MB, most of its 146 us on an H200.

Depthwise convolutions have no product: cuDNN's kernels (channels last) and torch's (else) take a time for each number
and for each multiplication. For the gradient of the weights torch runs a block per weight, whose eight warps take an
image each and 32 of its places at a time (`_turns`).

The gradient of a bias is a sum of torch's, channels last down columns (`reduction.py`): of 192 channels of 64 images of
1,296 places, whose 32 MB it reads at 0.3 TB/s, most of it is the last block's sum of 264 parts.

How full the last round of blocks is shows in none of the 427 fitted rows of an H200, as a factor on the FLOPs (with it
errors left out are 20% at the 90th percentile of dense ones instead of 16%) or as an input of the residual: small calls
divide their sums, which a floor and a rate describe as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopcast.kernels.shapes import DTYPE_BYTES
from flopcast.roofline.gpu.laws import reduction
from flopcast.roofline.gpu.laws.law import Law, Params
from flopcast.roofline.gpu.laws.smooth import Array, soft_max, trailing_zeros
from flopcast.roofline.stream.lowering.conv_1x1 import DIRECT
from flopcast.roofline.stream.lowering.variants import ConvVariant

PADDED = 8.0  # fewer channels are padded to so many
OVERLAP = 2.0  # exponent of the smooth maximum of a product's FLOPs and its bytes
PARTIAL = 4 * 2  # bytes of a weight's gradient of one image, in fp32, written and read
# A block of cuDNN's depthwise forward takes its time however few there are: on an H200 4 us for a result of 5 x 5, 5.5
# of 7 x 7, 7 of 10 x 10 and of 14 x 14 alike, twice as much with windows of 25 places. So the greater of that and of
# the work counts: 45 held-out rows were 10.5% off at the median with the sum, so they are 5.3%.
ROWS, WAIT = 10.0, 3.0
# Fewer images of one place than a tile has rows get other kernels: an H200 takes 12 us for 40 images of 28 channels and
# 672 results, which it converts, and 5 for 64. So the residual takes them to be as far apart as by a factor of 2^LEAP.
TILE, LEAP = 64.0, 8.0
WARPS, LANES = 8.0, 32.0  # of a block of torch's kernel for the weights of depthwise convolutions
# What an image and a block cost there besides, in turns of a warp: 0.28 and 2.05 us on an H200, a turn 0.365.
IMAGE_TURNS, BLOCK_TURNS = 0.8, 5.6


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
        """features[rows, sizes], in log2 but for the eighth."""
        images, channels, results, places, result_places, taps, groups = np.exp2(features[:, :7]).T
        return cls(images, channels, results, places, result_places, taps, groups, features[:, 7])

    @property
    def input(self) -> Array:
        """How many numbers the input has, its channels padded."""
        return self.images * np.maximum(self.channels, PADDED) * self.places

    @property
    def met(self) -> Array:
        """How many of them a window meets: of windows of one place every second way, a quarter."""
        return self.input * np.minimum(self.taps * self.result_places / self.places, 1.0)

    @property
    def stride(self) -> Array:
        """Places from one window to the next, from the sides of squares: windows reach half as far beyond an image as
        those of a result of its size would, give or take as much."""
        side, result_side, window = (np.sqrt(size) for size in (self.places, self.result_places, self.taps))
        between = (side - (window + 1.0) / 2.0) / np.maximum(result_side - 1.0, 1.0)
        return np.where(result_side < 1.5, 1.0, np.maximum(np.round(between), 1.0))

    @property
    def output(self) -> Array:
        return self.images * self.results * self.result_places

    @property
    def weights(self) -> Array:
        return self.results * np.maximum(self.channels / self.groups, PADDED) * self.taps


def log_seconds(variant: ConvVariant, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
    """log of seconds. features: log2 of images, channels, channels of the result, places of either, taps and groups,
    and whether there is a bias; bytes and FLOPs follow from them. Of a direct product of a 1x1 convolution also the
    log2 of the seconds of the same product of matrices, by the law of these."""
    sizes, item = Sizes.of(features), DTYPE_BYTES.get(variant.dtype, 2)
    if variant.algorithm == DIRECT:
        seconds = _direct(variant, params, sizes, np.exp2(features[:, 8]))
    else:
        work = _depthwise if variant.form.startswith("depthwise") else _products
        seconds = work(variant, params, sizes, item)
    return np.asarray(np.log(seconds + _bias(variant, params, sizes, item)))


def _direct(variant: ConvVariant, params: Params, sizes: Sizes, product: Array) -> Array:
    """Seconds of a product whose tensors stay as they lie, `product` seconds by the law of products of matrices."""
    seconds = params["floor"] + params["like"] * product
    if "partial_bandwidth" in params:
        seconds = seconds + PARTIAL * sizes.images * sizes.weights / params["partial_bandwidth"]
    return np.asarray(seconds)


def _bias(variant: ConvVariant, params: Params, sizes: Sizes, item: int) -> Array:
    passes = 2.0 if variant.direction == "fwd" else 1.0  # it is added in place, its gradient is a sum
    seconds = sizes.output * item * passes / params["bias_bandwidth"]
    if "merge" in params:
        plan = reduction.columns(
            np.round(sizes.results), np.round(sizes.images * sizes.result_places), params["sm_count"]
        )
        seconds = seconds + params["split"] + params["load"] * plan.loads + params["merge"] * plan.merged
    return np.asarray(sizes.has_bias * seconds)


def _products(variant: ConvVariant, params: Params, sizes: Sizes, item: int) -> Array:
    computing = 2.0 * sizes.output * sizes.weights / sizes.results / params["rate"]
    seconds: Array = np.full(len(computing), params["floor"])
    products = {"bwd": ("dgrad", "wgrad")}.get(variant.direction, (variant.direction,))
    for product in products:
        read = sizes.input if product == "dgrad" else sizes.met
        numbers = item * (read + sizes.output + sizes.weights)
        one = soft_max(computing, numbers / params["bandwidth"], OVERLAP)
        if "conversion_bandwidth" in params:
            one = one + _conversion(params, sizes, item) + params.get("conversion_floor", 0.0)
        seconds = seconds + one
    if "padding_bandwidth" in params:
        seconds = seconds + item * sizes.input / params["padding_bandwidth"]
    return seconds


def _conversion(params: Params, sizes: Sizes, item: int) -> Array:
    """Seconds in which the bytes of tensors are converted for a product."""
    seconds = 2.0 * item * (sizes.input + sizes.output) / params["conversion_bandwidth"]
    if "weight_bandwidth" in params:
        seconds = seconds + 2.0 * item * sizes.weights / params["weight_bandwidth"]
    return np.asarray(seconds)


def _depthwise(variant: ConvVariant, params: Params, sizes: Sizes, item: int) -> Array:
    given, made = sizes.images * sizes.channels * sizes.places, sizes.output
    is_cudnn = variant.layout == "nhwc"
    seconds = item * (given + made) / params["bandwidth"]
    # cuDNN's kernels take twice as long for a result of every second place, torch's a thread for each result
    each = made * sizes.stride if is_cudnn else made
    seconds = seconds + each / params["result_rate"]
    if is_cudnn or variant.direction == "fwd":
        seconds = seconds + sizes.taps * each / params["tap_rate"]
    weights = sizes.results * sizes.taps
    if variant.direction != "fwd":
        seconds = seconds + given * (1.0 / params["input_rate"] + sizes.taps / params["input_tap_rate"])
        seconds = seconds + weights * params["each"]
    if is_cudnn and variant.direction == "fwd" and "turn" in params:
        rows = np.minimum(np.sqrt(sizes.result_places), ROWS)
        return soft_max(seconds, params["floor"] + params["turn"] * sizes.taps * rows, WAIT)
    seconds = seconds + params["floor"]
    if is_cudnn or variant.direction == "fwd":
        return np.asarray(seconds)
    turns = _turns(sizes)
    sms = params.get("sm_count", 1.0)
    blocks = np.ceil(np.round(weights) / sms) * sms
    return np.asarray(seconds + soft_max(blocks * turns * WARPS * LANES / params["tap_rate"], turns * params["turn"]))


def _turns(sizes: Sizes) -> Array:
    """Turns of a warp of torch's kernel for the weights of depthwise convolutions, one after another.

    Each lane takes a place of 32. The compiler unrolls that loop by four, and what is left by two and one: lanes that
    have one place more than the others then take turns of their own, up to four. 36 places take 3 turns so, 64 take 2,
    100 take 7 and 144 take 5 (H200: 1.6, 1.1, 3.4 and 2.4 us for an image)."""
    places = np.round(sizes.result_places)
    whole = np.floor(places / LANES)
    more = np.where(whole % 4 == 3, 4.0, np.where(whole % 2 == 1, 2.0, 1.0))
    turns = whole + np.where(places % LANES > 0, more, 0.0)
    return np.asarray(np.ceil(np.round(sizes.images) / WARPS) * (turns + IMAGE_TURNS) + BLOCK_TURNS)


def inputs(variant: ConvVariant, params: Params, features: Array) -> Array:
    """The residual's inputs: images (channels last, where a product has a row for each place, rows), channels and how
    many more the result has, places of the result, stride, taps; in place of taps, of rows that are not aligned by how
    many bytes they are, of images of one place whether they fill a tile of 64."""
    images, channels, results, places, result_places, taps = features[:, :6].T
    last = taps
    if variant.form.startswith("unaligned"):
        last = trailing_zeros(places)
    elif variant.form.startswith("pooled"):
        last = LEAP * (images >= np.log2(TILE))
    rows = images + result_places if variant.layout == "nhwc" else images
    return np.column_stack([rows, channels, results - channels, result_places, places - result_places, last])


def is_rising(params: Params) -> bool:
    """All but direct products, which are like those of matrices: a larger one may fill the last wave of blocks."""
    return "like" not in params


LAW = Law(frozenset({"floor", "bias_bandwidth"}), log_seconds, inputs, is_rising=is_rising)
