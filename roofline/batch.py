"""Many at once, from CSV to CSV: forecasts of steps (`sweep`) and times of single operations (`kernels`).

A row that cannot be done stays: its numbers are empty and `reason` says why.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.forecast import MOST, Forecast, Run, forecast_stream, traced_of
from flopcast.roofline.garbage import no_garbage_collection as no_garbage_collection
from flopcast.roofline.lower import Work, describe
from flopcast.roofline.models import Config, check_config, depth_for, load_config, make_config, with_depth
from flopcast.roofline.prefetch import prefetched
from flopcast.roofline.profile import HostCosts, Profile
from flopcast.roofline.stream_cache import Traced
from flopcast.roofline.text_files import as_row, named, read_csv

Row = dict[str, str]
EXTRA = "\0extra"  # cells of a row beyond the header's columns; no column can have this name
MAX_SIZE = 2**40  # of one dimension in `kernels`: beyond it products leave the range of a float

MODEL_COLUMNS = {"width": int, "depth": int, "heads": int, "kv_heads": int, "head_dim": int, "ffn": int, "vocab": int,
                 "tied": bool, "config": str, "depth_law": str}  # fmt: skip
RUN_COLUMNS = {"batch": int, "seq": int, "accumulate": int, "checkpoint": str, "precision": str, "optimizer": str,
               "mode": str, "matmul": str, "attention": str, "fused": str}  # fmt: skip
SWEEP_OUT = (
    "gpu", "profile_basis", "mode", "n_params", "step_seconds", "step_seconds_low", "step_seconds_high",
    "device_seconds", "device_seconds_low", "device_seconds_high", "host_seconds", "host", "bound",
    "tokens_per_second", "flops_counted", "flops_6n", "mfu", "mfu_6n", "peak_flops_per_second", "peak_bytes", "fits",
    "usd_per_step", "flops_per_usd", "price_usd_per_hour", "price_provider", "price_date", "warnings", "reason",
)  # fmt: skip

_Z = 1.6449
GEMM_BACKENDS = ("torch", "triton")
ATTENTION_BACKENDS = ("sdpa", "sdpa-flash", "sdpa-cudnn", "triton")
KERNEL_DTYPES = ("bf16", "fp16", "tf32", "fp32")
KERNELS_IN = ("op", "m", "n", "k", "layout", "batch", "heads", "kv_heads", "seq", "head_dim", "causal", "direction",
              "dtype", "backend", "cache")  # fmt: skip
KERNELS_OUT = ("seconds", "seconds_low", "seconds_high", "tflops", "bound", "basis", "reason")


def read_rows(path: Path) -> tuple[list[str], list[Row]]:
    """(columns, rows) of a CSV file, plain or gzipped; blanks around cells taken off.

    Cells beyond the header's columns are kept as EXTRA: such a row may be shifted, so it is not answered.
    Raises DataError as `text_files.read_csv` does.
    """
    _, columns, lines = read_csv(path)
    rows = []
    for _, cells in lines:
        row = as_row(columns, cells)
        if any(cells[len(columns) :]):
            row[EXTRA] = ", ".join(cells[len(columns) :])
        rows.append(row)
    return columns, rows


def check_columns(path: Path, columns: Sequence[str], valid: Sequence[str]) -> None:
    """Raises UsageError for a column that is not valid: a misspelt one would silently take its default."""
    unknown = [name for name in columns if name not in valid]
    if unknown:
        raise UsageError(f"{path}: unknown columns {named(unknown)}; valid are {', '.join(valid)}")


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Booleans as true and false, floats to 7 digits, None as nothing. Raises UsageError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([format_cell(row.get(name)) for name in columns] for row in rows)
    except OSError as fault:
        raise UsageError(
            f"{path} cannot be written: {fault.strerror}; choose another file with --out"
        ) from fault


def format_cell(value: Any) -> str:
    """As `parse_cell` reads it; a number that is none, NaN or infinite, as nothing."""
    if type(value) is str:  # most cells of a table that is carried through
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.7g}" if isfinite(value) else ""
    return "" if value is None else str(value)


def parse_cell(name: str, text: str, kind: type) -> Any:
    """Raises UsageError when `text` is not of `kind`. 8.0 is an integer: so pandas writes a column with gaps."""
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{name} is {text!r}: valid are true and false")
        return text.lower() == "true"
    if kind is int:
        try:
            return int(text.removesuffix(".0"))
        except ValueError:
            raise UsageError(f"{name} is {text!r}: valid is an integer") from None
    return text


def model_from(options: Mapping[str, Any]) -> Config:
    """A config from the model options by name (None: not given). Raises UsageError."""
    shape = {k: options.get(k) for k in ("width", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied")}
    given = {name: value for name, value in shape.items() if value is not None}
    depth = options.get("depth")
    if options.get("config"):
        if options.get("depth_law"):
            given["depth_law"] = options["depth_law"]
        if given:
            raise UsageError(
                f"config and {', '.join(given)} given: give either a config (with depth to change its layers) or the "
                "shape"
            )
        config = load_config(str(options["config"]))
        return config if depth is None else with_depth(config, depth)
    if "width" not in given:
        raise UsageError("no model: give config (a name or a config.json), or width")
    if depth is None:
        depth = depth_for(given["width"], options.get("depth_law") or "printed")
    return make_config(depth=depth, **given)


def sweep(
    rows: Sequence[Row],
    profile: Profile,
    price_of: Callable[[str], Any],
    *,
    host: HostCosts | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Forecasts each row; `price_of` gives a Price or None for a GPU.

    Streams not at hand are traced by processes of their own while rows are forecast (`prefetch.py`).
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
                result = forecast_stream(stream, one.run, profile, host=host, price=price_of(profile.gpu))
                found[index] |= scalars(result)
            except UsageError as fault:
                found[index]["reason"] = str(fault)
            progress(done + 1 + len(rows) - len(asked), len(rows))
    return found


class Asked(NamedTuple):
    """A row of `sweep`, read."""

    config: Config
    run: Run
    traced: Traced


def _asked(row: Row, profile: Profile) -> Asked:
    """Raises UsageError for what is not valid."""
    kinds = {**MODEL_COLUMNS, **RUN_COLUMNS}
    _check_length(row)
    options = {n: parse_cell(n, row[n], kinds[n]) for n in kinds if row.get(n)}
    run = Run(**{name: options[name] for name in RUN_COLUMNS if name in options})
    run.check()
    config = model_from(options)
    check_config(config)
    return Asked(config, run, traced_of(run, profile))


def scalars(result: Forecast) -> dict[str, Any]:
    """The scalar fields of a forecast, as `sweep` writes them. `reason` stays empty: it marks what was not done."""
    record = result.to_json()
    price = {f"price_{name}": value for name, value in (record["price"] or {}).items()}
    return {
        **{name: record.get(name) for name in SWEEP_OUT},
        **price,
        "depth": result.depth,
        "warnings": "; ".join(result.warnings) or None,
    }


def kernels(rows: Sequence[Row], profile: Profile) -> list[dict[str, Any]]:
    """Times each row's operation alone, launch cost excluded, as graph replay over rotating operands times it."""
    out: list[dict[str, Any]] = [dict(row) for row in rows]
    asked: list[tuple[int, Work, str, str]] = []
    for index, row in enumerate(rows):
        try:
            asked.append((index, *_work_of(row)))
        except UsageError as fault:
            out[index]["reason"] = str(fault)
    gap = profile.ceiling("graph_gap", 0.0)
    floor = profile.ceiling("kernel_floor", 0.0)
    bandwidth = profile.ceiling("hbm_copy", 0.0)
    rates: dict[str, float] = {}
    estimates = profile.estimate([(work, backend, cache) for _, work, backend, cache in asked])
    for (index, work, backend, _cache), found in zip(asked, estimates, strict=True):
        if profile.device["type"] == "cpu" and backend == "triton":
            out[index]["reason"] = "backend triton needs a GPU"
            continue
        seconds = found.seconds + gap * profile.launches(work)
        spread = exp(_Z * found.sigma)
        dtype = getattr(work.shape, "dtype", "bf16")
        if dtype not in rates:
            rates[dtype] = _rate(dtype, profile)
        out[index] |= {
            "seconds": seconds,
            "seconds_low": seconds / spread,
            "seconds_high": seconds * spread,
            "tflops": work.flops / seconds / 1e12,
            "bound": _bound(work, floor, bandwidth, rates[dtype]),
            "basis": found.basis,
            "reason": "",
        }
    return out


