"""Products one by one inside real steps, forecast against measured: which ones a penalty's error comes from.

    python -m studies.widths.products --set 3 --steps reports/nvidia-h200/width-steps/3 [--out products.csv]

`studies/widths/steps.py` writes the kernels of a step's products in the order of the step; a stream has its products
in the same order, so they are told apart without names. A product's kind is its layout, which operand's rows do not
start at multiples of 16 bytes (a, b, both; "result": neither, only what is written), and the largest power of two that
its misaligned rows are a multiple of: odd, or 2 and 4. Steps that were profiled more than once (another run, or
aligned ones built twice) give means, and how far one profile of a product lies from another (`spread`).

These rows are of steps that nothing was fitted to, and are for judging and understanding alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from flopcast.errors import DataError
from flopcast.kernels.shapes import Gemm
from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.widths.penalties import power_of_two
from studies.command import parser_of
from studies.widths.check import rows_in
from studies.widths.sets import REPEAT, CheckSet

Row = dict[str, Any]

COLUMNS = (
    "step",
    "order",
    "m",
    "n",
    "k",
    "layout",
    "misaligned",
    "rows",
    "seconds",
    "spread",
    "forecast",
    "error",
    "kernel",
)
_LOADED = 8  # items of bf16 in the 16 bytes that a row has to start at


def kind_of(shape: Gemm) -> tuple[str, str]:
    """(misaligned: none, result, a, b or both; rows: aligned, "2, 4" or odd)."""
    a = power_of_two(shape.k if shape.layout[0] == "n" else shape.m)
    b = power_of_two(shape.k if shape.layout[1] == "t" else shape.n)
    least = min(a, b, power_of_two(shape.n))
    if least >= _LOADED:
        return "none", "aligned"
    which = "both" if max(a, b) < _LOADED else "a" if a < _LOADED else "b" if b < _LOADED else "result"
    return which, "odd" if least == 1 else "2, 4"


def joined(kernels: Iterable[Sequence[Any]]) -> list[tuple[str, float]]:
    """(kernel, seconds) of each product: the fill before a split product and the sum after it are part of it."""
    found: list[tuple[str, float]] = []
    waiting = 0.0  # of a fill
    for name, seconds in kernels:
        if name.startswith(("Memset", "Memcpy")):
            waiting += seconds
        elif "splitKreduce" in name and found:
            found[-1] = (found[-1][0], found[-1][1] + seconds)
        else:
            found.append((name, seconds + waiting))
            waiting = 0.0
    return found


def products(chosen: CheckSet, profile: Profile, rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row a product of every step of the set's neighbourhoods that was measured, in order. `seconds`: mean over the
    profiles of the step; `spread`: their relative standard deviation, None of a single one.

    Raises DataError where a step launched another number of products than its stream has."""
    measured: dict[str, list[list[tuple[str, float]]]] = defaultdict(list)
    for row in rows:
        if row["key"].startswith("step_kernels/") and row["status"] == "ok" and row.get("products"):
            measured[row["plan"]["name"].removesuffix(REPEAT)].append(joined(row["products"]))
    found: list[Row] = []
    for place in chosen.neighbourhoods:
        for value in place.values:
            plan = place.plan(value)
            if plan.name not in measured:
                continue
            stream = get_stream(plan.config, traced_of(place.run, profile), vary="width")
            forecast = [
                (op.work.shape, op.seconds)
                for op in PricedStep(stream, place.run, profile).ops
                if op.work is not None and isinstance(op.work.shape, Gemm) and op.work.shape.k > 1
            ]  # rotary frequencies are an outer product, launched as another call
            for launched in measured[plan.name]:
                if len(launched) != len(forecast):
                    raise DataError(
                        f"{plan.name}: {len(launched)} products were launched, its stream has {len(forecast)}; valid "
                        "are steps measured with the transformers version that streams are traced with"
                    )
            profiled = zip(*measured[plan.name], strict=True)
            for order, ((shape, seconds), kernels) in enumerate(zip(forecast, profiled, strict=True)):
                which, level = kind_of(shape)
                actual = mean(taken for _, taken in kernels)
                spread = stdev(taken for _, taken in kernels) / actual if len(kernels) > 1 else None
                found.append({
                    "step": plan.name, "order": order, "m": shape.m, "n": shape.n, "k": shape.k,
                    "layout": shape.layout, "misaligned": which, "rows": level, "seconds": actual, "spread": spread,
                    "forecast": seconds, "error": seconds / actual - 1, "kernel": kernels[0][0],
                })  # fmt: skip
    return found


def summary(rows: Sequence[Row]) -> list[Row]:
    """By kind: how many, their seconds, the signed error of the sum, median |error|, median spread."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["rows"], row["layout"], row["misaligned"]].append(row)
    return [
        {
            "rows": level, "layout": layout, "misaligned": which, "count": len(mine),
            "seconds": sum(row["seconds"] for row in mine),
            "signed": sum(row["forecast"] for row in mine) / sum(row["seconds"] for row in mine) - 1,
            "median": median(abs(row["error"]) for row in mine),
            "spread": median(spreads) if (spreads := [r["spread"] for r in mine if r["spread"] is not None]) else None,
        }
        for (level, layout, which), mine in sorted(groups.items())
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the errors of products by kind; writes each with --out."""
    from flopcast.roofline.gpu.library.profiles import find_profile
    from studies.widths.sets import SETS

    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--set", type=int, choices=sorted(SETS), default=max(SETS), help="of widths")
    parser.add_argument("--steps", type=Path, required=True, help="folder of a run, or of several")
    parser.add_argument("--out", type=Path, help="CSV of every product")
    given = parser.parse_args(arguments)
    raw = [row for rows in rows_in(given.steps) for row in rows]
    found = products(SETS[given.set], find_profile(given.gpu), raw)
    if given.out is not None:
        write_rows(given.out, COLUMNS, found)
    print("rows     layout misaligned  count  seconds  signed  median |error|  spread")
    for row in summary(found):
        spread = "" if row["spread"] is None else f"{row['spread']:.2%}"
        print(
            f"{row['rows']:8s} {row['layout']:6s} {row['misaligned']:10s} {row['count']:6d}  {row['seconds']:7.4f} "
            f"{row['signed']:+7.1%} {row['median']:15.1%} {spread:>7s}"
        )


if __name__ == "__main__":
    main()
