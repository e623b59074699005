"""What a step can use and the forecast does not model yet: recognized here and refused in words.

`refusing` watches a factory and its step: whatever runs compiled, scripted, captured or on several GPUs, and libraries
with kernels of their own, ends the trace with a `NotModelled` that holds a `Finding`. The recorder asks `check_call`
and `check_tensor` for what reaches the dispatcher, `finding_in` reads other errors.

Objects are recognized when they run, not when they are made: a module may compile a function that its step never
calls, and what was compiled before the trace began is refused too.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flopcast.errors import UsageError
from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.user_code import line_of, packages_in


class Topic(Enum):
    """What is not modelled; the value says so, and what to do for a forecast."""

    COMPILED = (
        "a step that compiles itself is compiled anew in a process of its own, for one GPU: name its factory, as "
        "package.module:factory or path/file.py:factory, and one GPU; or leave torch.compile out, or set "
        "TORCHDYNAMO_DISABLE=1, for the eager forecast"
    )
    SCRIPTED = "only eager steps are modelled yet: leave TorchScript out, or set PYTORCH_JIT=0, for the eager forecast"
    CAPTURED = "CUDA graphs are not modelled yet: leave the capture out for the eager forecast"
    SEVERAL_GPUS = (
        "it is of several GPUs: give --parallel own=N, the number of GPUs over which the code lays itself out, or "
        "forecast the step of one GPU, with its share of the batch and without the wrapper"
    )
    FP8 = "fp8 is not modelled yet: forecast the step in bf16"
    FLEX_ATTENTION = "flex_attention is not modelled yet: use scaled_dot_product_attention for a forecast"
    QUANTIZED = "quantized tensors are not modelled yet: forecast the step in bf16"
    SPARSE = "sparse tensors are not modelled yet: use dense ones (Embedding with sparse=False) for a forecast"
    NESTED = "nested tensors are not modelled yet: use padded ones for a forecast"
    DTYPE = (
        "tensors of this type are not modelled yet: valid are floating-point numbers of 16, 32 and 64 bits, integers, "
        "bool and complex64"
    )
    COMPLEX = "products of complex matrices are not modelled yet: write them as products of real and imaginary parts"
    LIBRARY = (
        "kernels of other libraries than torch are not modelled yet: use torch's own operators and optimizers for a "
        "forecast, and 16 bits in place of fewer"
    )
    ANOMALIES = "what anomaly detection costs is not modelled: leave it out, as runs that count do"
    CONTROL_FLOW = "torch's operators that take functions are not modelled yet: write the step without for a forecast"


@dataclass(frozen=True)
class Finding:
    """Something that is not modelled: what was found, as the start of a sentence ("torch.compile of Net (net.py:7)"),
    and the user's line that ran it, "" where none did."""

    topic: Topic
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.where})' if self.where else ''}: {self.topic.value}"


class NotModelled(UsageError):
    """The step does something that is not modelled yet."""

    def __init__(self, topic: Topic, what: str, trace: TracebackType | None = None) -> None:
        """Takes the traceback of another error where that is what was found."""
        self.finding = Finding(topic, what, line_of(trace or sys._getframe(1)))
        super().__init__(str(self.finding))


_modelled: set[Topic] = set()  # what is not refused now


@contextlib.contextmanager
def modelled(topic: Topic) -> Iterator[None]:
    """Within the context the topic is not refused: the trace is one that models it."""
    _modelled.add(topic)
    try:
        yield
    finally:
        _modelled.discard(topic)


# Classes of modules by their full names, which a module's class or one of its bases may have.
_MODULES = {
    "torch.nn.parallel.data_parallel.DataParallel": (Topic.SEVERAL_GPUS, "DataParallel"),
    "torch.nn.parallel.distributed.DistributedDataParallel": (Topic.SEVERAL_GPUS, "DistributedDataParallel"),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (Topic.SEVERAL_GPUS, "FSDP"),
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": (Topic.SEVERAL_GPUS, "fully_shard"),
    "torch.jit._script.ScriptModule": (Topic.SCRIPTED, "TorchScript"),
}

# Libraries that launch kernels of their own, which a trace of torch's operators would not see or take for others.
_LIBRARIES = ("bitsandbytes", "transformer_engine", "deepspeed", "apex", "xformers", "flash_attn", "flash_attn_3",
              "liger_kernel", "mamba_ssm", "causal_conv1d", "triton")  # fmt: skip

