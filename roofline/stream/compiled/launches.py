"""What one launch of a compiled graph is, and a graph: its launches in order and the life of its buffers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import NamedTuple

from flopcast.bounds import NonNegative
from flopcast.kernels.shapes import DTYPE_BYTES, Operand


class Kind(StrEnum):
    """What a launch is. The first eight are kernels that inductor generates."""

    POINTWISE = "pointwise"
    PERSISTENT = "persistent reduction"  # a row at once
    LOOPED = "looped reduction"  # a row in steps
    SPLIT = "split reduction"  # parts of a row, which a later reduction sums
    MIXED = "mixed-order reduction"  # rows at once, and sums over rows into a workspace of partial sums
    COOPERATIVE = "cooperative reduction"  # several programs a row
    SCATTER = "scatter"  # adds atomically at places read from memory
    FOREACH = "foreach"
    TEMPLATE = "template"
    PRODUCT = "product"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention backward"
    COPY = "copy"  # copies, casts and fills by an ATen call
    FALLBACK = "other"  # any other ATen call


GENERATED = frozenset({
    Kind.POINTWISE, Kind.PERSISTENT, Kind.LOOPED, Kind.SPLIT, Kind.MIXED, Kind.COOPERATIVE, Kind.SCATTER, Kind.FOREACH,
    Kind.TEMPLATE,
})  # fmt: skip


class Touch(NamedTuple):
    """What a launch reads and writes of one buffer, in bytes."""

    buffer: str
    read: int
    written: int


@dataclass(frozen=True)
class Work:
    """What one launch of a generated kernel does besides moving bytes (`instructions.py`).

    Of all threads together: `arithmetic` instructions; `special`, results of the special function unit;
    `trigonometric`, sines and cosines; `accesses`, loads and stores, each of a vector; `requested`, their bytes, those
    that a cache serves too; `gathered`, elements loaded or stored whose neighbours lie in other lines of memory.

    Of one thread: `steps`, loads that it does one after another, of which `chained` more need what others have loaded;
    `reductions`, how often it waits for the other threads of its program; `turns`, the rows that it takes one after
    another for sums over rows.
    """

    arithmetic: NonNegative = 0.0
    special: NonNegative = 0.0
    trigonometric: NonNegative = 0.0
    accesses: NonNegative = 0.0
    requested: NonNegative = 0.0
    gathered: NonNegative = 0.0
    steps: NonNegative = 0.0
    chained: NonNegative = 0.0
    reductions: NonNegative = 0.0
    turns: NonNegative = 0.0

    def plus(self, **more: float) -> Work:
        return replace(self, **{name: getattr(self, name) + amount for name, amount in more.items()})


@dataclass(frozen=True)
class Launch:
    """A kernel that inductor generated, or a call of a library.

    `name` is the generated kernel's, as a profiler shows it, or the call's ("mm", "aten.sum"). `bytes_read` and
    `bytes_written` count each element that is touched once, however often it is loaded: partial sums, slices and
    broadcasts by the kernel's own index expressions, elements found by an index from memory as if all were different.
    `numels`: sizes of the kernel's dimensions, (("x", 8192), ("r0_", 1024)); `hint`: inductor's word for a reduction's
    direction. `operands` and `results` are the tensors of a library's call. `ops`: the ATen operations that it came
    from, `nodes` the nodes of the traced graph. `touches`: the same bytes by buffer. `args`: a library call's arguments
    in the order of ATen's schema, as `kernels.shapes.Call` writes them, where `operands` are the inputs. `work`: what a
    generated kernel computes. `ages`: of the buffers that it reads, (bytes, bytes that the graph had moved since they
    were touched), without those that the graph has not touched before.
    """

    kind: Kind
    name: str
    bytes_read: int = 0
    bytes_written: int = 0
    numels: tuple[tuple[str, int], ...] = ()
    hint: str = ""
    ops: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    operands: tuple[Operand, ...] = ()
    results: tuple[Operand, ...] = ()
    work: Work | None = None
    touches: tuple[Touch, ...] = field(default=(), compare=False)  # names differ from graph to graph
    args: str = "[]"
    ages: tuple[tuple[int, int], ...] = field(default=(), compare=False)  # differ from layer to layer

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def is_generated(self) -> bool:
        return self.kind in GENERATED


@dataclass(frozen=True)
class Buffer:
    """Memory that a graph holds from before launch number `born` until before launch number `died`, None if it outlives
    the call: results, and what the backward pass is to read. Inputs are born at 0 and die when the graph drops them;
    whether that frees their memory depends on who else holds them."""

    name: str
    bytes: int
    born: int
    died: int | None
    is_input: bool = False


@dataclass(frozen=True)
class Graph:
    """A compiled graph: inputs by name, launches in order, buffers by birth, and the buffers of what it returns, in
    order; what is no buffer, None or a number, stays as the text has it. `captured`: its launches, from a number to
    before another, that are each captured as a CUDA graph and replayed. `returned`: as which tensors `outputs` are
    returned, None for what is no buffer."""

    label: str  # "0_forward", as the text has it
    inputs: tuple[tuple[str, Operand], ...]
    launches: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]
    outputs: tuple[str, ...]
    captured: tuple[tuple[int, int], ...] = ()
    returned: tuple[Operand | None, ...] = ()

    @property
    def is_backward(self) -> bool:
        return self.label.endswith("backward")


def extent(tensor: Operand) -> int:
    """Elements from the first to the last one in memory, those between them included."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))


def storage_bytes(tensor: Operand) -> int:
    return extent(tensor) * DTYPE_BYTES[tensor.dtype]


def touched_bytes(tensor: Operand) -> int:
    """Bytes of the elements that a tensor refers to, those of broadcast dimensions once."""
    return min(prod(tensor.shape), extent(tensor)) * DTYPE_BYTES[tensor.dtype]
