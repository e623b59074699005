"""Sets the curves of a ladder's modes side by side, and says who leads where: eager, compiled, with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flopcast.microbench.recipe.settings import MODES
from flopcast.roofline.dollars.crossovers import Best, best_gpu
from flopcast.roofline.dollars.curves import OWN, cost_curves
from flopcast.roofline.dollars.points import CostCurve
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import traced_of
from flopcast.roofline.stream.library.ahead import has_code
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Run

FEWEST = 2  # sizes of a curve

ByMode = Mapping[str, Sequence[CostCurve]]


class Leader(NamedTuple):
    """Who leads at a size where steps run in a mode."""

    mode: str
    best: Best


def curves_by_mode(
    profiles: Sequence[Profile],
    models: Sequence[Config],
    run: Run,
    prices: Mapping[str, Price],
    *,
    known: ByMode | None = None,
    host: HostCosts | None = None,
    hosts: str = OWN,
    at_hand: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Sequence[CostCurve]]:
    """Returns curves as `cost_curves` in every mode, except for those that are `known`. `at_hand`: of compiled steps
    only at sizes that were compiled before for all GPUs; a mode with fewer than FEWEST of these is left out."""
    found: dict[str, Sequence[CostCurve]] = {}
    for mode in MODES:
        if known is not None and mode in known:
            found[mode] = known[mode]
            continue
        own = replace(run, mode=mode)
        some = models
        if at_hand:
            some = [one for one in models if all(has_code(one, traced_of(own, profile)) for profile in profiles)]
        if len(some) >= min(FEWEST, len(models)):
            found[mode] = cost_curves(profiles, some, own, prices, host=host, hosts=hosts, progress=progress)
    return found


def leaders(by_mode: ByMode) -> list[Leader]:
    """Who leads at each size of each mode."""
    found = []
    for mode, curves in by_mode.items():
        for size in sorted({float(point.step.n_params) for curve in curves for point in curve.fitting}):
            best = best_gpu(curves, size)
            if best is not None:
                found.append(Leader(mode, best))
    return found


def leader_rows(by_mode: ByMode) -> list[dict[str, Any]]:
    """The leaders as plain rows, FLOPs per USD with the ends of their 90% intervals."""
    return [
        {
            "mode": mode, "n_params": best.n_params, "gpu": best.gpu, "flops_per_usd": best.flops_per_usd.value,
            "flops_per_usd_low": best.flops_per_usd.low, "flops_per_usd_high": best.flops_per_usd.high,
            "separable": best.separable, "contenders": " ".join(best.contenders),
        }
        for mode, best in leaders(by_mode)
    ]  # fmt: skip
