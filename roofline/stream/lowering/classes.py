"""Operation classes: the class of every ATen call, and the groups of classes that are compared together."""

from __future__ import annotations

# Class -> names of its calls, as the dispatcher and profilers give them; an in-place call has a name of its own. The
# calls of classes without names are recognized otherwise, by `op_class`.
_CALLS = {
    "gemm": "mm addmm addmm_ bmm baddbmm _grouped_mm _scaled_mm _weight_int4pack_mm",
    "attention": "",
    "conv": "convolution convolution_backward cudnn_convolution _conv_depthwise2d",
    "rnn": "_cudnn_rnn _cudnn_rnn_backward",
    "linalg": "cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_eig linalg_eigvals"
    " linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq"
    " linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular"
    " lu_solve ormqr triangular_solve _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet"
    " _linalg_solve_ex _linalg_svd",
    "pointwise": "",
    "copy": "_to_copy copy_ clone contiguous",
    "reduction": "mean sum all any amax max var_mean native_layer_norm native_layer_norm_backward norm"
    " native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward"
    " native_group_norm native_group_norm_backward cumsum",
    "softmax": "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data",
    "loss": "nll_loss_forward nll_loss_backward",
    "embedding": "embedding embedding_dense_backward index index_select",
    "optimizer": "optimizer_update_32bit optimizer_update_8bit_blockwise adamw_ adamw_clipped_ gradient_norm",
    "fused": "",
    "generated": "",
    "cat": "cat stack",
    "fill": "fill_ zero_ zeros ones full new_zeros new_ones zeros_like ones_like full_like new_full arange"
    " scalar_tensor",
    "custom": "",
    "other": "dequantize_4bit dequantize_blockwise",
}
# Namespaces of torch's own operators; of others it is not known what they compute.
_TORCH = ("aten", "prims", "prim", "profiler", "c10d", "c10d_functional", "_c10d_functional")
_READ = (
    *_TORCH,
    "bnb",
)  # also those of bitsandbytes, of which `recipe.bitsandbytes_calls` says what they read and write
_CLASS_OF = {name: op_class for op_class, names in _CALLS.items() for name in names.split()}

# How the names of calls begin that take lists of tensors: optimizers', and a gradient scaler's.
MULTI_TENSOR = ("_foreach", "_fused_adam", "_fused_adagrad", "_fused_sgd", "_amp_foreach")

# In the order in which they are printed.
OP_CLASSES = tuple(_CALLS)

PRODUCTS = ("gemm", "attention", "conv")  # what the matrix units run

# Classes that are compared together, because the kernels of one call are recorded under several calls' names: the
# backward of a slice fills and copies; those of an embedding and of a loss fill first.
GROUPS = {
    "gemm": ("gemm", "conv", "rnn"),
    "attention": ("attention",),
    "optimizer": ("optimizer",),
    "softmax": ("softmax",),
    "reduction": ("reduction",),
    "generated": ("generated",),
    "elementwise": ("pointwise", "copy", "cat", "fill", "loss", "embedding", "other", "linalg", "custom", "fused"),
}
_GROUP_OF = {op_class: group for group, members in GROUPS.items() for op_class in members}


def op_class(call: str, default: str = "pointwise") -> str:
    """Returns the class of a call by its name: aten.mm.default (dispatcher) or aten::mm (profiler) -> gemm; `default`
    where the name does not determine it."""
    namespace, _, name = call.replace("::", ".").partition(".")
    name = name.partition(".")[0] or namespace
    if "attention" in name:
        return "attention"
    if name.startswith(MULTI_TENSOR):
        return "optimizer"
    if namespace == "flopcast":
        return _CLASS_OF.get(name, "fused")
    if namespace == "inductor":
        return "generated"
    is_other = "." in call.replace("::", ".") and namespace not in _READ
    return "custom" if is_other else _CLASS_OF.get(name, default)


def group_of(op_class: str) -> str:
    """Returns the group of an operation class; "elementwise" for a class that is in none."""
    return _GROUP_OF.get(op_class, "elementwise")
