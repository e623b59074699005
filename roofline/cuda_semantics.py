"""CUDA's semantics on fake CPU tensors: what a training step would launch on a GPU, on a machine without one.

Three things differ between the devices, and each is put right where torch decides it:

- Autocast casts by another list. The kernels of the CPU's autocast key are replaced by ones that follow CUDA's
  list, read from this torch's own dispatcher.
- Some operations are made of others by a rule that asks for the device (dropout, attention). The rule of the CPU's
  autograd key is replaced by CUDA's, and kernels whose results have other dtypes on CUDA get those.
- Python code asks tensors where they lie: they say CUDA, but for the few that lie in host memory there too.

All is undone when the context ends. The real streams of an H200, recorded once, are what this is tested against.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

# --- autocast ---------------------------------------------------------------------------------------

# Of the operators that have a kernel for CUDA's autocast (aten/src/ATen/autocast_mode.h): those cast to the low
# precision, those whose result is asked for in fp32, those cast to their widest operand. The rest is cast to fp32.
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
_NOT_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class _CastWeights:
    """Autocast's cache: a leaf that learns is cast once, until the outermost autocast context ends."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self._known.clear()

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype == dtype or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        is_weight = tensor.dtype == torch.float32 and tensor.is_leaf and tensor.requires_grad
        if not (
            is_weight
            and dtype != torch.float32
            and torch.is_autocast_cache_enabled()
            and not tensor._is_view()
        ):
            return tensor.to(dtype)
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = tensor, tensor.to(dtype)
        return known[1]


def _kernel(function: Any, policy: str, weights: _CastWeights) -> Callable[..., Any]:
    """What CUDA's autocast does before it calls `function`; nothing by policy "none", but to what it is made of."""
    if policy == "none":
        return torch.library.fallthrough_kernel

    def low(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_NOT_CPU):
            dtype = _autocast_dtype()
            args = tuple(_map_tensors(a, lambda t: weights.cast(t, dtype)) for a in args)
            kwargs = {k: _map_tensors(v, lambda t: weights.cast(t, dtype)) for k, v in kwargs.items()}
            return function(*args, **kwargs)

    def high(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_NOT_CPU):
            args = tuple(_map_tensors(a, _to_fp32) for a in args)
            return function(*args, **{k: _map_tensors(v, _to_fp32) for k, v in kwargs.items()})

    def result_in_fp32(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_NOT_CPU):
            names = [argument.name for argument in function._schema.arguments]
            first = args[0]
            is_eligible = first.is_floating_point() and first.dtype != torch.float64
            given = dict(zip(names, args, strict=False)).get("dtype", kwargs.get("dtype"))
            if not is_eligible or given is not None:
                return function(*args, **kwargs)
            if "dtype" in names:
                return function(*args, **{**kwargs, "dtype": torch.float32})
            return (
                torch.ops.aten.norm.ScalarOpt_dtype(*args, dtype=torch.float32)
                if len(args) < 3
                else (
                    torch.ops.aten.norm.ScalarOpt_dim_dtype(
                        *args[:3], *(args[3:] or (False,)), dtype=torch.float32
                    )
                )
            )

    def widest(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_NOT_CPU):
            found = [t for a in (*args, *kwargs.values()) for t in _tensors(a) if t.is_floating_point()]
            if any(t.dtype == torch.float32 for t in found):
                args = tuple(_map_tensors(a, _to_fp32) for a in args)
                kwargs = {k: _map_tensors(v, _to_fp32) for k, v in kwargs.items()}
            return function(*args, **kwargs)

    return {"low": low, "high": high, "result": result_in_fp32, "widest": widest}[policy]


def _autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _policy(name: str, on_cuda: set[str]) -> str:
    """What CUDA's autocast does to an operator that the CPU's or CUDA's casts."""
    packet = name.split(".")[0]
    if name not in on_cuda:
        return "none"
    if packet in _LOW:
        return "low"
    if packet in _RESULT_IN_FP32:
        return "result"
    return "widest" if packet in _WIDEST else "high"


def _registered(key: str) -> set[str]:
    """Names of ATen operators that have a kernel of their own for a dispatch key."""
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


# --- operations that CUDA makes of others ------------------------------------------------------------


@torch.library.custom_op("flopcast::attention", mutates_args=())
def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    raise NotImplementedError("flopcast::attention exists for tracing only")


@_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    # As flash and cuDNN lay it out: in the order of the query's dimensions in memory.
    strides = query.stride()
    order = sorted(range(4), key=lambda d: -strides[d])
    shape = (*query.shape[:-1], value.shape[-1])
    out = query.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("flopcast::attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None, dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    raise NotImplementedError("flopcast::attention_backward exists for tracing only")


@_attention_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None, dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)  # else the unused log-sum-exp would get a gradient of zeros
    ctx.mark_non_differentiable(output[1])
    query, key, value, ctx.is_causal, ctx.mask, ctx.dropout = inputs
    ctx.save_for_backward(query, key, value, *output)


