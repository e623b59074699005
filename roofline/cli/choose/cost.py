"""`flopcast cost`: FLOPs per dollar of several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from flopcast.progress import progress
from flopcast.roofline.cli.shared.groups import Only
from flopcast.roofline.cli.shared.options import (
    ALL_GPUS,
    AsJson,
    Gpus,
    HostsOptions,
    ModelOptions,
    PriceKind,
    PriceOptions,
    given,
    ladder_of,
    refuse_unused,
    whole_numbers,
)
from flopcast.roofline.cli.shared.price_book import gpu_names, price_book
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.roofline.dollars.crossovers import Scenario
    from flopcast.roofline.dollars.modes import ByMode
    from flopcast.roofline.dollars.points import CostCurve
    from flopcast.roofline.stream.library.modules import Module
    from flopcast.roofline.stream.model.models import Config


def cost(
    context: Context,
    gpus: Gpus = ALL_GPUS,
    *,
    depth_law: Annotated[
        str, Option(help="Law of the number of layers at each width: printed, ln or qwen3.")
    ] = "printed",
    model: Annotated[ModelOptions, Only("module")],
    widths: Annotated[str | None, Option(help="Widths, separated by commas. Default: 256 to 4096 by 256.")] = None,
    run: Annotated[Run, Only("batch", "seq", "optimizer", "clip", "mode", "parallel", "nodes", "link")],
    feeding: HostsOptions,
    what_if: Annotated[
        bool,
        Option(
            "--what-if",
            help="Compare larger batches, too: 4 and 16 times. Takes seconds each where they are not at hand.",
        ),
    ] = False,
    all_modes: Annotated[
        bool,
        Option(
            "--all-modes",
            help="Say for every mode who leads, and draw the curves side by side. Each width is compiled once per kind "
            "of GPU, ten seconds of processor time, and kept.",
        ),
    ] = False,
    price: PriceOptions,
    kind: PriceKind = "on-demand",
    out: Annotated[Path | None, Option(help="Folder to write the tables (CSV) and the figure to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compares GPUs by FLOPs per dollar against model size: curves, crossovers, break-even prices."""
    from dataclasses import replace

    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.cli.choose import documents
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.dollars.crossovers import scenarios
    from flopcast.roofline.dollars.curves import SAME, cost_curves
    from flopcast.roofline.dollars.modes import curves_by_mode
    from flopcast.roofline.gpu.library.profiles import find_host, find_profiles
    from flopcast.roofline.stream.library.modules import Module
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.cost import print_cost, print_modes

    asked = run.checked()
    models: Sequence[Config | Module] = ladder_of(widths, depth_law)
    if model.module is not None:
        refuse_unused(
            "with --module: the factory makes the model", {"depth_law": None if depth_law == "printed" else depth_law}
        )
        refuse_unused("with --module: `flopcast sweep --batches` compares batches", {"what_if": what_if})
        sizes = {name: value for name, value in given(context, run).items() if name in ("batch", "seq")}
        refuse_unused("with --module: give --mode, one after the other", {"all_modes": all_modes})
        models = _modules(Module(model.module).resized(**sizes), widths)
    profiles = find_profiles(gpu_names(gpus))
    book = price_book(price, [profile.gpu for profile in profiles], ranked=True, kind=kind)
    check_writable(out, is_folder=True)
    host = find_host(feeding.host)
    with progress("forecasting the ladder") as shown:
        curves = cost_curves(
            profiles, models, asked, book, host=host, hosts=feeding.hosts, what_if=True, progress=shown.update
        )
        larger = {}
        for factor in (4, 16) if what_if else ():
            larger[factor] = cost_curves(
                profiles, models, replace(asked, batch=asked.batch * factor), book, host=host, hosts=feeding.hosts,
                vary="batch", progress=shown.update,
            )  # fmt: skip
        by_mode: dict[str, Sequence[CostCurve]] = {}
        if all_modes:
            configs = [model for model in models if not isinstance(model, Module)]
            by_mode = curves_by_mode(
                profiles, configs, asked, book, known={asked.mode: curves}, host=host, hosts=feeding.hosts,
                progress=shown.update,
            )  # fmt: skip
    changed = scenarios(curves, larger, asked.batch)
    if out is not None:
        for path in write_cost(curves, out, changed, by_mode):
            say(f"wrote {path}")
    if as_json:
        emit(
            documents.cost_document(
                curves, asked, hosts=feeding.hosts, host=feeding.host, scenarios=changed, by_mode=by_mode
            )
        )
    else:
        print_cost(curves, asked, changed, one_host=feeding.host is not None or feeding.hosts == SAME)
        print_modes(by_mode)


def _modules(module: Module, widths: str | None) -> list[Module]:
    """Returns the module at each of `widths`, or as its factory makes it. Raises UsageError where it takes no width."""
    if widths is None:
        return [module]
    return [module.resized(width=width) for width in sorted(set(whole_numbers("--widths", widths)))]


def write_cost(
    curves: Sequence[CostCurve], folder: Path, changed: Sequence[Scenario] = (), by_mode: ByMode | None = None
) -> list[Path]:
    """Writes cost.csv, crossovers.csv, break_even.csv, best.csv, memory.csv, what_if.csv (of `changed`), modes.csv (of
    `by_mode`), cost.png and modes.png to `folder` and returns their paths. Raises UsageError when they cannot be
    written."""
    from flopcast.roofline.base.csv_files import write_rows
    from flopcast.roofline.dollars.modes import leader_rows
    from flopcast.roofline.dollars.tables import cost_tables, scenario_rows
    from flopcast.roofline.views.figures.cost import cost_figure
    from flopcast.roofline.views.figures.file import save
    from flopcast.roofline.views.figures.modes import modes_figure

    tables = cost_tables(curves)
    if changed:
        tables["what_if"] = scenario_rows(changed)
    if by_mode:
        tables["modes"] = leader_rows(by_mode)
    paths = [folder / f"{'cost' if name == 'points' else name}.csv" for name in tables]
    for path, rows in zip(paths, tables.values(), strict=True):
        write_rows(path, list(rows[0]) if rows else ["gpu"], rows)
    for figure in (cost_figure(curves), modes_figure(by_mode or {})):
        if figure is not None:
            paths.append(folder / f"{figure.name}.png")
            save(figure, paths[-1], "folder with --out")
    return paths