def _rate(dtype: str, profile: Profile) -> float:
    """The matrix rate that nothing of this dtype could beat; of one that was not measured the highest of the others,
    which it hardly beats."""
    peaks = {name: number.value for name, number in profile.peaks.items()}
    return profile.ceiling(f"matrix_burst/{dtype}", peaks.get(dtype, max(peaks.values(), default=0.0)))


def _bound(work: Work, floor: float, bandwidth: float, rate: float) -> str:
    """The longest of the three times that nothing could beat: launch floor, bytes, FLOPs."""
    limits = {
        "launch": floor,
        "memory": work.bytes / bandwidth if bandwidth else 0.0,
        "matrix": work.flops / rate if rate else 0.0,
    }
    return max(limits, key=lambda name: limits[name])


def _work_of(row: Row) -> tuple[Work, str, str]:
    """(work, backend, cache) of a row of `kernels`. Raises UsageError."""
    _check_length(row)
    op = row.get("op") or "gemm"
    cache = row.get("cache") or "cold"
    dtype = row.get("dtype") or "bf16"
    _one_of("cache", cache, ("cold", "hot"))
    _one_of("dtype", dtype, KERNEL_DTYPES)
    if op == "gemm":
        backend = row.get("backend") or "torch"
        layout = row.get("layout") or "nt"
        _one_of("backend", backend, GEMM_BACKENDS)
        _one_of("layout", layout, ("nt", "nn", "tn"))
        m, n, k = (_size(row, name) for name in ("m", "n", "k"))
        return describe(Gemm(m=m, n=n, k=k, dtype=dtype, layout=layout), backend), backend, cache
    if op == "attention":
        backend = row.get("backend") or "sdpa"
        direction = row.get("direction") or "fwd"
        _one_of("backend", backend, ATTENTION_BACKENDS)
        _one_of("direction", direction, ("fwd", "bwd"))
        sizes = {name: _size(row, name) for name in ("batch", "heads", "head_dim")}
        sizes["seq"] = _size(row, "seq", MOST["seq"])  # its blocks are dealt out one by one
        sizes["kv_heads"] = _size(row, "kv_heads") if row.get("kv_heads") else sizes["heads"]
        if sizes["heads"] % sizes["kv_heads"]:
            raise UsageError(f"heads {sizes['heads']} is not divisible by kv_heads {sizes['kv_heads']}")
        causal = parse_cell("causal", row.get("causal") or "true", bool)
        shape = Attention(**sizes, causal=causal, direction=direction, dtype=dtype)
        return describe(shape, backend), backend, cache
    raise UsageError(f"op {op!r}: valid are gemm, attention")


def _check_length(row: Row) -> None:
    if EXTRA in row:
        raise UsageError(
            f"the row has cells beyond the last column: {row[EXTRA]}; quote a cell with commas in it"
        )


def _one_of(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise UsageError(f"{name} {value!r}: valid are {', '.join(valid)}")


def _size(row: Row, name: str, most: int = MAX_SIZE) -> int:
    if not row.get(name):
        raise UsageError(f"{name} is missing: valid is an integer of at least 1")
    value = int(parse_cell(name, row[name], int))
    if not 1 <= value <= most:
        raise UsageError(f"{name} is {value}: valid is an integer of at least 1, at most {most}")
    return value