def _attention_gradient(ctx: Any, grad: torch.Tensor, _lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    extra = () if ctx.mask is None and not ctx.dropout else (ctx.mask, ctx.dropout)
    return *_attention_backward(grad, *ctx.saved_tensors, ctx.is_causal, *extra), None, None, None


torch.library.register_autograd("flopcast::attention", _attention_gradient, setup_context=_save)


def _scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """One operation, whichever kernel the device picks for it; by parts where none does (aten/src/ATen/native/
    transformers: flash and cuDNN take 16-bit numbers alone, the memory-efficient one no grouped heads)."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if query.ndim != 4 or (not is_half and query.shape[1] != key.shape[1]):
        by_parts: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return by_parts
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # made one of numbers first
        least = torch.ops.aten.scalar_tensor.default(
            -65504.0 if is_half else float("-inf"), dtype=query.dtype
        )
        attn_mask = torch.ops.aten.where.ScalarSelf(attn_mask, 0.0, least)
    extra = () if attn_mask is None and not dropout_p else (attn_mask, dropout_p)
    out: torch.Tensor = _attention(query, key, value, is_causal, *extra)[0]
    return out


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """aten/src/ATen/native/Dropout.cpp: one fused kernel on CUDA."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    out: torch.Tensor = torch.ops.aten.native_dropout.default(input, p, train)[0]
    return out


def _batch_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    """cuDNN's for fp32, torch's own for bf16 (aten/src/ATen/native/Normalization.cpp)."""
    parts = (input, weight, bias, running_mean, running_var)
    if (
        input.dtype in (torch.float32, torch.float16)
        and all(part is not None for part in parts)
        and input.ndim >= 3
        and training
        and input.shape[0] <= 880_801
        and cudnn_enabled
    ):
        arguments = (*parts, training, momentum, eps)
        return torch.ops.aten.cudnn_batch_norm.default(*arguments)[0]  # type: ignore[no-any-return]
    out: torch.Tensor = torch.ops.aten._batch_norm_impl_index.default(
        *parts, training, momentum, eps, cudnn_enabled
    )[0]
    return out


# Composite operators whose parts depend on the device: name -> CUDA's rule.
_RULES: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    "scaled_dot_product_attention": _scaled_dot_product_attention,
    "dropout": _dropout,
}


# --- what Python sees -------------------------------------------------------------------------------

_CUDA = torch.device("cuda", 0)
# Compute capability that Python is told: of the parts that the profiles are of, the one measured.
_CAPABILITY = (9, 0)
# A step reads back a handful of truth values; a loop until one is false would never end.
MAX_CHECKS = 2_000


