"""Asks again who gives the most FLOPs per dollar where steps are compiled: the article's ladder, mode by mode.

    python -m studies.claims.modes --out reports/economics

writes modes.md, modes.csv and modes.png there. Each width is compiled once per kind of GPU (48 in all, ten seconds of
processor time each) and kept in the user's cache: from there a remake takes a minute or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flopcast.progress import progress
from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.base.units import count, short_name, three_digits
from flopcast.roofline.dollars.crossovers import best_gpu
from flopcast.roofline.dollars.modes import ByMode, curves_by_mode, leader_rows
from flopcast.roofline.dollars.points import CostCurve
from flopcast.roofline.gpu.library.profiles import find_profiles
from flopcast.roofline.stream.model.models import ladder
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.figures.file import save
from flopcast.roofline.views.figures.modes import modes_figure
from studies.claims.claims import PriceSet, test_claims
from studies.claims.report import GPUS, LAWS, WIDTHS, price_sets
from studies.command import parser_of
from studies.markdown import table

HEAD = """# Who leads where steps are compiled

`{command}`

Forecasts, not measurements: no compiled step has been measured on an L4, an A100 or an H100, whose generated kernels
are costed by the H200's law (`docs/compiled-steps.md` says what judged it). The article's ladder, widths {widths} at
4 x 256 tokens, AdamW as torch runs it by default, each GPU in a host of its own, 90% intervals.

![FLOPs per dollar by mode](modes.png)

## Who leads

Most FLOPs per dollar by the middle estimates; * not separable from the next at 90%.
"""


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--out", type=Path, default=Path("reports/economics"))
    given = parser.parse_args()
    widths = tuple(int(width) for width in given.widths.split(","))
    sets = [prices for prices in price_sets() if set(GPUS) <= set(prices.prices)]
    with progress("forecasting the ladder", in_logs=True) as shown:
        by_mode = curves_by_mode(
            find_profiles(GPUS), ladder(widths), Run(), dict(sets[0].prices), progress=shown.update
        )
    whole = widths == WIDTHS
    command = "python -m studies.claims.modes" + ("" if whole else f" --widths {given.widths}")
    (given.out / "modes.md").write_text(page(command, widths, by_mode, sets), encoding="utf-8")
    rows = rows_of(by_mode, sets)
    write_rows(given.out / "modes.csv", list(rows[0]), rows)
    figure = modes_figure(by_mode)
    if figure is not None:
        save(figure, given.out / "modes.png")
    print(f"wrote {given.out}/modes.md, modes.csv, modes.png")


def at_prices(curves: Sequence[CostCurve], prices: PriceSet) -> list[CostCurve]:
    return [curve.at_price(prices.prices[curve.gpu]) for curve in curves]


def rows_of(by_mode: ByMode, sets: Sequence[PriceSet]) -> list[dict[str, Any]]:
    """Who leads, under every price list."""
    return [
        {"prices": prices.name, **row}
        for prices in sets
        for row in leader_rows({mode: at_prices(curves, prices) for mode, curves in by_mode.items()})
    ]


def page(command: str, widths: Sequence[int], by_mode: ByMode, sets: Sequence[PriceSet]) -> str:
    sizes = sorted({p.step.n_params for curves in by_mode.values() for c in curves for p in c.fitting})
    lines = [HEAD.format(command=command, widths=", ".join(map(str, widths)))]
    for prices in sets:
        lead = [[mode, *_leads(at_prices(curves, prices), sizes)] for mode, curves in by_mode.items()]
        lines += [f"Prices {prices.name} ({prices.label}):\n", table(["", *map(count, sizes)], lead) + "\n"]
    lines += ["## The article's claims, by mode\n", "In brackets: models at which the middle estimates are for it.\n"]
    lines.append(table(["claim", "mode", *(prices.name for prices in sets)], list(_claims(by_mode, sets))) + "\n")
    for mode, curves in by_mode.items():
        lines += tables_of(mode, curves, sets[:1])
    return "\n".join(lines)


def _leads(curves: Sequence[CostCurve], sizes: Sequence[float]) -> Iterator[str]:
    for size in sizes:
        best = best_gpu(curves, float(size))
        yield "-" if best is None else short_name(best.gpu).split("-")[0] + ("" if best.separable else " *")


def _claims(by_mode: ByMode, sets: Sequence[PriceSet]) -> Iterator[list[str]]:
    verdicts: dict[tuple[str, str], list[str]] = {}
    for prices in sets:
        for mode, curves in by_mode.items():
            found: Sequence[Mapping[str, object]] = test_claims(curves, {}, prices, law=LAWS[0], hosts="own")
            for row in found:
                said = f"{row['verdict']} ({row['middle_for']} of {row['models']})"
                verdicts.setdefault((str(row["claim"]), mode), []).append(said)
    for claim in dict.fromkeys(claim for claim, _ in verdicts):
        for mode in by_mode:
            yield [claim, mode, *verdicts[claim, mode]]


def tables_of(mode: str, curves: Sequence[CostCurve], sets: Sequence[PriceSet]) -> Iterator[str]:
    """A table of a mode for each list of prices: PetaFLOPs (1e15) per dollar."""
    for prices in sets:
        yield f"## {mode}, prices {prices.name}\n"
        yield "PetaFLOPs (1e15) per dollar; in bold the leader, with * where it is not separable from the next.\n"
        priced = at_prices(curves, prices)
        yield table(["width", *(short_name(curve.gpu) for curve in priced)], list(_rows(priced))) + "\n"


def _rows(curves: Sequence[CostCurve]) -> Iterator[list[str]]:
    for width in sorted({point.step.width or 0 for curve in curves for point in curve.fitting}):
        at = {c.gpu: p.flops_per_usd for c in curves for p in c.fitting if p.step.width == width}
        first, *others = sorted(at, key=lambda gpu: -at[gpu].value)
        is_open = bool(others) and at[first].over(at[others[0]]).low <= 1.0
        cells = []
        for curve in curves:
            found = at.get(curve.gpu)
            if found is None:
                cells.append("-")
                continue
            value, low, high = (three_digits(number / 1e15) for number in (found.value, found.low, found.high))
            words = f"{value} ({low} to {high})"
            cells.append(f"**{words}{' *' if is_open else ''}**" if curve.gpu == first else words)
        yield [str(width), *cells]


if __name__ == "__main__":
    main()
