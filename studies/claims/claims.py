"""The source article's claims about FLOPs per dollar, put to the test with its own prices and with others.

Pure: curves in, plain rows out. `report.gather` makes the curves, `figures` draws them, and

    python -m studies.claims --out reports/economics

remakes the whole folder.

A claim is settled model by model of the ladder, at 90%: it holds where every comparison that it needs is decided for
it, it does not where one model decides against it, and else it is "not separable". "Middle" counts at how many models
it would hold if the middle estimates were the truth.

The claims, as tested (models of the ladder at 4 x 256 tokens, eager, AdamW; GPUs L4, A100-80GB PCIe, H100 SXM):

- the L4 gives the most FLOPs per dollar under 2^29 parameters ("0.5 B");
- the H100 gives the most above;
- the A100 never gives the most;
- a larger batch does what a larger width does: at one model, the lead passes from the L4 to the H100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from flopcast.roofline.dollars.points import CostCurve, CostPoint, Ranged
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.catalogue.prices import Price

L4, A100, H100, H200 = "nvidia-l4", "nvidia-a100-80gb-pcie", "nvidia-h100-sxm", "nvidia-h200"
COMPARED = (L4, A100, H100)  # the article's; the H200 is drawn beside them
HALF_BILLION = 2**29  # the article's "0.5 B": 6 x 2^29 x 1024 = 2^41.6 FLOPs a step

HOLDS, FAILS, OPEN = "holds", "does not hold", "not separable"
L4_BELOW, H100_ABOVE, A100_NEVER, BATCH = (
    "L4 best under 0.5 B parameters", "H100 best above", "A100 never best", "a larger batch does as a larger width",
)  # fmt: skip


@dataclass(frozen=True)
class PriceSet:
    """Prices of one era or provider. `name`: a column's worth."""

    name: str
    prices: Mapping[str, Price]

    @property
    def label(self) -> str:
        return ", ".join(f"{gpu.removeprefix('nvidia-')} ${p.usd_per_hour:g}" for gpu, p in self.prices.items())


@dataclass(frozen=True)
class Model:
    """One size: the points of the GPUs that have one, at their prices; those that do not fit are left out."""

    n_params: int
    points: Mapping[str, CostPoint]

    @property
    def label(self) -> str:
        step = next(iter(self.points.values())).step
        return f"width {step.width} x {step.depth}" + (f", {step.tokens:,} tokens" if step.tokens != 1024 else "")

    def ratio(self, gpu: str, rival: str) -> Ranged:
        return self.points[gpu].flops_per_usd.over(self.points[rival].flops_per_usd)


@dataclass(frozen=True)
class Evidence:
    """What a claim says at one model. `decided`: 1 for it, -1 against it, 0 open; `middle`: by the middle estimates.
    `gpu` and `rival` are the pair that settles it, or comes nearest to it, `ratio` their FLOPs per dollar."""

    model: Model
    decided: int
    middle: bool
    gpu: str
    rival: str
    ratio: Ranged


def models_of(curves: Sequence[CostCurve], prices: Mapping[str, Price]) -> list[Model]:
    """The ladder's models, smallest first, on the GPUs that have a price here."""
    priced = [curve.at_price(prices[curve.gpu]) for curve in curves if curve.gpu in prices]
    sizes = sorted({point.step.n_params for curve in priced for point in curve.fitting})
    return [Model(n, {c.gpu: p for c in priced for p in c.fitting if p.step.n_params == n}) for n in sizes]


def is_best(model: Model, gpu: str) -> Evidence | None:
    """Whether `gpu` gives the most of `COMPARED` here. None where it has no value, or nothing to beat."""
    rivals = [name for name in COMPARED if name != gpu and name in model.points]
    if gpu not in model.points or not rivals:
        return None
    ratios = {name: model.ratio(gpu, name) for name in rivals}
    worst = min(rivals, key=lambda name: ratios[name].value)
    lost = [name for name in rivals if ratios[name].high < 1.0]
    decided = -1 if lost else 1 if all(ratio.low > 1.0 for ratio in ratios.values()) else 0
    # the pair to show: who beats it for certain, else the rival that is nearest to it
    shown = min(lost, key=lambda name: ratios[name].high) if lost else worst
    return Evidence(model, decided, ratios[worst].value > 1.0, gpu, shown, ratios[shown])


def is_not_best(model: Model, gpu: str) -> Evidence | None:
    """Whether another of `COMPARED` gives more than `gpu` here."""
    found = is_best(model, gpu)
    if found is None:
        return None
    return Evidence(model, -found.decided, not found.middle, gpu, found.rival, found.ratio)


def weigh(found: Sequence[Evidence]) -> tuple[str, Evidence | None]:
    """The verdict, and the evidence to show for it: the clearest against, the weakest for, or the nearest to open."""
    if not found:
        return OPEN, None
    against = [e for e in found if e.decided < 0]
    if against:
        return FAILS, max(against, key=_margin)
    if all(e.decided > 0 for e in found):
        return HOLDS, min(found, key=_margin)
    undecided = [e for e in found if e.decided == 0]
    contrary = [e for e in undecided if not e.middle]
    # of those left open, the one that says most against it by its middle, else the one that is nearest to turning
    return OPEN, max(contrary or undecided, key=lambda e: abs(log(e.ratio.value)) * (1 if contrary else -1))


def _margin(evidence: Evidence) -> float:
    """How far the interval stays from 1, in logarithms."""
    return max(log(evidence.ratio.low), -log(evidence.ratio.high))


