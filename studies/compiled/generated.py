"""Fits the law of generated kernels to compiled steps, and judges it by other steps.

    python -m studies.compiled.generated reports/nvidia-h200/compiled-steps [--out generated.md] [--write]

Fitted: six small steps (`FIT`), of transformers, an MLP and a convolutional network, and kernels timed by themselves
that read and write in different shares (`traffic.py`), all but those of middle size. Held out: these, and all other
steps that the folder has, by whose kernels nothing of the law was chosen. Those of other models (`UNLIKE`) say how far
the law may be off: its deviations are theirs, and the whole Qwen3-0.6B tells whether these are right. The times of
steps are those of kernels within them: operands lie in the L2 or not as the step leaves them. `--write` replaces the
shipped parameters.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from scipy.optimize import least_squares

from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.laws.generated import GeneratedLaw, Rates, seconds
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.library.generated import FILE, Fitted, Spread, rates_of
from flopcast.roofline.stream.compiled.generated_kernel import GeneratedKernel, kernel_of_launch
from studies.compiled.recorded import cases_of, joined
from studies.fitting import fit_parser, hand_over
from studies.markdown import table

GPU = "nvidia-h200"
FIT = ("mlp", "qwen3-0.6b-l2", "qwen3-0.6b-l2-4x256", "qwen3-0.6b-l3", "gpt2-l2", "resnet50")
UNLIKE = ("vit-b16", "llama-3.2-1b-l2", "qwen3-1.7b-l2", "qwen3-4b-l2", "qwen3-moe-l2")
# Where the search begins: what a datasheet and a profiler let one expect.
START = GeneratedLaw(
    floor=0.7e-6, load=0.4e-6, ramp=1e-6, ramp_bytes=5e6, step=0.15e-6, chain=1.4e-6, reduction=0.5e-6, turn=0.2e-6,
    read=0.9, written=0.95, turned=0.2, cached=25.0, resident=0.9, arithmetic=1 / 128, trigonometric=0.2, access=0.06,
    request=0.04, gather=0.15, program=1.0, tail=1.0, overlap=3.0, overlap_pointwise=6.0,
)  # fmt: skip
FARTHEST = 4.0  # from there, in log
# A residual beyond which a kernel counts less: Triton's choice among configurations alone moves some by a fifth.
ROBUST = 0.1
SHARE = 5.0  # how much a kernel's share of its step's time adds to its weight
# The same of those that were timed by themselves, seven times each: there are thirty of them, and no step tells how
# memory turns from reading to writing, or how fast programs begin.
SHARE_ALONE = 75.0
TRAFFIC = "traffic"  # their name, and the folder's beside that of the steps
HELD_BYTES = (150e6, 500e6)  # of these none is fitted: the size in the middle
EDGES = (5e-6, 15e-6, 50e-6, 150e-6)  # seconds, between which kernels have a deviation of their own


@dataclass(frozen=True)
class Row:
    """A launch of a generated kernel as a step ran it. `name`: the kernel's."""

    case: str
    name: str
    kernel: GeneratedKernel
    measured: float


def main() -> None:
    parser = fit_parser(__spec__, __doc__, "folder of CASE.code.gz and CASE.json.gz", FILE)
    options = parser.parse_args()
    cases = cases_of(options.folder)
    if missing := {*FIT, *UNLIKE} - set(cases):
        parser.error(f"{options.folder} has no {', '.join(sorted(missing))}, which the law is made of")
    rows = [row for case in cases for row in rows_of(options.folder, case)] + alone(options.folder.parent / TRAFFIC)
    rates = rates_of(find_spec(GPU))
    fit = [row for row in rows if is_fitted(row)]
    law = fitted_law(fit, rates)
    spreads = deviations([row for row in rows if row.case in UNLIKE], law, rates)
    source = f"compiled steps {', '.join(FIT)}; kernels alone; deviations by {', '.join(UNLIKE)}"
    known = Fitted(gpu=GPU, law=law, spreads=spreads, source=source)
    shown = report(rows, known, rates)
    hand_over(shown, known, FILE, options)


def rows_of(folder: Path, case: str) -> list[Row]:
    """The generated kernels of a step."""
    timed = (one for one in joined(folder, case).launches if one.launch.is_generated)
    return [Row(case, one.launch.name, kernel_of_launch(one.launch), one.seconds) for one in timed]


def alone(folder: Path) -> list[Row]:
    """The kernels that were timed by themselves, those of middle size as a case that is held out."""
    least, most = HELD_BYTES
    return [
        replace(row, case=f"{TRAFFIC}, held out") if least < row.kernel.bytes < most else row
        for row in rows_of(folder, TRAFFIC)
    ]


