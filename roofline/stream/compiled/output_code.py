"""Reads inductor's output code, the wrapper that launches a graph's kernels, as data.

The text is Python: generated kernels as strings, then a function `call` that asserts the sizes of its inputs,
allocates, launches, drops and returns. Its statements are followed in order, so that every buffer's size and life is
known. A statement of a form that is not known here is an error that shows it, never a launch that goes missing.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.compiled.convolution_layout import relaid
from flopcast.roofline.stream.compiled.instructions import work_of
from flopcast.roofline.stream.compiled.kernel_source import UnreadableCodeError, moved_bytes, read_kernel
from flopcast.roofline.stream.compiled.launches import (
    Buffer,
    Graph,
    Kind,
    Launch,
    Touch,
    Work,
    extent,
    storage_bytes,
    touched_bytes,
)
from flopcast.roofline.stream.compiled.reuse import with_ages

GRAPH_MARK = re.compile(r"^# ---- graph \d+\n", re.MULTILINE)  # what the recording puts between graphs
_LABEL = re.compile(r"^# AOT ID: \['(.*?)'\]", re.MULTILINE)
_ORIGIN = re.compile(r"^\s*# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]\s*$")
_DTYPES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int64": "int64", "int32": "int32",
    "int16": "int16", "int8": "int8", "uint8": "uint8", "bool": "bool", "uint64": "int64", "uint32": "int32",
    "complex64": "complex64", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
_ALLOCATORS = ("empty_strided_cuda", "empty_strided_cpu", "empty_strided_cpu_pinned", "empty_strided")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "bias_addmm", "_mm_plus_mm", "_int_mm", "_scaled_mm", "_grouped_mm")
_NO_LAUNCH = ("assert_alignment", "run_intermediate_hooks", "check_memory_step")


@lru_cache(maxsize=16)  # a forecast asks several times for those of the same few texts, seconds each
def read_output_code(text: str) -> tuple[Graph, ...]:
    """The graphs of a step, in the order in which they were compiled. `text`: inductor's output code of each, between
    them a line "# ---- graph N". Raises UnreadableCodeError, with the statement, for what is not known."""
    return tuple(_read_graph(part) for part in GRAPH_MARK.split(text) if part.strip())


_Sizes = tuple[tuple[str, int], ...]


@lru_cache(maxsize=8192)
def _costs_of(source: str, numels: _Sizes, sizes: _Sizes) -> tuple[Mapping[str, tuple[int, int]], Work]:
    """What a kernel moves and computes, by its source: `moved_bytes` and `work_of`."""
    kernel = read_kernel(source)
    return moved_bytes(kernel, dict(numels), dict(sizes)), work_of(kernel, dict(numels))


def is_forward(text: str) -> bool:
    """Whether a graph's code is that of a forward which a backward follows."""
    label = _LABEL.search(text)
    return label is not None and label[1].endswith("forward")


def _read_graph(text: str) -> Graph:
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise UnreadableCodeError(f"line {error.lineno} is not Python: {(error.text or '').strip()[:200]!r}") from None
    label = _LABEL.search(text)
    reader = _Reader(_kernels(module), _inputs(module), _origins(text), _partitions(module))
    reader.read(_call_body(module))
    return reader.graph(label[1] if label else "")


def _kernels(module: ast.Module) -> dict[str, str]:
    """Sources of the generated kernels, by the name that the wrapper calls them by."""
    found = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            maker = ast.unparse(node.value.func)
            if maker == "async_compile.triton":
                found[node.targets[0].id] = str(ast.literal_eval(node.value.args[1]))
            elif maker.startswith("async_compile.") and maker != "async_compile.wait":
                raise UnreadableCodeError(
                    f"{node.targets[0].id}: made by {maker}; only Triton kernels are read (is the graph on a GPU?)"
                )
    return found


def _partitions(module: ast.Module) -> dict[str, ast.FunctionDef]:
    """The parts of a graph that are each captured as a CUDA graph, by name; none where nothing is captured."""
    return {
        node.name: node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("partition_")
    }


