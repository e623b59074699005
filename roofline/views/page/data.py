"""Defines the data of a report, which `assemble.py` gathers and `page.py` renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.views.figures.canvas import Figure, Row

if TYPE_CHECKING:
    from flopcast.roofline.dollars.modes import ByMode
    from flopcast.roofline.dollars.points import CostCurve
    from flopcast.roofline.dollars.standard import StandardGpu
    from flopcast.roofline.gpu.fit.quality import FitReport
    from flopcast.roofline.gpu.profile.host import HostCosts
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.step.forecast import Forecast
    from flopcast.roofline.views.figures.efficiency_map import ProductMap
    from flopcast.roofline.views.page.table import Table


@dataclass(frozen=True)
class Section:
    """A part of the page: figures, then tables. `commands`: by figure, the command that reproduces it. `advice`:
    heading and sentence for the summary; no advice if the sentence is empty."""

    name: str
    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    advice: tuple[str, str] = ("", "")


def section(
    name: str, title: str, figures: Sequence[Figure | None], tables: Sequence[Table | None], **more: Any
) -> Section:
    """A section of those figures and tables that are not None."""
    return Section(name, title, [f for f in figures if f is not None], [t for t in tables if t is not None], **more)


@dataclass(frozen=True)
class ReportData:
    """All data of a report. Empty fields are left out of the page.

    measurements: rows of measurements.jsonl, the latest of each. validation: real steps beside their forecasts.
    anatomy: forecasts of a ladder, small to large; batches: those of `batched_model` over batches of sequences of
    `batched_seq` tokens, and the largest that fits. curves: those of the GPUs compared. hosts: those known, the
    profile's own first. extra: sections made elsewhere (`extra.py`). notes: paragraphs for the foot of the page.
    standard: the standard models on this GPU. modes: curves of the same GPUs by mode, of the compiled ones where they
    are at hand.
    """

    profile: Profile
    fit: FitReport | None = None
    measurements: Sequence[Row] = ()
    validation: Sequence[StepComparison] = ()
    anatomy: Sequence[Forecast] = ()
    curves: Sequence[CostCurve] = ()
    title: str = ""
    notes: Sequence[str] = ()
    products: ProductMap | None = None
    batches: Sequence[Forecast] = ()
    batched_model: str = ""
    batched_seq: int = 0
    largest_batch: int | None = None
    hosts: Sequence[HostCosts] = ()
    extra: Sequence[Section] = ()
    standard: StandardGpu | None = None
    modes: ByMode = field(default_factory=dict)
