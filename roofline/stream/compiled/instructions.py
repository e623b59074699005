"""How much a generated kernel computes, from its source: what bounds it where its bytes do not.

Each expression is evaluated once for every combination of those of the kernel's indices that it depends on: what
depends on a row alone by the threads that share the row, a sine of a row and a column anew for both. Loads and stores
count by their addresses: whether what neighbouring threads address lies in one line of memory or in as many as there
are threads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import prod
from typing import NamedTuple

from flopcast.kernels.shapes import DTYPE_BYTES
from flopcast.roofline.stream.compiled.kernel_source import WORKSPACE, Kernel
from flopcast.roofline.stream.compiled.launches import Work

BYTES_OF_REGISTER = 4
VECTOR_BYTES = 16  # that a thread loads or stores at most at a time
LONG = 64  # neighbours, more than any vector has
LINE_BYTES = 32  # of what an access to memory moves at least
# Instructions of a thread and results of the special function unit, counted by hand from how libdevice computes these
# functions, without branches that ordinary arguments do not take: right within a few instructions.
# Ten rounds of two products of 32 by 32 bits, at a quarter of the rate, and two xors of three numbers each.
PHILOX = 10 * (2 * 4 + 2)
COSTS = {
    "exp": (8, 1), "exp2": (2, 1), "expm1": (20, 1), "log": (4, 1), "log2": (2, 1), "log1p": (20, 1),
    "rsqrt": (2, 1), "sqrt": (6, 1), "sqrt_rn": (8, 1), "erf": (25, 1), "tanh": (16, 2), "sigmoid": (15, 2),
    "welford_reduce": (11, 1), "pow": (40, 2), "div_rn": (8, 1), "rand": (PHILOX, 0), "randn": (PHILOX + 20, 4),
    "online_softmax_combine": (28, 2),
}  # fmt: skip
DIVISION = (5, 1)
INTEGER_DIVISION = 6  # by a constant that is no power of two: a product and shifts
TRIGONOMETRIC = ("sin", "cos", "tan")
ACCESSES = ("load", "store", "atomic_add")
FREE = ("arange", "program_id", "num_programs", "range", "debug_barrier", "reshape", "expand_dims")
REDUCTIONS = ("sum", "max", "max2", "min", "min2", "prod", "any", "online_softmax_reduce", "welford", "argmax",
              "argmin")  # fmt: skip
# Elements of a row, or down a column, that a program of a looped reduction takes at a time (inductor's defaults).
STEP = {"INNER": 2048, "OUTER": 8, "OUTER_TINY": 128}
STEP_DEFAULT = 512

HALF = 0.5  # of a load's elements where it has a condition: two halves of a concatenation, say
WARP, PROGRAM = 32, 256  # threads
PER_THREAD = 8  # elements of a row that a thread holds
SHUFFLES = 10  # instructions by which a warp's threads add up what each holds

Axes = frozenset[str]
NO_AXES: Axes = frozenset()


class _Known(NamedTuple):
    """Of a name: the indices that it depends on; loads on the way to it; and, for an index, how far apart in units
    two neighbours along an axis are (by axis), None where that is not one number.

    In every `run` of neighbours along the axis that threads are neighbours along an index is constant, or one more each
    time, and at the begin of each run a multiple of `multiple`; both are powers of two up to `LONG`.
    """

    axes: Axes = NO_AXES
    depth: int = 0
    strides: Mapping[str, float] | None = None
    run: int = 1
    multiple: int = 1


def work_of(kernel: Kernel, numels: Mapping[str, int]) -> Work:
    """`numels`: values of xnumel, r0_numel, ..."""
    counter = _Counter(kernel, {name.removesuffix("numel").removesuffix("_"): size for name, size in numels.items()})
    counter.statements(kernel.body, 1.0)
    return counter.work


class _Counter:
    def __init__(self, kernel: Kernel, sizes: Mapping[str, int]) -> None:
        self.kernel = kernel
        self.sizes = dict(sizes)
        self.work = Work()
        self.computed: dict[str, _Known] = {}  # expressions of the statements at hand, each of which is computed once
        self.reductions = 0  # among the threads of a program, in the statements at hand
        self.addresses = _addresses(kernel.body)
        self.of_addresses: dict[str, tuple[float, frozenset[str]]] = {}  # instructions, and what they begin from
        self.charged: dict[str, float] = {}  # how many times a name that addresses come from was evaluated, a place
        self.fastest = self._fastest(frozenset(sizes))
        self.known = {
            f"{axis}{'_' if axis.startswith('r') else ''}index": _Known(
                frozenset({axis}), 0, {axis: 1.0}, LONG, LONG if axis in self.fastest else 1
            )
            for axis in sizes
        }
        self.known |= dict.fromkeys(kernel.dtypes, _Known(strides={}, run=LONG, multiple=LONG))  # where tensors begin
        # A row that a program holds as a whole is padded to a power of two.
        is_whole = not _loops(kernel)
        self.padded = {
            axis: 1 << (size - 1).bit_length() if is_whole and axis.startswith("r") else size
            for axis, size in self.sizes.items()
        }

    def statements(self, body: Iterable[ast.stmt], turns: float) -> None:
        deepest, reductions, self.reductions = 0, self.reductions, 0
        computed, self.computed = self.computed, {}
        for statement in body:
            if isinstance(statement, (ast.For, ast.While)):
                self.statements(statement.body, self._turns(statement))
            elif isinstance(statement, (ast.If, ast.With)):
                self.statements(statement.body, turns)
            else:
                deepest = max(deepest, self._statement(statement))
        self.work = self.work.plus(
            steps=min(deepest, 1) * turns, chained=max(deepest - 1, 0) * turns, reductions=(self.reductions > 0) * turns
        )
        self.reductions, self.computed = reductions, computed

    def _turns(self, loop: ast.For | ast.While) -> float:
        text = ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
        if "split_size" in text:  # rows one after another, their loads ahead of their turn
            self.work = self.work.plus(turns=float(self.kernel.rows_per_program))
            return 1.0
        step = STEP.get(self.kernel.hint, STEP_DEFAULT)
        return float(-(-self.sizes.get("r0", 1) // step))

    def _statement(self, node: ast.stmt) -> int:
        """Counts a statement; the depth of its loads."""
        if isinstance(node, ast.Assign):
            name = _target(node)
            if name in self.addresses:
                found, spent = self._apart(node.value)
                self.of_addresses[name] = spent, _names(node.value)
            else:
                found = self._value(node.value)
            for target in node.targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Name) and not one.id.endswith("index"):
                        self.known[one.id] = found
            return found.depth
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return self._value(node.value).depth
        return 0

    def _count(self, axes: Axes) -> float:
        return float(prod(self.sizes[axis] for axis in axes))

    def _threads(self, axes: Axes) -> float:
        """Evaluations: what depends on a row alone is evaluated by all threads that share the row."""
        if any(axis.startswith("r") for axis in axes):
            return float(prod(self.padded[axis] for axis in axes))
        reduced = [size for axis, size in self.sizes.items() if axis.startswith("r")]
        shared = axes and reduced and self._is_inner()
        return self._count(axes) * (min(max(prod(reduced) / PER_THREAD, WARP), PROGRAM) if shared else 1.0)

    def _is_inner(self) -> bool:
        return self.kernel.hint not in ("OUTER", "OUTER_TINY")

    def _add(self, axes: Axes, **per_element: float) -> None:
        count = self._threads(axes)
        self.work = self.work.plus(**{name: count * amount for name, amount in per_element.items() if amount})

    def _value(self, node: ast.expr, is_address: bool = False) -> _Known:
        """What an expression depends on; its work is counted on the way, that of addresses apart, and once if the same
        stands in several places, as a compiler finds it."""
        if not isinstance(node, (ast.BinOp, ast.Compare, ast.BoolOp)):
            return self._new_value(node, is_address)
        key = ast.dump(node)
        if key not in self.computed:
            self.computed[key] = self._new_value(node, is_address)
        return self.computed[key]

    def _apart(self, node: ast.expr, is_address: bool = False) -> tuple[_Known, float]:
        """`_value`, and its instructions, which are not counted yet."""
        work, self.work = self.work, Work()
        found = self._value(node, is_address)
        spent, self.work = self.work.arithmetic, work.plus(**(asdict(self.work) | {"arithmetic": 0.0}))
        return found, spent

    def _charge(self, names: Iterable[str], share: float) -> float:
        """Instructions by which the names are evaluated for a share of the places, where they were not before."""
        found = 0.0
        for name in names:
            if (more := share - self.charged.get(name, 0.0)) > 0 and name in self.of_addresses:
                spent, begin = self.of_addresses[name]
                self.charged[name] = share
                found += more * spent + self._charge(begin, share)
        return found

    def _new_value(self, node: ast.expr, is_address: bool) -> _Known:
        match node:
            case ast.Constant(value=value):
                return _Known(strides={}, run=LONG, multiple=_power(value) if isinstance(value, int) else 1)
            case ast.Name(id=name):
                return self.known.get(name, _Known(strides={}, run=LONG))
            case ast.Subscript(value=value):
                return self._value(value, is_address)
            case ast.UnaryOp(operand=operand):
                found = self._value(operand, is_address)
                if not (is_address or isinstance(operand, ast.Constant)):
                    self._add(found.axes, arithmetic=1.0)
                return found._replace(strides=_scaled(found.strides, -1.0))
            case ast.BinOp(left=left, op=op, right=right):
                return self._operation(op, left, right, is_address)
            case ast.Compare(left=left, comparators=others):
                return self._combined([left, *others], 1.0)
            case ast.BoolOp(values=values):
                return self._combined(values, 1.0)
            case ast.IfExp(body=body, orelse=orelse):
                return self._combined([body, orelse], 1.0)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return self._combined(elements, 0.0)
            case ast.Call():
                return self._call(node, is_address)
        return _Known()

    def _combined(self, nodes: Iterable[ast.expr], arithmetic: float) -> _Known:
        parts = [self._value(node) for node in nodes]
        axes = NO_AXES.union(*(part.axes for part in parts))
        self._add(axes, arithmetic=arithmetic)
        return _Known(axes, max((part.depth for part in parts), default=0))

    def _operation(self, op: ast.operator, left: ast.expr, right: ast.expr, is_address: bool) -> _Known:
        one, other = self._value(left, is_address), self._value(right, is_address)
        axes, depth = one.axes | other.axes, max(one.depth, other.depth)
        found = _Known(axes, depth)
        if isinstance(op, (ast.FloorDiv, ast.Mod)):
            divisor = right.value if isinstance(right, ast.Constant) and isinstance(right.value, int) else 0
            is_power = divisor > 0 and not divisor & (divisor - 1)
            self._add(axes, arithmetic=1.0 if is_power else INTEGER_DIVISION)
            if one.strides is not None and divisor > 0:
                found = _divided(one, divisor, isinstance(op, ast.Mod), self.fastest)
        elif isinstance(op, ast.Div):
            self._add(axes, arithmetic=DIVISION[0], special=DIVISION[1])
        else:
            if not is_address:
                self._add(axes, arithmetic=1.0)
            found = found._replace(run=min(one.run, other.run))
            if isinstance(op, (ast.Add, ast.Sub)):
                found = found._replace(multiple=min(one.multiple, other.multiple))
                if one.strides is not None and other.strides is not None:
                    found = found._replace(
                        strides=_sum(one.strides, other.strides, 1.0 if isinstance(op, ast.Add) else -1.0)
                    )
            elif isinstance(op, ast.Mult):
                for constant, term in ((left, other), (right, one)):
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, int):
                        multiple = min(term.multiple * _power(constant.value), LONG)
                        found = found._replace(strides=_scaled(term.strides, float(constant.value)), multiple=multiple)
        return found

    def _call(self, node: ast.Call, is_address: bool) -> _Known:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name in ACCESSES:
            return self._access(node, name)
        if name in ("full", "zeros"):
            return _Known(strides={})
        if name in ("broadcast_to", "to"):
            is_of_tl = isinstance(owner, ast.Name) and owner.id == "tl"
            return self._value(node.args[0] if is_of_tl or owner is None else owner, is_address)
        parts = [self._value(a) for a in node.args]
        axes = NO_AXES.union(*(part.axes for part in parts))
        depth = max((part.depth for part in parts), default=0)
        if name in FREE:
            return _Known(axes, depth)
        if name in TRIGONOMETRIC:
            self._add(axes, trigonometric=1.0)
        else:
            arithmetic, special = COSTS.get(name, (1, 0))
            self._add(axes, arithmetic=arithmetic, special=special)
        if name in REDUCTIONS:
            along = [a.value for a in node.args[1:] if isinstance(a, ast.Constant) and isinstance(a.value, int)]
            axes = frozenset(a for a in axes if a.startswith("r") == (along[:1] == [0]))
            self.reductions += self.kernel.hint != "OUTER_TINY"
            if self._is_inner():
                self._add(axes, arithmetic=SHUFFLES)
        return _Known(axes, depth)

    def _access(self, node: ast.Call, method: str) -> _Known:
        address = node.args[0]
        where, spent = self._apart(address, is_address=True)
        value = self._value(node.args[1]) if method != "load" and len(node.args) > 1 else _Known()
        pointers = [n.id for n in ast.walk(address) if isinstance(n, ast.Name) and n.id in self.kernel.dtypes]
        size = DTYPE_BYTES[self.kernel.dtypes[pointers[0]]] if pointers else 4
        axes = where.axes | value.axes
        depth = max(where.depth, value.depth)
        if pointers and pointers[0] == WORKSPACE:
            self.work = self.work.plus(arithmetic=spent)
            return _Known(axes, depth)
        share = HALF if method == "load" and self._is_conditional(node) else 1.0
        is_gathered = self._is_gathered(axes, where.strides, size)
        most = min(max(VECTOR_BYTES // size, 1), self._together(node, method, axes))
        at_once = 1 if is_gathered else min(where.run, where.multiple, most)
        spent = spent / at_once + self._charge(_names(address), 1.0 / at_once)
        self.work = self.work.plus(arithmetic=spent)
        cast = 1.0 if size != BYTES_OF_REGISTER else 0.0
        self._add(axes, arithmetic=share * cast, accesses=share / at_once)
        count = self._count(axes) * share
        self.work = self.work.plus(
            requested=count * max(size, BYTES_OF_REGISTER / at_once), gathered=count if is_gathered else 0.0
        )
        run = 1 if axes & self._fastest(frozenset(self.sizes)) else LONG
        return _Known(axes, depth + (method == "load"), run=run)

    def _is_gathered(self, axes: Axes, strides: Mapping[str, float] | None, size: int) -> bool:
        """Whether neighbours along the axis that threads are neighbours along lie in different lines. If another axis
        has neighbours in one line, Triton lets threads be neighbours along that."""
        if strides is None or any(0 < abs(stride) * size < LINE_BYTES for stride in strides.values()):
            return False
        return any(abs(strides.get(axis, 0.0)) * size >= LINE_BYTES for axis in self._fastest(axes))

    def _together(self, node: ast.Call, method: str, axes: Axes) -> int:
        """How many neighbours share their condition, that the index is within the kernel's: where the number of indices
        is odd each has its own, and is loaded alone."""
        given = node.args[1 + (method != "load") :][:1]
        masks = {part.id for mask in given for part in ast.walk(mask) if isinstance(part, ast.Name)}
        ends = (axis for axis in self._fastest(axes) if masks & {f"{axis}mask", f"{axis}_mask"})
        return min((_power(self.sizes[axis]) for axis in ends), default=LONG)

    @staticmethod
    def _is_conditional(load: ast.Call) -> bool:
        """Whether a load has a condition of its own besides the ends of the kernel's indices."""
        return len(load.args) > 1 and any(
            isinstance(part, ast.Name) and part.id.startswith("tmp") for part in ast.walk(load.args[1])
        )

    def _fastest(self, axes: Axes) -> Axes:
        reduced = frozenset(axis for axis in axes if axis.startswith("r"))
        if reduced and self._is_inner():
            return reduced
        return frozenset({"x"}) & axes or axes


