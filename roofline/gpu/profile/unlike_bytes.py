"""Says the least and the most that a kernel takes whose time follows neither from its bytes nor from its FLOPs, where
none of its operation was measured: what has steps one after the other (decompositions, recurrent networks, scans), what
several passes whose number a library or the values decide (sorts, transforms), what waits for its own atomic additions,
and operators of other libraries than torch, of which only the operands are known.

The estimate is the geometric mean of the two ends, which are meant to hold the true time nine times in ten. They are
judgements from how the kernels work, not measurements, and wide on purpose: a step made of them is forecast within a
factor, not within percents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, sqrt

from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.profile.passes import Rates, convolution_seconds
from flopcast.roofline.gpu.profile.request import WorkLike
from flopcast.roofline.stream.lowering.variants import CallVariant, ConvVariant, Variant

Ends = tuple[float, float]  # seconds: the least and the most


@dataclass(frozen=True)
class Rule:
    """What bounds the time of one kind of kernel. `words` say what its time depends on."""

    ends: Callable[[Rates, Variant, WorkLike], Ends]
    words: str

    def estimate(self, rates: Rates, variant: Variant, work: WorkLike) -> tuple[float, float]:
        """Returns (seconds, standard deviation of their logarithm)."""
        least, most = self.ends(rates, variant, work)
        return sqrt(least * most), log(most / least) / (2 * Z_90)


def _passes(least: float, most: float, kernels: int = 1) -> Callable[[Rates, Variant, WorkLike], Ends]:
    """So many times its bytes at copy bandwidth, in at most so many kernels."""

    def ends(rates: Rates, variant: Variant, work: WorkLike) -> Ends:
        once = work.bytes / rates.bandwidth
        return rates.floor + least * once, kernels * rates.floor + most * once

    return ends


# Seconds of a decomposition's step, one per column: of those that reflect or rotate, a few launches; of those that
# eliminate by blocks, a part of one. A loop on the host may be ten times as slow, a kernel that keeps the matrix on the
# multiprocessor ten times as quick.
_COLUMN_SECONDS, _BLOCKED_SECONDS = 2e-5, 3e-6
_EITHER_WAY = 10.0
# FLOPs of a decomposition over the cube of its size: from a Cholesky's 1/3 to a singular value decomposition's 20.
_CUBES = {
    "_linalg_svd": 20.0,
    "_linalg_eigh": 9.0,
    "_linalg_eigvals": 25.0,
    "linalg_eig": 25.0,
    "linalg_matrix_exp": 20.0,
}
_MOST_CUBES = 2.0  # of all others
_SLOW_SHARE = 0.1  # of the products' rate, which panels and rotations reach at most


# Those that reflect or rotate, which torch does to one matrix after the other; the others have kernels for many side by
# side.
_LOOPED = (
    "_linalg_svd", "_linalg_eigh", "_linalg_eigvals", "linalg_eig", "geqrf", "linalg_qr", "linalg_householder_product",
    "ormqr",
)  # fmt: skip


def _decomposition(rates: Rates, variant: Variant, work: WorkLike) -> Ends:
    """Columns one after the other, and FLOPs far below the peak."""
    assert isinstance(variant, CallVariant), variant
    size, count = (2**log2 for log2 in work.features[1:3])
    flops = _CUBES.get(variant.operation, _MOST_CUBES) * size**3
    is_looped = variant.operation in _LOOPED
    columns = size * (_COLUMN_SECONDS if is_looped else _BLOCKED_SECONDS)
    rate = rates.matrix_rate("fp32")
    least = rates.floor + max(columns / _EITHER_WAY, count * flops / rate, work.bytes / rates.bandwidth)
    in_turn = count if is_looped else 1
    return least, rates.floor + max(in_turn * columns * _EITHER_WAY, count * flops / (_SLOW_SHARE * rate))


# Seconds of a recurrent layer's step: of a persistent kernel, whose blocks wait for each other through L2, and of a
# product and a kernel for the gates with their gaps.
_STEP_SECONDS = 1e-6, 1.5e-5


def _recurrent(rates: Rates, variant: Variant, work: WorkLike) -> Ends:
    """The products at their rate, or at a quarter of it, and, one after the other, the steps of all layers."""
    matrix = max(work.flops / rates.matrix_rate(variant.dtypes), work.bytes / rates.bandwidth)
    steps = 2 ** work.features[0]
    least, most = _STEP_SECONDS
    return rates.floor + matrix + steps * least, rates.floor + 4 * matrix + steps * most


def _rare_convolution(least: float, most: float) -> Callable[[Rates, Variant, WorkLike], Ends]:
    """So many times what the FLOPs and passes of a common convolution take."""

    def ends(rates: Rates, variant: Variant, work: WorkLike) -> Ends:
        seconds = convolution_seconds(rates, variant, work)
        return least * seconds, most * seconds

    return ends


# A product that unpacks weights of 4 bits (tinygemm) takes 16 rows at a time, which all weights pass anew, from L2
# where they fit; it neither loads ahead, so that a short one may take twice the floor, nor uses Hopper's products of
# whole warp groups.
_TINY_ROWS, _TINY_STREAM, _TINY_SLOWDOWN = 16, 4, 10


def _unpacking_product(rates: Rates, variant: Variant, work: WorkLike) -> Ends:
    """Its bytes once, or its FLOPs at the rate of bf16; at most its bytes at a quarter of the bandwidth, again for
    every 16 rows at the whole one, or its FLOPs at a tenth."""
    once, computing = work.bytes / rates.bandwidth, work.flops / rates.matrix_rate("bf16")
    rounds = 2 ** work.features[1] / _TINY_ROWS
    most = max(_TINY_STREAM * once, rounds * once, _TINY_SLOWDOWN * computing)
    return rates.floor + max(once, computing), 2 * rates.floor + most


_BY_NAMES = {
    "cumsum cumprod cummax cummin _cummax_helper _cummin_helper logcumsumexp": Rule(
        _passes(1, 10, 3), "running sums, whose time depends on the dimension they run along"
    ),
    "sort argsort msort kthvalue median nanmedian mode _unique _unique2 unique_dim unique_consecutive randperm"
    " multinomial": Rule(_passes(2, 40, 30), "sorts, whose passes depend on the length of their rows"),
    "topk searchsorted bucketize": Rule(_passes(1, 20, 8), "searches, whose passes depend on values and lengths"),
    "scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ index_reduce index_reduce_ index_put"
    " index_put_ _index_put_impl_ put put_ bincount histc _embedding_bag _embedding_bag_dense_backward"
    " _embedding_bag_backward upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward"
    " grid_sampler_2d_backward grid_sampler_3d_backward max_pool2d_with_indices_backward"
    " max_pool3d_with_indices_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward col2im": Rule(
        _passes(1, 20, 8), "additions to shared places, whose time depends on how many meet"
    ),
    "scatter scatter_ gather take index_copy index_copy_ index_fill index_fill_ masked_scatter masked_select": Rule(
        _passes(0.5, 8, 2), "reads and writes in places that values decide"
    ),
    "_fft_c2c _fft_r2c _fft_c2r": Rule(_passes(1, 12, 6), "Fourier transforms, whose passes depend on their lengths"),
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward"
    " _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"
    " grid_sampler_2d grid_sampler_3d im2col": Rule(_passes(0.5, 8, 2), "windows, which are read once or many times"),
    "igamma igammac lgamma digamma polygamma special_zeta special_i0e special_i1 special_i1e erfinv": Rule(
        _passes(1, 10), "special functions, which compute for longer than they read"
    ),
    "decode": Rule(_passes(1, 6, 2), "attention of one token, which few or many blocks may share out"),
    "dequantize_4bit dequantize_blockwise optimizer_update_32bit": Rule(  # 1.7 on an H200
        _passes(1, 3, 2), "kernels of bitsandbytes, which look up what their bits stand for"
    ),
    "optimizer_update_8bit_blockwise": Rule(  # 28 ps a parameter on an H200: of fp32 7.2, of bf16 11.3
        _passes(5, 14, 2), "AdamW in 8 bits, which searches for the bits of its states"
    ),
    "_weight_int4pack_mm": Rule(_unpacking_product, "products that unpack weights of 4 bits on their way"),
    "_cdist_forward _cdist_backward _pdist_forward _pdist_backward _trilinear": Rule(
        _passes(1, 300, 4), "sums over pairs, which do not show in their operands' sizes"
    ),
}  # fmt: skip
_BY_NAME = {name: rule for names, rule in _BY_NAMES.items() for name in names.split()}
_BY_CLASS = {
    "linalg": Rule(_decomposition, "decompositions, whose columns follow one another"),
    "rnn": Rule(_recurrent, "recurrent layers, whose steps follow one another"),
    "custom": Rule(_passes(1, 300, 30), "another library's operators: their FLOPs are not known, nor counted"),
}
_GROUPED = Rule(_rare_convolution(0.5, 12), "grouped convolutions, for which libraries have kernels of all kinds")
_NOT_PLANES = Rule(_rare_convolution(0.5, 5), "convolutions along one dimension or three, which were not measured")


def rule_of(op_class: str, variant: Variant) -> Rule | None:
    """Returns the rule of a kind of kernel; None for one whose time follows from its bytes and FLOPs."""
    if isinstance(variant, ConvVariant):
        form, _, rank = variant.form.partition("-")
        return _GROUPED if form in ("depthwise", "grouped") else _NOT_PLANES if rank else None
    if isinstance(variant, CallVariant):
        return _BY_CLASS.get(op_class) or _BY_NAME.get(variant.operation)
    return None