def _inputs(module: ast.Module) -> dict[str, Operand]:
    """The inputs, from the benchmark that inductor appends: their dtypes are nowhere else."""
    found: dict[str, Operand] = {}
    functions = (function for function in module.body if isinstance(function, ast.FunctionDef))
    for node in (statement for function in functions for statement in function.body):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="rand_strided"), args=[shape, stride, *_], keywords=keywords),
            ):
                dtype = next(_dtype(keyword.value) for keyword in keywords if keyword.arg == "dtype")
                found[name] = Operand(_numbers(shape), _numbers(stride), dtype)
            case ast.Assign(  # inputs that share memory are views of one tensor, from torch 2.13
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="as_strided"), args=[ast.Name(id=shared), shape, stride, *_]),
            ) if shared in found:
                found[name] = Operand(_numbers(shape), _numbers(stride), found[shared].dtype)
    return found


def _origins(text: str) -> list[tuple[int, tuple[str, ...], tuple[str, ...]]]:
    """(line, nodes, ATen operations) of the comments that say what a launch was made of."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _ORIGIN.match(line):
            nodes, ops = (tuple(part.strip() for part in group.split(",") if part.strip()) for group in match.groups())
            found.append((number, nodes, tuple(dict.fromkeys(op.removeprefix("aten.") for op in ops))))
    return found


def _call_body(module: ast.Module) -> list[ast.stmt]:
    for node in ast.walk(module):
        if (
            isinstance(node, ast.FunctionDef)
            and node.name == "call"
            and [a.arg for a in node.args.args][-1:] == ["args"]
        ):
            return node.body
    raise UnreadableCodeError("no function call(args): is this inductor's output code?")


def _dtype(node: ast.expr) -> str:
    name = ast.unparse(node).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnreadableCodeError(f"dtype {name!r}; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


@dataclass
class _Storage:
    """Memory behind one or more names. Its size is not known where a library allocates, until it is asserted."""

    name: str
    bytes: int
    born: int
    is_input: bool = False
    names: set[str] = field(default_factory=set)
    died: int | None = None


@dataclass
class _Value:
    """What a name stands for: a tensor in a storage, or what a library call returned, or a part of that."""

    storage: _Storage
    tensor: Operand | None
    made_by: int | None = None  # the library call, by the number of its launch
    place: int = 0  # among what that call returned


class _Reader:
    """Follows the statements of a graph's `call` and keeps its launches, and the size and life of its buffers.

    `kernels`: the sources of generated kernels by name; `asked`: the inputs as the benchmark has them (`_inputs`);
    `origins`: what launches were made of (`_origins`); `partitions`: the functions of captured parts by name.
    """

    def __init__(
        self,
        kernels: dict[str, str],
        asked: dict[str, Operand],
        origins: list[tuple[int, tuple[str, ...], tuple[str, ...]]],
        partitions: dict[str, ast.FunctionDef],
    ) -> None:
        self.kernels = kernels
        self.asked = asked
        self.origins = origins
        self.partitions = partitions
        self.captured: list[tuple[int, int]] = []
        self.handed: set[str] = set()  # names that the next partition is given
        self.released: set[str] = set()  # of those: what is held by it alone
        self.values: dict[str, _Value] = {}
        self.storages: list[_Storage] = []
        self.inputs: list[str] = []
        self.input_tensors: dict[str, Operand] = {}
        self.launches: list[Launch] = []
        self.returned: dict[int, dict[int, Operand]] = {}  # by library call: what it returned, by place
        self.outputs: tuple[str, ...] = ()
        self.results: tuple[Operand | None, ...] = ()
        self.last_line = 0

    # --- statements

    def read(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.With(body=body):
                self.read(body)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                for name in names:
                    self._input(ast.unparse(name))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id="args")):
                self._input(name)
            case ast.Assign(value=ast.Call(func=func)) | ast.Expr(value=ast.Call(func=func)) if _is_partition(func):
                self._partition(ast.unparse(func).partition("[")[2].rstrip("]"), node)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.List(elts=given)) if name.endswith("_args"):
                self.handed = {ast.unparse(one) for one in given}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value, node)
            case ast.Delete(targets=names):
                for dropped in map(ast.unparse, names):
                    if dropped in self.handed:
                        self.released.add(dropped)
                    else:
                        self._drop(dropped)
            case ast.Expr(value=ast.Call() as call):
                self._call(call, node)
            case ast.Return(value=value):
                self._return(value, node)
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case _:
                raise self._unknown(node)

    def _assign(self, name: str, value: ast.expr, node: ast.stmt) -> None:
        match value:
            case ast.Call(func=ast.Name(id=function), args=[shape, stride, dtype, *_]) if function in _ALLOCATORS:
                tensor = Operand(_numbers(shape), _numbers(stride), _dtype(dtype))
                self._bind(name, _Value(self._storage(name, 0 if "cpu" in function else storage_bytes(tensor)), tensor))
            case ast.Name(id=other):
                self._bind(name, replace(self._value(other, node)))
            case ast.Call(func=ast.Name(id="reinterpret_tensor")):
                self._bind(name, self._view(value, node))
            case ast.Call(func=ast.Name(id="get_raw_stream")) | ast.Constant():
                pass
            case ast.Subscript(value=ast.Name(id=whole), slice=ast.Constant(value=int() as place)):
                self._bind(name, _Value(self._storage(name, 0), None, self._value(whole, node).made_by, place))
            case ast.Call() if (partial := _partial_sum(value)) is not None:
                self._sum(name, partial, node)
            case ast.Call():
                self._call(value, node, name)
            case _:
                raise self._unknown(node)

    def _partition(self, number: str, node: ast.stmt) -> None:
        """Follows a captured part of the graph, which calls what it is given and returns by the caller's names."""
        function = self.partitions.get(f"partition_{number}")
        if function is None:
            raise self._unknown(node)
        first, before = len(self.launches), set(self.values) - self.released
        self.handed, self.released = set(), set()
        last_line, self.last_line = self.last_line, function.lineno
        returned: list[ast.expr] = []
        for statement in function.body:
            match statement:
                case ast.Assign(value=ast.Name(id="args")):
                    pass
                case ast.Return(value=ast.Tuple(elts=returned)):
                    pass
                case ast.Return(value=value):
                    returned = [] if value is None else [value]
                case _:
                    self._statement(statement)
        kept = before | {ast.unparse(one) for one in returned}
        for name in set(self.values) - kept:
            self._drop(name)
        self.last_line = last_line
        self.captured.append((first, len(self.launches)))

    def _call(self, call: ast.Call, node: ast.stmt, result: str | None = None) -> None:
        call = _without_state(call)
        function = ast.unparse(call.func)
        if function == "assert_size_stride":
            self._assert_size(call, node)
        elif function in _NO_LAUNCH or function.endswith((".clear", "set_device", ".synchronize")):
            pass
        elif function.endswith(".run") and function.removesuffix(".run") in self.kernels:
            self._generated(function.removesuffix(".run"), call, node)
        elif function.startswith(("extern_kernels.", "torch.ops.", "aten.", "inductor_ops.", "prims.")):
            self._library(function, call, node, result)
        elif isinstance(call.func, ast.Attribute) and call.func.attr in ("copy_", "zero_", "fill_"):
            self._in_place(call.func, call, node)
        else:
            raise self._unknown(node)

    # --- launches

    def _generated(self, name: str, call: ast.Call, node: ast.stmt) -> None:
        kernel = read_kernel(self.kernels[name])
        given = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
        if len(given) != len(kernel.parameters):
            raise UnreadableCodeError(
                f"{name} takes {len(kernel.parameters)} arguments, {', '.join(kernel.parameters)}, and is given "
                f"{len(given)}: {ast.unparse(node)[:300]}"
            )
        sizes: dict[str, int] = {}
        numels: dict[str, int] = {}
        buffers: dict[str, str] = {}
        for parameter, argument in zip(kernel.parameters, given, strict=True):
            if parameter in kernel.dtypes:
                value = self._argument(argument, node)
                buffers[parameter], tensor = value.storage.name, value.tensor
                sizes[parameter] = max(prod(tensor.shape), extent(tensor)) if tensor is not None else _UNBOUNDED
            elif parameter.endswith("numel"):
                numels[parameter] = self._number(argument, node)
        # layers launch the same kernel at the same sizes, and so do other depths of the model
        moved, work = _costs_of(self.kernels[name], tuple(numels.items()), tuple(sizes.items()))
        touches = [Touch(buffers[parameter], *both) for parameter, both in moved.items()]
        launch = Launch(
            kernel.kind, kernel.name, sum(one.read for one in touches), sum(one.written for one in touches),
            numels=tuple((parameter.removesuffix("numel"), size) for parameter, size in numels.items()),
            hint=kernel.hint, work=work, touches=tuple(touches),
        )  # fmt: skip
        self._launch(launch, node)

    def _library(self, function: str, call: ast.Call, node: ast.stmt, result: str | None) -> None:
        given = _in_order(call)
        name = _library_name(function)
        passed = self._arguments(given, node)
        operands = self._relaid(name, passed, node)
        results = self._arguments([keyword.value for keyword in call.keywords if keyword.arg == "out"], node)
        places = iter(range(len(operands)))
        args = [{"t": next(places)} if self._is_tensor(one) else _literal(one) for one in given]
        launch = _library_launch(_library_kind(name), name, operands, results)
        self._launch(replace(launch, args=json.dumps(args, separators=(",", ":"))), node)
        for copy in operands:
            if copy not in passed:
                copy.storage.died = len(self.launches)
        if result is not None:
            self._bind(result, _Value(self._storage(result, 0), None, len(self.launches) - 1))

    def _relaid(self, name: str, operands: list[_Value], node: ast.stmt) -> list[_Value]:
        """The operands of a library's call, of a convolution after the copies that ATen makes of some first: in 25 of
        them ConvNeXt's backward spends 3% of its time on an H200."""
        if not name.endswith(("convolution", "convolution_backward")):
            return operands
        found = []
        for value, laid in zip(operands, relaid([value.tensor for value in operands]), strict=True):
            if laid is None:
                found.append(value)
                continue
            found.append(_Value(self._storage(f"{value.storage.name} for {name}", storage_bytes(laid)), laid))
            self._launch(_library_launch(Kind.COPY, "aten.clone", [value], found[-1:]), node)
        return found

    def _in_place(self, function: ast.Attribute, call: ast.Call, node: ast.stmt) -> None:
        sources, target = self._arguments(call.args, node), self._arguments([function.value], node)
        self._launch(_library_launch(Kind.COPY, f"aten.{function.attr}", sources, target), node)

    def _sum(self, name: str, partial: _PartialSum, node: ast.stmt) -> None:
        """torch's own reduction of partial sums, and a copy where the result has another type."""
        workspace, programs, row = partial.workspace, partial.programs, partial.row
        source = self._value(workspace, node)
        dtype = source.tensor.dtype if source.tensor is not None else "fp32"
        read = _Value(source.storage, Operand((programs, row), (row, 1), dtype))
        tensor = Operand((row,), (1,), dtype)
        made = _Value(self._storage(name, storage_bytes(tensor)), tensor)
        self._bind(name, made)
        launch = _library_launch(Kind.FALLBACK, "aten.sum", [read], [made])
        self._launch(replace(launch, args='[{"t":0},[0]]'), node)
        if partial.dtype not in (None, dtype):
            other = Operand((row,), (1,), partial.dtype)
            cast = _Value(self._storage(name, storage_bytes(other)), other)
            self._bind(name, cast)
            self._launch(_library_launch(Kind.COPY, "aten.copy_", [made], [cast]), node)

    def _launch(self, launch: Launch, node: ast.stmt) -> None:
        above = [origin for origin in self.origins if self.last_line < origin[0] < node.lineno]
        _, nodes, ops = above[-1] if above else (0, (), ())
        self.last_line = node.lineno
        self.launches.append(replace(launch, ops=ops or _own_ops(launch), nodes=nodes))

    # --- values and their life

    def _input(self, name: str) -> None:
        self.inputs.append(name)
        if self.partitions and name in self.asked:  # the text of captured graphs asserts no sizes
            tensor = self.input_tensors[name] = self.asked[name]
            self._bind(name, _Value(self._storage(name, storage_bytes(tensor), is_input=True), tensor))
        else:
            self._bind(name, _Value(self._storage(name, 0, is_input=True), None))

    def _assert_size(self, call: ast.Call, node: ast.stmt) -> None:
        name = ast.unparse(call.args[0])
        value = self._value(name, node)
        shape, stride = _numbers(call.args[1]), _numbers(call.args[2])
        if value.tensor is not None:
            value.tensor = Operand(shape, stride, value.tensor.dtype)
            return
        if value.made_by is not None:
            dtype = _result_dtype(self.launches[value.made_by], shape)
        elif name in self.asked:
            dtype = self.asked[name].dtype
        else:
            raise UnreadableCodeError(f"input {name}: its dtype is nowhere in the text (rand_strided)")
        value.tensor = Operand(shape, stride, dtype)
        value.storage.bytes = storage_bytes(value.tensor)
        if value.made_by is not None:
            returned = self.returned.setdefault(value.made_by, {})
            returned[value.place] = value.tensor
            maker, made = self.launches[value.made_by], touched_bytes(value.tensor)
            self.launches[value.made_by] = replace(
                maker,
                results=tuple(tensor for _, tensor in sorted(returned.items())),
                bytes_written=maker.bytes_written + made,
                touches=(*maker.touches, Touch(value.storage.name, 0, made)),
            )
        else:
            self.input_tensors[name] = value.tensor

    def _storage(self, name: str, size: int, is_input: bool = False) -> _Storage:
        storage = _Storage(name, size, 0 if is_input else len(self.launches), is_input)
        self.storages.append(storage)
        return storage

    def _bind(self, name: str, value: _Value) -> None:
        if name in self.values:
            self._drop(name)
        self.values[name] = value
        value.storage.names.add(name)

    def _drop(self, name: str) -> None:
        value = self.values.pop(name, None)
        if value is not None:
            value.storage.names.discard(name)
            if not value.storage.names:
                value.storage.died = len(self.launches)

    def _return(self, value: ast.expr | None, node: ast.stmt) -> None:
        returned = value.elts if isinstance(value, ast.Tuple) else [] if value is None else [value]
        used = [
            next((n.id for n in ast.walk(item) if isinstance(n, ast.Name) and n.id in self.values), None)
            for item in returned
        ]
        self.outputs = tuple(
            ast.unparse(item) if name is None else self.values[name].storage.name
            for item, name in zip(returned, used, strict=True)
        )
        self.results = tuple(
            None
            if name is None
            else self.values[name].tensor
            if isinstance(item, ast.Name)
            else self._view(item, node).tensor
            for item, name in zip(returned, used, strict=True)
        )
        for name in list(self.values):
            if name not in used:
                self._drop(name)

    def graph(self, label: str) -> Graph:
        launches = with_ages(_with_splits(self.launches))
        buffers = tuple(
            Buffer(storage.name, storage.bytes, storage.born, storage.died, storage.is_input)
            for storage in self.storages
            if storage.bytes
        )
        inputs = tuple((name, self.input_tensors[name]) for name in self.inputs if name in self.input_tensors)
        return Graph(label, inputs, launches, buffers, self.outputs, tuple(self.captured), self.results)

    # --- expressions

    def _value(self, name: str, node: ast.stmt) -> _Value:
        if name not in self.values:
            raise UnreadableCodeError(f"{name} is not known at {ast.unparse(node)[:300]!r}")
        return self.values[name]

    def _view(self, node: ast.expr, statement: ast.stmt) -> _Value:
        if not (isinstance(node, ast.Call) and len(node.args) >= 3):
            raise self._unknown(statement)
        source = (
            self._view(node.args[0], statement)
            if isinstance(node.args[0], ast.Call)
            else self._value(ast.unparse(node.args[0]), statement)
        )
        dtype = source.tensor.dtype if source.tensor is not None else "fp32"
        return _Value(source.storage, Operand(_numbers(node.args[1]), _numbers(node.args[2]), dtype))

    def _argument(self, node: ast.expr, statement: ast.stmt) -> _Value:
        """What a tensor among the arguments of a call is."""
        match node:
            case ast.Name(id=name):
                return self._value(name, statement)
            case ast.Call(func=ast.Name(id="reinterpret_tensor")):
                return self._view(node, statement)
        raise UnreadableCodeError(f"{ast.unparse(node)} is no tensor: {ast.unparse(statement)[:300]!r}")

    def _arguments(self, nodes: Iterable[ast.expr], statement: ast.stmt) -> list[_Value]:
        """The tensors of known sizes among the arguments of a call."""
        return [self._argument(node, statement) for node in nodes if self._is_tensor(node)]

    def _is_tensor(self, node: ast.expr) -> bool:
        """Whether an argument is a tensor of known sizes."""
        match node:
            case ast.Name(id=name) if name not in ("inf", "nan"):
                return name not in self.values or self.values[name].tensor is not None
            case ast.Call(func=ast.Name(id="reinterpret_tensor")):
                return True
        return False

    def _number(self, node: ast.expr, statement: ast.stmt) -> int:
        try:
            return int(ast.literal_eval(node))
        except ValueError:
            raise UnreadableCodeError(
                f"{ast.unparse(node)} is not a number: compile with dynamic=False ({ast.unparse(statement)[:200]!r})"
            ) from None

    def _unknown(self, node: ast.stmt) -> UnreadableCodeError:
        return UnreadableCodeError(f"line {node.lineno} of a graph is of no known form: {ast.unparse(node)[:300]!r}")


