"""Makes reports/economics: the claims of `claims.py` tested, the cost curves behind them, and a page of Markdown.

    python -m studies.claims --out reports/economics

Forecasts only, about a minute on two cores once the op streams of the batches are traced. The page of a GPU shows the
rows of claims.json, whose `why` is made here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.base.units import count, short_name
from flopcast.roofline.cli.choose.cost import write_cost
from flopcast.roofline.dollars.crossovers import best_gpu, scenarios, sentence
from flopcast.roofline.dollars.crossovers import crossovers as crossings
from flopcast.roofline.dollars.curves import HOSTS, OWN, cost_curves
from flopcast.roofline.dollars.plan import largest_models
from flopcast.roofline.dollars.points import CostCurve, CostPoint
from flopcast.roofline.gpu.catalogue.prices import ARTICLE_DATE, Price, latest, load_prices
from flopcast.roofline.gpu.library.profiles import find_profiles
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.model.models import LADDER_WIDTHS, ladder
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.figures.canvas import Figure
from studies.claims.claims import COMPARED, H200, PriceSet, test_claims
from studies.markdown import table

COMMAND = "python -m studies.claims --out reports/economics"
GPUS = (*COMPARED, H200)
WIDTHS = LADDER_WIDTHS  # as `cost` and the pages have: a crossover is read between models, so fewer would move it
LAWS = ("printed", "ln")
BATCH_WIDTH = 1024  # 218 M parameters: the L4 leads here if anywhere, and holds a batch 16 times as large
BATCHES = (1, 4, 8, 16, 32, 64, 128)  # x 256 tokens
BUDGETS = (30, 100, 300, 1000, 3000)  # dollars
SERVERLESS = DATA / "claims_prices.csv"


@dataclass(frozen=True)
class Gathered:
    """Curves by depth law and hosts; one model at rising batches by hosts; the price sets."""

    ladders: Mapping[tuple[str, str], Sequence[CostCurve]]
    batches: Mapping[str, Mapping[str, Sequence[CostPoint]]]
    price_sets: Sequence[PriceSet]
    profiles: Sequence[Profile]


@dataclass(frozen=True)
class Section:
    """What README.md shows of the claims: rows, and figures."""

    rows: Sequence[Mapping[str, Any]]
    figures: Sequence[Figure]


def price_sets() -> list[PriceSet]:
    """The article's (late 2025), the newest, the article's spot prices, and a serverless list."""
    book = load_prices()

    def of(**how: Any) -> dict[str, Price]:
        return {gpu: price for gpu in GPUS if (price := latest(book, gpu, **how)) is not None}

    return [
        PriceSet("late 2025, the article's", of(on=ARTICLE_DATE)),
        PriceSet("newest", of()),
        PriceSet("late 2025, spot", of(on=ARTICLE_DATE, kind="spot")),
        PriceSet("serverless, Modal", {price.gpu: price for price in load_prices(SERVERLESS)}),
    ]


def gather(
    progress: Callable[[str], None] = lambda what: None, *, laws: Sequence[str] = LAWS, all_hosts: Sequence[str] = HOSTS
) -> Gathered:
    """The forecasts that the claims need, for these depth laws and assumptions about hosts."""
    sets = price_sets()
    prices = dict(sets[1].prices)
    profiles = find_profiles(GPUS)
    ladders = {}
    for law in laws:
        for hosts in all_hosts:
            progress(f"ladder, {law} law, hosts {hosts}")
            ladders[law, hosts] = cost_curves(
                profiles, ladder(WIDTHS, law), Run(), prices, hosts=hosts, what_if=hosts == OWN
            )
    model = ladder((BATCH_WIDTH,))
    batches: dict[str, dict[str, list[CostPoint]]] = {}
    for hosts in all_hosts:
        progress(f"batches at width {BATCH_WIDTH}, hosts {hosts}")
        batches[hosts] = {gpu: [] for gpu in GPUS}
        for batch in BATCHES:
            run = replace(Run(), batch=batch)
            for curve in cost_curves(profiles, model, run, prices, hosts=hosts, vary="batch"):
                batches[hosts][curve.gpu] += curve.points
    return Gathered(ladders, batches, sets, profiles)


def claim_rows(found: Gathered) -> list[dict[str, Any]]:
    """Every claim under every price set, depth law and assumption about hosts."""
    return [
        row
        for prices in found.price_sets
        for (law, hosts), curves in found.ladders.items()
        for row in test_claims(curves, found.batches[hosts] if law == LAWS[0] else {}, prices, law=law, hosts=hosts)
    ]


def section(found: Gathered | None = None) -> Section:
    """The rows of the printed depth law with each GPU on a host of its own, and the figures.

    Without `found` it makes its own forecasts: some ten seconds once the streams of the batches are traced."""
    from studies.claims.figures import batch_figure, claims_figure

    found = found or gather(laws=LAWS[:1], all_hosts=(OWN,))
    rows = [row for row in claim_rows(found) if row["depth_law"] == LAWS[0] and row["hosts"] == OWN]
    drawn = (
        claims_figure(found.ladders[LAWS[0], OWN], found.price_sets),
        batch_figure(found.ladders[LAWS[0], OWN], found.batches[OWN], found.price_sets[0]),
    )
    return Section(rows, [figure for figure in drawn if figure is not None])


def write(found: Gathered, out: Path, shown: Section | None = None) -> list[Path]:
    """claims.csv, claims.json, README.md, the figures, and the cost curves of both depth laws in folders."""
    from flopcast.roofline.views.figures.file import save

    rows, shown = claim_rows(found), shown or section(found)
    paths = [out / "claims.csv", out / "claims.json", out / "README.md"]
    write_rows(paths[0], list(rows[0]), rows)
    prices = {s.name: [price.to_row() for price in s.prices.values()] for s in found.price_sets}
    claims = [{**row, "why": why(row)} for row in rows]
    paths[1].write_text(json.dumps({"prices": prices, "claims": claims}, indent=1, allow_nan=False) + "\n")
    for figure in shown.figures:
        paths.append(out / f"{figure.name}.png")
        save(figure, paths[-1])
    for law in LAWS:
        curves = found.ladders[law, OWN]
        paths += write_cost(curves, out / law, scenarios(curves, {}, Run().batch))
    paths[2].write_text(page(found, rows, shown))
    return paths


def page(found: Gathered, rows: Sequence[Mapping[str, Any]], shown: Section) -> str:
    """README.md: the command, the prices, the verdicts, why, and what the rest of the folder holds."""
    basis = ", ".join(f"{p.gpu} {p.basis}" for p in found.profiles)
    names = [short_name(gpu) for gpu in GPUS]
    curves = found.ladders[LAWS[0], OWN]
    lines = [
        "# FLOPs per dollar: the article's claims, tested",
        "",
        f"Remade whole by `{COMMAND}`. Forecasts, not measurements: {basis}. 90% intervals.",
        "",
        f"Ladder of widths {', '.join(map(str, WIDTHS))} at 4 x 256 tokens, eager, AdamW; batches at width "
        f"{BATCH_WIDTH}, {', '.join(map(str, BATCHES))} x 256. A claim holds where every model decides for it, does "
        "not where one decides against it, and is else not separable; in brackets, the models at which the middle "
        "estimates are for it.",
        "",
        "## Prices, $ per GPU and hour",
        "",
        table(("", *names, "provider, day"), [_price_row(prices) for prices in found.price_sets]),
        "",
        "## Verdicts",
        "",
        "Each GPU in a host of its own; after the bar, all in one host, whose pace cancels in comparisons, where that "
        "changes the verdict or the count.",
        "",
        table(("claim", "depth law", *(s.name for s in found.price_sets)), _verdict_rows(rows, found.price_sets)),
        "",
        "## Who leads",
        "",
        "Most FLOPs per dollar by the middle estimates, of these four GPUs; * not separable from the next.",
        "",
        *_leaders(found),
        "## Why",
        "",
        *_reasons(shown),
        *_power(found.profiles),
    ]
    for figure in shown.figures:
        lines += [f"![{figure.title}]({figure.name}.png)", "", figure.caption, ""]
    lines += [
        *_crossovers(curves, found.price_sets[:2]),
        "## The largest model that a budget trains",
        "",
        "20 tokens a parameter, 4 x 256 tokens a step, one GPU, newest prices; interval and days in brackets. More: "
        "`flopcast plan`.",
        "",
        table(("budget", *names), _budget_rows(curves)),
        "",
        "## In this folder",
        "",
        "- `claims.csv`, `claims.json`: every claim under every price list, depth law and assumption about hosts, "
        "with the pair that settles it, its ratio, the break-even price ratio and the reason.",
        "- `printed/`, `ln/`: the curves of each depth law at the newest prices: `cost.csv` (every point), "
        "`crossovers.csv`, `break_even.csv` (price ratios at which two GPUs are equal: they outlive the price list), "
        "`best.csv`, `memory.csv`, `what_if.csv` (a host at none, half and twice its cost), `cost.png`.",
        "- `modes.md`, `modes.csv`, `modes.png`: who leads where steps are compiled, by "
        "`python -m studies.claims.modes`.",
        "",
    ]
    return "\n".join(lines)


def _budget_rows(curves: Sequence[CostCurve]) -> list[list[str]]:
    rows = []
    for usd in BUDGETS:
        cells = []
        for row, curve in zip(largest_models(curves, usd), curves, strict=True):
            if row.n_params is None or row.days is None:
                cells.append("-")
                continue
            end = "" if row.limited_by == "budget" else f", {row.limited_by}'s end"
            low = count(row.low) if row.low else f"under {count(curve.fitting[0].step.n_params)}"
            days = float(f"{row.days:.2g}")  # two digits, no exponent
            cells.append(f"{count(row.n_params)} ({low} to {count(row.high or 0.0)}; {days:g} d{end})")
        rows.append([f"${usd:,}", *cells])
    return rows


def _leaders(found: Gathered) -> list[str]:
    """The leader at each size of each depth law under each price list."""
    lines = []
    for law in LAWS:
        curves = found.ladders[law, OWN]
        sizes = sorted({point.step.n_params for curve in curves for point in curve.fitting})
        rows = []
        for prices in found.price_sets:
            priced = [c.at_price(prices.prices[c.gpu]) for c in curves if c.gpu in prices.prices]
            best = [best_gpu(priced, float(size)) for size in sizes]
            cells = [
                "-" if b is None else short_name(b.gpu).split("-")[0] + ("" if b.separable else " *") for b in best
            ]
            rows.append([prices.name, *cells])
        lines += [table((f"{law} law", *map(count, sizes)), rows), ""]
    return lines


def _crossovers(curves: Sequence[CostCurve], sets: Sequence[PriceSet]) -> list[str]:
    lines = ["## Crossovers (printed law)", ""]
    for prices in sets:
        priced = [curve.at_price(prices.prices[curve.gpu]) for curve in curves if curve.gpu in prices.prices]
        lines += [f"{prices.name[0].upper()}{prices.name[1:]}:", ""]
        lines += [*(f"- {sentence(row)}" for row in crossings(priced)), ""]
    return lines


def _reasons(shown: Section) -> list[str]:
    """A claim, and below it a line for each price list."""
    lines = []
    for claim in dict.fromkeys(row["claim"] for row in shown.rows):
        lines.append(f"- {claim}")
        mine = [row for row in shown.rows if row["claim"] == claim]
        lines += [f"  - {row['prices']}: {row['verdict']}; {why(row)}" for row in mine]
    return [*lines, ""]


def why(row: Mapping[str, Any]) -> str:
    """What a verdict rests on: the middle estimates, the pair that settles it, and the reason."""
    if row["ratio"] is None:
        return f"{row['reason']}."
    gpu, rival = (short_name(row[name]).split("-")[0].upper() for name in ("gpu", "rival"))
    middle = f"{row['middle_for']} of {row['models']} models by the middle estimates; " if row["models"] > 1 else ""
    return (
        f"{middle}{gpu} over {rival} at {row['at']}: {row['ratio']:.2f} ({row['ratio_low']:.2f} to "
        f"{row['ratio_high']:.2f}); {row['reason']}."
    )


def _price_row(prices: PriceSet) -> list[str]:
    cells = [f"{p.usd_per_hour:.4g}" if (p := prices.prices.get(gpu)) else "-" for gpu in GPUS]
    days = sorted({f"{'about ' if p.date_inferred else ''}{p.date}" for p in prices.prices.values()})
    providers = sorted({f"{p.provider} {p.kind}" for p in prices.prices.values()})
    return [prices.name, *cells, f"{', '.join(providers)}; {', '.join(days)}"]


def _verdict_rows(rows: Sequence[Mapping[str, Any]], sets: Sequence[PriceSet]) -> list[list[str]]:
    made = []
    for claim in dict.fromkeys(row["claim"] for row in rows):
        for law in LAWS:
            cells = []
            for prices in sets:
                asked = {
                    row["hosts"]: f"{row['verdict']} ({_middle(row)})"
                    for row in rows
                    if (row["claim"], row["depth_law"], row["prices"]) == (claim, law, prices.name)
                }
                cells.append(" \\| ".join(dict.fromkeys(asked[hosts] for hosts in HOSTS if hosts in asked)))
            if any(cells):
                made.append([claim, law, *cells])
    return made


def _middle(row: Mapping[str, Any]) -> str:
    """By the middle estimates: at how many models, or which way."""
    if row["models"] == 1:
        return "middle for it" if row["middle_for"] else "middle against it"
    return f"{row['middle_for']} of {row['models']}"


def _power(profiles: Sequence[Profile]) -> list[str]:
    """What the power limit leaves of each projected GPU's matrix peak."""
    parts = []
    for profile in profiles:
        kept = profile.provenance.get("sustained_fraction")
        watts = profile.device.get("power_limit_w")
        if kept and watts:
            name = short_name(profile.gpu)
            parts.append(f"{name} {kept[0]:.0%} ({kept[1]:.0%} to {kept[2]:.0%}) at {watts:g} W")
    if not parts:
        return []
    return [f"Of their dense bf16 peak the power limit lets large products sustain: {'; '.join(parts)}.", ""]
