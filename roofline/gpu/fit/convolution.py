"""Convolutions at fit time: the priors of their surfaces, from the device's ceilings, and the products of windows of
one place, told apart by the names of kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flopcast.roofline.gpu.fit.cases import Case
from flopcast.roofline.gpu.fit.priors import Belief, Prior
from flopcast.roofline.gpu.profile.conv_1x1 import part_of
from flopcast.roofline.gpu.profile.gaussian_process import Residual
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.conv_1x1 import ALGORITHMS, CONVERTED, DIRECT, is_1x1, ways_of, wholes_of
from flopcast.roofline.stream.lowering.variants import ConvVariant, SurfaceKey

# Start values: two kernels per call; products at half the peak; tensors at the bandwidth of a copy, converted at half
# of it, weights and biases at a fifth, by few blocks. Of depthwise ones a multiplication takes what the cores that are
# not for matrices need, in torch's kernel for the weights a warp's turn 150 ns, and a block 5 ns.
KERNELS, CONVERSIONS, SHARE_OF_PEAK = 2.0, 6.0, 0.5
CONVERSION, SLOW, PADDING = 0.5, 0.2, 0.23
TAP_RATE, RATE, TURN, TURN_OF_ROW, EACH = 2e12, 1e12, 1.5e-7, 4e-8, 5e-9
# Of the gradient of a bias: seconds to begin and end, per load and per partial sum (5 to 264 of them), share of the
# bandwidth. So an H200's 60 sums beside convolutions took 3 to 130 us, and their kernels tell them apart from the rest.
SPLIT, LOAD, MERGE, SUMMED, KNOWN = Belief(4e-6, 0.2), Belief(2e-7, 0.2), Belief(4.2e-7, 0.2), 0.6, 0.2
WIDE, WIDEST = 0.8, 1.6  # of what ceilings tell, and of what they do not
AMPLITUDE, WHITE, LEVEL = 0.15, 0.04, 0.1
LENGTHS = (3.0,) * 6
LIKE = Belief(1.0, 0.3)  # times as long as the law of products of matrices says
LEAST = 3  # products from which on the rarer algorithm has a surface
# Parts of the names of cuDNN's kernels that convert a tensor's layout: to channels last, to channels first, to any.
_TO_LAST, _TO_FIRST, _TO_ANY = "nchwToNhwc", "nhwcToNchw", "tensorTransform"


def conv_prior(
    variant: ConvVariant, floor: float, bandwidth: float, peaks: Mapping[str, float], sm_count: float = 0.0
) -> Prior:
    """The prior of a surface: `floor` in seconds, `bandwidth` in bytes per second, `peaks` in FLOP/s by dtype;
    `sm_count`: 0 where it is not known."""
    law = {
        "floor": Belief(KERNELS * floor, WIDE),
        "bandwidth": Belief(bandwidth, WIDE),
        "bias_bandwidth": Belief(SLOW * bandwidth, WIDE),
    }
    fixed = {"sm_count": sm_count} if sm_count else {}
    is_backward, is_converted = variant.direction != "fwd", variant.layout != "nhwc"
    if sm_count and is_backward and not is_converted:
        law |= {"split": SPLIT, "load": LOAD, "merge": MERGE}
        law |= {"bias_bandwidth": Belief(SUMMED * bandwidth, KNOWN)}
    if variant.algorithm == DIRECT:
        del law["bandwidth"]
        law |= {"floor": Belief(floor / KERNELS, WIDE), "like": LIKE}
        if variant.direction == "wgrad" and is_converted and not variant.form.startswith("pooled"):
            law |= {"partial_bandwidth": Belief(bandwidth, WIDE)}
    elif variant.form.startswith("depthwise"):
        law |= {"tap_rate": Belief(TAP_RATE, WIDEST), "result_rate": Belief(RATE, WIDEST)}
        if is_backward:
            law |= {"input_tap_rate": Belief(TAP_RATE, WIDEST), "input_rate": Belief(RATE, WIDEST)}
            law |= {"each": Belief(EACH, WIDEST)}
        if is_backward == is_converted:
            law |= {"turn": Belief(TURN if is_converted else TURN_OF_ROW, WIDE)}
    else:
        peak = peaks.get("tf32" if variant.dtype == "fp32" else variant.dtype) or min(peaks.values(), default=1e12)
        law |= {"rate": Belief(SHARE_OF_PEAK * peak, WIDE)}
        if is_backward and not is_converted and variant.form.startswith("few"):
            law |= {"padding_bandwidth": Belief(PADDING * bandwidth, WIDE)}
        if variant.algorithm == CONVERTED:
            law |= {"conversion_bandwidth": Belief(CONVERSION * bandwidth, WIDE)}
            law |= {"conversion_floor": Belief(CONVERSIONS * floor, WIDE)}
        elif is_converted and not variant.form.startswith("pooled"):
            law |= {"conversion_bandwidth": Belief(CONVERSION * bandwidth, WIDE)}
            law |= {"weight_bandwidth": Belief(SLOW * bandwidth, WIDE)}
    return Prior(law, fixed, Residual(LENGTHS, AMPLITUDE, WHITE, (LEVEL,)))


# --- products of 1x1 convolutions


def with_products(cases: Sequence[Case], surfaces: Mapping[SurfaceKey, Surface]) -> list[Case]:
    """The cases, with those of each product in place of a 1x1 convolution whose kernels are named.
    `surfaces` hold those of products of matrices. Where one lacks, or no row of a kind has names, its convolutions stay
    whole; a row without a name among others that have them says nothing of its products."""
    others = [case for case in cases if not is_1x1(case.work.variant)]
    found = [(case, _products(case, surfaces)) for case in cases if is_1x1(case.work.variant)]
    counts = Counter(part.surface for _, parts in found for part in parts)
    told = {case.surface.kind for case, parts in found if parts}
    whole = [case for case, _ in found if case.surface.kind not in told]
    most: dict[SurfaceKey, int] = {}  # of a product, whatever the algorithm
    for key, count in counts.items():
        most[_whole(key)] = max(count, most.get(_whole(key), 0))
    rare = {key for key, count in counts.items() if count < min(LEAST, most[_whole(key)])}
    return [*others, *whole, *(part for _, parts in found for part in parts if part.surface not in rare)]


def _whole(key: SurfaceKey) -> SurfaceKey:
    return replace(key, variant=wholes_of(key.variant)[0])


def _products(case: Case, surfaces: Mapping[SurfaceKey, Surface]) -> list[Case]:
    """A convolution's products, its seconds divided as those of their kernels are; empty where these do not tell."""
    variant = case.work.variant
    assert isinstance(variant, ConvVariant), variant
    products, kernels = ways_of(variant), list(case.kernels)
    ends = [_end_of_first(kernels), len(kernels)] if len(products) == 2 else [len(kernels)]
    starts = [0, *ends[:-1]]
    seconds = [sum(float(took) for _, took in kernels[a:b]) for a, b in zip(starts, ends, strict=True)]
    if not all(one > 0 for one in seconds):
        return []
    found = []
    for ways, a, b, took in zip(products, starts, ends, seconds, strict=True):
        way = dict(zip(ALGORITHMS, ways, strict=True))
        is_converted = any(_is_conversion(name) for name, _ in kernels[a:b])
        part = part_of(case.work, way[CONVERTED if is_converted else DIRECT], surfaces)
        if part is None:
            return []
        work = replace(case.work, variant=part.variant, features=part.features, bytes=part.bytes, flops=part.flops)
        found.append(replace(case, work=work, seconds=case.seconds * took / sum(seconds), kernels=kernels[a:b]))
    return found


def _end_of_first(kernels: Sequence[Sequence[object]]) -> int:
    """How many kernels of a backward are the gradient of the input's: all to the conversion of its result where the
    first converts, else one, and what adds up its parts."""
    names = [str(name) for name, _ in kernels]
    start = next((i for i, name in enumerate(names) if not name.startswith("Memset")), len(names))
    if start == len(names):
        return start
    if _is_conversion(names[start]):
        return next((i + 1 for i, name in enumerate(names) if _TO_FIRST in name), len(names))
    return next((i for i, name in enumerate(names) if i > start and "splitKreduce" not in name), len(names))


def _is_conversion(name: str) -> bool:
    return any(what in name for what in (_TO_LAST, _TO_FIRST, _TO_ANY))
