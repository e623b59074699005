"""Fits what dropout adds to attention to a compiled GPT-2.

    python -m studies.compiled.dropout reports/nvidia-h200/compiled-steps [--out dropout.md] [--write]

Of a call, forward and backward, what it takes beyond the same call without dropout by the profile. Nothing else in the
folder has dropout: GPT-2's other steps judge it (`DEVIATION`). `--write` replaces the shipped parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.laws.attention_dropout import DropoutLaw, dropout_seconds
from flopcast.roofline.gpu.laws.generated import Rates
from flopcast.roofline.gpu.library.attention_dropout import FILE, Fitted, plain
from flopcast.roofline.gpu.library.generated import rates_of_profile
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import L2_SHARE, backend_of, describe_ops, l2_shares
from flopcast.roofline.stream.compiled.launches import Kind
from flopcast.roofline.stream.compiled.to_stream import to_stream
from studies.compiled.record import CASES, Case
from studies.compiled.recorded import eager_stream, graphs_of, joined, run_of
from studies.fitting import fit_parser, hand_over
from studies.markdown import table

GPU = "nvidia-h200"
FIT = "gpt2-l2"
ATTENTION = {Kind.ATTENTION: "fwd", Kind.ATTENTION_BACKWARD: "bwd"}
DEVIATION = 0.05  # of eleven steps of GPT-2 in 16 bits ten have attention within 8.1%, which is 1.65 of it


@dataclass(frozen=True)
class Row:
    """The calls of one shape in a step: median seconds, and those of the same call without dropout."""

    case: str
    shape: Attention
    measured: float
    without: float


def main() -> None:
    parser = fit_parser(__spec__, __doc__, "folder of CASE.code.gz and CASE.json.gz", FILE)
    options = parser.parse_args()
    profile = find_profile(GPU)
    rates = rates_of_profile(profile)
    rows = rows_of(options.folder, next(case for case in CASES if case.name == FIT), profile)
    source = f"{FIT}; deviation by other steps of GPT-2"
    known = Fitted(gpu=GPU, law=fitted_law(rows, rates), sigma=DEVIATION, source=source)
    hand_over(report(rows, known.law, rates), known, FILE, options)


def rows_of(folder: Path, case: Case, profile: Profile) -> list[Row]:
    """Of each shape of attention in a recorded step, with and without dropout alike."""
    calls: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for one in joined(folder, case.name).launches:
        if one.launch.kind in ATTENTION:
            query = one.launch.operands[one.launch.kind is Kind.ATTENTION_BACKWARD]
            calls[ATTENTION[one.launch.kind], query.shape[0], query.shape[2]].append(one.seconds)
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
        backend = backend_of(work, run, profile.default_attention)
        asked = [(plain(work), backend, cache) for cache in ("cold", "hot")]
        cold, hot = (one.seconds for one in profile.estimate(asked))
        share = sum(shares[shape]) / len(shares[shape])
        measured = median(calls[shape.direction, shape.batch, shape.seq])
        rows.append(Row(case.name, shape, measured, cold - share * max(cold - hot, 0.0)))
    return rows


def fitted_law(rows: Sequence[Row], rates: Rates) -> DropoutLaw:
    """The clocks of a random number by which each direction's call takes as long as it did."""
    unit = DropoutLaw(fwd=1.0, bwd=1.0)
    clocks = {
        row.shape.direction: (row.measured - row.without) / dropout_seconds(row.shape, rates, unit) for row in rows
    }
    return replace(unit, **clocks)


def report(rows: Sequence[Row], law: DropoutLaw, rates: Rates) -> str:
    head = ["call", "heads x keys", "without, us", "measured, us", "clocks of a random number"]
    told = (
        "Attention calls of a compiled GPT-2, medians of the step's. `without`: the same call without dropout by the "
        "profile, as warm as the step leaves its operands. `python -m studies.compiled.dropout`."
    )
    lines = []
    for row in rows:
        shape = row.shape
        times = [f"{value * 1e6:.1f}" for value in (row.without, row.measured)]
        clocks = law.fwd if shape.direction == "fwd" else law.bwd
        sizes = f"{shape.batch} x {shape.heads} x {shape.seq}, {shape.head_dim} columns"
        lines.append(["forward" if shape.direction == "fwd" else "backward", sizes, *times, f"{clocks:.3f}"])
    return "\n".join(["# Attention with dropout", "", told, "", table(head, lines)])


if __name__ == "__main__":
    main()
