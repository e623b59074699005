"""Forecasts the steps of many models, one per row, from CSV to CSV, for `flopcast sweep`.

A row that cannot be forecast is kept: its numbers are empty and `reason` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.base.csv_files import Row, check_length, parse_cell
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.prefetch import prefetched
from flopcast.roofline.stream.model.models import MODEL_COLUMNS, Config, check_config, model_from
from flopcast.roofline.stream.model.run import Run, Traced

RUN_COLUMNS = {"batch": int, "seq": int, "accumulate": int, "checkpoint": str, "precision": str, "optimizer": str,
               "mode": str, "matmul": str, "attention": str, "fused": str}  # fmt: skip
SWEEP_OUT = (
    "gpu", "profile_basis", "mode", "n_params", "step_seconds", "step_seconds_low", "step_seconds_high",
    "device_seconds", "device_seconds_low", "device_seconds_high", "host_seconds", "host", "bound",
    "tokens_per_second", "flops_counted", "flops_6n", "mfu", "mfu_6n", "peak_flops_per_second", "peak_bytes", "fits",
    "usd_per_step", "flops_per_usd", "price_usd_per_hour", "price_provider", "price_date", "warnings", "reason",
)  # fmt: skip


def sweep(
    rows: Sequence[Row],
    profile: Profile,
    price_of: Callable[[str], Any],
    *,
    host: HostCosts | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Forecasts each row; `price_of` gives a Price or None for a GPU.

    Streams that are neither shipped nor cached are traced in separate processes while rows are forecast
    (`stream/library/prefetch.py`).
    """
    found: list[dict[str, Any]] = [dict(row) for row in rows]
    asked: dict[int, Asked] = {}
    for index, row in enumerate(rows):
        try:
            asked[index] = _asked(row, profile)
        except UsageError as fault:
            found[index]["reason"] = str(fault)
    wanted = [(one.config, one.traced) for one in asked.values()]
    with prefetched(wanted) as stream_of, no_garbage_collection():
        for done, index in enumerate(asked):
            one = asked[index]
            try:
                stream = stream_of(one.config, one.traced)
                step = PricedStep(stream, one.run, profile, host, price_of(profile.gpu))
                found[index] |= scalars(step.forecast())
            except UsageError as fault:
                found[index]["reason"] = str(fault)
            progress(done + 1 + len(rows) - len(asked), len(rows))
    return found


class Asked(NamedTuple):
    """A parsed row of `sweep`."""

    config: Config
    run: Run
    traced: Traced


def _asked(row: Row, profile: Profile) -> Asked:
    """Parses a row. Raises UsageError for what is not valid."""
    kinds = {**MODEL_COLUMNS, **RUN_COLUMNS}
    check_length(row)
    options = {n: parse_cell(n, row[n], kinds[n]) for n in kinds if row.get(n)}
    run = Run(**{name: options[name] for name in RUN_COLUMNS if name in options})
    run.check()
    config = model_from(**{name: options[name] for name in MODEL_COLUMNS if name in options})
    check_config(config)
    return Asked(config, run, traced_of(run, profile))


def scalars(result: Forecast) -> dict[str, Any]:
    """Returns the scalar fields of a forecast, as `sweep` writes them. `reason` stays empty: it marks rows that could
    not be forecast."""
    record = result.to_json()
    price = {f"price_{name}": value for name, value in (record["price"] or {}).items()}
    return {
        **{name: record.get(name) for name in SWEEP_OUT},
        **price,
        "depth": result.depth,
        "warnings": "; ".join(result.warnings) or None,
    }
