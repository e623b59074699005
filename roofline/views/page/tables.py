"""The tables of the report page: this GPU, its steps, how wrong their forecasts were (`report_dollars.py`: prices)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flopcast.roofline.base.units import (
    count,
    duration,
    gb_in_column,
    integer,
    ms_in_column,
    percent,
    rate,
    share,
    three_in_column,
    yes_no,
)
from flopcast.roofline.dollars.points import CostCurve
from flopcast.roofline.gpu.profile.roofs import spec_of
from flopcast.roofline.step.forecast import tokens_of, width_of
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.validation.summary import summaries
from flopcast.roofline.views.figures.agreement import RESIDUALS
from flopcast.roofline.views.figures.canvas import Row
from flopcast.roofline.views.page.table import NONE, Column, Table, prose, text

if TYPE_CHECKING:
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


def ceiling_table(profile: Profile) -> Table | None:
    if not profile.ceilings and not profile.peaks:
        return None
    spec = spec_of(profile)
    rows: list[dict[str, Any]] = []
    for name, number in sorted(profile.ceilings.items(), key=_natural):
        head, _, tail = name.partition("/")
        unit, ideal = "s", None
        if head.startswith("matrix"):
            unit = "FLOP/s"
            peak = profile.peaks.get(tail)
            ideal = peak.value if peak is not None and peak.basis != "measured" else None
        elif head in ("hbm_copy", "hbm_read", "hbm_write", "l2_copy", "copy", "l2_read"):
            unit = "B/s"
            ideal = spec.bandwidth_bytes_per_second if spec is not None and head.startswith("hbm") else None
        elif head == "queue_depth":
            unit = "launches"
        of = f"{int(tail) / 2**20:g} MiB" if head in ("copy", "l2_read") else tail
        rows.append({
            "name": name, "what": ", ".join(filter(None, (_CEILINGS.get(head, head), of))), "value": number.value,
            "low": number.low, "high": number.high, "unit": unit, "share": number.value / ideal if ideal else None,
            "basis": number.basis, "source": number.source,
        })  # fmt: skip
    for dtype, number in profile.peaks.items():
        if number.basis != "measured":
            rows.append({"name": f"peak/{dtype}", "what": f"dense peak, {dtype}", "value": number.value,
                         "unit": "FLOP/s", "basis": number.basis, "source": number.source})  # fmt: skip
    if spec is not None:
        rows.append({"name": "bandwidth", "what": "memory bandwidth", "value": spec.bandwidth_bytes_per_second,
                     "unit": "B/s", "basis": "datasheet", "source": spec.source})  # fmt: skip
    for row in rows:
        for end in ("value", "low", "high"):
            row[f"{end}_shown"] = None if row.get(end) is None else _with_unit(row[end], row["unit"])
    shown = [_Shown(end, label) for end, label in (("value", "value"), ("low", "low"), ("high", "high"))]
    columns = [
        text("what", "what"), *shown, text("unit", "SI unit"), Column("share", "of datasheet", share),
        text("basis", "basis"), prose("source", "source"),
    ]  # fmt: skip
    note = "What the device reached, with the 90% interval of its samples, beside what its maker publishes."
    return Table("ceilings", "Ceilings", note, columns, rows)


class _Shown(Column):
    """A number whose unit differs from row to row."""

    def text(self, row: Row) -> str:
        return row.get(f"{self.key}_shown") or NONE


def _with_unit(value: float, unit: str) -> str:
    if unit == "s":
        return duration(value)
    return f"{value:,.0f}" if unit == "launches" else rate(value, unit)


def _natural(entry: tuple[str, Any]) -> tuple[int, int, str]:
    """In the order of _CEILINGS, sizes by number."""
    head, _, tail = entry[0].partition("/")
    place = list(_CEILINGS).index(head) if head in _CEILINGS else 99
    return place, int(tail) if tail.isdigit() else 0, tail


def host_table(profile: Profile) -> Table | None:
    host = profile.host
    if host is None:
        return None
    kinds = {
        "launch": "an op that launches a kernel", "view": "a view or other op without a kernel",
        "host_op": "an op on the host", "per_tensor": "each tensor of a multi-tensor op", "fixed": "once a step",
    }  # fmt: skip
    rows = [
        {"phase": phase, "what": kinds.get(kind, kind), "seconds": seconds, "basis": host.basis}
        for phase in ("forward", "backward", "optimizer")
        for kind, seconds in getattr(host, phase).items()
    ]
    rows.append(
        {"phase": "step", "what": "once a step, outside these", "seconds": host.step_fixed, "basis": host.basis}
    )
    columns = [text("phase", "phase"), text("what", "of"), Column("seconds", "µs", lambda s: f"{s * 1e6:,.2f}"),
               text("basis", "basis")]  # fmt: skip
    note = f"{host.name}. Runs differ by {host.sigma:.0%} (standard deviation of the logarithm); forecasts carry that."
    return Table("host", "Host costs", note, columns, rows)


def cards_table(profile: Profile) -> Table | None:
    """How far the cards of a profile lie apart, by class and cache."""
    gpus = profile.provenance.get("gpus") or {}
    if not gpus.get("classes"):
        return None
    rows = [{"class": name, **found} for name, found in gpus["classes"].items()]
    columns = [
        text("class", "class / cache"), Column("rows", "rows", integer), Column("median", "apart, median", share),
        Column("p90", "90th percentile", share), Column("sigma", "deviation", share), text("slowest", "slowest card"),
        Column("slowest_factor", "above the median", lambda v: percent(v - 1)),
    ]  # fmt: skip
    note = (
        f"{len(gpus['cards'])} cards of this kind measured: the largest over the smallest time of a row, less 1. The "
        "profile is the median card; its forecasts carry the deviation."
    )
    return Table("cards", "How far the cards lie apart", note, columns, rows)


# --- steps


def anatomy_table(found: Sequence[Forecast], curve: CostCurve | None) -> Table | None:
    """The (width, depth) pairs used, with the whole forecast of each."""
    if not found:
        return None
    usd = None if curve is None else curve.price.usd_per_hour / 3600
    rows = [
        {
            "width": width_of(f), "depth": f.depth, "n_params": f.n_params, "step_seconds": f.step_seconds,
            "step_seconds_low": f.step_seconds_low, "step_seconds_high": f.step_seconds_high,
            "device_seconds": f.device_seconds, "host_seconds": f.host_seconds, "bound": f.bound,
            "tokens_per_second": f.tokens_per_second, "mfu": f.mfu, "mfu_6n": f.mfu_6n, "peak_bytes": f.peak_bytes,
            "fits": f.fits, "kernels": f.kernels,
            "usd_per_million_tokens": None if usd is None else usd / f.tokens_per_second * 1e6,
        }
        for f in found
    ]  # fmt: skip
    columns = [
        Column("width", "width", str), Column("depth", "layers", str), Column("n_params", "parameters", count),
        Column("step_seconds", "step, ms", ms_in_column), Column("step_seconds_low", "low", ms_in_column),
        Column("step_seconds_high", "high", ms_in_column), Column("device_seconds", "device, ms", ms_in_column), 
        Column("host_seconds", "host, ms", ms_in_column), text("bound", "bound by"),
        Column("tokens_per_second", "tokens/s", integer), Column("mfu", "MFU, counted", share),
        Column("mfu_6n", "MFU, 6N", share), Column("peak_bytes", "peak memory, GB", gb_in_column),
        Column("fits", "fits", yes_no, is_number=False), Column("kernels", "kernels", integer),
        Column("usd_per_million_tokens", "$/Mtoken", three_in_column),
    ]  # fmt: skip
    dtype_peak = found[0].peak_flops_per_second
    note = (
        f"{tokens_of(found[0]):,} tokens a step, forecast from a {found[0].profile_basis} profile; low and high: 90% "
        f"interval. MFU against a dense peak of {rate(dtype_peak, 'FLOP/s')}: counted = 2 FLOPs per multiply-add of "
        "matrix products and attention, causal halved; 6N = 6 x parameters x tokens."
        + ("" if curve is None else f" Price: {curve.price.label}.")
    )
    return Table("ladder", "Models of the ladder: the (width, depth) pairs used", note, columns, rows)


def batch_table(found: Sequence[Forecast], name: str, seq: int, largest: int | None) -> Table | None:
    """One model over batches: time, rate and memory."""
    if not found:
        return None
    rows = [
        {
            "batch": round(tokens_of(f) / seq), "step_seconds": f.step_seconds, "step_seconds_low": f.step_seconds_low,
            "step_seconds_high": f.step_seconds_high, "device_seconds": f.device_seconds,
            "host_seconds": f.host_seconds, "bound": f.bound, "tokens_per_second": f.tokens_per_second, "mfu": f.mfu,
            "peak_bytes": f.peak_bytes, "needed_bytes": f.needed_bytes, "fits": f.fits,
        }
        for f in found
    ]  # fmt: skip
    columns = [
        Column("batch", "batch", str), Column("step_seconds", "step, ms", ms_in_column),
        Column("step_seconds_low", "low", ms_in_column),
        Column("step_seconds_high", "high", ms_in_column), Column("device_seconds", "device, ms", ms_in_column),
        Column("host_seconds", "host, ms", ms_in_column), text("bound", "bound by"),
        Column("tokens_per_second", "tokens/s", integer), Column("mfu", "MFU, counted", share),
        Column("peak_bytes", "peak memory, GB", gb_in_column), Column("needed_bytes", "needed, GB", gb_in_column),
        Column("fits", "fits", yes_no, is_number=False),
    ]  # fmt: skip
    note = f"{name}, sequences of {seq} tokens, AdamW, autocast to bf16; low and high: 90% interval."
    if largest is not None:
        note += f" The largest batch that fits: {largest:,}."
    return Table("batches", "One model over batches", note, columns, rows)


_VALIDATION_DETAILS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("device_seconds", "device measured, ms", ms_in_column), ("device_forecast", "device forecast, ms", ms_in_column),
    ("host_seconds", "host measured, ms", ms_in_column), ("host_forecast", "host forecast, ms", ms_in_column),
    ("peak_bytes", "memory measured, GB", gb_in_column), ("peak_forecast", "memory forecast, GB", gb_in_column),
    ("kernels", "kernels measured", integer), ("kernels_forecast", "kernels forecast", integer),
    ("width", "width", str), ("depth", "layers", str), ("n_params", "parameters", count),
)  # fmt: skip


def validation_table(rows: Sequence[StepComparison]) -> Table | None:
    """Every step, those that could not run too. The errors come first, what they are made of after them."""
    if not rows:
        return None
    columns = [
        text("label", "step"),
        Column("step_seconds", "measured, ms", ms_in_column),
        Column("step_forecast", "forecast, ms", ms_in_column),
        Column("step_low", "low", ms_in_column),
        Column("step_high", "high", ms_in_column),
        Column("step_error", "step error", percent, is_error=True),
        Column("within_interval", "in interval", yes_no, is_number=False),
        Column("device_error", "device error", percent, is_error=True),
        Column("host_error", "host error", percent, is_error=True),
        Column("peak_error", "memory error", percent, is_error=True),
        text("bound", "bound by"),
        Column("status", "status", is_number=False, is_detail=True),
        Column("group", "set", is_number=False, is_detail=True),
        *(Column(key, label, show, is_detail=True) for key, label, show in _VALIDATION_DETAILS),
        Column("reason", "reason", _short, is_number=False, is_prose=True),
    ]
    note = "Real training steps on this device, none used in fitting. Errors are signed: forecast / measured - 1."
    return Table("validation", "Validation: every step", note, columns, _labelled(rows))


def _short(reason: str) -> str:
    """A reason's beginning; the CSV has it whole."""
    return reason if len(reason) <= 70 else f"{reason[:68].rstrip()} …"