_UNBOUNDED = 1 << 62  # elements of a buffer whose size is not known: no index is cut off


def _numbers(node: ast.expr) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in ast.literal_eval(node))
    except ValueError:
        raise UnreadableCodeError(f"sizes {ast.unparse(node)} are not numbers: compile with dynamic=False") from None


def _is_partition(function: ast.expr) -> bool:
    """Whether what is called is `self.partitions[n]`."""
    return isinstance(function, ast.Subscript) and ast.unparse(function.value).endswith(".partitions")


@dataclass(frozen=True)
class _PartialSum:
    """`workspace[a:b].view(programs, row).sum(dim=0)`; `dtype`: what it is then turned into, None where it stays."""

    workspace: str
    programs: int
    row: int
    dtype: str | None = None


def _partial_sum(node: ast.Call) -> _PartialSum | None:
    """The sum of a workspace's parts that a call stands for, None where it is another. torch 2.13 puts it into the
    result's shape, a row with dimensions of one, by another `view`, and into its type by `to`."""
    match node:
        case ast.Call(func=ast.Attribute(attr="to", value=ast.Call() as summed), args=[dtype]):
            found = _partial_sum(summed)
            return replace(found, dtype=_dtype(dtype)) if found is not None else None
        case ast.Call(func=ast.Attribute(attr="view", value=ast.Call() as summed), args=[ast.List()]):
            return _partial_sum(summed)
        case ast.Call(
            func=ast.Attribute(
                attr="sum",
                value=ast.Call(
                    func=ast.Attribute(attr="view", value=ast.Subscript(value=ast.Name(id=workspace))),
                    args=[ast.Constant(value=int() as programs), ast.Constant(value=int() as row)],
                ),
            )
        ):
            return _PartialSum(workspace, programs, row)
    return None


