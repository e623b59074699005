"""What a generated Triton kernel reads and writes, from its source.

The source is parsed as Python. Each `tl.load`, `tl.store` and `tl.atomic_add` addresses a pointer plus an index, a sum
of multiples of the kernel's own indices, of their quotients and remainders, and of values loaded before. From the range
of each follows how many different elements are touched; masks that compare an index with a constant narrow its range.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from flopcast.errors import FlopcastError
from flopcast.kernels.shapes import DTYPE_BYTES
from flopcast.roofline.stream.compiled.launches import Kind

DTYPES = {  # of pointers in a kernel's signature
    "fp64": "fp64", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "i64": "int64", "i32": "int32", "i16": "int16",
    "i8": "int8", "u8": "uint8", "i1": "bool", "u64": "int64", "u32": "int32", "fp8e4nv": "fp8", "fp8e5": "fp8",
}  # fmt: skip
HEURISTICS = {
    "pointwise": Kind.POINTWISE, "persistent_reduction": Kind.PERSISTENT, "reduction": Kind.LOOPED,
    "cooperative_reduction": Kind.COOPERATIVE, "foreach": Kind.FOREACH, "template": Kind.TEMPLATE,
    "user_autotune": Kind.TEMPLATE, "split_scan": Kind.SPLIT,
}  # fmt: skip
WORKSPACE = "ws_ptr"  # a mixed-order reduction's partial sums


class UnreadableCodeError(FlopcastError):
    """Text that is not what inductor is known to generate."""


@dataclass(frozen=True)
class Term:
    """An index, or a quotient, remainder or loaded value, that runs from `low` to `high` (both included).

    `bases`: (kernel's index, its size) that it follows from.
    """

    name: str
    low: int
    high: int
    bases: tuple[tuple[str, int], ...]
    is_loaded: bool = False

    @property
    def count(self) -> int:
        return self.high - self.low + 1


@dataclass(frozen=True)
class Index:
    """A sum of terms times coefficients, and a constant."""

    terms: tuple[tuple[Term, int], ...] = ()
    constant: int = 0

    @property
    def low(self) -> int:
        return self.constant + sum(c * (term.low if c > 0 else term.high) for term, c in self.terms)

    @property
    def high(self) -> int:
        return self.constant + sum(c * (term.high if c > 0 else term.low) for term, c in self.terms)


@dataclass(frozen=True)
class Access:
    """A load or store: which pointer, which elements."""

    pointer: str
    index: Index
    is_write: bool
    is_atomic: bool = False


@dataclass(frozen=True)
class Kernel:
    """A generated kernel. `parameters` without those that Triton fills in; `dtypes` of the pointers among them."""

    name: str
    kind: Kind
    hint: str
    parameters: tuple[str, ...]
    dtypes: Mapping[str, str]
    rows_per_program: int  # of a mixed-order reduction, else 0
    body: tuple[ast.stmt, ...] = field(repr=False, hash=False, compare=False, default=())

    def pointers(self) -> tuple[str, ...]:
        return tuple(name for name in self.parameters if name in self.dtypes)


def read_kernel(source: str) -> Kernel:
    """The kernel that `source` defines. Raises UnreadableCodeError for a source without one."""
    return _read_kernel(source)


@lru_cache(maxsize=4096)
def _read_kernel(source: str) -> Kernel:
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).startswith("triton_heuristics."):
                    return _kernel(node, decorator)
    raise UnreadableCodeError(f"a Triton kernel without heuristics, which inductor does not write: {source[:200]!r}")


def _kernel(function: ast.FunctionDef, decorator: ast.Call) -> Kernel:
    heuristics = ast.unparse(decorator.func).removeprefix("triton_heuristics.")
    if heuristics not in HEURISTICS:
        raise UnreadableCodeError(
            f"{function.name}: a kernel of kind {heuristics!r}; known are {', '.join(sorted(HEURISTICS))}"
        )
    keywords = {keyword.arg: keyword.value for keyword in decorator.keywords}
    signature = _entry(keywords["triton_meta"], "signature")
    types: dict[str, str] = ast.literal_eval(signature) if signature is not None else {}
    split = _entry(keywords["inductor_meta"], "RSPLIT_SIZE")
    kind = HEURISTICS[heuristics]
    if any(isinstance(node, ast.Attribute) and node.attr == "atomic_add" for node in ast.walk(function)):
        kind = Kind.SCATTER
    elif split is not None:
        kind = Kind.MIXED
    return Kernel(
        name=function.name,
        kind=kind,
        hint=ast.unparse(keywords["reduction_hint"]).rpartition(".")[2] if "reduction_hint" in keywords else "",
        parameters=tuple(a.arg for a in function.args.args if not a.arg.isupper()),  # XBLOCK and the like are Triton's
        dtypes={name: _dtype(function.name, kind) for name, kind in types.items() if kind.startswith("*")},
        rows_per_program=int(ast.literal_eval(split)) if split is not None else 0,
        body=tuple(function.body),
    )


def _dtype(kernel: str, pointer: str) -> str:
    name = pointer.removeprefix("*")
    if name not in DTYPES:
        raise UnreadableCodeError(f"{kernel}: a pointer to {name!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def _entry(dictionary: ast.expr, key: str) -> ast.expr | None:
    if isinstance(dictionary, ast.Dict):
        for name, value in zip(dictionary.keys, dictionary.values, strict=True):
            if isinstance(name, ast.Constant) and name.value == key:
                return value
    return None


# --- bytes


def moved_bytes(kernel: Kernel, numels: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """(read, written) by one launch, by pointer. `numels`: values of xnumel, r0_numel, ...; `sizes`: elements of the
    tensor behind each pointer, which bound what can be touched.

    An element counts once for reading and once for writing; what the kernel has stored before it loads it does not
    count as read. Atomic additions read what they write. A kernel of several parts (foreach) or a template reads and
    writes whole tensors.
    """
    if kernel.kind in (Kind.FOREACH, Kind.TEMPLATE):
        touched = {(a.pointer, a.is_write): sizes[a.pointer] for a in _pointers_used(kernel)}
    else:
        touched = {}
        found = _first_touches(_Reader(kernel, numels).accesses())
        for pointer, is_write in dict.fromkeys((a.pointer, a.is_write) for a in found):
            own = [a.index for a in found if (a.pointer, a.is_write) == (pointer, is_write)]
            touched[pointer, is_write] = min(_different(own), sizes[pointer])

    def moved(pointer: str, is_write: bool) -> int:
        return touched.get((pointer, is_write), 0) * DTYPE_BYTES[kernel.dtypes[pointer]]

    pointers = dict.fromkeys(pointer for pointer, _ in touched)
    return {pointer: (moved(pointer, False), moved(pointer, True)) for pointer in pointers}


def _first_touches(accesses: Iterable[Access]) -> list[Access]:
    """Without loads of what the kernel has stored before: a looped reduction that keeps a row in memory for its second
    loop finds it in cache."""
    found: list[Access] = []
    stored: set[str] = set()
    for access in accesses:
        if access.is_write and not access.is_atomic:
            stored.add(access.pointer)
        if access.is_write or access.pointer not in stored:
            found.append(access)
    return found


def _different(indices: list[Index]) -> int:
    """Elements that at least one of the indices addresses. Indices that differ only in an offset, or in the part of a
    row that they run over, are joined as intervals; others are taken as disjoint."""
    rows: dict[tuple[Term | None, tuple[tuple[Term, int], ...]], list[tuple[int, int]]] = {}
    for index in dict.fromkeys(indices):
        along = next((term for term, factor in index.terms if factor == 1 and not term.is_loaded), None)
        across = tuple(sorted((pair for pair in index.terms if pair[0] is not along), key=lambda pair: pair[0].name))
        low, high = (along.low, along.high) if along is not None else (0, 0)
        unit = replace(along, low=0, high=0) if along is not None else None
        rows.setdefault((unit, across), []).append((index.constant + low, index.constant + high))
    return sum(
        _count(across, unit, high - low + 1, len(intervals))
        for (unit, across), intervals in rows.items()
        for low, high in _union(intervals)
    )


def _count(across: tuple[tuple[Term, int], ...], along: Term | None, length: int, accesses: int) -> int:
    """Number of combinations: for each access, by each of the kernel's indices at most its size."""
    groups: dict[tuple[tuple[str, int], ...], int] = {}
    for term, _ in across:
        groups[term.bases] = groups.get(term.bases, 1) * term.count
    if along is not None:
        groups[along.bases] = groups.get(along.bases, 1) * length
    most = accesses * prod(size for _, size in {base for bases in groups for base in bases})
    return min(most, prod(min(count, accesses * prod(size for _, size in bases)) for bases, count in groups.items()))


def _union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


def _pointers_used(kernel: Kernel) -> Iterator[Access]:
    """Loads and stores by pointer, whatever their index."""
    for statement in kernel.body:
        for call, method in _memory_calls(statement):
            names = [n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name) and n.id in kernel.dtypes]
            for name in names:
                yield Access(name, Index(), method != "load")


