"""Gathers what a report shows - forecasts of the ladder, curves, comparisons - and writes the folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep, forecast, traced_of
from flopcast.roofline.stream.model.models import ladder, load_config, make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.figures.canvas import Row

if TYPE_CHECKING:
    from flopcast.roofline.dollars.points import CostCurve
    from flopcast.roofline.gpu.fit.quality import FitReport
    from flopcast.roofline.gpu.profile.host import HostCosts
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.validation.step_comparison import StepComparison


BATCHED = "qwen3-0.6b"  # shown over batches: its op streams at these batches are shipped
BATCHES = (2, 4, 8, 16, 32, 64, 128)
# GPUs that a report compares its own GPU with: those of the source article.
COMPARED = ("nvidia-l4", "nvidia-a100-80gb-pcie", "nvidia-h100-sxm", "nvidia-h200")


@no_garbage_collection()
def build_report(
    profile: Profile, quality: FitReport | None, out: Path, *, measured: Sequence[Row] = (),
    compared: Sequence[StepComparison] | None = None,
) -> Path:  # fmt: skip
    """Writes report.html, figures and CSV files into `out`; returns the page. `measured`: rows of measurements;
    `compared`: real steps beside their forecasts, None for none, which needs no torch.

    Raises UsageError if the folder cannot be written.
    """
    from flopcast.roofline.dollars.standard import standard_gpu
    from flopcast.roofline.gpu.catalogue.prices import latest, load_prices
    from flopcast.roofline.step.questions.largest_batch import largest_batch
    from flopcast.roofline.validation.step_comparison import write_csv
    from flopcast.roofline.views.figures.efficiency_map import product_map
    from flopcast.roofline.views.page.data import ReportData
    from flopcast.roofline.views.page.extra import extra_sections
    from flopcast.roofline.views.page.page import render

    if compared is not None:
        write_csv(compared, out / "validation.csv")
    is_cpu = profile.device.get("type") == "cpu"
    # comparing steps needs torch, which other reports do not load
    extra, faults = extra_sections(profile, out, may_trace=compared is not None)
    ladder_steps, eager = anatomy(profile), curves(profile)
    data = ReportData(
        profile=profile,
        fit=quality,
        measurements=measured,
        validation=list(compared or ()),
        anatomy=ladder_steps,
        curves=eager,
        modes=modes(profile, eager),
        products=product_map(profile),
        batches=[] if is_cpu else batches(profile),
        batched_model=BATCHED,
        batched_seq=Run().seq,
        largest_batch=None if is_cpu else largest_batch(load_config(BATCHED), Run(), profile),
        hosts=hosts(profile),
        extra=extra,
        notes=faults,
        standard=None if is_cpu else standard_gpu(profile, latest(load_prices(), profile.gpu)),
    )
    return render(data, out)


def anatomy(profile: Profile) -> list[Forecast]:
    """Forecasts the ladder's steps on this device: 4 x 256 tokens on a GPU, a small ladder on a CPU."""
    if profile.device.get("type") == "cpu":
        from flopcast.roofline.stream.model.models import CPU_BATCH, CPU_SEQ, CPU_VOCABULARY
        from flopcast.roofline.validation.step_plans import CPU_WIDTHS

        run = Run(batch=CPU_BATCH, seq=CPU_SEQ)
        configs = [make_config(width=w, depth=d, vocab=CPU_VOCABULARY) for w, d in CPU_WIDTHS]
        return [forecast(config, run, profile) for config in configs]
    return [forecast(config, Run(), profile) for config in ladder()]


def batches(profile: Profile) -> list[Forecast]:
    """Forecasts Qwen3-0.6B over batches, up to the first that does not fit."""
    from flopcast.roofline.stream.library.streams import get_stream

    found: list[Forecast] = []
    for batch in BATCHES:
        run = Run(batch=batch)
        stream = get_stream(load_config(BATCHED), traced_of(run, profile), vary="batch")
        found.append(PricedStep(stream, run, profile).forecast())
        if not found[-1].fits:
            break
    return found


def hosts(profile: Profile) -> list[HostCosts]:
    """The profile's own host, then the other known hosts."""
    from flopcast.roofline.gpu.library.profiles import known_hosts

    own = [] if profile.host is None else [profile.host]
    costs = [] if profile.device.get("type") == "cpu" else [entry.costs for entry in known_hosts()]
    return own + [host for host in costs if not own or host != own[0]]


def curves(profile: Profile) -> list[CostCurve]:
    """FLOPs per dollar of the GPUs compared, and of this GPU where it has a price."""
    from flopcast.roofline.dollars.curves import cost_curves
    from flopcast.roofline.gpu.catalogue.prices import latest, load_prices

    own = [profile.gpu] if profile.device.get("type") != "cpu" else []
    book = load_prices()
    prices = {name: price for name in (*COMPARED, *own) if (price := latest(book, name)) is not None}
    return cost_curves([_other(name, profile) for name in prices], ladder(), Run(), prices)


def modes(profile: Profile, eager: Sequence[CostCurve]) -> dict[str, Sequence[CostCurve]]:
    """The curves of the same GPUs in every mode: of compiled steps those that `flopcast cost --all-modes`, or another
    command, has compiled before."""
    from flopcast.roofline.dollars.modes import curves_by_mode

    prices = {curve.gpu: curve.price for curve in eager if curve.price is not None}
    profiles = [_other(name, profile) for name in prices]
    return curves_by_mode(profiles, ladder(), Run(), prices, known={"eager": eager}, at_hand=True)


def _other(name: str, profile: Profile) -> Profile:
    """The profile of `name`, projected from `profile` if `name` was not measured and `profile` is the one to project
    from."""
    from flopcast.roofline.gpu.catalogue.datasheets import find_spec
    from flopcast.roofline.gpu.library.profiles import SOURCE, find_profile, known_profiles
    from flopcast.roofline.gpu.projection.project import project

    if name == profile.gpu:
        return profile
    if profile.gpu != SOURCE or name in known_profiles():
        return find_profile(name)
    return project(profile, find_spec(name))


def print_summary(profile: Profile, out: Path) -> None:
    """Prints the few numbers that a reader looks for first."""
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.forecast import print_forecast
    from flopcast.roofline.views.terminal.roofs import print_roofs

    print_roofs(profile)
    path = out / "validation.csv"
    if path.is_file():
        say(f"forecast against measured, every row: {path}")
    if profile.device.get("type") != "cpu":
        print_forecast(forecast(load_config("qwen3-0.6b"), Run(), profile), Run())