def component_table(rows: Sequence[StepComparison]) -> Table | None:
    if not rows:
        return None
    columns = [text("label", "step")]
    columns += [Column(f"{group}_error", f"{RESIDUALS[group]} error", percent, is_error=True) for group in GROUPS]
    for group in GROUPS:
        columns += [
            Column(f"{group}_seconds", f"{RESIDUALS[group]} measured, ms", ms_in_column, is_detail=True),
            Column(f"{group}_forecast", f"{RESIDUALS[group]} forecast, ms", ms_in_column, is_detail=True),
        ]
    note = "Device time of the same steps by class, forecast against the profiler's kernel times."
    return Table("components", "Validation: device time by class", note, columns, _labelled(rows))


def _labelled(rows: Sequence[StepComparison]) -> list[dict[str, Any]]:
    return [{**row.to_json(), "label": row.label_with_optimizer} for row in rows]


def summary_table(rows: Sequence[StepComparison]) -> Table | None:
    """One line a component: median and worst |error| over all steps and by what bounds them."""
    sets = summaries(rows)
    if not sets:
        return None
    lines = [
        {
            "component": shown,
            **{f"{kind}/{entry.label}": getattr(entry.parts[name], kind) for entry in sets for kind in _KINDS},
        }
        for name, shown in RESIDUALS.items()
        if sets[0].parts[name].median is not None
    ]
    columns = [text("component", "component")]
    for entry in sets:
        label = f"{_SHORT.get(entry.label, entry.label)} ({entry.n})"
        columns += [
            Column(f"{kind}/{entry.label}", label if kind == "median" else kind, share, is_error=True)
            for kind in _KINDS
        ]
    inside = ", ".join(f"{entry.coverage:.0%} of {entry.label} ({entry.n})" for entry in sets)
    note = (
        "|forecast / measured - 1|: the median over so many steps, and beside it the worst. Measured steps inside the "
        f"90% interval: {inside}."
    )
    return Table("summary", "Validation: summary", note, columns, lines)


_KINDS = ("median", "worst")
_SHORT = {"patched with other kernels": "other kernels"}


def fit_table(fit: Mapping[str, Any] | None) -> Table | None:
    """Errors of the fit by class: points left out, and rows that it never saw."""
    if fit is None or not fit["classes"]:
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
        f"|forecast / measured - 1| of single kernels over {fit['n']:,} fitted and {fit['n_holdout']:,} held-out rows. "
        "Left out: each point told from the others of its curve. Held out: never seen by the fit."
    )
    return Table("fit", "Errors of the kernel model by class", note, columns, fit["classes"])
