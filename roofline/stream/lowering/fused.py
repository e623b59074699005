"""The fused memory-bound kernels (`kernels/patch_layers.py`, `kernels/adamw.py`) in an op stream. No torch, no triton.

A model that is traced patched calls operators of the namespace `flopcast`: rms_norm, add_rms_norm, rope_qk_norm,
rotary, swiglu, cross_entropy and their backwards. They are calls like any other, of a class of their own ("fused"):
measured by replay, timed by their measurements, and more expensive for the host than an ATen call
(`HostCosts.triton`). So are those of the optimizer "adamw-triton", which are of the class of optimizers.
"""

from __future__ import annotations

from dataclasses import replace

from flopcast.kernels.shapes import Call, Operand

# Kernels per call: a call that sums a weight's gradient adds up the partial sums in a second kernel; a loss with its
# gradient counts its targets in a first and averages in a last one, which counts too where no gradient is made.
FUSED_LAUNCHES = {
    "rms_norm": 1, "rms_norm_backward": 2, "add_rms_norm": 1, "add_rms_norm_backward": 2,
    "rope_qk_norm": 1, "rope_qk_norm_backward": 2, "rotary": 1, "rotary_backward": 1, "swiglu": 1, "swiglu_backward": 1,
    "cross_entropy": 2, "cross_entropy_backward": 1, "cross_entropy_with_gradient": 3, "scale_": 1,
    # one for each parameter group; the norm is zeroed, the squares summed, and their sums added up
    "adamw_": 1, "adamw_clipped_": 1, "gradient_norm": 2,
}  # fmt: skip

OWN_OPTIMIZER = ("adamw_", "adamw_clipped_", "gradient_norm")  # of the class of optimizers, among torch's

# Operators that take longer than their bytes at copy bandwidth, and by which factor (H200,
# reports/nvidia-h200/memory-kernels, operations of 0.6 to 5 GB, configurations that are now the default): a loss reads
# most of a row twice, the gradient of rope and norms waits for its reductions. The others came within 7%.
FUSED_PASSES = {
    "cross_entropy_with_gradient": 1.22,
    "cross_entropy_backward": 1.02,
    "rope_qk_norm_backward": 1.09,
    "rms_norm_backward": 1.02,
}


def is_fused(packet: str) -> bool:
    """Whether a call ("flopcast.rms_norm") is one of the fused operators. The stand-in for attention is not."""
    namespace, _, name = packet.partition(".")
    return namespace == "flopcast" and name in FUSED_LAUNCHES


def fused_call(call: Call, accumulate: int) -> Call:
    """Returns the call as it is measured and timed.

    The gradient of the logits is scaled in place by that of the loss, which is 1 unless micro-batches are accumulated.
    For a factor of 1 the kernel reads only the factor and returns; it is timed as a call on 16 elements.
    """
    if call.op.split(".")[1] != "scale_" or accumulate > 1:
        return call
    small = Operand((16,), (1,), call.inputs[0].dtype)
    return replace(call, inputs=(small, *call.inputs[1:]))
