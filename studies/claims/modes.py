"""Asks again who gives the most FLOPs per dollar where steps are compiled: the ladder's widths, mode by mode.

    python -m studies.claims.modes --widths 256,1024 --modes eager,compile-graphs --out reports/economics/modes.md

Each width and mode is compiled once per kind of GPU, half a minute to a minute each, and kept in the user's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flopcast.roofline.base.units import short_name, three_digits
from flopcast.roofline.dollars.curves import OWN, cost_curves
from flopcast.roofline.dollars.points import CostCurve
from flopcast.roofline.gpu.library.profiles import find_profiles
from flopcast.roofline.stream.model.models import ladder
from flopcast.roofline.stream.model.run import MODES, Run
from studies.claims.claims import PriceSet
from studies.claims.report import GPUS, price_sets
from studies.command import parser_of
from studies.markdown import table

HEAD = """# Who leads where steps are compiled

`{command}`

Forecasts, not measurements: no compiled step has been judged on an L4, an A100 or an H100, whose generated
kernels are costed by the H200's law, nor on an H200 one that nothing was fitted to
(`reports/nvidia-h200/compiled-steps/timeline.md`). The article's ladder at 4 x 256 tokens, AdamW as torch runs it by
default, each GPU in a host of its own. PetaFLOPs (1e15) per dollar with their 90% intervals; in bold the middle
estimates' leader at each size, with * where it is not separable from the next.
"""


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--widths", default="256,1024")
    parser.add_argument("--modes", default="eager,compile-graphs", help=f"of {', '.join(MODES)}")
    parser.add_argument("--out", type=Path, default=Path("reports/economics/modes.md"))
    given = parser.parse_args()
    widths = tuple(int(width) for width in given.widths.split(","))
    sets = [prices for prices in price_sets() if set(GPUS) <= set(prices.prices)]
    profiles = find_profiles(GPUS)
    parts = [HEAD.format(command=f"python -m studies.claims.modes --widths {given.widths} --modes {given.modes}")]
    for mode in given.modes.split(","):
        run = replace(Run(), mode=mode)
        curves = cost_curves(profiles, ladder(widths), run, dict(sets[0].prices), hosts=OWN)
        parts += page_of(mode, curves, sets)
    given.out.write_text("\n".join(parts), encoding="utf-8")
    print(f"wrote {given.out}")


def page_of(mode: str, curves: Sequence[CostCurve], sets: Sequence[PriceSet]) -> Iterator[str]:
    """A table of a mode for each list of prices."""
    for prices in sets:
        yield f"## {mode}, prices {prices.name}\n"
        priced = [curve.at_price(prices.prices[curve.gpu]) for curve in curves]
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
