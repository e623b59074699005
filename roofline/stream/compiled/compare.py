"""Two lists of launches side by side: those expected, of a real GPU, and those found without one.

By kind, the number of launches and the bytes on both sides. Products and attention are also matched one by one, by
shape, layout and type, since what they cost depends on these and not on their bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.compiled.launches import Graph, Kind, Launch

MATCHED = (Kind.PRODUCT, Kind.CONVOLUTION, Kind.ATTENTION, Kind.ATTENTION_BACKWARD)
ALL = "all"


@dataclass(frozen=True)
class Side:
    launches: int
    bytes: int


@dataclass(frozen=True)
class KindRow:
    """Launches of a kind, or `ALL`, on both sides."""

    kind: str
    expected: Side
    found: Side

    @property
    def launches_error(self) -> float:
        return _relative(self.found.launches, self.expected.launches)

    @property
    def bytes_error(self) -> float:
        return _relative(self.found.bytes, self.expected.bytes)


@dataclass(frozen=True)
class CallRow:
    """Calls of a library of one shape whose number differs."""

    call: str
    expected: int
    found: int


@dataclass(frozen=True)
class Comparison:
    """`kinds` ends with all launches together; `calls` are the shapes of products, convolutions and attention that do
    not occur as often on both sides, of `n_calls` expected calls."""

    kinds: tuple[KindRow, ...]
    calls: tuple[CallRow, ...]
    n_calls: int

    @property
    def total(self) -> KindRow:
        return self.kinds[-1]

    @property
    def unmatched(self) -> int:
        """Calls that have no counterpart, the more numerous side's."""
        more = sum(max(row.expected - row.found, 0) for row in self.calls)
        less = sum(max(row.found - row.expected, 0) for row in self.calls)
        return max(more, less)

    def within(self, tolerance: float) -> bool:
        """Whether the number of launches and their bytes are within a relative tolerance, and every call has its
        counterpart."""
        return (
            abs(self.total.launches_error) <= tolerance
            and abs(self.total.bytes_error) <= tolerance
            and not self.unmatched
        )


def compare(expected: Sequence[Graph], found: Sequence[Graph]) -> Comparison:
    """Launches by kind, and library calls by shape, of all graphs of a step together: how the step is cut into graphs,
    and in which order independent launches stand, is left open."""
    ours, theirs = _launches(found), _launches(expected)
    kinds = [kind for kind in Kind if any(launch.kind is kind for launch in (*ours, *theirs))]
    rows = [
        KindRow(
            kind.value, _side(launch for launch in theirs if launch.kind is kind),
            _side(launch for launch in ours if launch.kind is kind),
        )
        for kind in kinds
    ]  # fmt: skip
    wanted, had = (Counter(call_of(launch) for launch in side if launch.kind in MATCHED) for side in (theirs, ours))
    calls = tuple(CallRow(call, wanted[call], had[call]) for call in sorted(wanted | had) if wanted[call] != had[call])
    return Comparison((*rows, KindRow(ALL, _side(theirs), _side(ours))), calls, wanted.total())


def call_of(launch: Launch) -> str:
    """A library's call as a word: its name and its operands' shapes, layouts and types.

    A layout is the order of the dimensions in memory, the slowest first, sizes of one left out: 10 is a transposed
    matrix. Rows that are padded or part of a wider tensor say by how much they are apart.
    """
    return f"{launch.name}({', '.join(_word(operand) for operand in launch.operands)})"


def _word(tensor: Operand) -> str:
    dimensions = [d for d, size in enumerate(tensor.shape) if size > 1]
    order = sorted(dimensions, key=lambda d: (-tensor.stride[d], d))
    layout = "" if order == dimensions else "/" + "".join(map(str, order))
    dense, apart = 1, ""
    for d in reversed(order):
        if tensor.stride[d] != dense:
            apart += f"+{d}:{tensor.stride[d]}"
            dense = tensor.stride[d]
        dense *= tensor.shape[d]
    return f"{tensor.dtype}[{'x'.join(map(str, tensor.shape))}]{layout}{apart}"


def _launches(graphs: Sequence[Graph]) -> list[Launch]:
    return [launch for graph in graphs for launch in graph.launches]


def _side(launches: Iterable[Launch]) -> Side:
    known = list(launches)
    return Side(len(known), sum(launch.bytes for launch in known))


def _relative(found: int, expected: int) -> float:
    if expected:
        return found / expected - 1.0
    return 0.0 if not found else float("inf")
