"""Sets the experts' products of real steps beside forecasts: of balanced loads, by `--imbalance`, by their own loads.

    python -m studies.experts.table [--out reports/nvidia-h200/experts/README.md]

Reads the rows of `studies.experts.measure`. Needs no GPU. No law is fitted to these rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.library.profiles import SOURCE, find_profile
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.grouped import Groups, uneven_groups
from studies.command import parser_of
from studies.experts.measure import CASES, FOLDER, Case, Measured, load
from studies.markdown import table
from studies.suites.gemms import layer

WAYS = ("balanced", "by the imbalance", "by each layer's loads")


@dataclass(frozen=True)
class Compared:
    """The experts' products of a step. `imbalance`: tokens of the fullest expert over the mean, and `idle`: experts
    without a token, both as means of layers. `forecast`: (seconds, kernels) in each of WAYS."""

    case: Case
    imbalance: float
    idle: float
    seconds: float
    kernels: int
    forecast: tuple[tuple[float, int], ...]

    def error(self, way: int) -> float:
        return self.forecast[way][0] / self.seconds - 1

    def kernels_error(self, way: int) -> float:
        return self.forecast[way][1] / self.kernels - 1


def compared(rows: Iterable[Measured]) -> list[Compared]:
    """Raises ValueError where the products of a step are not those of its loads."""
    cases = {(case.name, case.batch, case.seq): case for case in CASES}
    found = []
    for row in rows:
        case = cases[row.name, row.batch, row.seq]
        experts, layers = len(row.loads[0]), len(row.loads)
        each = sum(row.loads[0]) / experts
        made = Counter((one.m, one.n, one.k) for one in row.products)
        own = Counter((one.m, one.n, one.k) for loads in row.loads for one in products_of(case, loads))
        if made != own:
            raise ValueError(f"{row.name} {row.batch} x {row.seq}: {made - own} beyond the loads, {own - made} missing")
        imbalance = fmean(max(loads) / each for loads in row.loads)
        fallen = [one.rows for one in uneven_groups(Groups(round(each), experts), imbalance) for _ in range(one.groups)]
        ways = ([[each] * experts] * layers, [fallen] * layers, row.loads)
        found.append(Compared(
            case, imbalance, fmean(loads.count(0) for loads in row.loads), sum(one.seconds for one in row.products),
            sum(one.kernels for one in row.products), tuple(forecast_of(case, loads) for loads in ways),
        ))  # fmt: skip
    return found


def products_of(case: Case, loads: Iterable[float]) -> list[Gemm]:
    """The products of a layer's experts: gate and up in one, and down; of each the output, the gradient of the input
    and that of the weight. Of an expert without a token nothing runs."""
    hidden, inner = case.config["hidden_size"], case.config["moe_intermediate_size"]
    return [
        replace(layer(layout, rows, into, out), dtype="fp32")
        for rows in map(round, loads)
        if rows
        for out, into in ((2 * inner, hidden), (hidden, inner))
        for layout in ("nt", "nn", "tn")
    ]


def forecast_of(case: Case, layers: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Seconds and kernels of the products, one by one, by the shipped profile."""
    count = Counter(product for loads in layers for product in products_of(case, loads))
    found = find_profile(SOURCE).estimate([(describe(product), "torch", "cold") for product in count])
    pairs = list(zip(found, count.values(), strict=True))
    return sum(one.seconds * number for one, number in pairs), sum(one.launches * number for one, number in pairs)


def page(found: Sequence[Compared], gpu: str) -> str:
    rows = []
    for one in found:
        errors = [f"{one.error(way):+.1%}" for way in range(3)] + [
            f"{one.kernels_error(way):+.0%}" for way in (0, 1, 2)
        ]
        rows.append([
            f"{one.case.name} {one.case.batch} x {one.case.seq}" + ("*" if one.case.seen else ""),
            f"{one.idle:.1f} of {one.case.config['num_experts']}", f"{one.imbalance:.2f}", f"{one.seconds * 1e3:.2f}",
            f"{one.kernels:,}", *errors,
        ])  # fmt: skip
    columns = ["step", "without a token", "fullest / mean", "products, ms", "kernels",
               *WAYS, *(f"kernels, {way}" for way in WAYS)]  # fmt: skip
    return "\n".join([_WORDS.format(gpu=gpu), table(columns, rows), "", *summary(found)]) + "\n"


_WORDS = """# The products of experts in real steps, by the loads that they had

`python -m studies.experts.table`, of the rows of `python -m studies.experts.measure` on one {gpu}: training
steps of mixtures of experts, fp32 weights under autocast in bf16, so that experts are multiplied one by one in fp32.
Routers are untrained and have no auxiliary loss; after forty steps of the same tokens many experts get none. Forecasts
of the products by the shipped profile, to which none of these rows was fitted: of balanced loads, as by default; of
loads that fall from the fullest by one ratio, as `--imbalance` assumes, with the step's own fullest over the mean; and
of each layer's own loads. Steps with a star were looked at when that shape of loads was chosen, in another run.
"""


def summary(found: Sequence[Compared]) -> list[str]:
    lines = []
    for title, some in (
        ("steps that nothing was chosen by", [one for one in found if not one.case.seen]),
        ("all steps", list(found)),
    ):
        told = []
        for way, name in enumerate(WAYS):
            errors = [abs(one.error(way)) for one in some]
            kernels = [abs(one.kernels_error(way)) for one in some]
            told.append(
                f"{name} {median(errors):.1%} / {max(errors):.1%} (kernels {median(kernels):.0%} / {max(kernels):.0%})"
            )
        lines.append(f"- {len(some)} {title}, error of their products, median / worst: {'; '.join(told)}")
    return lines


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = load(FOLDER)
    text = page(compared(rows), rows[0].gpu)
    if out:
        out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
