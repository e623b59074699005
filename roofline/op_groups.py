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
