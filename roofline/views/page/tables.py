"""Makes the report page's tables of this GPU, its steps and their forecasts' errors (`dollars.py`: prices)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from flopcast.roofline.base.units import (
    count,
    duration,
    gb_in_column,
    integer,
    ms_in_column,
    percent,
    rate,
    share,
    three_digits,
    three_in_column,
    yes_no,
)
from flopcast.roofline.dollars.points import CostCurve
from flopcast.roofline.gpu.profile.roofs import spec_of
from flopcast.roofline.step.forecast import tokens_of, width_of
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.validation.summary import Summary, summaries
from flopcast.roofline.views.figures.agreement import RESIDUALS
from flopcast.roofline.views.page.table import NONE, Column, Table, prose, text

if TYPE_CHECKING:
    from flopcast.roofline.base.numbers import Number
    from flopcast.roofline.gpu.fit.quality import FitReport
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.step.forecast import Forecast


# --- this GPU

_CEILINGS = {
    "matrix_burst": "matrix products, burst", "matrix_sustained": "matrix products, sustained",
    "hbm_copy": "memory copy", "hbm_read": "memory read", "hbm_write": "memory write",
    "l2_copy": "copy within the cache", "copy": "copy, working set", "l2_read": "read, working set",
    "kernel_floor": "shortest kernel",
    "kernel_floor_cupti": "shortest kernel, by profiler", "kernel_gap": "gap between kernels of a stream",
    "kernel_gap_tiny": "gap between tiny kernels",
    "graph_gap": "gap between kernels of a graph",
    "launch": "host time of a launch", "launch_inplace": "host time of an in-place launch",
    "sync": "host time of a synchronisation", "queue_depth": "launches that the queue holds",
}  # fmt: skip


@dataclass(frozen=True)
class Ceiling:
    """A value that the device reaches or its maker publishes. `share`: its share of the published value."""

    what: str
    value: float
    unit: str
    basis: str
    source: str
    low: float | None = None
    high: float | None = None
    share: float | None = None


def ceiling_table(profile: Profile) -> Table | None:
    if not profile.ceilings and not profile.peaks:
        return None
    spec = spec_of(profile)
    published = {dtype: number for dtype, number in profile.peaks.items() if number.basis != "measured"}
    ideals = {f"matrix_{kind}/{dtype}": n.value for dtype, n in published.items() for kind in ("burst", "sustained")}
    if spec is not None:
        ideals |= {f"hbm_{kind}": spec.bandwidth_bytes_per_second for kind in ("copy", "read", "write")}
    rows = [_ceiling(name, number, ideals.get(name)) for name, number in sorted(profile.ceilings.items(), key=_natural)]
    rows += [
        Ceiling(f"dense peak, {dtype}", number.value, "FLOP/s", number.basis, number.source)
        for dtype, number in published.items()
    ]
    if spec is not None:
        rows.append(Ceiling("memory bandwidth", spec.bandwidth_bytes_per_second, "B/s", "datasheet", spec.source))
    columns = [
        text("what", "what"), *(_InOwnUnit(end, end) for end in ("value", "low", "high")), text("unit", "SI unit"),
        Column("share", "of datasheet", share), text("basis", "basis"), prose("source", "source"),
    ]  # fmt: skip
    note = "What the device reached, with the 90% interval of its samples, beside what its maker publishes."
    return Table("ceilings", "Ceilings", note, columns, rows)


def _ceiling(name: str, number: Number, ideal: float | None) -> Ceiling:
    head, _, tail = name.partition("/")
    unit = next((unit for start, unit in _UNITS.items() if head.startswith(start)), "s")
    of = f"{int(tail) / 2**20:g} MiB" if head in ("copy", "l2_read") else tail
    return Ceiling(
        ", ".join(filter(None, (_CEILINGS.get(head, head), of))), number.value, unit, number.basis, number.source,
        number.low, number.high, number.value / ideal if ideal else None,
    )  # fmt: skip


_UNITS = {"matrix": "FLOP/s", "hbm": "B/s", "l2": "B/s", "copy": "B/s", "queue_depth": "launches"}


class _InOwnUnit(Column):
    """A number whose unit differs from row to row."""

    def text(self, row: Any) -> str:
        value = self.value(row)
        if value is None:
            return NONE
        if row.unit == "s":
            return duration(value)
        return integer(value) if row.unit == "launches" else rate(value, row.unit)


def _natural(entry: tuple[str, Number]) -> tuple[int, int, str]:
    """Sort key: the order of _CEILINGS, then sizes by number."""
    head, _, tail = entry[0].partition("/")
    place = list(_CEILINGS).index(head) if head in _CEILINGS else 99
    return place, int(tail) if tail.isdigit() else 0, tail


class HostCost(NamedTuple):
    phase: str
    what: str
    seconds: float


def host_table(profile: Profile) -> Table | None:
    host = profile.host
    if host is None:
        return None
    kinds = {
        "launch": "an op that launches a kernel", "view": "a view or other op without a kernel",
        "host_op": "an op on the host", "per_tensor": "each tensor of a multi-tensor op", "fixed": "once a step",
    }  # fmt: skip
    rows = [
        HostCost(phase, kinds.get(kind, kind), seconds)
        for phase in ("forward", "backward", "optimizer")
        for kind, seconds in getattr(host, phase).items()
    ]
    if host.step_fixed:
        rows.append(HostCost("step", "once a step, outside these", host.step_fixed))
    columns = [text("phase", "phase"), text("what", "of"), Column("seconds", "µs", lambda s: f"{s * 1e6:,.2f}"),
               text("basis", "basis", lambda _: host.basis)]  # fmt: skip
    differ = "Runs" if host.n_machines < 2 else f"The mean of {host.n_machines} machines, which"
    note = (
        f"{host.name}. {differ} differ by {host.sigma:.0%} (standard deviation of the logarithm); forecasts carry that."
    )
    return Table("host", "Host costs", note, columns, rows)


def cards_table(profile: Profile) -> Table | None:
    """How far the cards of a profile differ, by class and cache."""
    gpus = profile.provenance.get("gpus") or {}
    if not gpus.get("classes"):
        return None
    rows = [{"class": name, **found} for name, found in gpus["classes"].items()]
    columns = [
        text("class", "class / cache"), Column("rows", "rows", integer), Column("median", "apart, median", share),
        Column("p90", "90th percentile", share), Column("sigma", "deviation", share), text("slowest", "slowest card"),
        Column("slowest_factor", "above the median", lambda factor: percent(factor - 1)),
    ]  # fmt: skip
    note = (
        f"{len(gpus['cards'])} cards of this kind measured: the largest over the smallest time of a row, less 1. The "
        "profile is the median card; its forecasts carry the deviation."
    )
    return Table("cards", "How far the cards lie apart", note, columns, rows)


# --- steps

_STEP = (
    Column("step_seconds", "step, ms", ms_in_column), Column("step_seconds_low", "low", ms_in_column),
    Column("step_seconds_high", "high", ms_in_column), Column("device_seconds", "device, ms", ms_in_column),
    Column("host_seconds", "host, ms", ms_in_column), text("bound", "bound by"),
    Column("tokens_per_second", "tokens/s", three_digits), Column("mfu", "MFU, counted", share),
)  # fmt: skip
_PEAK = Column("peak_bytes", "peak memory, GB", gb_in_column)
_FITS = Column("fits", "fits", yes_no, is_number=False)


def anatomy_table(found: Sequence[Forecast], curve: CostCurve | None) -> Table | None:
    """The (width, depth) pairs used, with the whole forecast of each."""
    if not found:
        return None
    price = None if curve is None else curve.price
    usd = None if price is None else price.usd_per_hour / 3600
    columns = [
        Column("width", "width", of=width_of), Column("depth", "layers"), Column("n_params", "parameters", count),
        *_STEP, Column("mfu_6n", "MFU, 6N", share), _PEAK, _FITS, Column("kernels", "kernels", integer),
        Column("usd_per_million_tokens", "$/Mtoken", three_in_column,
               lambda step: usd / step.tokens_per_second * 1e6 if usd is not None and step.fits else None),
    ]  # fmt: skip
    note = (
        f"{tokens_of(found[0]):,} tokens per step, forecast from a {found[0].profile_basis} profile; low and high: 90% "
        f"interval. MFU against a dense peak of {rate(found[0].peak_flops_per_second, 'FLOP/s')}: counted = 2 FLOPs "
        "per multiply-add of matrix products and attention, causal halved; 6N = 6 x parameters x tokens."
        + ("" if price is None else f" Price: {price.label}.")
    )
    return Table("ladder", "Models of the ladder: the (width, depth) pairs used", note, columns, found)


def batch_table(found: Sequence[Forecast], name: str, seq: int, largest: int | None) -> Table | None:
    """One model over batches: time, rate and memory."""
    if not found:
        return None
    columns = [
        Column("batch", "batch", of=lambda step: round(tokens_of(step) / seq)), *_STEP, _PEAK,
        Column("needed_bytes", "needed, GB", gb_in_column), _FITS,
    ]  # fmt: skip
    note = f"{name}, sequences of {seq} tokens, AdamW, autocast to bf16; low and high: 90% interval."
    if largest is not None:
        note += f" The largest batch that fits: {largest:,}."
    return Table("batches", "One model over batches", note, columns, found)


_LABEL = text("label", "step", attrgetter("label_with_optimizer"))


def validation_table(rows: Sequence[StepComparison]) -> Table | None:
    """Every step, including those that could not run. Errors come first, then the values that they are made from."""
    if not rows:
        return None
    columns = [
        _LABEL,
        Column("step_seconds", "measured, ms", ms_in_column, attrgetter("step.measured")),
        Column("step_forecast", "forecast, ms", ms_in_column, attrgetter("step.forecast")),
        Column("step_low", "low", ms_in_column, attrgetter("step.low")),
        Column("step_high", "high", ms_in_column, attrgetter("step.high")),
        Column("step_error", "step error", percent, attrgetter("step.error"), is_error=True),
        Column("within_interval", "in interval", yes_no, attrgetter("step.is_within"), is_number=False),
        Column("device_error", "device error", percent, attrgetter("device.error"), is_error=True),
        Column("host_error", "host error", percent, attrgetter("host.error"), is_error=True),
        Column("peak_error", "memory error", percent, attrgetter("peak.error"), is_error=True),
        text("bound", "bound by"),
        Column("status", "status", is_number=False, is_detail=True),
        Column("group", "set", of=attrgetter("plan.group"), is_number=False, is_detail=True),
        Column("device_seconds", "device measured, ms", ms_in_column, attrgetter("device.measured"), is_detail=True),
        Column("device_forecast", "device forecast, ms", ms_in_column, attrgetter("device.forecast"), is_detail=True),
        Column("host_seconds", "host measured, ms", ms_in_column, attrgetter("host.measured"), is_detail=True),
        Column("host_forecast", "host forecast, ms", ms_in_column, attrgetter("host.forecast"), is_detail=True),
        Column("peak_bytes", "memory measured, GB", gb_in_column, attrgetter("peak.measured"), is_detail=True),
        Column("peak_forecast", "memory forecast, GB", gb_in_column, attrgetter("peak.forecast"), is_detail=True),
        Column("kernels", "kernels measured", integer, attrgetter("kernels.measured"), is_detail=True),
        Column("kernels_forecast", "kernels forecast", integer, attrgetter("kernels.forecast"), is_detail=True),
        Column("width", "width", is_detail=True),
        Column("depth", "layers", is_detail=True),
        Column("n_params", "parameters", count, is_detail=True),
        Column("reason", "reason", _short, is_number=False, is_prose=True),
    ]
    note = "Real training steps on this device, none used in fitting. Errors are signed: forecast / measured - 1."
    return Table("validation", "Validation: every step", note, columns, rows)


def _short(reason: str) -> str:
    """The beginning of a reason; the CSV has the whole."""
    return reason if len(reason) <= 70 else f"{reason[:68].rstrip()} …"


def component_table(rows: Sequence[StepComparison]) -> Table | None:
    if not rows:
        return None

    def column(group: str, key: str, label: str, what: str, show: Callable[[Any], str], **how: Any) -> Column:
        shown = f"{RESIDUALS[group]} {label}"
        return Column(f"{group}_{key}", shown, show, lambda row: getattr(row.classes[group], what), **how)

    measured = [group for group in GROUPS if any(row.classes[group].measured for row in rows)]
    columns = [_LABEL, *(column(group, "error", "error", "error", percent, is_error=True) for group in measured)]
    for group in measured:
        columns += [
            column(group, "seconds", "measured, ms", "measured", ms_in_column, is_detail=True),
            column(group, "forecast", "forecast, ms", "forecast", ms_in_column, is_detail=True),
        ]
    note = "Device time of the same steps by class, forecast against the profiler's kernel times."
    return Table("components", "Validation: device time by class", note, columns, rows)


def summary_table(rows: Sequence[StepComparison]) -> Table | None:
    """One line for each component: median and worst |error| over all steps and by what bounds them."""
    sets = summaries(rows)
    if not sets:
        return None
    columns = [text("component", "component", RESIDUALS.get)]
    for entry in sets:
        label = f"{_SHORT.get(entry.label, entry.label)} ({entry.n})"
        columns += [
            Column(f"{kind}/{entry.label}", heading, share, _error(entry, kind), is_error=True)
            for kind, heading in (("median", label), ("worst", "worst"))
        ]
    inside = ", ".join(f"{entry.coverage:.0%} of {entry.label} ({entry.n})" for entry in sets)
    note = (
        "|forecast / measured - 1|: the median over so many steps, and beside it the worst. Measured steps inside the "
        f"90% interval: {inside}."
    )
    components = [name for name in RESIDUALS if sets[0].parts[name].median is not None]
    return Table("summary", "Validation: summary", note, columns, components)


def _error(entry: Summary, kind: str) -> Callable[[str], float | None]:
    """The median or worst error of a component in a set of steps."""
    return lambda component: getattr(entry.parts[component], kind)


_SHORT = {"patched with other kernels": "other kernels"}


def fit_table(fit: FitReport | None) -> Table | None:
    """Errors of the fit by class: at points left out of it, and at rows that it never saw."""
    if fit is None or not fit.classes:
        return None
    columns = [
        text("name", "backend / class / cache"),
        Column("n", "fitted", integer),
        Column("left_out_median", "left out, median", share, is_error=True),
        Column("left_out_p90", "90th percentile", share, is_error=True),
        Column("n_holdout", "held out", integer),
        Column("holdout_median", "held out, median", share, is_error=True),
        Column("holdout_p90", "90th percentile", share, is_error=True),
        Column("holdout_coverage", "in 90% interval", share),
    ]
    note = (
        f"|forecast / measured - 1| of single kernels over {fit.n:,} fitted and {fit.n_holdout:,} held-out rows. "
        "Left out: each point told from the others of its curve. Held out: never seen by the fit."
    )
    return Table("fit", "Errors of the kernel model by class", note, columns, fit.classes)