def _without_state(call: ast.Call) -> ast.Call:
    """An operator as it is called by itself, of one that is run with a given state of the random numbers, as those are
    that activation checkpointing runs twice: `graphsafe_run_with_rng_state(op, query, key, rng_state=state)`."""
    if not ast.unparse(call.func).endswith(".graphsafe_run_with_rng_state"):
        return call
    function, *given = call.args
    return ast.Call(function, given, [keyword for keyword in call.keywords if keyword.arg != "rng_state"])


def _library_name(function: str) -> str:
    """`extern_kernels.mm` -> mm, `torch.ops.aten.convolution_backward.default` -> aten.convolution_backward."""
    name = function.removeprefix("extern_kernels.").removeprefix("torch.ops.")
    parts = name.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 else name


def _library_kind(name: str) -> Kind:
    bare = name.rpartition(".")[2]
    if bare in _PRODUCTS:
        return Kind.PRODUCT
    if "convolution" in bare:
        return Kind.CONVOLUTION
    if "attention" in bare:
        return Kind.ATTENTION_BACKWARD if "backward" in bare else Kind.ATTENTION
    if bare in ("copy_", "copy", "_to_copy", "clone", "fill_", "zero_", "full", "zeros"):
        return Kind.COPY
    return Kind.FALLBACK


