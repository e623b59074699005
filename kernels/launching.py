"""Launches Triton kernels at the least cost to the host: a call is recorded once per kind of operands, then replayed.

    @Replayed
    def scaled(x: Tensor, factor: float) -> Tensor:
        out = torch.empty_like(x)
        launch(kernel, (programs,), x, out, factor, BLOCK=1024)
        return out

What a call of such a function does depends on its operands' kinds alone: shapes, strides, dtypes, device, whether they
begin at multiples of 16 bytes, and the values of what is not a tensor. The first call of a kind runs as written and
compiles. The second is watched: the tensors that it allocates, the views that it takes and the kernels that it
launches. From then on a call of that kind allocates the same and calls Triton's own C launcher with the same kernels
and numbers and the pointers of today, by a function made for it; nothing is looked up, bound, specialised, guarded or
asked of torch again. Without the driver's part a call of SwiGLU takes 29 us of Python as written and 0.8 us by its
recording, one of RMSNorm 55 and 2.3, where torch's x * y takes 1.9 us (triton 3.7; `kernel[grid](...)` alone takes 14).
On an H200's host that made RMSNorm's forward 16 us of 92, attention's 22 of 191 (`studies.kernels.launch_cost`).

A call is not replayed, and runs as written, wherever that might not be the same:
- the function did something else when watched, such as copying an operand to make it contiguous;
- an operand is no plain tensor, begins elsewhere than at a multiple of 16 bytes, or lies on another device than the
  current one; a hook of Triton wants to know of launches;
- the kernel needs scratch memory, or the launcher is not that of triton 3.6 or 3.7, which are all that is known here.

A replay asks the current stream anew and allocates by torch's allocator, so that it can be captured in a CUDA graph.
Tensor-memory descriptors are made by Triton's function and kept by address, since they hold nothing but the address
and what the kind of operands says. What a function takes from elsewhere, and not from its operands, comes from a
function marked `asked_each_time`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = frozenset((Tensor, nn.Parameter))  # types of tensors that stand for memory and nothing else
ALIGNMENT = 16  # bytes: Triton compiles a kernel anew for pointers that are no multiples of it
PLANS = 1024  # of a function, at most: beyond, all are forgotten, so that ever new shapes fill no memory
MAPS = 4096  # descriptors kept per place of a plan

KNOWN = ((3, 6), (3, 7))  # versions of triton whose launcher for CUDA takes what a replay gives it
_UNSEEN: Any = object()  # in place of a plan: no call of this kind so far
_ALLOCATE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")

Any_ = TypeVar("Any_", bound=Callable[..., Any])
_local = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """`kernel[grid](*args, **named)`, which a recording notes. The current device must be that of the tensors."""
    compiled = kernel[grid](*args, **named)
    recorder = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.saw_launch(kernel, compiled, grid, args, named)


def asked_each_time(function: Any_) -> Any_:
    """Marks a function of numbers, names and devices whose result, a tensor, a replay asks for anew."""

    @functools.wraps(function)
    def asked(*args: Any) -> Any:
        recorder = getattr(_local, "recorder", None)
        if recorder is None:
            return function(*args)
        with recorder.looking_away():
            result = function(*args)
        recorder.saw_asked(function, args, result)
        return result

    return cast(Any_, asked)


class Refused(Exception):
    """Why a call cannot be replayed."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor begins: `offset` bytes after the memory that a name of the plan stands for."""

    name: str
    offset: int