# Variables that launchers of several processes set, which steps for several GPUs read.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Parts of torch whose own errors mean that they are not modelled: on fake tensors they fail in ways of their own.
_PARTS = {
    ("nested",): Topic.NESTED,
    ("sparse",): Topic.SPARSE,
    ("ao", "quantization"): Topic.QUANTIZED,
    ("distributed",): Topic.SEVERAL_GPUS,
    ("nn", "attention", "flex_attention.py"): Topic.FLEX_ATTENTION,
}

# (where, name, topic): functions and constructors that nothing but the topic calls.
_ENTRIES: tuple[tuple[Any, str, Topic], ...] = (
    (torch.nn.DataParallel, "__init__", Topic.SEVERAL_GPUS),
    (torch.nn.parallel.DistributedDataParallel, "__init__", Topic.SEVERAL_GPUS),
    (torch.cuda, "make_graphed_callables", Topic.CAPTURED),
    (torch.cuda.graphs, "make_graphed_callables", Topic.CAPTURED),
    (torch.cuda.graphs.graph, "__init__", Topic.CAPTURED),
    (torch.cuda.graphs.CUDAGraph, "__new__", Topic.CAPTURED),
)
_SEVERAL_PROCESSES = ("init_process_group", "rendezvous", "_get_default_group", "init_device_mesh")


@contextlib.contextmanager
def refusing() -> Iterator[Callable[[], None]]:
    """Raises NotModelled within the context for what is not modelled. Yields a function to call after the factory: it
    watches a compiler that the factory has loaded."""
    with contextlib.ExitStack() as stack:
        watched: set[str] = set()

        def watch_compiler() -> None:
            compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
            if compiler is not None and not watched:
                watched.add(compiler.__name__)
                find = compiler._callback_from_stance
                stack.enter_context(replaced(compiler, "_callback_from_stance", _compiled(find)))

        def compile_and_watch(*args: Any, **kwargs: Any) -> Any:
            made = compile_(*args, **kwargs)
            watch_compiler()
            return made

        compile_ = torch.compile
        stack.enter_context(replaced(torch, "compile", compile_and_watch))
        watch_compiler()
        for owner, name, topic in _ENTRIES:
            if topic in _modelled:
                continue
            label = name if not name.startswith("__") else f"torch.cuda.{owner.__name__}"
            label = owner.__name__ if topic is Topic.SEVERAL_GPUS else label
            stack.enter_context(replaced(owner, name, _refused(topic, label)))
        if torch.distributed.is_available() and Topic.SEVERAL_GPUS not in _modelled:
            for owner in (torch.distributed, torch.distributed.distributed_c10d, torch.distributed.device_mesh):
                for name in _SEVERAL_PROCESSES:
                    if hasattr(owner, name):
                        refused = _refused(Topic.SEVERAL_GPUS, f"torch.distributed ({name.strip('_')})")
                        stack.enter_context(replaced(owner, name, refused))
        stack.enter_context(replaced(torch.jit.ScriptFunction, "__call__", _scripted))
        stack.enter_context(torch.nn.modules.module.register_module_forward_pre_hook(_check_module))
        stack.enter_context(register_optimizer_step_pre_hook(lambda optimizer, *_: _check_library(optimizer)))
        yield watch_compiler


