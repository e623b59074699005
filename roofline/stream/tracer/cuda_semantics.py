"""Emulates CUDA on fake CPU tensors: shows what a training step would launch on a GPU, on a machine without one.

Fake tensors on CUDA itself will not do: without a CUDA build of torch their backward ends the process. So the tensors
are fake CPU tensors, and the three things that differ between the devices are changed where torch decides them:

- Autocast casts different operators, to different dtypes (`cuda_autocast`).
- Some operators run different kernels, or give results of another dtype (`cuda_operators`).
- Python code asks tensors for their device: they answer CUDA, except for those in host memory.

Everything is undone when the context ends. Tests compare the result with real streams, recorded once on an H200.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from flopcast.roofline.stream.tracer.cuda_autocast import CastWeights, kernels_for
from flopcast.roofline.stream.tracer.cuda_operators import RESULTS, RULES
from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.unmodelled import check_call

_CUDA = torch.device("cuda", 0)
# The compute capability that Python code sees: that of the H200, on which the streams of the tests were recorded.
_CAPABILITY = (9, 0)
# A step reads back few Boolean values; a loop that runs until one is false would never end.
MAX_CHECKS = 2_000
# Processor seconds of one trace: 48 layers of 16 experts take 20 s, 62 layers that all differ half a minute.
MAX_SECONDS = 120.0


class HostTensors:
    """The tensors in host memory even on a machine with CUDA: those made by `torch.tensor` without a device."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()

    def add(self, tensor: torch.Tensor) -> None:
        self._known[tensor] = True

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._known


class _LooksLikeCuda(TorchFunctionMode):
    """Makes fake CPU tensors answer Python as CUDA tensors would; a move to CUDA or creation there keeps the CPU."""

    def __init__(self, hosts: HostTensors) -> None:
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
# Lists of the tensor types that torch's multi-tensor kernels accept, to which fake tensors are added.
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


class FakeValues(TorchDispatchMode):
    """Answers calls that read a value back, which fake tensors lack: Boolean values are true, numbers are 1."""

    supports_higher_order_operators = True  # they are called like any other, and refused

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_inside = False  # within an operator's call, where only torch itself asks for devices
        self.failed = ""  # the call that raised last, and what
        self.fault: Exception | None = None
        self.checks = 0  # Boolean values read back so far
        self.is_cuda = False  # whether results have the dtypes and shapes of CUDA's kernels
        self.ends = time.process_time() + MAX_SECONDS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if time.process_time() > self.ends:
            raise RuntimeError(
                f"one step is not traced after {MAX_SECONDS:g} s of processor time; fewer layers take less"
            )
        check_call(func)
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
            if self.is_cuda and func in RESULTS and (result := RESULTS[func](*args, **kwargs)) is not None:
                return result
            result = func(*args, **kwargs)
            if isinstance(result, FakeTensor) and result.fake_device.type == "cuda":  # autograd would end the process
                raise RuntimeError("a CUDA tensor was made in a way that is not followed")
            return result
        except Exception as fault:
            self.failed, self.fault = str(func), fault
            raise
        finally:
            self.is_inside = before


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Within it, libraries that treat fake tensors specially treat them like any other tensors.

    transformers takes fake tensors for a compiler's and then does not use causal SDPA; torch's `Module.to` swaps them,
    which fails where a weak reference to them exists; its truncated normal redraws until all numbers are in range.
    """
    import transformers.utils.import_utils as utils

    with (
        replaced(utils, "is_fake_tensor", lambda x: False),
        replaced(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_kwargs: tensor),
        replaced(torch.nn.Module, "_apply", _apply_to_fakes(WeakIdKeyDictionary())),
    ):
        yield


def _apply_to_fakes(moved: WeakIdKeyDictionary) -> Callable[..., Any]:
    """Makes a `Module._apply` that replaces parameters instead of swapping contents; `moved` keeps tied ones tied."""

    def apply(module: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
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
def as_on_cuda(values: FakeValues) -> Iterator[HostTensors]:
    """Makes fake CPU tensors behave as CUDA tensors within the context; yields the tensors that are in host memory.

    Autocast for "cuda" works, through the CPU's. Not thread-safe: torch's dispatcher is changed.
    """
    hosts = HostTensors()
    weights = CastWeights()
    clear, is_enabled, get_dtype = (torch.clear_autocast_cache, torch.is_autocast_enabled, torch.get_autocast_dtype)
    start = torch.amp.autocast_mode.autocast.__init__
    where = FakeTensor.device

    def clear_cache() -> None:
        weights.clear()
        clear()

    def begin(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
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
            stack.enter_context(replaced(owner, name, value))
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
def _cuda_rules(weights: CastWeights) -> Iterator[None]:
    """Registers CUDA's autocast in place of the CPU's, and CUDA's rules for composite operators."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, kernel in kernels_for(weights):
            library.impl(name, kernel, "AutocastCPU")
        for name, rule in RULES.items():
            library.impl(name, rule, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()