# What `extern_kernels.convolution` is given by keyword, in the schema's order.
_BY_KEYWORD = (
    "input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups",
)  # fmt: skip


def _in_order(call: ast.Call) -> list[ast.expr]:
    """A library call's arguments in the order of ATen's schema."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    return [*call.args, *(keywords[name] for name in _BY_KEYWORD[len(call.args) :] if name in keywords)]


def _literal(node: ast.expr) -> Any:
    """A number, a list of them or None; what is neither, such as a dtype, is None."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return list(value) if isinstance(value, tuple) else value


def _library_launch(kind: Kind, name: str, operands: Sequence[_Value], results: Sequence[_Value]) -> Launch:
    """A call of a library, which reads its operands and writes its results whole."""
    reads, writes = (
        [(value.storage.name, value.tensor) for value in values if value.tensor is not None]
        for values in (operands, results)
    )
    touches = [
        *(Touch(buffer, touched_bytes(tensor), 0) for buffer, tensor in reads),
        *(Touch(buffer, 0, touched_bytes(tensor)) for buffer, tensor in writes),
    ]
    return Launch(
        kind, name, sum(one.read for one in touches), sum(one.written for one in touches),
        operands=tuple(tensor for _, tensor in reads), results=tuple(tensor for _, tensor in writes),
        touches=tuple(touches),
    )  # fmt: skip