def _refused(topic: Topic, what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotModelled(topic, what)

    return refuse


def _scripted(function: Any, *_: Any, **__: Any) -> Any:
    raise NotModelled(Topic.SCRIPTED, f"TorchScript's {function.name}")


# Parts of torch that compile what they are given.
_COMPILES_ITSELF = {
    "torch.nn.attention.flex_attention.": Topic.FLEX_ATTENTION,
    "torch._higher_order_ops.": Topic.CONTROL_FLOW,
}


def _compiled(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes the compiler's `_callback_from_stance`, which every compiled callable calls before it runs; the callback is
    None or False where nothing is to be compiled."""

    def refuse(callback: Any) -> Any:
        found = find(callback)
        if not callable(found):
            return found
        function = sys._getframe(1).f_locals.get("fn")  # of the wrapper that torch.compile made
        name = _name_of(function)
        for package, topic in _COMPILES_ITSELF.items():
            if name.startswith(package):
                raise NotModelled(topic, package.removesuffix("."))
        raise NotModelled(Topic.COMPILED, f"torch.compile of {name}" if name else "torch.compile")

    return refuse


def _name_of(function: Any) -> str:
    """Returns the name of a function or of the module whose method it is."""
    function = inspect.unwrap(function) if callable(function) else function
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    name = getattr(function, "__qualname__", "").replace("<locals>.", "")
    module = getattr(function, "__module__", "")
    return f"{module}.{name}" if module.startswith("torch.") else name


_known: dict[type, tuple[Topic, str] | None] = {}


def _check_module(module: torch.nn.Module, _args: Any) -> None:
    kind = type(module)
    if kind not in _known:
        names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
        _known[kind] = next((_MODULES[name] for name in names if name in _MODULES), None)
    if (found := _known[kind]) is not None and found[0] not in _modelled:
        inner = getattr(module, "original_name", None) or type(getattr(module, "module", module)).__name__
        raise NotModelled(found[0], f"{found[1]} of {inner}")
    _check_library(module)


def _check_library(thing: Any) -> None:
    library = type(thing).__module__.partition(".")[0]
    if library in _LIBRARIES:
        raise NotModelled(Topic.LIBRARY, f"{library}'s {type(thing).__name__}")


def check_call(function: Any) -> None:
    """Raises NotModelled for an operator, as the dispatcher knows it, that is not modelled."""
    if isinstance(function, HigherOrderOperator):
        name = function.name()
        is_flex = name.startswith("flex_attention")
        raise NotModelled(Topic.FLEX_ATTENTION if is_flex else Topic.CONTROL_FLOW, name)
    if function.namespace in _LIBRARIES:
        raise NotModelled(Topic.LIBRARY, f"{function.namespace}'s {function._opname}")
    if function.namespace in ("quantized", "quantized_decomposed") or function._opname.startswith("quantize_per_"):
        raise NotModelled(Topic.QUANTIZED, str(function))
    if function.namespace in ("c10d", "_c10d_functional") and Topic.SEVERAL_GPUS not in _modelled:
        raise NotModelled(Topic.SEVERAL_GPUS, str(function))


_COMPLEX_PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.", "aten.convolution")


def check_layout(tensor: torch.Tensor, where: object) -> None:
    """Raises NotModelled for a tensor that is no block of memory with strides. `where`: the operator that takes or
    makes it, or what it is."""
    if tensor.layout is not torch.strided:
        topic = Topic.NESTED if tensor.is_nested else Topic.SPARSE
        raise NotModelled(topic, f"a tensor of layout {str(tensor.layout).removeprefix('torch.')} in {where}")
    if tensor.is_nested:
        raise NotModelled(Topic.NESTED, f"a nested tensor in {where}")


def check_tensor(tensor: torch.Tensor, function: Any, dtypes: Container[torch.dtype]) -> None:
    """Raises NotModelled for an operand or result whose kind is not modelled. `dtypes`: those that are."""
    check_layout(tensor, function)
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in dtypes or (name.startswith("float8") and Topic.FP8 not in _modelled):
        topic = Topic.FP8 if name.startswith("float8") else Topic.QUANTIZED if tensor.is_quantized else Topic.DTYPE
        raise NotModelled(topic, f"a tensor of {name} in {function}")
    if tensor.dtype.is_complex and str(function).startswith(_COMPLEX_PRODUCTS):
        raise NotModelled(Topic.COMPLEX, str(function))


def finding_in(fault: BaseException) -> NotModelled | None:
    """Returns what an error of another kind says of something that is not modelled: one from within a library with
    kernels of its own, or of a script that a launcher has to start."""
    if isinstance(fault, KeyError) and fault.args and fault.args[0] in _LAUNCHER_VARIABLES:
        return NotModelled(Topic.SEVERAL_GPUS, f"the launcher's variable {fault.args[0]}", fault.__traceback__)
    if "_scaled_mm" in str(fault):  # it has no derivative, which autograd says before the operator is called
        return NotModelled(Topic.FP8, "torch._scaled_mm", fault.__traceback__)
    if "returned nan values" in str(fault):  # in torch's search for NaN, which fake tensors do not pass
        return NotModelled(Topic.ANOMALIES, "torch.autograd.detect_anomaly", fault.__traceback__)
    for package, *parts in packages_in(fault.__traceback__):
        if package in _LIBRARIES:
            return NotModelled(Topic.LIBRARY, f"{package} ({type(fault).__name__})", fault.__traceback__)
        if package == "torch":
            for part, topic in _PARTS.items():
                if tuple(parts[: len(part)]) == part and topic not in _modelled:
                    name = ".".join(("torch", *part)).removesuffix(".py")
                    return NotModelled(topic, f"{name} ({type(fault).__name__})", fault.__traceback__)
    return None
