"""Fake tensors that are CUDA's for Python and of no device for autograd.

Compilers decide by the device: which operators autocast casts, how operators decompose, which passes and heuristics
apply. Fake tensors on CUDA would do, if autograd's engine did not ask the device for its streams: without a CUDA build
of torch it ends the process, with one it wants the driver. So torch's C++ is told that these tensors are on "meta",
a device without streams. Their dispatch keys stay CUDA's, and so does what Python sees.

Where C++ decides by the device it is then told what to do, as CUDA does it: autocast (`tracer/cuda_autocast`), a few
composite operators (`tracer/cuda_operators`), attention, and the layout of convolutions. A tensor that C++ makes "where
the other one is" is made on CUDA. For a process of its own: nothing is undone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from flopcast.errors import UsageError
from flopcast.roofline.stream.tracer.cuda_autocast import CastWeights, kernels_for
from flopcast.roofline.stream.tracer.cuda_operators import RULES
from flopcast.roofline.stream.tracer.known_values import learn
from flopcast.roofline.stream.tracer.user_code import line_of

_CUDA, _META = torch.device("cuda", 0), torch.device("meta")
_DEVICE: Any = torch.ops.prim.device.default  # what C++ calls to learn a tensor's device
_libraries: list[torch.library.Library] = []  # kept: what they register ends with them


def be_cuda(attention: Callable[..., torch.Tensor]) -> None:
    """Makes fake tensors on CUDA work in this process. `attention`: CUDA's `scaled_dot_product_attention`."""
    _hide_device_from_autograd()
    _keep_device_of_functional_tensors()
    for mode in (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode):
        mode.__torch_dispatch__ = _on_cuda(mode.__torch_dispatch__)  # type: ignore[method-assign]
    for kind in (FakeTensor, FunctionalTensor):
        _answer_from_device(kind)
    # makes a real tensor there, and tensors of Python's values there
    fake_tensor.init_gpu_context = lambda _device: None  # type: ignore[assignment]
    FakeTensorMode.avoid_device_init = property(lambda _mode: True)  # type: ignore[assignment]
    torch._C._conv_determine_backend_memory_format = _format_of(torch._C._conv_determine_backend_memory_format)
    torch._C._group_tensors_by_device_and_dtype = _grouped(torch._C._group_tensors_by_device_and_dtype)
    _register({**RULES, "scaled_dot_product_attention": attention})


@dataclass
class Watched:
    """Whom to tell of the operators that a step runs outside of its graphs: one mode's, at a time."""

    mode: FakeTensorMode | None = None
    waited: Callable[[str], None] = lambda line: None
    ran: Callable[[Any, Any], None] = lambda func, given: None


