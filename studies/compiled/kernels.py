"""Judges the laws that a profile has today by the kernels of recorded compiled steps.

    python -m studies.compiled.kernels reports/nvidia-h200/compiled-steps --gpu H200 [--out kernels.md]

A profile knows ATen's own kernels, not those that inductor generates. Each generated kernel is therefore timed as the
call that stands nearest to it, with as many bytes (`stand_in`): an addition, a layer norm, a sum, a log-softmax, an
embedding's backward. Products, attention, convolutions and other library calls are timed as what they are. All are
taken with cold operands. Nothing here is fitted to the recorded kernels: the table says how far today's laws are off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flopcast.kernels.shapes import Attention, Call, Gemm, Operand, Shape
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.compiled.launches import Kind, Launch
from flopcast.roofline.stream.compiled.profiled import TimedLaunch
from flopcast.roofline.stream.lowering.describe import describe, layout_of
from studies.command import parser_of
from studies.compiled.recorded import cases_of, joined
from studies.markdown import table

LONG_ROW = 16384  # elements of a row that only a vocabulary has: the loss
REDUCING = 0.25  # of what a kernel reads it writes less, if it only reduces


@dataclass(frozen=True)
class Judged:
    """A launch of a case: what it took, and what today's laws give; None where the table has no stand-in."""

    case: str
    launch: Launch
    measured: float
    predicted: float | None

    @property
    def error(self) -> float:
        assert self.predicted is not None
        return self.predicted / self.measured - 1.0


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("folder", type=Path, help="folder of CASE.code.gz and CASE.json.gz")
    parser.add_argument("--gpu", default="H200", help="profile")
    parser.add_argument("--out", type=Path, help="file for the tables")
    options = parser.parse_args()
    profile = find_profile(options.gpu)
    cases = cases_of(options.folder)
    judged = [row for case in cases for row in judge(case, joined(options.folder, case).launches, profile)]
    text = report(judged, profile.gpu)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def judge(case: str, launches: Sequence[TimedLaunch], profile: Profile) -> list[Judged]:
    works = [stand_in(timed.launch) for timed in launches]
    backends = [_backend(work, profile) for work in works]
    requests = [
        (describe(shape), backend, "cold")
        for (shape, _), backend in ((w, b) for w, b in zip(works, backends, strict=True) if w is not None)
    ]
    estimates = iter(profile.estimate(requests))
    rows = []
    for timed, work in zip(launches, works, strict=True):
        predicted = None if work is None else next(estimates).seconds * work[1]
        rows.append(Judged(case, timed.launch, timed.seconds, predicted))
    return rows


def _backend(work: tuple[Shape, float] | None, profile: Profile) -> str:
    return "sdpa-cudnn" if work is not None and isinstance(work[0], Attention) else "torch"


def stand_in(launch: Launch) -> tuple[Shape, float] | None:
    """The shape that a profile times in place of a launch, and by how much its time is to be multiplied."""
    match launch.kind:
        case Kind.PRODUCT:
            return _product(launch)
        case Kind.ATTENTION | Kind.ATTENTION_BACKWARD:
            return _attention(launch)
        case Kind.POINTWISE | Kind.COPY:
            return _scaled(_addition(launch.bytes), launch)
        case Kind.SCATTER:
            return _scaled(_embedding_backward(launch), launch)
        case Kind.FALLBACK if launch.name == "aten.sum":
            return Call("aten.sum.dim_IntList", launch.operands, launch.results, '[{"t":0},[0]]'), 1.0
        case Kind.PERSISTENT | Kind.LOOPED | Kind.SPLIT | Kind.MIXED | Kind.COOPERATIVE:
            return _reduction(launch)
    return None


def _product(launch: Launch) -> tuple[Shape, float] | None:
    a, b = launch.operands[-2:]
    if launch.name not in ("mm", "addmm", "bmm", "baddbmm") or min(a.shape[-1], b.shape[-1]) == 0:
        return None
    (m, k), n = a.shape[-2:], b.shape[-1]
    gemm = Gemm(m=m, n=n, k=k, dtype=a.dtype, layout=layout_of(a, b), batch=math.prod(a.shape[:-2]))
    return gemm, 1.0


def _attention(launch: Launch) -> tuple[Shape, float] | None:
    """With a mask all of the square is computed, whatever the mask leaves of it. What reading the mask costs no profile
    knows: eager steps have none, where a compiled transformers model makes one."""
    is_backward = launch.kind is Kind.ATTENTION_BACKWARD
    query, key = launch.operands[is_backward : is_backward + 2]
    batch, heads, seq, head_dim = query.shape
    direction = "bwd" if is_backward else "fwd"
    return Attention(
        batch=batch, heads=heads, kv_heads=key.shape[1], seq=seq, head_dim=head_dim, causal=False, direction=direction,
        dtype=query.dtype,
    ), 1.0  # fmt: skip


