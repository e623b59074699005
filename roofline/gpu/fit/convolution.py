"""Priors of convolution surfaces, from the device's ceilings. Used at fit time."""

from __future__ import annotations

from collections.abc import Mapping

from flopcast.roofline.gpu.fit.priors import Belief, Prior
from flopcast.roofline.gpu.profile.gaussian_process import Residual
from flopcast.roofline.stream.lowering.variants import ConvVariant

# Start values: two kernels per call; products at half the peak; tensors at the bandwidth of a copy, converted at half
# of it, weights and biases at a fifth, by few blocks. Of depthwise ones a multiplication takes what the cores that are
# not for matrices need, in torch's kernel for the weights a warp's turn 150 ns, and a block 5 ns.
KERNELS, CONVERSIONS, SHARE_OF_PEAK = 2.0, 6.0, 0.5
CONVERSION, SLOW, PADDING = 0.5, 0.2, 0.23
ODD = 1.5  # times as long where it can read two bytes at a time only, not four or eight
UNALIGNED = 3.0  # times as long a product takes whose rows tensor cores cannot read 16 bytes at a time
TAP_RATE, RATE, TURN, TURN_OF_ROW, EACH = 2e12, 1e12, 1.5e-7, 4e-8, 5e-9
# Of the gradient of a bias: seconds to begin and end, per load and per partial sum (5 to 264 of them), share of the
# bandwidth. So an H200's 60 sums beside convolutions took 3 to 130 us, and their kernels tell them apart from the rest.
SPLIT, LOAD, MERGE, SUMMED, KNOWN = Belief(4e-6, 0.2), Belief(2e-7, 0.2), Belief(4.2e-7, 0.2), 0.6, 0.2
WIDE, WIDEST = 0.8, 1.6  # of what ceilings tell, and of what they do not
AMPLITUDE, WHITE, LEVEL = 0.15, 0.04, 0.1
LENGTHS = (3.0,) * 6


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
    if variant.form.startswith("depthwise"):
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
        form = variant.form.split("-")[0]
        is_unaligned = form == "unaligned"
        if is_converted and form != "pooled":
            law |= {"conversion_bandwidth": Belief(CONVERSION * bandwidth, WIDE)}
            if form in ("point", "unaligned"):
                law |= {
                    "conversion_floor": Belief(CONVERSIONS * floor, WIDE),
                    "partial_bandwidth": Belief(bandwidth, WIDE),
                    "image_bandwidth": Belief((CONVERSION if is_unaligned else 1.0) * bandwidth, WIDE),
                    "slower": Belief(UNALIGNED if is_unaligned else 1.0, WIDE),
                }
                law |= {"odd": Belief(ODD, WIDE)} if is_unaligned else {}
            else:
                law |= {"weight_bandwidth": Belief(SLOW * bandwidth, WIDE)}
    return Prior(law, fixed, Residual(LENGTHS, AMPLITUDE, WHITE, (LEVEL,)))