def read_ones() -> Watched:
    """Makes the mode that is watched read 1 and true from its tensors on the GPU, or what is known of a healthy step
    (`known_values`), and tell the line that asked to `waited`; and tell the other operators that it runs, with their
    arguments, to `ran`. A number on the processor without any is refused: what follows may be any branch.
    Compilers have modes of their own, in which there is nothing to read."""
    dispatch = FakeTensorMode.__torch_dispatch__
    watched = Watched()
    depth = 0  # of operators that run others
    known = WeakIdKeyDictionary()

    def read(own: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        nonlocal depth
        if own is watched.mode:
            if func is torch.ops.aten._local_scalar_dense.default and (args[0].is_cuda or args[0].constant is None):
                line = line_of(sys._getframe(1))
                if args[0].is_cuda:
                    watched.waited(line)
                if args[0] in known:
                    return known[args[0]]
                if not args[0].is_cuda:
                    raise UsageError(
                        f"the step reads a number on the processor that is not known without running it: {line}; "
                        "models that drop layers at random draw such a one before each; valid is mode eager, or a "
                        "model that does not ask"
                    )
                return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
            if not depth:
                watched.ran(func, (args, kwargs))
        depth += 1
        try:
            result = dispatch(own, func, types, args, kwargs)
        finally:
            depth -= 1
        if own is watched.mode and not depth:
            learn(func, args, result, known)
        return result

    # where a step runs outside of its graphs, dynamo looks at what it calls, and would compile this too
    FakeTensorMode.__torch_dispatch__ = torch.compiler.disable(read)  # type: ignore[method-assign]
    return watched


def _hide_device_from_autograd() -> None:
    """Answers C++ that fake tensors on CUDA are on meta, which FakeTensor does within a kernel's call anyway."""

    def where(args: Any) -> torch.device:
        device: torch.device = args[0].fake_device
        return _META if device.type == "cuda" or args[0].fake_mode.in_kernel_invocation else device

    def dispatch(kind: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return where(args) if func is _DEVICE else original(kind, func, types, args, kwargs or {})

    original = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
    FakeTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[method-assign, assignment]
    fake_tensor._DISPATCH_META_HANDLERS[_DEVICE] = where


def _keep_device_of_functional_tensors() -> None:
    """AOTAutograd's wrappers take their device, and so their keys, from what C++ says of the tensor within."""
    inside = _CUDA
    make, wrap = torch.Tensor._make_wrapper_subclass, FunctionalTensor.__new__

    def new(kind: type, elem: torch.Tensor, mode: Any) -> Any:
        nonlocal inside
        inside = torch._from_functional_tensor(elem).device
        return wrap(kind, elem, mode)

    def made(kind: type, *args: Any, **kwargs: Any) -> Any:
        if kind is FunctionalTensor:  # size, strides, offset, format, dtype, layout, device, ..., whether to ask for it
            args = (*args[:6], inside, *args[7:10], True, *args[11:])
        return make(kind, *args, **kwargs)

    torch.Tensor._make_wrapper_subclass = staticmethod(made)  # type: ignore[method-assign, assignment]
    FunctionalTensor.__new__ = new  # type: ignore[method-assign, assignment]
    share = torch._functionalize_unsafe_set

    def shared(result: torch.Tensor, tensor: torch.Tensor) -> None:
        """A wrapper's storage is on CUDA, that of the tensor within, which is seldom asked for a view, on meta."""
        if result.untyped_storage().device == tensor.untyped_storage().device:
            share(result, tensor)

    torch._functionalize_unsafe_set = shared  # type: ignore[assignment]
    FunctionalTensor.device = property(  # type: ignore[assignment]
        lambda tensor: torch._from_functional_tensor(tensor.elem).device
    )


def _on_cuda(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a mode that makes a tensor on CUDA where C++ asks for one on meta, having asked another for its device."""

    def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if kwargs and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": _CUDA}
        return dispatch(mode, func, types, args, kwargs or {})

    return dispatched


def _format_of(own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the rule by which convolutions lay their results out: cuDNN's as either operand is
    (`cudnn_conv_suggest_memory_format`), other libraries' where C++ finds no cuDNN."""

    def chosen(tensor: torch.Tensor, weight: torch.Tensor, backend: Any) -> Any:
        if not tensor.is_cuda or tensor.dtype == torch.float64:
            return own(tensor, weight, backend)
        # as ATen reads strides: a depthwise convolution's weights, of one channel, may be contiguous and channels last
        formats = {suggest_memory_format(operand) for operand in (tensor, weight)}
        return next(iter(formats - {torch.contiguous_format}), torch.contiguous_format)

    return chosen


def _grouped(own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes what groups tensors for multi-tensor kernels say of a group that it is on CUDA: its device decides whether
    gradients are clipped by such kernels."""

    def grouped(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return {(_CUDA if device == _META else device, dtype): group for (device, dtype), group in found.items()}

    return grouped


def _answer_from_device(kind: Any) -> None:
    """Lets tensors answer by their `device` what C++ would answer by meta."""
    to, cuda = kind.to, kind.cuda

    def indexed(device: Any) -> Any:
        """Names the GPU of a device without a number: C++ would ask CUDA for the current one."""
        if isinstance(device, (str, torch.device)) and str(device) == "cuda":
            return _CUDA
        return device

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Leaves out the device where the tensor is there already, which C++ takes for another."""
        args, kwargs = tuple(map(indexed, args)), {name: indexed(value) for name, value in kwargs.items()}
        if args and isinstance(args[0], torch.device):
            args, kwargs = (), dict(zip(("device", "dtype", "non_blocking", "copy"), args, strict=False)) | kwargs
        if kwargs.get("device") == tensor.device:
            kwargs = {name: value for name, value in kwargs.items() if name != "device" and value is not None}
            if not kwargs.keys() - {"non_blocking"}:
                return tensor
        result: torch.Tensor = to(tensor, *args, **kwargs)
        return result

    kind.to = moved
    kind.cuda = lambda tensor, *args, **kwargs: tensor if tensor.is_cuda else cuda(tensor, *args, **kwargs)
    kind.is_cuda = property(lambda tensor: tensor.device.type == "cuda")
    kind.is_cpu = property(lambda tensor: tensor.device.type == "cpu")
    kind.is_meta = property(lambda tensor: tensor.device.type == "meta")
    kind.get_device = lambda tensor: -1 if tensor.device.type == "cpu" else 0


def _register(rules: Mapping[str, Callable[..., Any]]) -> None:
    """Registers CUDA's autocast, whose own looks at the device, and CUDA's rules for composite operators; has
    constants, which have values, stay on the processor. A weight is cast once, until autocast ends, for what runs
    outside of graphs as within them."""
    aten, prims = (torch.library.Library(name, "IMPL") for name in ("aten", "prims"))
    _libraries.extend((aten, prims))
    weights, clear = CastWeights(), torch.clear_autocast_cache

    def clear_cache() -> None:
        weights.clear()
        clear()

    torch.clear_autocast_cache = _left_alone(clear_cache)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, kernel in kernels_for(weights, "cuda", is_in_order=True):
            aten.impl(name, _left_alone(kernel), "AutocastCUDA")
        for name, rule in rules.items():
            aten.impl(name, _left_alone(rule), "AutogradCUDA")
        # a number that a step makes on the GPU, as `torch.tensor(0.0, device="cuda")`: tracing computes such constants
        prims.impl(
            "device_put", lambda number, _device, _non_blocking=False: number.clone(), "BackendSelect",
            allow_override=True,  # torch 2.13's default; 2.11 refuses to replace what is registered
        )  # fmt: skip


def _left_alone(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps dynamo from compiling what stands for CUDA's own code, where a step calls it outside of its graphs."""
    is_function = kernel is not torch.library.fallthrough_kernel
    return torch.compiler.disable(kernel) if is_function else kernel
