"""Renders the report page: one self-contained HTML file per GPU, with its figures as files beside it.

No external resource: styles, script and figures are in the page, so it works offline and can be sent to a
colleague. Parts without data are left out: a CPU has no curves, a GPU may have no validation.
`report.json` beside the page holds its main numbers, for the index over several pages (`index.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopcast import files
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.views.figures.agreement import agreement_figure, residual_figure
from flopcast.roofline.views.figures.anatomy import anatomy_figure, batch_figure
from flopcast.roofline.views.figures.bandwidth import memory_figure
from flopcast.roofline.views.figures.capacity import capacity_figure, host_figure
from flopcast.roofline.views.figures.cost import cost_figure
from flopcast.roofline.views.figures.efficiency_map import map_figure
from flopcast.roofline.views.figures.kernels import roofline_figure
from flopcast.roofline.views.figures.modes import modes_figure
from flopcast.roofline.views.page import dollars, tables
from flopcast.roofline.views.page.data import ReportData, Section, section
from flopcast.roofline.views.page.provenance import provenance, reproduce
from flopcast.roofline.views.page.standard import standard_table
from flopcast.roofline.views.page.words import key_numbers, name_of, own_curve, summary_lines, warnings

TEMPLATES = DATA / "templates"
PAGE, NUMBERS = "report.html", "report.json"
# Three tables of a page are not folded: the standard models', and the first of these that it has.
OPENED = ("summary", "leaders", "ladder", "ceilings")
IN_INDEX = ("What a step costs", "Which multiple to keep", "FLOPs per dollar")  # headings of the summary


def render(data: ReportData, folder: Path) -> Path:
    """Writes report.html, report.json and figures/*.png into `folder`; returns the page.

    Raises UsageError if they cannot be written.
    """
    parts = sections(data)
    figures = [figure for part in parts for figure in part.figures]
    page = template("report.html.j2").render(
        title=data.title or f"{name_of(data.profile)}: what it reaches and what a step costs",
        gpu=data.profile.gpu,
        basis=data.profile.basis,
        numbers=list(key_numbers(data)),
        summary=list(summary_lines(data)),
        standard=standard_table(data.standard),
        sections=parts,
        open_tables=opened(parts, 3 - (data.standard is not None)),
        provenance=list(provenance(data)),
        reproduce=list(reproduce(data, figures)),
        warnings=warnings(data),
        notes=data.notes,
        css=asset("report.css"),
        js=asset("report.js"),
    )
    contents = {f"figures/{figure.name}.png": figure.png for figure in figures}
    contents[PAGE] = page.encode()
    contents[NUMBERS] = (json.dumps(main_numbers(data), indent=1, allow_nan=False) + "\n").encode()
    with files.write_errors(folder):
        for name, content in contents.items():
            files.write(folder / name, content)
    return folder / PAGE


def template(name: str) -> Any:
    """Loads a page's template, which escapes every value and raises for missing ones."""
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


def sections(data: ReportData) -> list[Section]:
    """The page's sections in order; empty ones are left out."""
    profile, steps, name, seq = data.profile, data.validation, data.batched_model, data.batched_seq
    memory = 0.0 if profile.device.get("type") == "cpu" else float(profile.device.get("memory_bytes") or 0)
    made = [
        section(
            "roofs", "What this device reaches",
            [roofline_figure(profile, data.measurements), map_figure(profile, data.products),
             memory_figure(profile, data.measurements)],
            [tables.ceiling_table(profile), tables.cards_table(profile)],
        ),
        section(
            "steps", "What a training step costs",
            [anatomy_figure(data.anatomy, steps), batch_figure(data.batches, name, seq)],
            [tables.anatomy_table(data.anatomy, own_curve(data))],
        ),
        section(
            "errors", "Forecast against measured",
            [agreement_figure(steps), residual_figure(steps)],
            [tables.summary_table(steps), tables.validation_table(steps), tables.component_table(steps),
             tables.fit_table(data.fit)],
        ),
        section(
            "dollars", "FLOPs per dollar",
            [cost_figure(data.curves), modes_figure(data.modes)],
            [dollars.leader_table(data.curves), dollars.mode_table(data.modes), dollars.crossover_table(data.curves),
             dollars.cost_table(data.curves), dollars.break_even_table(data.curves, profile.gpu),
             dollars.price_table(data.curves)],
        ),
        *data.extra,
        section(
            "memory", "Memory",
            [capacity_figure(data.anatomy, data.batches, memory, name, seq, steps)],
            [tables.batch_table(data.batches, name, seq, data.largest_batch)],
        ),
        section("host", "The host", [host_figure(data.hosts)], [tables.host_table(profile)]),
    ]  # fmt: skip
    return [part for part in made if part.figures or part.tables]


def opened(parts: Sequence[Section], most: int) -> list[str]:
    """Names of the tables that are not folded."""
    names = {table.name for part in parts for table in part.tables}
    return [name for name in OPENED if name in names][:most]


def main_numbers(data: ReportData) -> dict[str, Any]:
    """The numbers that the index shows of a page, in SI units; null where there is none."""
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