def _own_ops(launch: Launch) -> tuple[str, ...]:
    return () if launch.is_generated else (launch.name.removeprefix("aten."),)


def _result_dtype(launch: Launch, shape: Sequence[int]) -> str:
    """Dtype of what a library call returned, which the text does not say: that of its first floating-point operand, but
    attention's log-sum-exp (one number a row) is fp32 and its seed and offset int64."""
    floating = [tensor for tensor in launch.operands if tensor.dtype in ("fp64", "fp32", "bf16", "fp16")]
    if launch.kind is Kind.ATTENTION:
        if not shape:
            return "int64"
        if floating and len(shape) == len(floating[0].shape) and tuple(shape) == (*floating[0].shape[:-1], 1):
            return "fp32"
        if floating and len(shape) == len(floating[0].shape) - 1:
            return "fp32"
    if floating:
        return floating[0].dtype
    return launch.operands[0].dtype if launch.operands else "fp32"


def _with_splits(launches: list[Launch]) -> tuple[Launch, ...]:
    """A reduction whose source nodes are also those of a later reduction sums parts of a row: its kind is SPLIT.
    (Inductor reduces long rows or columns in two kernels, both of the same node.)"""
    reductions = (Kind.PERSISTENT, Kind.LOOPED)
    last: dict[str, int] = {}
    for place, launch in enumerate(launches):
        if launch.kind in reductions:
            last |= dict.fromkeys(launch.nodes, place)
    return tuple(
        replace(launch, kind=Kind.SPLIT)
        if launch.kind in reductions and launch.nodes and _is_finished_later(launch, place, launches, last)
        else launch
        for place, launch in enumerate(launches)
    )


def _is_finished_later(launch: Launch, place: int, launches: list[Launch], last: dict[str, int]) -> bool:
    later = {last[node] for node in launch.nodes if last[node] > place}
    return any(set(launches[other].nodes) <= set(launch.nodes) for other in later)
