"""The fused memory-bound kernels (`kernels/patch_qwen3.py`) in an op stream. No torch, no triton.

A model that is traced patched calls operators of the namespace `flopcast`: rms_norm, add_rms_norm, rope_qk_norm,
swiglu, cross_entropy and their backwards. They are calls like any other, of a class of their own ("fused"): measured
by replay, timed by what was measured, and dearer for the host than an ATen call (`HostCosts.triton`).
"""

from __future__ import annotations

from dataclasses import replace

from flopcast.kernels.shapes import Call, Operand

# Kernels a call launches: those that sum a weight's gradient add its partial sums up in a second, a loss counts its
# targets first and averages last.
FUSED_LAUNCHES = {
    "rms_norm": 1, "rms_norm_backward": 2, "add_rms_norm": 1, "add_rms_norm_backward": 2,
    "rope_qk_norm": 1, "rope_qk_norm_backward": 2, "swiglu": 1, "swiglu_backward": 1,
    "cross_entropy": 3, "cross_entropy_backward": 1, "cross_entropy_with_gradient": 3, "scale_": 1,
}  # fmt: skip

# What takes longer than its bytes at copy bandwidth, by so much (H200, reports/nvidia-h200/memory-kernels, operations
# of 0.6 to 5 GB, configurations that are now the default): a loss reads most of a row twice, the gradient of rope and
# norms waits for its reductions. The others came within 7%.
FUSED_PASSES = {
    "cross_entropy_with_gradient": 1.22,
    "cross_entropy_backward": 1.02,
    "rope_qk_norm_backward": 1.09,
    "rms_norm_backward": 1.02,
}


def is_fused(packet: str) -> bool:
    """Whether a call ("flopcast.rms_norm") is one of the fused operators; attention's stand-in is none."""
    namespace, _, name = packet.partition(".")
    return namespace == "flopcast" and name in FUSED_LAUNCHES


def fused_call(call: Call, accumulate: int) -> Call:
    """The call as it is measured and timed.

    The loss's gradient is scaled in place by that of the loss, which is 1 but where micro-batches are accumulated: the
    kernel then reads the factor alone and returns. It stands for one of 16 elements.
    """
    if call.op.split(".")[1] != "scale_" or accumulate > 1:
        return call
    small = Operand((16,), (1,), call.inputs[0].dtype)
    return replace(call, inputs=(small, *call.inputs[1:]))