def _reduction(launch: Launch) -> tuple[Shape, float]:
    sizes = dict(launch.numels)
    rows = math.prod(size for name, size in sizes.items() if not name.startswith("r"))
    columns = math.prod(size for name, size in sizes.items() if name.startswith("r"))
    if columns >= LONG_ROW:
        return _scaled(_log_softmax(rows, columns), launch)
    if launch.bytes_written < REDUCING * launch.bytes_read and launch.kind is not Kind.MIXED:
        return _scaled(_sum(rows, columns, along_rows=launch.hint != "OUTER"), launch)
    return _scaled(_layer_norm(rows, columns), launch)


def _scaled(call: Call, launch: Launch) -> tuple[Shape, float]:
    return call, launch.bytes / max(call.bytes, 1)


def _tensor(*shape: int, dtype: str = "fp32") -> Operand:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return Operand(shape, tuple(strides), dtype)


def _addition(moved: int) -> Call:
    one = _tensor(max(1, moved // 12))
    return Call("aten.add.Tensor", (one, one), (one,), '[{"t":0},{"t":1}]')


def _sum(rows: int, columns: int, along_rows: bool) -> Call:
    source = _tensor(rows, columns) if along_rows else _tensor(columns, rows)
    dimension = 1 if along_rows else 0
    return Call("aten.sum.dim_IntList", (source,), (_tensor(rows),), f'[{{"t":0}},[{dimension}]]')


def _layer_norm(rows: int, columns: int) -> Call:
    x, weight, row = _tensor(rows, columns), _tensor(columns), _tensor(rows, 1)
    args = f'[{{"t":0}},[{columns}],{{"t":1}},{{"t":2}},1e-05]'
    return Call("aten.native_layer_norm.default", (x, weight, weight), (x, row, row), args)


def _log_softmax(rows: int, columns: int) -> Call:
    x = _tensor(rows, columns)
    return Call("aten._log_softmax.default", (x,), (x,), '[{"t":0},1,false]')


def _embedding_backward(launch: Launch) -> Call:
    """Of as many rows of 1,024 as there are bytes."""
    rows = max(1, launch.bytes // (3 * 4096))
    gradient, ids = _tensor(rows, 1024), _tensor(rows, dtype="int64")
    args = f'[{{"t":0}},{{"t":1}},{rows},-1,false]'
    return Call("aten.embedding_dense_backward.default", (gradient, ids), (_tensor(rows, 1024),), args)


# --- tables


def report(judged: Sequence[Judged], gpu: str) -> str:
    kinds = [kind for kind in Kind if any(row.launch.kind is kind for row in judged)]
    by_kind = [_line(kind.value, [row for row in judged if row.launch.kind is kind]) for kind in kinds]
    cases = dict.fromkeys(row.case for row in judged)
    by_case = [_line(case, [row for row in judged if row.case == case]) for case in cases]
    head = ["launches", "measured ms", "predicted ms", "sum", "launch, median", "90%", "worst", "no stand-in"]
    told = (
        f"{len(judged)} launches of {len(cases)} compiled steps by the profile {gpu}, operands cold. Generated kernels "
        "by the eager call that stands nearest, as many bytes of it; products, attention and other calls as what they "
        "are, but attention without its mask. Errors of single launches are absolute values. "
        "`python -m studies.compiled.kernels`."
    )
    return "\n".join(
        ["# Compiled kernels by the laws of eager ones", "", told, "", table(["kind", *head], by_kind), "",
         table(["case", *head], by_case)]
    )  # fmt: skip


def _line(name: str, rows: Iterable[Judged]) -> list[str]:
    known = [row for row in rows if row.predicted is not None]
    without = sum(1 for row in rows if row.predicted is None)
    measured, predicted = sum(row.measured for row in known), sum(row.predicted or 0.0 for row in known)
    if not known:
        return [name, "0", "", "", "", "", "", "", str(without)]
    errors = sorted(abs(row.error) for row in known)
    shown = [median(errors), errors[int(0.9 * (len(errors) - 1))], errors[-1]]
    return [
        name, str(len(known)), f"{measured * 1e3:.2f}", f"{predicted * 1e3:.2f}", f"{predicted / measured - 1:+.1%}",
        *(f"{error:.0%}" for error in shown), str(without),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
