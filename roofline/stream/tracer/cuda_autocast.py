"""Emulates CUDA's autocast, by default under the CPU's dispatch key: which operators it casts, and to which dtype.

Under autocast, torch's dispatcher calls a wrapper that casts an operator's operands before it calls the operator. CUDA
and the CPU have wrappers for different operators. `kernels_for` gives, for each operator that either of them casts, one
that does what CUDA's does; `cuda_semantics.as_on_cuda` registers them in place of the CPU's. Which operators CUDA casts
is read from the dispatcher of the installed torch; to what, from the lists below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# Of the operators that CUDA's autocast casts (aten/src/ATen/autocast_mode.h): those cast to the low precision, those
# asked for a result in fp32, and those cast to the dtype of their widest operand. All others are cast to fp32.
_LOW = {
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm",
    "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
}  # fmt: skip
_RESULT_IN_FP32 = {
    "prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum", "norm",
}  # fmt: skip
_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
}  # fmt: skip
_KEYS = {
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU),
    "cuda": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
}


class CastWeights:
    """Autocast's cache: a trainable weight is cast once, until the outermost autocast context ends."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self._known.clear()

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype == dtype or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        is_weight = tensor.dtype == torch.float32 and tensor.is_leaf and tensor.requires_grad
        if not (is_weight and dtype != torch.float32 and torch.is_autocast_cache_enabled() and not tensor._is_view()):
            return tensor.to(dtype)
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = tensor, tensor.to(dtype)
        return known[1]


def _kernel(
    function: Any, policy: str, weights: CastWeights, device_type: str, *, is_in_order: bool
) -> Callable[..., Any]:
    """Makes a wrapper that casts as `policy` says and calls `function`. With "none" nothing is cast, and the operators
    that `function` is composed of are dispatched as usual."""
    if policy == "none":
        return torch.library.fallthrough_kernel
    key = _KEYS[device_type]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            if policy == "result":
                return _with_result_in_fp32(function, args, kwargs)
            if policy == "widest" and all(t.dtype != torch.float32 for t in _tensors((*args, *kwargs.values()))):
                return function(*args, **kwargs)
            dtype = torch.get_autocast_dtype(device_type)
            cast = (lambda t: weights.cast(t, dtype)) if policy == "low" else _to_fp32
            if is_in_order:
                args = tuple([_map_tensors(arg, cast) for arg in reversed(args)][::-1])
            return function(*_map_tensors(args, cast), **{k: _map_tensors(v, cast) for k, v in kwargs.items()})

    return wrapper


def _with_result_in_fp32(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `function` for a result in fp32, unless the call names a dtype itself."""
    names = [argument.name for argument in function._schema.arguments]
    first = args[0]
    is_eligible = first.is_floating_point() and first.dtype != torch.float64
    if not is_eligible or dict(zip(names, args, strict=False)).get("dtype", kwargs.get("dtype")) is not None:
        return function(*args, **kwargs)
    if "dtype" in names:
        return function(*args, **{**kwargs, "dtype": torch.float32})
    if len(args) < 3:
        return torch.ops.aten.norm.ScalarOpt_dtype(*args, dtype=torch.float32)
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(*args[:3], *(args[3:] or (False,)), dtype=torch.float32)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _policy(name: str, on_cuda: set[str]) -> str:
    """Returns how CUDA's autocast treats an operator: "low", "result" (in fp32), "widest", "high" (fp32) or "none"."""
    packet = name.split(".")[0]
    if name not in on_cuda:
        return "none"
    if packet in _LOW:
        return "low"
    if packet in _RESULT_IN_FP32:
        return "result"
    return "widest" if packet in _WIDEST else "high"


def _registered(key: str) -> set[str]:
    """Returns the names of the ATen operators that have their own kernel for a dispatch key."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in found if name.startswith("aten::")}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def kernels_for(
    weights: CastWeights, device_type: str = "cpu", *, is_in_order: bool
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields (operator, wrapper that casts as on CUDA) for each operator that CUDA's autocast or that of `device_type`
    casts; the wrapper is for the latter's dispatch key.

    `is_in_order`: the last operand is cast first, as C++ does (its compilers evaluate arguments from the last on). It
    numbers a compiler's tensors, and decides in which order autograd adds gradients up."""
    on_cuda = _registered("AutocastCUDA")
    for name in sorted(on_cuda | _registered(f"Autocast{device_type.upper()}")):
        policy = _policy(name, on_cuda)
        yield name, _kernel(_operator(name), policy, weights, device_type, is_in_order=is_in_order)