class Hosts:
    """Tensors that lie in host memory on a machine with CUDA too: those made by `torch.tensor` with no device."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()

    def add(self, tensor: torch.Tensor) -> None:
        self._known[tensor] = True

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._known


class _LooksLikeCuda(TorchFunctionMode):
    """Fake CPU tensors answer Python as CUDA tensors would; asked to go to or to be made on CUDA, they stay."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__()
        self.hosts = hosts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WHERE:
            return (args[0] in self.hosts) != (func == _IS_CUDA)
        name = getattr(func, "__name__", "")
        to_cuda = name == "cuda" or _is_cuda(kwargs.get("device")) or any(_is_cuda(a) for a in args[:2])
        if to_cuda and name in ("cuda", "to") and args[0] in self.hosts:
            return args[0].to(kwargs.get("dtype", args[0].dtype), copy=True)  # now on the device
        if name == "cuda":
            return args[0]
        if to_cuda:
            args = tuple(_CPU if _is_cuda(a) else a for a in args)
            kwargs = {key: _CPU if _is_cuda(value) else value for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if func is torch.tensor and not to_cuda:
            self.hosts.add(result)
        return result


_CPU = torch.device("cpu")
# Lists of the tensor types that torch's multi-tensor kernels take; fake tensors are no subclass that they know.
_TYPES: tuple[list[type], ...] = tuple(
    getattr(module, "_foreach_supported_types", [])
    for module in (importlib.import_module("torch.optim.optimizer"), _foreach_utils)
)
_IS_CUDA, _IS_CPU = torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_WHERE = {_IS_CUDA, _IS_CPU}


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _histc(tensor: torch.Tensor, bins: int = 100, *_: Any, **__: Any) -> torch.Tensor | None:
    """Of whole numbers on CUDA alone."""
    return None if tensor.is_floating_point() else tensor.new_empty(bins)


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor | None:
    """In other dtypes than bf16 torch's own shapes are refused, yet CUDA multiplies group by group."""
    if a.dtype == torch.bfloat16 or offs is None:
        return None
    groups = () if a.ndim + b.ndim == 5 else (len(offs),)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _layer_norm(tensor: torch.Tensor, shape: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    """Mean and deviation are kept in fp32."""
    rows = (*tensor.shape[: tensor.ndim - len(shape)], *[1] * len(shape))
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return out, tensor.new_empty(rows, dtype=torch.float32), tensor.new_empty(rows, dtype=torch.float32)


def _batch_norm_results(tensor: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Mean and deviation of a channel are kept in fp32."""
    channels = tensor.shape[1]
    statistics = (tensor.new_empty(channels, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(tensor), *statistics


def _cudnn_batch_norm(tensor: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return *_batch_norm_results(tensor, *rest), tensor.new_empty(0, dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    tensor: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(tensor), torch.empty_like(weight), torch.empty_like(weight)


# Operators whose results on CUDA are not those of fake CPU tensors; None: they are.
_RESULTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.histc.default: _histc,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten.native_layer_norm.default: _layer_norm,
    torch.ops.aten.native_batch_norm.default: _batch_norm_results,
    torch.ops.aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    torch.ops.aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}


class FakeValues(TorchDispatchMode):
    """A fake tensor has no value to read back: checks are taken to pass, numbers to be 1."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_inside = False  # a call: what runs below is torch's own
        self.failed = ""  # the call that raised
        self.checks = 0  # truth values read back
        self.is_cuda = False  # whether results are those of CUDA's kernels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            self.checks += dtype == torch.bool
            if self.checks > MAX_CHECKS:
                raise RuntimeError("a loop waits for a value, and fake tensors have none")
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        before, self.is_inside = self.is_inside, True
        try:
            if self.is_cuda and func in _RESULTS and (result := _RESULTS[func](*args, **kwargs)) is not None:
                return result
            result = func(*args, **kwargs)
            if (
                isinstance(result, FakeTensor) and result.fake_device.type == "cuda"
            ):  # autograd would end the process
                raise RuntimeError("a CUDA tensor was made in a way that is not followed")
            return result
        except Exception:
            self.failed = str(func)
            raise
        finally:
            self.is_inside = before


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Libraries that treat fake tensors apart treat them as others.

    transformers takes them for a compiler's and leaves the causal SDPA; torch's `Module.to` swaps them, which a weak
    reference forbids; its truncated normal draws until the numbers fit.
    """
    import transformers.utils.import_utils as utils

    with (
        _replaced(utils, "is_fake_tensor", lambda x: False),
        _replaced(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_kwargs: tensor),
        _replaced(torch.nn.Module, "_apply", _apply_to_fakes(WeakIdKeyDictionary())),
    ):
        yield


def _apply_to_fakes(moved: WeakIdKeyDictionary) -> Callable[..., Any]:
    """`Module._apply` that puts another parameter where the function gives one; tied ones stay tied by `moved`."""

    def apply(
        module: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True
    ) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                made = function(parameter)
            if made is not parameter:
                known = moved.get(parameter)
                if known is None or (known.dtype, known.stride()) != (made.dtype, made.stride()):
                    known = moved[parameter] = torch.nn.Parameter(made, parameter.requires_grad)
                module._parameters[name] = known
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    return apply


@contextlib.contextmanager
def as_on_cuda(values: FakeValues) -> Iterator[Hosts]:
    """While it lasts, fake CPU tensors behave as CUDA tensors do; gives those that are in host memory nevertheless.

    Autocast for "cuda" is autocast. Not for two threads at once: torch's dispatcher is changed.
    """
    hosts = Hosts()
    weights = _CastWeights()
    clear, is_enabled, get_dtype = (
        torch.clear_autocast_cache,
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
    )
    start = torch.amp.autocast_mode.autocast.__init__
    where = FakeTensor.device

    def clear_cache() -> None:
        weights.clear()
        clear()

    def begin(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or (get_dtype("cpu") if is_enabled("cpu") else torch.float16)
        start(self, device_type, dtype, *args, **kwargs)

    def device(tensor: FakeTensor) -> torch.device:
        own: torch.device = where.__get__(tensor)
        return own if values.is_inside or own.type != "cpu" or tensor in hosts else _CUDA

    with contextlib.ExitStack() as stack:
        stack.enter_context(_cuda_rules(weights))
        for owner, name, value in (
            (torch, "clear_autocast_cache", clear_cache),
            (torch, "is_autocast_enabled", lambda device_type="cpu": is_enabled(_cpu_for(device_type))),
            (torch, "get_autocast_dtype", lambda device_type: get_dtype(_cpu_for(device_type))),
            (torch.amp.autocast_mode.autocast, "__init__", begin),
            (torch.cuda, "get_device_capability", lambda device=None: _CAPABILITY),
            (FakeTensor, "device", property(device)),
        ):
            stack.enter_context(_replaced(owner, name, value))
        for types in _TYPES:
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        stack.enter_context(_LooksLikeCuda(hosts))
        values.is_cuda = True
        try:
            yield hosts
        finally:
            values.is_cuda = False
            weights.clear()


def _cpu_for(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


@contextlib.contextmanager
def _cuda_rules(weights: _CastWeights) -> Iterator[None]:
    """CUDA's autocast in place of the CPU's, and CUDA's rules for composite operators."""
    library = torch.library.Library("aten", "IMPL")
    on_cuda = _registered("AutocastCUDA")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in sorted(on_cuda | _registered("AutocastCPU")):
            library.impl(name, _kernel(_operator(name), _policy(name, on_cuda), weights), "AutocastCPU")
        for name, rule in _RULES.items():
            library.impl(name, rule, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name) if not isinstance(owner, type) else vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
