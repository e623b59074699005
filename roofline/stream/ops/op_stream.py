"""The op stream: every ATen call of one training step, in order, with what each tensor is stored in.

A `Stream` is plain data (JSON), made by `tracer/trace.py` and read without torch. Its layers may be folded (`to_depth`)
and so may its micro-batches (`to_micro_batches`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar
from weakref import finalize

from flopcast import files
from flopcast.bounds import Count, Size, Valid
from flopcast.decode import decode
from flopcast.json_files import read_json
from flopcast.kernels.shapes import DTYPE_BYTES, Call, Dtype, Operand

SCHEMA = 1
PHASES = ("forward", "backward", "optimizer")
FOLDED_DEPTH = 3  # first, middle and last layer: they differ in their neighbours
# In steps on several GPUs the second layer differs too: FSDP frees what one layer gathered two layers later.
FOLDED_PARALLEL = 4


Of = TypeVar("Of")  # what a function of a stream returns
Beside = ParamSpec("Beside")  # what else it is given


class NotDerivable(ValueError):
    """A stream cannot be derived from those that were given: it has to be traced."""


# Named tuples take a third of the time of frozen dataclasses to make; a deep stream has tens of thousands of them.


class TensorRef(NamedTuple):
    """An operand and the storage that holds it."""

    operand: Operand
    storage: int


class Storage(NamedTuple):
    """A block of memory. `kind`: parameter, gradient, state, input, buffer, activation, bucket (of gradients, which
    DistributedDataParallel holds all the time), or host (in host memory); of inference also cache (keys and values
    from before the call) and new cache (those that it leaves in blocks of its own)."""

    bytes: Count
    kind: str
    layer: Count | None = None


class Op(NamedTuple):
    """One ATen call. `inputs` and `outputs` index `Stream.tensors`; `written` are positions in `inputs`.

    `args` and `kwargs` are as in `kernels.shapes.Call`.
    `kind`: launch (runs on the device), view (outputs are views of the inputs, nothing runs), host (works on
    tensors in host memory), sync (copies a value to the host, which waits for it). `freed`: storages released
    since the previous op. `is_recomputed`: it repeats in the backward what the forward did (activation checkpointing).
    `lane`: the CUDA stream that it runs on, 0 the one that computes; a lane runs its ops in order. `waits`: ops of
    other lanes, by index, that have to finish before it starts. Steps of one GPU have one lane.
    """

    name: str
    phase: Annotated[str, Literal["forward", "backward", "optimizer"]]
    inputs: tuple[Count, ...]
    outputs: tuple[Count, ...]
    written: tuple[Count, ...] = ()
    args: str = "[]"
    kwargs: str = "{}"
    layer: Count | None = None
    module: str = ""
    kind: Annotated[str, Literal["launch", "view", "host", "sync"]] = "launch"
    freed: tuple[Count, ...] = ()
    is_recomputed: Annotated[bool, Literal[0, 1]] = False  # in a file 1; the fields from here on may lack there
    lane: Count = 0
    waits: tuple[Count, ...] = ()


@dataclass(frozen=True)
class Stream:
    """Ops over tensors over storages. `meta` says what was traced and with which versions."""

    ops: tuple[Op, ...]
    tensors: tuple[TensorRef, ...]
    storages: tuple[Storage, ...]
    n_params: int
    depth: int | None = None  # layers in `ops`; None: the module has no stack of identical layers
    meta: dict[str, Any] = field(default_factory=dict)
    # For each op of an unfolded stream the index of the op of the folded one that it repeats with identical operands,
    # -1 for none; empty where nothing was unfolded, and in a stream that is made from this one with other ops.
    repeats: tuple[int, ...] = field(default=(), repr=False, compare=False)
    # Of a pipeline: the streams of the stages before this one, which is the last; not part of a file.
    stages_before: tuple[Stream, ...] = field(default=(), repr=False, compare=False)

    def call(self, op: Op) -> Call:
        """Returns the op as a call that can be replayed."""
        return Call(
            op.name,
            tuple(self.tensors[i].operand for i in op.inputs),
            tuple(self.tensors[i].operand for i in op.outputs),
            op.args,
            op.kwargs,
            op.written,
        )

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(s.bytes for s in self.storages if s.kind == "parameter")


def once_per_stream(function: Callable[Concatenate[Stream, Beside], Of]) -> Callable[Concatenate[Stream, Beside], Of]:
    """Decorates a function of a stream, and of hashable values beside it, which is then computed once for each of these
    while the stream lives: a step is priced on many GPUs."""
    known: dict[int, dict[tuple[Any, ...], Of]] = {}

    @wraps(function)
    def of(stream: Stream, /, *beside: Beside.args, **named: Beside.kwargs) -> Of:
        if id(stream) not in known:
            known[id(stream)] = {}
            finalize(stream, known.pop, id(stream), None).atexit = False
        of_stream, key = known[id(stream)], (*beside, *sorted(named.items()))
        if key not in of_stream:
            of_stream[key] = function(stream, *beside, **named)
        return of_stream[key]

    return of


def to_json(stream: Stream) -> dict[str, Any]:
    """Returns the stream as compact JSON: ops are lists, without the last fields where these have their defaults."""
    return {
        "schema": SCHEMA,
        "n_params": stream.n_params,
        "depth": stream.depth,
        "meta": stream.meta,
        "storages": [[s.bytes, s.kind, s.layer] for s in stream.storages],
        "tensors": [
            [list(t.operand.shape), list(t.operand.stride), t.operand.dtype, t.storage]
            for t in stream.tensors
        ],
        "ops": [
            [op.name, op.phase, list(op.inputs), list(op.outputs), list(op.written), op.args, op.kwargs,
             op.layer, op.module, op.kind, list(op.freed), *_last_fields(op)]
            for op in stream.ops
        ],
    }  # fmt: skip


def _last_fields(op: Op) -> list[Any]:
    if op.lane or op.waits:
        return [int(op.is_recomputed), op.lane, list(op.waits)]
    return [1] * op.is_recomputed


class Meta(TypedDict, total=False):
    """What anything reads of `Stream.meta`."""

    batch: Size
    seq: Size
    torch: str
    transformers: str
    precision: str
    optimizer: str
    accumulate: Size
    layer_params: Count
    params_of_layers: list[Count]  # of a model whose layers have not all the same
    repeated: list[tuple[Count, Count, Size]]  # ops from the first to before the second run so many times
    config: dict[str, Any]


class _Tensor(NamedTuple):
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    dtype: Dtype
    storage: Count


class _Record(TypedDict):
    """A stream as a file holds it (`to_json`)."""

    ops: tuple[Op, ...]
    tensors: tuple[_Tensor, ...]
    storages: tuple[Storage, ...]
    n_params: Count
    depth: Size | None
    meta: Annotated[dict[str, Any], Meta]


_WIDEST = max(DTYPE_BYTES.values())


def _refers_to_its_own(record: _Record) -> bool:
    """Raises ValueError where a tensor or an op is of what the stream does not hold."""
    ops, tensors = record["ops"], record["tensors"]
    for told, lists, held in (
        ("tensor {} is of no storage of it", [(tensor.storage,) for tensor in tensors], len(record["storages"])),
        ("op {} is of no tensor of it", [op.inputs for op in ops], len(tensors)),
        ("op {} is of no tensor of it", [op.outputs for op in ops], len(tensors)),
        ("op {} frees no storage of it", [op.freed for op in ops], len(record["storages"])),
    ):
        if max(chain.from_iterable(lists), default=-1) >= held:
            place = next(place for place, one in enumerate(lists) if max(one, default=-1) >= held)
            raise ValueError(told.format(place))
    for place, tensor in enumerate(tensors):
        if len(tensor.shape) != len(tensor.stride):
            raise ValueError(f"tensor {place} has {len(tensor.shape)} sizes and {len(tensor.stride)} strides")
    for place, op in enumerate(ops):
        if op.waits and max(op.waits) >= place:
            raise ValueError(f"op {place} waits for one that does not come before it")
        if op.written and max(op.written) >= len(op.inputs):
            raise ValueError(f"op {place} writes what it does not take")
    widest: dict[int, int] = {}  # bytes of an element, by storage; generated code is recorded with bytes of any dtype
    for tensor in tensors:
        size = _WIDEST if tensor.dtype == "uint8" else DTYPE_BYTES[tensor.dtype]
        widest[tensor.storage] = max(widest.get(tensor.storage, 1), size)
    storages = record["storages"]
    held = sum(storages[i].bytes // size for i, size in widest.items() if storages[i].kind == "parameter")
    if held > record["n_params"]:  # 6N would come out negative
        raise ValueError(f"n_params is {record['n_params']}: its tensors hold {held} parameters")
    return True


_WHOLE: Any = Annotated[_Record, Valid(_refers_to_its_own, "")]


def from_json(record: Any, source: str = "stream") -> Stream:
    """Reads a stream from JSON. Raises DataError when it is not a stream or was written by a newer flopcast."""
    found: _Record = decode(_WHOLE, record, source, "a flopcast op stream", hint="trace it again", schema=SCHEMA)
    operands: dict[tuple[Any, ...], Operand] = {}  # equal ones are made once: hundreds for a thousand tensors
    tensors: list[TensorRef] = []
    for shape, stride, dtype, storage in found["tensors"]:
        key = shape, stride, dtype
        known = operands.get(key)
        if known is None:
            known = operands[key] = Operand(*key)
        tensors.append(TensorRef(known, storage))
    return Stream(found["ops"], tuple(tensors), found["storages"], found["n_params"], found["depth"], found["meta"])


def save(stream: Stream, path: Path) -> None:
    """Writes gzipped JSON without a time stamp, so that the same stream gives the same bytes."""
    data = json.dumps(to_json(stream), separators=(",", ":")).encode()
    files.write(path, data)


def load(path: Path) -> Stream:
    """Reads a stream from a file. Raises DataError when the file is not a stream."""
    return from_json(read_json(path, "a flopcast op stream", hint="delete it to trace again"), str(path))


@lru_cache(maxsize=4096)
def tensor_places(args: str) -> tuple[int | None, ...]:
    """Returns, for each argument of a call, which of its `inputs` it is; None for one that is no single tensor.

    A tensor that is passed twice is one input, so that its bytes count once: `mm(x, x)` has two arguments, one input.
    """
    return tuple(value["t"] if isinstance(value, dict) and "t" in value else None for value in json.loads(args))


@lru_cache(maxsize=4096)
def packet(name: str) -> str:
    """Strips the overload from an operator's name: aten.add.Tensor -> aten.add."""
    return ".".join(name.split(".")[:2])