@dataclass
class _Allocation:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class _Recorder(TorchDispatchMode):
    """Watches a call; `source` is then the text of the function that repeats it."""

    operands: Sequence[Any]
    passed: frozenset[int] = frozenset()  # operands, by their place, that are numbers and change from call to call
    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)  # what the text refers to
    allocations: dict[str, _Allocation] = field(default_factory=dict)
    why_not: str = ""
    away: bool = False

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places: dict[int, _Place] = {}
        self._numbers = {id(self.operands[index]): f"a{index}" for index in self.passed}
        self._kept: list[Any] = []  # a place is known by the tensor's identity, which must not be used again
        tensors = [x for x in self.operands if isinstance(x, Tensor)]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        for index, x in enumerate(self.operands):
            if isinstance(x, Tensor):
                self._know(x, _Place(f"a{index}", 0))
                if x.device != self.device:
                    self.refuse("operands of two devices")

    # --- what is seen

    def refuse(self, why: str) -> None:
        self.why_not = self.why_not or why

    def _know(self, x: Tensor, place: _Place) -> None:
        self._places.setdefault(id(x), place)
        self._kept.append(x)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        self.away = True
        try:
            yield
        finally:
            self.away = False

    def _name(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.away:
            self._saw_operator(func, args, out)
        return out

    def _saw_operator(self, func: Any, args: Any, out: Any) -> None:
        outputs = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        if func._schema.is_mutable or (not outputs and any(isinstance(x, Tensor) for x in args)):
            self.refuse(f"calls {func}")
        elif not outputs:  # of dtypes
            return
        elif func._schema.name.removeprefix("aten::") in _ALLOCATE:
            self._saw_allocation(out)
        else:  # a view, or something else than we can repeat
            sources = {x.untyped_storage()._cdata: x for x in args if isinstance(x, Tensor) and id(x) in self._places}
            for x in outputs:
                source = sources.get(x.untyped_storage()._cdata)
                if source is None:
                    self.refuse(f"calls {func}")
                else:
                    place = self._places[id(source)]
                    self._know(x, _Place(place.name, place.offset + x.data_ptr() - source.data_ptr()))

    def _saw_allocation(self, x: Tensor) -> None:
        if x.device != self.device or x.layout != torch.strided:
            self.refuse(f"allocates on {x.device}")
        name = f"r{len(self.allocations)}"
        self.allocations[name] = _Allocation(tuple(x.shape), x.stride(), x.dtype)
        self.lines.append(name)  # its text is made when its last use is known
        self._know(x, _Place(name, 0))

    def saw_asked(self, function: Any, args: tuple[Any, ...], result: Tensor) -> None:
        name = f"g{len(self._kept)}"
        arguments = ", ".join(self._constant(x) for x in args)
        self.lines += [
            f"{name} = {self._name('f', function)}({arguments})",
            f"if {name}.data_ptr() % {ALIGNMENT}: return NotImplemented",
        ]
        if result.data_ptr() % ALIGNMENT:
            self.refuse("a tensor that does not begin at a multiple of 16 bytes")
        self._know(result, _Place(name, 0))

    def saw_launch(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Any, named: Any) -> None:
        try:
            self._saw_launch(kernel, compiled, grid, args, named)
        except (Refused, AttributeError, KeyError, TypeError, ValueError) as error:  # other internals than are known
            self.refuse(f"{getattr(kernel, '__name__', kernel)}: {error!r}")

    def _saw_launch(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Any, named: Any) -> None:
        if compiled is None or kernel.pre_run_hooks:
            raise Refused("no compiled kernel, or one with hooks")
        launcher = compiled.run
        known = type(launcher).__name__ == "CudaLauncher" and _version_of_triton() in KNOWN
        if not known:
            raise Refused(f"the launcher {type(launcher).__name__} of triton {_version_of_triton()}")
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise Refused("scratch memory")
        metas = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        make_map = getattr(sys.modules[type(launcher).__module__], "make_tensordesc_arg", None)
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        passed: list[str] = []
        for parameter in kernel.params:
            value = values.get(parameter.name, parameter.default)
            if isinstance(value, Tensor):
                passed.append(self._pointer(value))
            elif hasattr(value, "block_shape"):
                passed += self._descriptor(value, metas.pop(0), make_map)
            else:
                passed.append(self._constant(value))
        x, y, z = (*grid, 1, 1)[:3]
        how = f"{bool(launcher.launch_cooperative_grid)}, {bool(launcher.launch_pdl)}"
        self._kept.append(compiled)
        start = f"{x}, {y}, {z}, stream, {int(compiled.function)}, {how}"
        packed = self._constant(tuple(compiled.packed_metadata))
        call = self._name("launch", _c_function(launcher.launch))
        arguments = "".join(f"{one}, " for one in passed)
        if hasattr(launcher, "arg_annotations"):  # triton 3.7
            annotations = self._name("n", launcher.arg_annotations), self._name("s", launcher.kernel_signature)
            text = f"{packed}, None, None, None, None, None, {annotations[0]}, {annotations[1]}, ({arguments})"
        else:  # triton 3.6
            text = f"None, None, {packed}, None, None, None, {arguments}"
        self.lines.append(f"{call}({start}, {text})")

    def _constant(self, value: Any) -> str:
        if type(value) is float and id(value) in self._numbers:
            return self._numbers[id(value)]
        if isinstance(value, tuple) and all(type(x) is int for x in value):
            return repr(value)
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if isinstance(value, tuple | list | Tensor):
            raise Refused(f"argument {value!r}")
        return self._name("c", value)

    def _pointer(self, x: Tensor) -> str:
        place = self._places.get(id(x))
        if place is None:
            raise Refused("a tensor that is neither operand nor allocated")
        if not x.numel():
            return "0"
        pointer = f"p_{place.name}"
        if (line := f"{pointer} = {place.name}.data_ptr()") not in self.lines:
            self.lines.append(line)
        return pointer if not place.offset else f"{pointer} + {place.offset}"

    def _descriptor(self, value: Any, meta: Any, make: Any) -> list[str]:
        """The texts of a descriptor as the C launcher takes it: a map of the memory, the sizes, the strides."""
        if meta is None or make is None:
            raise Refused("descriptors that are not of tensor memory")
        maps: dict[int, Any] = {}
        template = copy.copy(value)  # without the tensor: a plan that kept one would keep its memory
        template.base, dtype = None, value.base.dtype

        def map_at(pointer: int) -> Any:
            if len(maps) >= MAPS:
                maps.clear()
            here = copy.copy(template)
            here.base = _At(pointer, dtype)
            maps[pointer] = found = make(here, meta)[0]
            return found

        rank = len(value.shape)
        rest = make(value, meta)[1:]
        if len(rest) != 2 * rank or not all(type(x) is int for x in rest):
            raise Refused("an unknown form of descriptors")
        pointer = self._pointer(value.base)
        get, made = self._name("get", maps.get), self._name("map", map_at)
        return [f"{get}({pointer}) or {made}({pointer})", *map(repr, rest)]

    # --- the text

    def plan(self, results: Any) -> Callable[..., Any]:
        """The function of the operands that repeats the call, or returns NotImplemented where that might be wrong."""
        returned = self._returned(results)
        if self.why_not:
            raise Refused(self.why_not)
        if not any("stream" in line for line in self.lines):
            raise Refused("launches nothing")
        operands = [f"a{index}" for index in range(len(self.operands))]
        pointers = [f"p_a{i} = a{i}.data_ptr()" for i, x in enumerate(self.operands) if isinstance(x, Tensor)]
        tests = [f"({' | '.join(line.split()[0] for line in pointers)}) & {ALIGNMENT - 1}"]
        hooks = sys.modules["triton"].knobs.runtime
        self.names |= {"entered": hooks.launch_enter_hook.calls, "left": hooks.launch_exit_hook.calls}
        tests += ["entered", "left"]
        body = list(pointers)
        if self.device.type == "cuda":
            self.names |= {"device": torch._C._cuda_getDevice, "get_stream": torch._C._cuda_getCurrentRawStream}
            tests.append(f"device() != {self.device.index}")
            stream = f"stream = get_stream({self.device.index})"
        else:
            stream = "stream = 0"
        body += [f"if {' or '.join(tests)}: return NotImplemented", stream]
        self.names["allocate"] = _allocator(self.device)
        for line in self.lines:
            if line in pointers:
                continue
            if (made := self.allocations.get(line)) is not None:
                if f"p_{line} = {line}.data_ptr()" not in self.lines and not re.search(rf"\b{line}\b", returned):
                    continue  # nothing is in it, or nobody reads it
                body.append(f"{line} = allocate({made.size}, {made.stride}, {self._name('d', made.dtype)})")
            else:
                body.append(line)
        body.append(f"return {returned}")
        source = f"def replay({', '.join(operands)}):\n" + "".join(f"    {line}\n" for line in body)
        scope = dict(self.names)
        exec(compile(source, "<replay>", "exec"), scope)  # as Triton makes the function that binds a kernel's arguments
        replay = scope["replay"]
        replay.kept = tuple(x for x in self._kept if not isinstance(x, Tensor))
        self._kept.clear()
        replay.source = source
        return cast(Callable[..., Any], replay)

    def _returned(self, results: Any) -> str:
        if isinstance(results, tuple):
            return "(" + "".join(f"{self._result(x)}, " for x in results) + ")"
        return self._result(results)

    def _result(self, x: Any) -> str:
        if x is None:
            return "None"
        place = self._places.get(id(x))
        made = None if place is None else self.allocations.get(place.name)
        if place is None or made is None or made.dtype != x.dtype:
            raise Refused("returns something else than what it allocated")
        size, stride = tuple(x.shape), x.stride()
        if (size, stride, place.offset) == (made.size, made.stride, 0):
            return place.name
        return f"{place.name}.as_strided({size}, {stride}, {place.offset // x.element_size()})"


@dataclass(frozen=True)
class _At:
    """What a descriptor asks of a tensor."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def _version_of_triton() -> tuple[int, ...]:
    return tuple(map(int, sys.modules["triton"].__version__.split(".")[:2]))


def _c_function(launch: Any) -> Any:
    """The C function in a launcher, without the Python around it that makes descriptors."""
    code = getattr(launch, "__code__", None)
    if code is not None and "launcher" in code.co_freevars:
        launch = launch.__closure__[code.co_freevars.index("launcher")].cell_contents
    return launch


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """A function of (size, stride, dtype), as `torch.empty_strided` on the current device of that type: inductor's if
    torch has that, which takes 0.4 us where the other takes 1.0 us."""
    guards = getattr(torch._C._dynamo, "guards", None)
    quick = getattr(guards, f"_empty_strided_{device.type}", None)
    if quick is not None:
        return cast(Callable[..., Tensor], quick)
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


# --- functions that are replayed


def key_of(
    function: Callable[..., Any], passed: frozenset[int] = frozenset()
) -> tuple[Callable[..., Any], Callable[..., bool]]:
    """Two functions of a function's arguments: what a recording of a call depends on, but for pointers and the numbers
    that are `passed`; and whether all tensors, by the annotations, are plain."""
    parts: list[str] = []
    plain: list[str] = []
    names = []
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        name = f"a{index}"
        names.append(name)
        if str(parameter.annotation) in ("Tensor", str(Tensor)):
            parts += [f"{name}.shape", f"{name}.stride()", f"{name}.dtype", f"{name}.get_device()"]
            plain.append(f"type({name}) in PLAIN")
        elif str(parameter.annotation) in ("Tensor | None", str(Tensor | None)):
            kind = f"({name}.shape, {name}.stride(), {name}.dtype, {name}.get_device())"
            parts.append(f"None if {name} is None else {kind}")
            plain.append(f"({name} is None or type({name}) in PLAIN)")
        elif index not in passed:
            parts.append(name)
    scope: dict[str, Any] = {"PLAIN": PLAIN}
    source = f"def key({', '.join(names)}): return ({', '.join(parts)},)\n"
    source += f"def plain({', '.join(names)}): return {' and '.join(plain) or 'False'}\n"
    exec(compile(source, "<key>", "exec"), scope)
    return scope["key"], scope["plain"]


class Replayed:
    """A function of tensors and constants, called like it; `plans` holds what its calls were recorded as.

    `passed`: the names of floats that the function hands to its kernels as they are, so that recordings hold for all.
    """

    def __init__(self, function: Callable[..., Any], passed: Sequence[str] = ()) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        names = list(inspect.signature(function).parameters)
        self._passed = frozenset(names.index(name) for name in passed)
        self.plans: dict[tuple[Any, ...], Callable[..., Any] | None] = {}
        self._key, self.plain = key_of(function, self._passed)
        self.refused: dict[tuple[Any, ...], str] = {}  # why calls of a kind are not replayed

    def __call__(self, *args: Any) -> Any:
        if not self.plain(*args):
            return self.function(*args)
        return self.of_plain(*args)

    def of_plain(self, *args: Any) -> Any:
        """As the call, of operands that are known to be plain."""
        key = self._key(*args)
        plan = self.plans.get(key, _UNSEEN)
        if plan is _UNSEEN:
            self._keep(key, None)
            return self.function(*args)
        if plan is None:
            return self._record(key, args)
        results = plan(*args)
        return self.function(*args) if results is NotImplemented else results

    def _keep(self, key: tuple[Any, ...], plan: Callable[..., Any] | None) -> None:
        if len(self.plans) >= PLANS:
            self.plans.clear()
            self.refused.clear()
        self.plans[key] = plan

    def _record(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        tensors = {id(x): x for x in args if isinstance(x, Tensor)}
        distinct = len(tensors) == sum(isinstance(x, Tensor) for x in args)  # else which it was could not be told
        distinct &= len({id(args[index]) for index in self._passed}) == len(self._passed)
        aligned = not any(x.data_ptr() % ALIGNMENT for x in tensors.values())
        if not distinct or not aligned or getattr(_local, "recorder", None) is not None:
            return self.function(*args)  # a later call of the kind may be recorded
        recorder = _local.recorder = _Recorder(args, self._passed)
        try:
            with recorder:
                results = self.function(*args)
        finally:
            _local.recorder = None
        try:
            self._keep(key, recorder.plan(results))
        except (Refused, AttributeError, KeyError) as error:
            self.refused[key] = str(error)
            self._keep(key, self.function)
        return results
