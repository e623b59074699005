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
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from flopcast.roofline.stream.tracer.cuda_autocast import CastWeights, kernels_for
from flopcast.roofline.stream.tracer.cuda_operators import RESULTS, RULES
from flopcast.roofline.stream.tracer.gpu_machine import check_index, cuda_device
from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.known_values import learn
from flopcast.roofline.stream.tracer.lanes import wraps
from flopcast.roofline.stream.tracer.recorder import DEVICE_OF, fake_device, flatten, is_on_processor
from flopcast.roofline.stream.tracer.unmodelled import check_call
from flopcast.roofline.stream.tracer.user_code import users_line

_CUDA = torch.device("cuda", 0)
# A step reads back few Boolean values; a loop that runs until one is false would never end.
MAX_CHECKS = 2_000
# Processor seconds of one trace: 48 layers of 16 experts take 20 s, 62 layers that all differ half a minute.
MAX_SECONDS = 120.0
CALLS_A_LOOK = 64  # calls of operators between two looks at the time, each of which is 2% of a call


class HostTensors:
    """The tensors in host memory even on a machine with CUDA: those made from Python's and numpy's values without a
    device, those put on the CPU or pinned by name, batches of a DataLoader, and what is computed from these alone.

    A tensor that is made without a device is taken to be on the GPU, so that a step that names none is forecast there.
    """

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()
        self.moving: bool | None = None  # while a tensor is made somewhere by name: whether in host memory

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self._known[tensor] = True
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._known

    def follow(self, args: Any, results: Any) -> None:
        """Adds the results of a call that takes tensors in host memory only, and the copy that is made there."""
        if self.moving is None and not self._known:
            return
        operands = [t for t in flatten(args) if isinstance(t, torch.Tensor)]
        if self.moving or (self.moving is None and operands and all(t in self._known for t in operands)):
            for result in flatten(results):
                if isinstance(result, torch.Tensor):
                    self.add(result)

    def copied(
        self, tensor: torch.Tensor, to_host: bool, dtype: torch.dtype | None = None, **memory_format: Any
    ) -> torch.Tensor:
        """Copies a tensor to host memory or from there."""
        with self.making(to_host):
            return tensor.to(dtype or tensor.dtype, copy=True, **memory_format)

    def uploaded(self, tensor: torch.Tensor, dtype: torch.dtype | None = None, **memory_format: Any) -> torch.Tensor:
        """Copies a tensor from host memory and waits for the stream, as torch does unless `non_blocking` is set, also
        of pinned memory (c10/cuda/CUDAFunctions.cpp, memcpy_and_sync)."""
        result = self.copied(tensor, False, dtype, **memory_format)
        torch.ops.flopcast.synchronize.default()
        return result

    @contextlib.contextmanager
    def making(self, on_host: bool = True) -> Iterator[None]:
        """Within the context results lie in host memory, or on the device."""
        before, self.moving = self.moving, on_host
        try:
            yield
        finally:
            self.moving = before


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
        if (
            func is torch.device or name == "_parse_to"
        ):  # descriptions, no places; a number is a device of the GPU's kind
            args = tuple(torch.device("cuda", a) if i == 0 and type(a) is int else a for i, a in enumerate(args))
            if type(kwargs.get("device")) is int:
                kwargs["device"] = torch.device("cuda", kwargs["device"])
            return args[0] if func is torch.device and isinstance(args[0], torch.device) else func(*args, **kwargs)
        if (answer := _ASKED.get(name)) is not None and args and isinstance(args[0], torch.Tensor):
            return answer(self.hosts, *args, **kwargs)
        if name in _MOVES and args and isinstance(args[0], torch.Tensor):
            return self._move(func, name, args, kwargs)
        if name in _INDEXED and isinstance(args[0], torch.Tensor):
            return func(args[0], self._index_beside(args[0], args[1]), *args[2:], **kwargs)
        device = kwargs.get("device")
        if type(device) is int:
            check_index(device)
            device = _CUDA
        to_cuda = cuda_device(device) or any(cuda_device(a) for a in args[:2])
        if to_cuda:
            args = tuple(_CPU if cuda_device(a) else a for a in args)
            kwargs = {key: _CPU if key == "device" or cuda_device(value) else value for key, value in kwargs.items()}
        if to_cuda and func in _FROM_VALUES and not isinstance(args[0], torch.Tensor):
            with self.hosts.making():
                made = self.hosts.add(func(*args, **kwargs))
            if made.numel():  # an empty one, as caches begin with, is not copied
                return self.hosts.uploaded(made)
        is_pinned = kwargs.pop("pin_memory", False)
        is_on_cpu = device is not None and not to_cuda and torch.device(device).type == "cpu"
        is_from_values = func in _FROM_VALUES and device is None and _default_type() == "cpu"
        if is_pinned or is_on_cpu or is_from_values:
            with self.hosts.making():
                result = func(*args, **kwargs)
            return self.hosts.add(result) if isinstance(result, torch.Tensor) else result
        return func(*args, **kwargs)

    def _index_beside(self, tensor: torch.Tensor, index: Any) -> Any:
        """An index with its lists of numbers as tensors where the tensor lies: torch copies them to a GPU each time."""
        if isinstance(index, tuple):
            return tuple(self._index_beside(tensor, part) for part in index)
        if not isinstance(index, list) or not index or any(type(number) is not int for number in index):
            return index
        with self.hosts.making():
            made = self.hosts.add(torch.tensor(index))
        return made if tensor in self.hosts else self.hosts.uploaded(made)

    def _move(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers `cuda`, `cpu` and `to`: a copy where the tensor lies elsewhere."""
        tensor, *rest = args
        named = [*rest, *kwargs.values()]
        dtype = next((value for value in named if isinstance(value, torch.dtype)), None)
        other = next((value for value in named if isinstance(value, torch.Tensor)), None)
        device: Any = kwargs.get("device", rest[0] if rest else None)
        if name == "cpu" or device is None:
            device = name if name != "to" else None
        if type(device) is int:
            check_index(device)
            device = _CUDA
        to_host: bool | None = None
        if other is not None:
            to_host, dtype = other in self.hosts, other.dtype
        elif cuda_device(device) is not None:
            to_host = False
        elif isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu":
            to_host = True
        if to_host is not None and to_host != (tensor in self.hosts):
            memory_format = {key: value for key, value in kwargs.items() if key == "memory_format"}
            if to_host or kwargs.get("non_blocking") or True in rest:
                return self.hosts.copied(tensor, to_host, dtype, **memory_format)
            return self.hosts.uploaded(tensor, dtype, **memory_format)
        if name != "to":
            return tensor
        args = tuple(_CPU if type(a) is int or cuda_device(a) else a for a in args)
        kwargs = {key: _CPU if type(value) is int or cuda_device(value) else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


# Calls that move tensors, that take an index, and calls that make tensors of values.
_MOVES = ("cuda", "cpu", "to")
_INDEXED = ("__getitem__", "__setitem__")
_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)


def _array(hosts: HostTensors, tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    """A numpy array for a tensor in host memory: of ones, since there are no values."""
    if tensor not in hosts:
        raise TypeError(  # in torch's words
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
            "first."
        )
    return numpy.ones(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _list(values: FakeValues, tensor: torch.Tensor) -> Any:
    """Python's numbers, read back in one copy."""
    if not tensor.ndim:
        return tensor.item()
    hosts = values.hosts
    ones = _array(hosts, tensor if tensor in hosts else hosts.copied(tensor, to_host=True))
    return (ones * values.known[tensor] if tensor in values.known else ones).tolist()


def _format(_hosts: HostTensors, tensor: torch.Tensor, spec: str) -> str:
    return format(tensor.item(), spec) if not tensor.ndim else "tensor(...)"


# What tensors answer about themselves.
_ASKED: dict[str, Callable[..., Any]] = {
    "get_device": lambda hosts, tensor: -1 if tensor in hosts else 0,
    "is_pinned": lambda hosts, tensor, *_: tensor in hosts,
    "pin_memory": lambda hosts, tensor, *_: tensor if tensor in hosts else hosts.copied(tensor, to_host=True),
    "numpy": _array,
    "__array__": _array,
    "__format__": _format,
}


_CPU = torch.device("cpu")
# Lists of the tensor types that torch's multi-tensor kernels accept, to which fake tensors are added.
_TYPES: tuple[list[type], ...] = tuple(
    getattr(module, "_foreach_supported_types", [])
    for module in (importlib.import_module("torch.optim.optimizer"), _foreach_utils)
)
_IS_CUDA, _IS_CPU = torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_WHERE = {_IS_CUDA, _IS_CPU}


class FakeValues(TorchDispatchMode):
    """Answers calls that read a value back, which fake tensors lack: Boolean values are true, numbers are 1."""

    supports_higher_order_operators = True  # they are called like any other, and refused

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hosts = HostTensors()
        self.known: Any = WeakIdKeyDictionary()  # values that tensors have in any step in good health
        self.notes: dict[str, None] = {}  # what a forecast takes for granted, in order
        self.is_inside = False  # within an operator's call, where only torch itself asks for devices
        self.failed = ""  # the call that raised last, and what
        self.fault: Exception | None = None
        self.checks = 0  # Boolean values read back so far
        self.is_cuda = False  # whether results have the dtypes and shapes of CUDA's kernels
        self.ends = time.process_time() + MAX_SECONDS
        self.calls = 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Within it tensors say where they really are."""
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    def note(self, text: str) -> None:
        self.notes[text] = None

    def _read(self, tensor: torch.Tensor) -> Any:
        """Returns a tensor's value: one that is known, else true or 1."""
        is_truth = tensor.dtype == torch.bool
        if tensor in self.known:
            value = self.known[tensor]
            return bool(value) if is_truth else float(value) if tensor.dtype.is_floating_point else int(value)
        constant = getattr(
            tensor, "constant", None
        )  # of a tensor made from Python's values; counters of steps are fp32
        if constant is not None and not tensor.dtype.is_floating_point:
            return constant.item()
        self.checks += is_truth
        if self.checks > MAX_CHECKS:
            raise RuntimeError("a loop waits for a value, and fake tensors have none")
        if is_truth and (line := users_line(sys._getframe(1))):
            self.note(f"a condition that depends on values is taken to be true: {line}")
        return True if is_truth else 1.0 if tensor.dtype.is_floating_point else 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF and is_on_processor(args[0]):
            return fake_device(args[0])
        if wraps(types):
            return NotImplemented
        self.calls += 1
        if self.calls % CALLS_A_LOOK == 0 and time.process_time() > self.ends:
            raise RuntimeError(
                f"one step is not traced after {MAX_SECONDS:g} s of processor time; fewer layers take less"
            )
        check_call(func)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(args[0])
        kwargs = kwargs or {}
        if cuda_device(kwargs.get("device")):
            kwargs["device"] = _CPU
        before, self.is_inside = self.is_inside, True
        try:
            result = RESULTS[func](*args, **kwargs) if self.is_cuda and func in RESULTS else None
            if result is None:
                result = func(*args, **kwargs)
            if isinstance(result, FakeTensor) and result.fake_device.type == "cuda":  # autograd would end the process
                raise RuntimeError("a CUDA tensor was made in a way that is not followed")
            if self.is_cuda:
                self.hosts.follow(args, result)
            learn(func, args, result, self.known)
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
    which fails where a weak reference to them exists; its truncated normal redraws until all numbers are in range; its
    multi-tensor kernels take some types of tensors alone. Inference mode, in which calls come to the dispatcher whole,
    becomes no_grad, which launches the same kernels.
    """
    import transformers.utils.import_utils as utils

    with (
        contextlib.ExitStack() as stack,
        replaced(utils, "is_fake_tensor", lambda x: False),
        replaced(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_kwargs: tensor),
        replaced(torch.nn.Module, "_apply", _apply_to_fakes(WeakIdKeyDictionary())),
        replaced(torch.inference_mode, "__enter__", _begin_inference),
        replaced(torch.inference_mode, "__exit__", _end_inference),
    ):
        for types in _TYPES:
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        yield


def _begin_inference(context: Any) -> None:
    context.prev = torch.is_grad_enabled()
    torch.set_grad_enabled(context.prev and not context.mode)


def _end_inference(context: Any, *_fault: Any) -> None:
    torch.set_grad_enabled(context.prev)


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
def as_on_cuda(values: FakeValues, *, casts_in_order: bool = False) -> Iterator[HostTensors]:
    """Makes fake CPU tensors behave as CUDA tensors within the context; yields the tensors that are in host memory.

    Autocast for "cuda" works, through the CPU's; `casts_in_order`: `kernels_for`'s `is_in_order`. Not thread-safe:
    torch's dispatcher is changed.
    """
    hosts = values.hosts
    weights = CastWeights()
    clear, is_enabled, get_dtype = (torch.clear_autocast_cache, torch.is_autocast_enabled, torch.get_autocast_dtype)
    start = torch.amp.autocast_mode.autocast.__init__
    where = FakeTensor.device
    where_if_real = torch.Tensor.device
    from_numpy, group = torch.from_numpy, torch._C._group_tensors_by_device_and_dtype

    def clear_cache() -> None:
        weights.clear()
        clear()

    def begin(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or (get_dtype("cpu") if is_enabled("cpu") else torch.float16)
        start(self, device_type, dtype, *args, **kwargs)

    def grouped(lists: Any, *args: Any) -> Any:
        """Groups tensors as optimizers do, under the devices that they answer."""
        found: dict[Any, Any] = group(lists, *args)
        return {(tensors[0][0].device, *key[1:]): (tensors, *rest) for key, (tensors, *rest) in found.items()}

    def device(tensor: torch.Tensor) -> torch.device:
        own: torch.device = (where if isinstance(tensor, FakeTensor) else where_if_real).__get__(tensor)
        return own if values.is_inside or own.type != "cpu" or tensor in hosts else _CUDA

    with contextlib.ExitStack() as stack:
        stack.enter_context(_cuda_rules(weights, is_in_order=casts_in_order))
        for owner, name, value in (
            (torch, "clear_autocast_cache", clear_cache),
            (torch, "is_autocast_enabled", lambda device_type="cpu": is_enabled(_cpu_for(device_type))),
            (torch, "get_autocast_dtype", lambda device_type: get_dtype(_cpu_for(device_type))),
            (torch.amp.autocast_mode.autocast, "__init__", begin),
            (torch._C, "_group_tensors_by_device_and_dtype", grouped),
            (torch, "from_numpy", lambda array: hosts.add(from_numpy(array))),
            (FakeTensor, "device", property(device)),
            (FakeTensor, "tolist", lambda tensor: _list(values, tensor)),
        ):
            stack.enter_context(replaced(owner, name, value))
        # real tensors, such as a batch that exists already; torch.Tensor inherits its own
        torch.Tensor.device = property(device)  # type: ignore[assignment]
        stack.callback(delattr, torch.Tensor, "device")
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
def _cuda_rules(weights: CastWeights, *, is_in_order: bool) -> Iterator[None]:
    """Registers CUDA's autocast in place of the CPU's, and CUDA's rules for composite operators."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, kernel in kernels_for(weights, is_in_order=is_in_order):
            library.impl(name, kernel, "AutocastCPU")
        for name, rule in RULES.items():
            library.impl(name, rule, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()


def _default_type() -> str:
    """The type of the default device. To learn it, torch 2.11's `get_default_device` makes a tensor, which would be one
    of the step."""
    found = torch.utils._device.CURRENT_DEVICE
    return "cpu" if found is None else found.type
