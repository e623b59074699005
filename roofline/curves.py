"""FLOPs-per-dollar curves: the ladder forecast on several GPUs, with their prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flopcast.roofline.batch import write_rows
from flopcast.roofline.cost import CostCurve, StepPoint, cost_curve, cost_rows, crossover_rows
from flopcast.roofline.forecast import Forecast, Run, forecast
from flopcast.roofline.models import Config
from flopcast.roofline.prices import Price
from flopcast.roofline.profile import HostCosts, Profile


def cost_curves(
    profiles: Sequence[Profile],
    models: Sequence[Config],
    run: Run,
    prices: Mapping[str, Price],
    *,
    host: HostCosts | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[CostCurve]:
    """One curve a profile over `models`; `prices` must hold each profile's GPU."""
    curves = []
    total = len(profiles) * len(models)
    for index, profile in enumerate(profiles):
        points = []
        for number, model in enumerate(models):
            points.append(step_point(forecast(model, run, profile, host=host), model, run))
            progress(index * len(models) + number + 1, total)
        curves.append(cost_curve(profile.gpu, points, prices[profile.gpu], profile.basis))
    return curves


def step_point(found: Forecast, model: Config, run: Run) -> StepPoint:
    """A forecast as a point of a curve."""
    return StepPoint(
        n_params=found.n_params,
        width=model["hidden_size"],
        depth=model["num_hidden_layers"],
        step_seconds=found.step_seconds,
        low=found.step_seconds_low,
        high=found.step_seconds_high,
        flops_counted=found.flops_counted,
        tokens=run.batch * run.seq,
        fits=found.fits,
    )


def write_cost(curves: Sequence[CostCurve], folder: Path) -> list[Path]:
    """cost.csv, crossovers.csv and cost.png in `folder`. Raises UsageError when it cannot be written."""
    from flopcast.roofline.plots import save_cost_figure

    paths = [folder / "cost.csv", folder / "crossovers.csv"]
    for path, rows in zip(paths, (cost_rows(curves), crossover_rows(curves)), strict=True):
        write_rows(path, list(rows[0]) if rows else ["gpu"], rows)
    figure = folder / "cost.png"
    save_cost_figure(curves, figure)
    return [*paths, figure]
