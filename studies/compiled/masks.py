"""Fits what masks and dropout add to attention to compiled steps, and judges it by other steps.

    python -m studies.compiled.masks reports/nvidia-h200/compiled-steps [--out masks.md] [--write]

Fitted: the calls with masks of Qwen3-0.6B (`FIT`: 8 x 1,024 and 4 x 256), and for dropout those of GPT-2. Held out:
Llama (64 columns a head, 2,048 keys), Qwen3 of 1.7B and 4B, Qwen3-MoE (512 keys). A call without mask takes what the
profile says, as warm as the step leaves its operands. `--write` replaces the shipped parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from flopcast.kernels.shapes import Attention
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.laws.attention_mask import Direction, MaskLaw, other_seconds, seconds
from flopcast.roofline.gpu.laws.generated import Rates
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.library.attention_mask import FILE, Fitted, plain
from flopcast.roofline.gpu.library.generated import rates_of_profile
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import L2_SHARE, backend_of, describe_ops, l2_shares
from flopcast.roofline.stream.compiled.launches import Kind
from flopcast.roofline.stream.compiled.profiled import TimedLaunch
from flopcast.roofline.stream.compiled.to_stream import to_stream
from studies.compiled.record import CASES, Case
from studies.compiled.recorded import eager_stream, graphs_of, joined, run_of
from studies.fitting import fit_parser, hand_over
from studies.markdown import table

GPU = "nvidia-h200"
FIT = ("qwen3-0.6b-8x1024", "qwen3-0.6b-4x256", "qwen3-0.6b-l2", "qwen3-0.6b-l2-4x256", "qwen3-0.6b-l3")
DROPOUT = ("gpt2-l2",)
OTHER_KERNELS = ("compute_dot_do_o", "convert_dq")  # of the backward, in their names
ATTENTION = (Kind.ATTENTION, Kind.ATTENTION_BACKWARD)


@dataclass(frozen=True)
class Row:
    """The calls of one shape in a step: median seconds, of the backward's other kernels too, and those of the same call
    without mask and dropout."""

    case: str
    shape: Attention
    measured: float
    other: float
    plain: float


def main() -> None:
    parser = fit_parser(__spec__, __doc__, "folder of CASE.code.gz and CASE.json.gz", FILE)
    options = parser.parse_args()
    profile = find_profile(GPU)
    rates = rates_of_profile(profile)
    rows = [row for case in CASES for row in rows_of(options.folder, case, profile)]
    law = fitted_law(rows, rates)
    held = [row for row in rows if row.case not in (*FIT, *DROPOUT)]
    errors = [abs(math.log(seconds(row.shape, row.plain, rates, law) / row.measured)) for row in held]
    source = f"masks: {', '.join(FIT)}; dropout: {', '.join(DROPOUT)}; deviation by the other compiled steps"
    known = Fitted(gpu=GPU, law=law, sigma=float(np.quantile(errors, 0.9)) / Z_90, source=source)
    shown = report(rows, known, rates)
    hand_over(shown, known, FILE, options)


def rows_of(folder: Path, case: Case, profile: Profile) -> list[Row]:
    calls: dict[tuple[Kind, tuple[int, ...]], list[TimedLaunch]] = defaultdict(list)
    for one in joined(folder, case.name).launches:
        if one.launch.kind in ATTENTION:
            query = one.launch.operands[one.launch.kind is Kind.ATTENTION_BACKWARD]
            calls[one.launch.kind, query.shape].append(one)
    if not calls:
        return []
    stream, run = to_stream(graphs_of(folder, case.name), eager_stream(case)), run_of(case)
    works = describe_ops(stream)
    hot_shares = l2_shares(stream, [work is not None for work in works], L2_SHARE * profile.l2_bytes)
    shares: dict[Attention, list[float]] = defaultdict(list)
    for work, share in zip(works, hot_shares, strict=True):
        if work is not None and isinstance(work.shape, Attention):
            shares[work.shape].append(share)
    rows = []
    for work in {work.shape: work for work in works if work is not None}.values():
        shape = work.shape
        if not isinstance(shape, Attention):
            continue
        kind = Kind.ATTENTION if shape.direction == "fwd" else Kind.ATTENTION_BACKWARD
        timed = calls[kind, (shape.batch, shape.heads, shape.seq, shape.head_dim)]
        without, backend = plain(work), backend_of(work, run, profile.default_attention)
        cold, hot = (one.seconds for one in profile.estimate([(without, backend, cache) for cache in ("cold", "hot")]))
        rows.append(
            Row(
                case.name, shape, median(one.seconds for one in timed),
                median(_other(one) for one in timed),
                cold - sum(shares[shape]) / len(shares[shape]) * max(cold - hot, 0.0),
            )
        )  # fmt: skip
    return rows


def _other(call: TimedLaunch) -> float:
    return sum(seconds for name, seconds in call.kernels if any(other in name for other in OTHER_KERNELS))


def fitted_law(rows: Sequence[Row], rates: Rates) -> MaskLaw:
    """The parameters of least log residuals, those of dropout after those of masks. Calls of one shape are as much as
    one, in however many steps."""
    moved = [
        other_seconds(row.shape, rates, 1.0) / row.other
        for row in rows
        if row.case in FIT and row.shape.direction == "bwd"
    ]
    law = MaskLaw(fwd=Direction(1.0, 1e-5, 0.0), bwd=Direction(1.0, 1e-5, 0.0), moved=max(moved))
    for direction in ("fwd", "bwd"):
        mine = [row for row in rows if row.shape.direction == direction]
        for cases, names in ((FIT, ("slower", "start")), (DROPOUT, ("random",))):
            law = _fitted([row for row in mine if row.case in cases], law, direction, names, rates)
    return law


_BEGIN = {"slower": 1.0, "start": 5e-6, "random": 0.3}


def _fitted(rows: Sequence[Row], law: MaskLaw, direction: str, names: Sequence[str], rates: Rates) -> MaskLaw:
    alike: dict[Attention, int] = defaultdict(int)
    for row in rows:
        alike[row.shape] += 1
    weights = np.array([alike[row.shape] ** -0.5 for row in rows])

    def law_of(logs: Array) -> MaskLaw:
        values = {name: float(_BEGIN[name] * math.exp(log)) for name, log in zip(names, logs, strict=True)}
        fwd, bwd = (
            one._replace(**values) if name == direction else one for name, one in (("fwd", law.fwd), ("bwd", law.bwd))
        )
        return MaskLaw(fwd=fwd, bwd=bwd, moved=law.moved)

    def residuals(logs: Array, /) -> Array:
        trial = law_of(logs)
        found = np.log([seconds(row.shape, row.plain, rates, trial) / row.measured for row in rows])
        return np.asarray(weights * found)

    return law_of(least_squares(residuals, np.zeros(len(names))).x)


def report(rows: Sequence[Row], known: Fitted, rates: Rates) -> str:
    head = ["step", "call", "heads x keys", "without, us", "measured, us", "forecast, us", "error"]
    told = (
        "Attention calls of compiled steps, medians of a step's. `without`: the same call without mask and dropout by "
        "the profile, as warm as the step leaves its operands. `python -m studies.compiled.masks`."
    )
    parts = ["# Attention with masks", "", told]
    for name, cases in (("Fitted", FIT), ("Fitted, dropout", DROPOUT), ("Held out", ())):
        some = [row for row in rows if (row.case in cases if cases else row.case not in (*FIT, *DROPOUT))]
        parts += ["", f"## {name}", "", table(head, [_line(row, known, rates) for row in some])]
    values = [
        [f"{direction} {name}", f"{value:.3g}"]
        for direction, one in (("forward", known.law.fwd), ("backward", known.law.bwd))
        for name, value in one._asdict().items()
    ]
    values += [["moved", f"{known.law.moved:.3g}"], ["deviation", f"{known.sigma:.3g}"]]
    return "\n".join([*parts, "", "## Parameters", "", table(["parameter", "value"], values)])


def _line(row: Row, known: Fitted, rates: Rates) -> list[str]:
    found, shape = seconds(row.shape, row.plain, rates, known.law), row.shape
    sizes = f"{shape.batch} x {shape.heads} x {shape.seq}, {shape.head_dim} columns"
    shown = [f"{value * 1e6:.1f}" for value in (row.plain, row.measured, found)]
    call = "forward" if shape.direction == "fwd" else "backward"
    return [row.case, call, sizes, *shown, f"{found / row.measured - 1.0:+.1%}"]


if __name__ == "__main__":
    main()