def is_fitted(row: Row) -> bool:
    return row.case in (*FIT, TRAFFIC)


def fitted_law(rows: Sequence[Row], rates: Rates) -> GeneratedLaw:
    """The parameters of least log residuals. A kernel that a step launches often counts as one, and more by its share
    of the step's time."""
    launches = Counter((row.case, row.name) for row in rows)
    totals: dict[str, float] = defaultdict(float)
    for row in rows:
        totals[row.case] += row.measured
    shares = [(SHARE_ALONE if row.case == TRAFFIC else SHARE) * row.measured / totals[row.case] for row in rows]
    weights = np.array(
        [math.sqrt(1.0 / launches[row.case, row.name] + share) for row, share in zip(rows, shares, strict=True)]
    )
    measured = np.log([row.measured for row in rows])
    names = [field.name for field in fields(GeneratedLaw)]
    begin = np.log([getattr(START, name) for name in names])

    def law_of(logs: Array) -> GeneratedLaw:
        return GeneratedLaw(**dict(zip(names, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: Array, /) -> Array:
        law = law_of(logs)
        return np.asarray(weights * (np.log([seconds(row.kernel, rates, law) for row in rows]) - measured))

    bounds = (begin - FARTHEST, begin + FARTHEST)
    found = least_squares(residuals, begin, bounds=bounds, loss="soft_l1", f_scale=ROBUST, max_nfev=200)
    return law_of(found.x)


def deviations(rows: Sequence[Row], law: GeneratedLaw, rates: Rates) -> list[Spread]:
    """The deviation of log seconds, by how long kernels take: that by which nine in ten different ones lie in the
    interval of 90%, so that a few that Triton configured badly do not widen all."""
    different = {(row.case, row.name): row for row in rows}.values()
    by_duration: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in different:
        told = seconds(row.kernel, rates, law)
        by_duration[bisect(EDGES, told)].append((math.log(told), abs(math.log(told / row.measured))))
    return [
        Spread(math.exp(fmean(log for log, _ in found)), float(np.quantile([off for _, off in found], 0.9)) / Z_90)
        for _, found in sorted(by_duration.items())
    ]


# --- tables


def report(rows: Sequence[Row], known: Fitted, rates: Rates) -> str:
    fit, held = ([row for row in rows if is_fitted(row) is wanted] for wanted in (True, False))
    head = ["", "launches", "measured ms", "sum", "launch, median", "90%", "in the interval"]
    told = (
        f"{len(fit)} kernels fitted, of {len(FIT)} steps and of some timed by themselves; {len(held)} held out. "
        "Seconds are those of kernels within steps, with the L2 as a step leaves it; intervals are those of 90%, "
        f"by the deviations of {', '.join(UNLIKE)}. `python -m studies.compiled.generated`."
    )
    parts = ["# The law of generated kernels", "", told]
    for name, some in (("Fitted", fit), ("Held out", held)):
        by_case = _lines(some, known, rates, lambda row: row.case)
        by_kind = _lines(some, known, rates, lambda row: row.kernel.kind.value)
        parts += ["", f"## {name}", "", table(head, by_case), "", table(head, by_kind)]
    values = [[name, f"{value:.3g}"] for name, value in asdict(known.law).items()]
    spreads = [[f"{one.seconds * 1e6:.3g}", f"{one.sigma:.1%}"] for one in known.spreads]
    return "\n".join([
        *parts, "", "## Parameters", "", table(["parameter", "value"], values), "",
        "## Deviation of a kernel by how long it takes", "", table(["us", "deviation"], spreads),
    ])  # fmt: skip


def _lines(rows: Sequence[Row], known: Fitted, rates: Rates, key: Callable[[Row], str]) -> list[list[str]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return [_line(name, some, known, rates) for name, some in [*sorted(groups.items()), ("all", list(rows))]]


def _line(name: str, rows: Sequence[Row], known: Fitted, rates: Rates) -> list[str]:
    predicted = [seconds(row.kernel, rates, known.law) for row in rows]
    measured = [row.measured for row in rows]
    errors = [abs(found / real - 1.0) for found, real in zip(predicted, measured, strict=True)]
    inside = [
        abs(math.log(found / row.measured)) <= Z_90 * known.sigma(found)
        for found, row in zip(predicted, rows, strict=True)
    ]
    total = sum(predicted) / sum(measured) - 1.0
    shown = [f"{total:+.1%}", f"{median(errors):.1%}", f"{float(np.quantile(errors, 0.9)):.1%}"]
    return [name, str(len(rows)), f"{sum(measured) * 1e3:.2f}", *shown, f"{sum(inside) / len(inside):.0%}"]


if __name__ == "__main__":
    main()