def _memory_calls(node: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = call.func.value
            if isinstance(owner, ast.Name) and owner.id == "tl" and call.func.attr in ("load", "store", "atomic_add"):
                yield call, call.func.attr


class _Reader:
    """Follows a kernel's statements in order and knows what each name stands for."""

    def __init__(self, kernel: Kernel, numels: Mapping[str, int]) -> None:
        self.kernel = kernel
        self.numels = dict(numels)
        self.indices: dict[str, Index] = {}
        self.follows: dict[str, dict[str, Term]] = {}  # of a value: the terms that it was loaded or computed by
        self.narrowed: dict[str, dict[str, tuple[int, int]]] = {}  # of a mask: the ranges that it leaves
        for name, size in numels.items():
            base = {"rnumel": "rindex"}.get(name, name.removesuffix("numel") + "index")
            self.indices[base] = Index(((Term(base, 0, size - 1, ((base, size),)), 1),))

    def accesses(self) -> Iterator[Access]:
        yield from self._statements(list(self.kernel.body))

    def _statements(self, statements: list[ast.stmt]) -> Iterator[Access]:
        for statement in statements:
            if isinstance(statement, (ast.For, ast.While, ast.If, ast.With)):
                yield from self._statements(statement.body)
                continue
            for call, method in _memory_calls(statement):
                yield from self._access(call, method)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._assign(statement.targets[0].id, statement.value)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
                for target in statement.targets[0].elts:
                    if isinstance(target, ast.Name):
                        self.follows[target.id] = self._terms(statement.value)

    def _assign(self, name: str, value: ast.expr) -> None:
        if name in self.indices and name.endswith("index"):
            return  # xindex = xoffset + tl.arange(...): its range is known from the sizes
        index = self._index(value)
        if index is not None:
            self.indices[name] = index
        else:
            self.indices.pop(name, None)
        self.follows[name] = self._terms(value)
        self.narrowed[name] = self._mask(value)

    def _access(self, call: ast.Call, method: str) -> Iterator[Access]:
        address = call.args[0]
        is_write = method != "load"
        if isinstance(address, ast.Name):
            pointer, where = address.id, Index()
        elif isinstance(address, ast.BinOp) and isinstance(address.op, ast.Add):
            first, offset = _pointer_and_offset(address)
            if first not in self.kernel.dtypes:
                raise self._unread(call)
            pointer = first
            if pointer == WORKSPACE:
                programs = -(-self.numels["xnumel"] // self.kernel.rows_per_program)
                row = self.numels["r0_numel"]
                part = _part(offset)
                base = Term("partial sums", 0, programs * row - 1, (("programs", programs), ("r0_index", row)))
                where = Index(((base, 1),), part * programs * row)
            else:
                where = self._index(offset) or self._any_index(offset)
        else:
            raise self._unread(call)
        if pointer not in self.kernel.dtypes:
            raise self._unread(call)
        mask = call.args[2] if is_write and len(call.args) > 2 else call.args[1] if len(call.args) > 1 else None
        where = _narrow(where, self._mask(mask) if mask is not None else {})
        yield Access(pointer, where, is_write, method == "atomic_add")
        if method == "atomic_add":
            yield Access(pointer, where, False, True)

    def _unread(self, node: ast.AST) -> UnreadableCodeError:
        return UnreadableCodeError(
            f"{self.kernel.name}: an access that this reader does not know: {ast.unparse(node)[:300]}"
        )

    def _index(self, node: ast.expr) -> Index | None:
        """The index that an expression stands for; None for anything but an index. A loaded value is a term of its own,
        which runs over as many values as it was loaded at."""
        match node:
            case ast.Constant(value=bool() | None):
                return None
            case ast.Constant(value=int() as value):
                return Index((), value)
            case ast.Name(id=name) if name in self.indices:
                return self.indices[name]
            case ast.Name(id=name) if name in self.numels:
                return Index((), self.numels[name])
            case ast.Name(id=name) if name.startswith("tmp") and name in self.follows:
                return self._loaded(name)
            case ast.Name(id=name) if name in self.kernel.parameters or name.startswith("load_seed"):
                return Index()  # a number that is the same for all
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                found = self._index(operand)
                return None if found is None else _times(found, -1)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                one, other = self._index(left), self._index(right)
                if one is None or other is None:
                    return None
                return _plus(one, other if isinstance(op, ast.Add) else _times(other, -1))
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                one, other = self._index(left), self._index(right)
                if one is None or other is None or (one.terms and other.terms):
                    return None
                return _times(one, other.constant) if one.terms else _times(other, one.constant)
            case ast.BinOp(left=left, op=ast.FloorDiv() | ast.Mod() as op, right=right):
                one, other = self._index(left), self._index(right)
                if one is None or other is None or other.terms or other.constant <= 0:
                    return None
                return (
                    _quotient(one, other.constant) if isinstance(op, ast.FloorDiv) else _remainder(one, other.constant)
                )
            case ast.Call(func=ast.Attribute(attr="broadcast_to", value=ast.Name(id="tl")), args=[value, *_]):
                return self._index(value)
            case ast.Call(func=ast.Attribute(attr="broadcast_to" | "to", value=value)):
                return self._index(value)
            case ast.Call(func=ast.Attribute(attr="full"), args=[_, ast.expr() as value, *_]):
                return self._index(value)
        return None

    def _any_index(self, node: ast.expr) -> Index:
        """An index of another form, such as the window of a pooling, is taken as different for every combination of the
        terms that it is made of."""
        return self._opaque(ast.unparse(node), self._terms(node))

    def _loaded(self, name: str) -> Index:
        return self._opaque(name, self.follows[name])

    def _opaque(self, name: str, terms: Mapping[str, Term]) -> Index:
        bases = tuple(sorted({base for term in terms.values() for base in term.bases}))
        count = prod(term.count for term in terms.values())
        return Index(((Term(name, 0, max(count, 1) - 1, bases, is_loaded=True), 1),))

    def _terms(self, node: ast.AST) -> dict[str, Term]:
        """The terms that a value follows from, by name."""
        found: dict[str, Term] = {}
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                if part.id in self.indices and not part.id.startswith("tmp"):
                    found |= {term.name: term for term, _ in self.indices[part.id].terms if not term.is_loaded}
                else:
                    found |= self.follows.get(part.id, {})
        return found

    def _mask(self, node: ast.expr) -> dict[str, tuple[int, int]]:
        """By term, the range that a condition leaves it."""
        match node:
            case ast.Name(id=name):
                return self.narrowed.get(name, {})
            case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
                return _both(self._mask(left), self._mask(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                one, other = self._index(left), self._index(right)
                if one is None or other is None or other.terms or len(one.terms) != 1:
                    return {}
                (term, factor), limit = one.terms[0], other.constant - one.constant
                if factor != 1 or term.is_loaded:
                    return {}
                low, high = {
                    ast.Lt: (term.low, limit - 1), ast.LtE: (term.low, limit), ast.Gt: (limit + 1, term.high),
                    ast.GtE: (limit, term.high), ast.Eq: (limit, limit),
                }.get(type(op), (term.low, term.high))  # fmt: skip
                return {term.name: (max(low, term.low), min(high, term.high))}
        return {}


def _pointer_and_offset(node: ast.BinOp) -> tuple[str, ast.expr]:
    """`pointer + offset`; where Python has read `pointer + a + b` as `(pointer + a) + b`, the offset is a + b."""
    if isinstance(node.left, ast.Name):
        return node.left.id, node.right
    if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add):
        pointer, rest = _pointer_and_offset(node.left)
        return pointer, ast.BinOp(left=rest, op=ast.Add(), right=node.right)
    return "", node


def _part(offset: ast.expr) -> int:
    """Which of a workspace's parts a store is to: the 1 of `program_id(0) + 1 * num_programs(0)`."""
    for node in ast.walk(offset):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.Constant):
            value: Any = node.left.value
            return int(value)
    return 0


def _plus(one: Index, other: Index) -> Index:
    terms = dict(one.terms)
    for term, factor in other.terms:
        terms[term] = terms.get(term, 0) + factor
    return Index(tuple((term, factor) for term, factor in terms.items() if factor), one.constant + other.constant)


def _times(index: Index, factor: int) -> Index:
    if not factor:
        return Index()
    return Index(tuple((term, c * factor) for term, c in index.terms), index.constant * factor)


def _quotient(index: Index, divisor: int) -> Index:
    return _derived(index, f"//{divisor}", index.low // divisor, index.high // divisor)


def _remainder(index: Index, divisor: int) -> Index:
    if index.low >= 0 and index.high < divisor:
        return index
    return _derived(index, f"%{divisor}", 0, divisor - 1)


def _derived(index: Index, how: str, low: int, high: int) -> Index:
    if low == high:
        return Index((), low)
    if not index.terms:
        raise UnreadableCodeError(f"a constant with a range: {index}")
    name = "+".join(f"{c}*{term.name}" for term, c in index.terms) + f"+{index.constant}"
    bases = tuple(sorted({base for term, _ in index.terms for base in term.bases}))
    is_loaded = any(term.is_loaded for term, _ in index.terms)
    return Index(((Term(f"({name}){how}", low, high, bases, is_loaded), 1),))


def _narrow(index: Index, ranges: Mapping[str, tuple[int, int]]) -> Index:
    """The index with its terms' ranges cut to what a mask leaves."""
    terms = []
    for term, factor in index.terms:
        low, high = ranges.get(term.name, (term.low, term.high))
        low, high = max(low, term.low), min(high, term.high)
        terms.append((replace(term, low=low, high=max(low, high)), factor))
    return Index(tuple(terms), index.constant)


def _both(one: Mapping[str, tuple[int, int]], other: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {
        name: (max(pair[0] for pair in pairs), min(pair[1] for pair in pairs))
        for name in {**one, **other}
        for pairs in [[ranges[name] for ranges in (one, other) if name in ranges]]
    }