def _addresses(body: Iterable[ast.stmt]) -> frozenset[str]:
    """The names from which nothing comes but addresses: a thread that takes several elements at a time evaluates them
    for the first of these alone."""
    used: dict[str, set[str]] = {}  # by which names: "" where the value itself is needed
    for node in (node for statement in body for node in ast.walk(statement)):
        if not isinstance(node, (ast.Assign, ast.Expr, ast.AugAssign)):
            continue
        inside = {
            id(part)
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ACCESSES
            for part in ast.walk(call.args[0])
        }
        by = _target(node) if isinstance(node, ast.Assign) else ""
        for part in ast.walk(node.value):
            if isinstance(part, ast.Name):
                used.setdefault(part.id, set()).update(() if id(part) in inside else {by})
    found = {name for name in used if not name.endswith(("index", "numel", "offset"))}
    while True:
        kept = {name for name in found if used[name] <= found}
        if kept == found:
            return frozenset(found)
        found = kept


def _target(node: ast.Assign) -> str:
    """The name that a statement assigns to; "" where it is none or several."""
    return node.targets[0].id if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) else ""


def _names(node: ast.expr) -> frozenset[str]:
    return frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def _scaled(strides: Mapping[str, float] | None, factor: float) -> Mapping[str, float] | None:
    return None if strides is None else {axis: stride * factor for axis, stride in strides.items()}


def _sum(one: Mapping[str, float], other: Mapping[str, float], sign: float) -> Mapping[str, float]:
    return {axis: one.get(axis, 0.0) + sign * other.get(axis, 0.0) for axis in {**one, **other}}


def _divided(index: _Known, divisor: int, is_remainder: bool, fastest: Axes) -> _Known:
    """Within a run of `divisor` neighbours the remainder goes on and the quotient stays. Of what is the same for all
    neighbours of a run, the number of a head say, both stay."""
    power = _power(divisor)
    assert index.strides is not None
    run = min(index.run, power) if any(index.strides.get(axis) for axis in fastest) else index.run
    if is_remainder:
        strides = {axis: stride if stride < divisor else 0.0 for axis, stride in index.strides.items()}
        return index._replace(strides=strides, run=run, multiple=min(index.multiple, power))
    return index._replace(strides=dict.fromkeys(index.strides, 0.0), run=run, multiple=1)


def _power(number: int) -> int:
    """The largest power of two that divides a number, at most LONG."""
    return min(number & -number, LONG) if number else LONG


def _loops(kernel: Kernel) -> bool:
    return any(isinstance(statement, ast.For) for statement in kernel.body) and not kernel.rows_per_program
