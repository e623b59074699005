"""Operation classes that are compared together, and the class of a call as profilers name it.

Together, because one call's kernels fall under several calls' names: a slice's backward fills and copies, an
embedding's backward fills first, a loss's too.
"""

from __future__ import annotations

# The launching ATen call, as profilers name it -> the class that the forecast counts it in. What is not
# listed is element-wise.
_CLASS_OF_OP = {
    "mm": "gemm", "addmm": "gemm", "bmm": "gemm", "baddbmm": "gemm", "_grouped_mm": "gemm",
    "cudnn_convolution": "conv", "convolution": "conv", "convolution_backward": "conv",
    "native_layer_norm": "reduction", "native_layer_norm_backward": "reduction",
    "native_batch_norm": "reduction", "native_batch_norm_backward": "reduction",
    "cudnn_batch_norm": "reduction", "cudnn_batch_norm_backward": "reduction",
    "copy_": "copy", "_to_copy": "copy", "clone": "copy", "fill_": "fill", "zero_": "fill", "arange": "fill",
    "mean": "reduction", "sum": "reduction", "all": "reduction", "cumsum": "reduction",
    "_log_softmax": "softmax", "_log_softmax_backward_data": "softmax",
    "nll_loss_forward": "loss", "nll_loss_backward": "loss",
    "embedding": "embedding", "index_select": "embedding", "embedding_dense_backward": "embedding",
    "cat": "cat",
}  # fmt: skip

GROUPS = {
    "gemm": ("gemm", "conv"),
    "attention": ("attention",),
    "optimizer": ("optimizer",),
    "softmax": ("softmax",),
    "reduction": ("reduction",),
    "elementwise": ("pointwise", "copy", "cat", "fill", "loss", "embedding", "other", "fused"),
}

_GROUP_OF = {op_class: group for group, members in GROUPS.items() for op_class in members}


def group_of(op_class: str) -> str:
    """The group of an operation class; "elementwise" for one that is in none."""
    return _GROUP_OF.get(op_class, "elementwise")


def op_class(op: str) -> str:
    """aten::mm -> gemm"""
    name = op.removeprefix("aten::")
    if "attention" in name:
        return "attention"
    if name.startswith(("_foreach", "_fused_adam")):
        return "optimizer"
    if name.startswith("flopcast::"):
        return "fused"
    return _CLASS_OF_OP.get(name, "pointwise")


OP_CLASSES = ("gemm", "attention", "conv", "pointwise", "copy", "reduction", "softmax", "loss", "embedding",
              "optimizer", "fused", "cat", "fill", "other")  # fmt: skip

# name of the ATen packet -> class; whatever is not listed is pointwise if its output has the broadcast shape of
# its inputs, else "other".
_PACKETS = {
    "copy": "_to_copy copy_ clone contiguous",
    "reduction": "mean sum all any amax max var_mean native_layer_norm native_layer_norm_backward norm"
    " native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward"
    " native_group_norm native_group_norm_backward cumsum",
    "conv": "convolution convolution_backward",
    "gemm": "_grouped_mm",
    "attention": "attention attention_backward",
    "softmax": "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data",
    "loss": "nll_loss_forward nll_loss_backward",
    "embedding": "embedding embedding_dense_backward index index_select",
    "cat": "cat stack",
    "fill": "fill_ zero_ zeros ones full new_zeros new_ones zeros_like ones_like full_like new_full arange"
    " scalar_tensor",
}
CLASS_OF = {packet: op_class for op_class, packets in _PACKETS.items() for packet in packets.split()}
