"""The page a person reads: one self-contained HTML file per GPU, its figures beside it.

No external resource: styles, script and figures are in the page, so it works offline and can be sent to a
colleague. What the data do not hold is left out: a processor without curves, a GPU without validation.
`report.json` beside the page holds its main numbers, for the index over several pages (`report_index.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.views.figures.agreement import agreement_figure, residual_figure
from flopcast.roofline.views.figures.anatomy import anatomy_figure, batch_figure
from flopcast.roofline.views.figures.bandwidth import memory_figure
from flopcast.roofline.views.figures.canvas import Figure
from flopcast.roofline.views.figures.capacity import capacity_figure, host_figure
from flopcast.roofline.views.figures.cost import cost_figure
from flopcast.roofline.views.figures.efficiency_map import map_figure
from flopcast.roofline.views.figures.kernels import roofline_figure
from flopcast.roofline.views.page import dollars, tables
from flopcast.roofline.views.page.data import ReportData, Section
from flopcast.roofline.views.page.provenance import provenance, reproduce
from flopcast.roofline.views.page.table import Table
from flopcast.roofline.views.page.words import key_numbers, name_of, own_curve, summary_lines, warnings

TEMPLATES = DATA / "templates"
PAGE, NUMBERS = "report.html", "report.json"
IN_INDEX = ("What a step costs", "Which multiple to keep", "FLOPs per dollar")  # of the summary


def render(data: ReportData, folder: Path) -> Path:
    """Writes report.html, report.json and figures/*.png into `folder`; returns the page.

    Raises UsageError when it cannot.
    """
    figures = draw_all(data)
    parts = sections(data, figures)
    page = template("report.html.j2").render(
        title=data.title or f"{name_of(data.profile)}: what it reaches and what a step costs",
        gpu=data.profile.gpu,
        basis=data.profile.basis,
        numbers=list(key_numbers(data)),
        summary=list(summary_lines(data)),
        sections=parts,
        provenance=list(provenance(data)),
        reproduce=list(reproduce(data, [figure for part in parts for figure in part.figures])),
        warnings=warnings(data),
        notes=data.notes,
        css=asset("report.css"),
        js=asset("report.js"),
    )
    shown = [figure for part in parts for figure in part.figures]
    files = {f"figures/{figure.name}.png": figure.png for figure in shown}
    files[PAGE] = page.encode()
    files[NUMBERS] = (json.dumps(main_numbers(data), indent=1, allow_nan=False) + "\n").encode()
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as fault:
        raise UsageError(f"{folder} cannot be written: {fault.strerror}; choose another folder with --out") from fault
    return folder / PAGE


def template(name: str) -> Any:
    """A page's template: everything put in is escaped, what is missing raises."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def draw_all(data: ReportData) -> list[Figure]:
    """The figures that these data suffice for, but for those of `extra`."""
    profile = data.profile
    memory = float(profile.device.get("memory_bytes") or 0)
    is_cpu = profile.device.get("type") == "cpu"
    drawn = (
        roofline_figure(profile, data.measurements), map_figure(profile, data.products),
        memory_figure(profile, data.measurements), anatomy_figure(data.anatomy, data.validation),
        batch_figure(data.batches, data.batched_model, data.batched_seq),
        agreement_figure(data.validation), residual_figure(data.validation), cost_figure(data.curves),
        None if is_cpu else capacity_figure(data.anatomy, data.batches, memory, data.batched_model, data.batched_seq,
                                            data.validation),
        host_figure(data.hosts),
    )  # fmt: skip
    return [figure for figure in drawn if figure is not None]


def sections(data: ReportData, figures: Sequence[Figure]) -> list[Section]:
    """The page's parts in order; empty ones are left out."""
    drawn = {figure.name: figure for figure in figures}
    own = own_curve(data)
    plan: list[tuple[str, str, tuple[str, ...], tuple[Table | None, ...]]] = [
        ("roofs", "What this device reaches", ("roofline", "map", "bandwidth"),
         (tables.ceiling_table(data.profile), tables.cards_table(data.profile))),
        ("steps", "What a training step costs", ("anatomy", "batches"), (tables.anatomy_table(data.anatomy, own),)),
        ("errors", "Forecast against measured", ("agreement", "residuals"),
         (tables.summary_table(data.validation), tables.validation_table(data.validation),
          tables.component_table(data.validation), tables.fit_table(data.fit))),
        ("dollars", "FLOPs per dollar", ("cost",),
         (dollars.leader_table(data.curves), dollars.crossover_table(data.curves), dollars.cost_table(data.curves),
          dollars.break_even_table(data.curves, data.profile.gpu), dollars.price_table(data.curves))),
        ("memory", "Memory", ("memory",),
         (tables.batch_table(data.batches, data.batched_model, data.batched_seq, data.largest_batch),)),
        ("host", "The host", ("host",), (tables.host_table(data.profile),)),
    ]  # fmt: skip
    made = [
        Section(name, title, [drawn[f] for f in wanted if f in drawn], [t for t in found if t is not None])
        for name, title, wanted, found in plan
    ]
    at = next(i for i, part in enumerate(made) if part.name == "memory")
    return [part for part in [*made[:at], *data.extra, *made[at:]] if part.figures or part.tables]


def main_numbers(data: ReportData) -> dict[str, Any]:
    """What the index says of a page: SI units, null where there is none."""
    profile = data.profile
    made = profile.provenance
    done = [row for row in data.validation if row.step.error is not None]
    return {
        "schema": 1,
        "gpu": profile.gpu,
        "name": name_of(profile),
        "basis": profile.basis,
        "date": str(made.get("from") or "")[:10] or None,
        "torch": profile.stack.get("torch"),
        "rows": made.get("rows"),
        "numbers": [vars(number) for number in key_numbers(data)],
        "summary": [[heading, sentence] for heading, sentence in summary_lines(data) if heading in IN_INDEX],
        "steps": len(done),
        "page": PAGE,
    }