def test_claims(
    curves: Sequence[CostCurve], batches: Mapping[str, Sequence[CostPoint]], prices: PriceSet, *, law: str, hosts: str
) -> list[dict[str, Any]]:
    """One row a claim. `batches`: of each GPU the same model at rising batches."""
    models = models_of(curves, prices.prices)
    below = [m for m in models if m.n_params <= HALF_BILLION]
    above = [m for m in models if m.n_params > HALF_BILLION]
    cases: list[tuple[str, list[Model], Callable[[Model], Evidence | None]]] = [
        (L4_BELOW, below, lambda m: is_best(m, L4)),
        (H100_ABOVE, above, lambda m: is_best(m, H100)),
        (A100_NEVER, models, lambda m: is_not_best(m, A100)),
    ]
    rows = []
    for claim, chosen, ask in cases:
        found = [e for m in chosen if (e := ask(m)) is not None]
        verdict, shown = weigh(found)
        rows.append(_row(claim, prices, law, hosts, verdict, found, shown))
    if batches:
        rows.append(_batch_row(batches, prices, law, hosts))
    return rows


test_claims.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's


def _batch_row(batches: Mapping[str, Sequence[CostPoint]], prices: PriceSet, law: str, hosts: str) -> dict[str, Any]:
    """The lead passes if the L4 does not lead at the largest batch that it holds: H100 over L4 there."""
    models = batch_models(batches, prices.prices)
    both = [m for m in models if L4 in m.points and H100 in m.points]
    if not both:
        return _row(BATCH, prices, law, hosts, OPEN, [], None)
    last = both[-1]
    ratio = last.ratio(H100, L4)
    decided = 1 if ratio.low > 1.0 else -1 if ratio.high < 1.0 else 0
    shown = Evidence(last, decided, ratio.value > 1.0, H100, L4, ratio)
    return _row(BATCH, prices, law, hosts, {1: HOLDS, -1: FAILS, 0: OPEN}[decided], [shown], shown)


def batch_models(batches: Mapping[str, Sequence[CostPoint]], prices: Mapping[str, Price]) -> list[Model]:
    """One model at rising batches, on the GPUs that have a price and hold it."""
    found: dict[int, dict[str, CostPoint]] = {}
    for gpu, points in batches.items():
        for point in points:
            if gpu in prices and point.step.fits:
                found.setdefault(point.step.tokens, {})[gpu] = CostPoint(gpu, point.step, prices[gpu])
    return [Model(next(iter(p.values())).step.n_params, p) for _, p in sorted(found.items())]


def _row(
    claim: str, prices: PriceSet, law: str, hosts: str, verdict: str, found: Sequence[Evidence], shown: Evidence | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "claim": claim, "prices": prices.name, "depth_law": law, "hosts": hosts, "verdict": verdict,
        "models": len(found), "decided_for": sum(e.decided > 0 for e in found),
        "decided_against": sum(e.decided < 0 for e in found), "middle_for": sum(e.middle for e in found),
    }  # fmt: skip
    figures = ("at", "n_params", "gpu", "rival", "ratio", "ratio_low", "ratio_high", "break_even", "break_even_low",
               "break_even_high", "price_ratio", "reason")  # fmt: skip
    if shown is None:
        return {**row, **dict.fromkeys(figures), "reason": "no model that these GPUs hold both"}
    one, two = shown.model.points[shown.gpu], shown.model.points[shown.rival]
    price_ratio = one.usd_per_hour / two.usd_per_hour
    ratio = shown.ratio
    values = (
        shown.model.label, shown.model.n_params, shown.gpu, shown.rival, ratio.value, ratio.low, ratio.high,
        ratio.value * price_ratio, ratio.low * price_ratio, ratio.high * price_ratio, price_ratio, reason(one, two),
    )  # fmt: skip
    return {**row, **dict(zip(figures, values, strict=True))}


def reason(one: CostPoint, two: CostPoint) -> str:
    """Why the two compare as they do: what bounds each, and how much faster for how much more."""
    fast, slow = sorted((one, two), key=lambda point: point.step.step_seconds)
    speed = slow.step.step_seconds / fast.step.step_seconds
    dearer = fast.usd_per_hour / slow.usd_per_hour
    text = f"the {_name(fast)} is {speed:.2g} x as fast at {dearer:.2g} x the price{_datasheet(fast.gpu, slow.gpu)}"
    bounds = (fast.step.bound, slow.step.bound)
    busy = fast.step.device_seconds / fast.step.step_seconds if fast.step.device_seconds else None
    if bounds == ("host", "host"):
        return f"both wait for the host, so price decides: {text}"
    if bounds[0] == "host":
        idle = f", idle {1 - busy:.0%} of the step" if busy is not None else ""
        return f"the {_name(fast)} waits for its host{idle}; the {_name(slow)} is bound by {_words(bounds[1])}: {text}"
    return f"the {_name(fast)} is bound by {_words(bounds[0])}, the {_name(slow)} by {_words(bounds[1])}: {text}"


def _datasheet(fast: str, slow: str) -> str:
    """How much faster one is by the datasheet; nothing for a GPU of a profile file."""
    specs = load_specs()
    if fast not in specs or slow not in specs:
        return ""
    memory = specs[fast].bandwidth_bytes_per_second / specs[slow].bandwidth_bytes_per_second
    peak = specs[fast].bf16_flops_per_second / specs[slow].bf16_flops_per_second
    return f" (by the datasheet {memory:.2g} x in memory bandwidth, {peak:.2g} x in matrix peak)"


def _name(point: CostPoint) -> str:
    return point.gpu.removeprefix("nvidia-").split("-")[0].upper()


def _words(bound: str) -> str:
    return {"memory": "memory bandwidth", "matrix": "its matrix units"}.get(bound, bound or "its device")
