"""Forecast against real steps, component by component: device time by class, host, step, memory, kernels.

The measured side are the rows that `microbench.run_steps` wrote; none of them is used in fitting. Errors are
signed, forecast / measured - 1: what cancels in the step shows in its parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from flopcast.errors import UsageError
from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast, forecast_stream, traced_of
from flopcast.roofline.step.uncertainty import is_synchronous
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.classes import GROUPS, op_class
from flopcast.roofline.stream.model.run import Run, run_from
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.validation import baselines
from flopcast.roofline.validation.comparable import check_stack, check_stream, release
from flopcast.roofline.validation.host_of_run import hosts_of_runs
from flopcast.roofline.validation.step_plans import GROUP as INTERVALS

Row = dict[str, Any]

# How a step was run, with what a plan of an older version means that does not say it.
_RUN_DEFAULTS = {
    "batch": None, "seq": None, "precision": "autocast-bf16", "optimizer": None, "matmul": "torch",
    "attention": "sdpa", "accumulate": 1, "checkpoint": "none", "fused": "none",
    "module": "",
}  # fmt: skip

ESTIMATES = "estimates"  # folder beside steps, of torch's estimates that were made apart

COLUMNS = (
    "name", "group", "width", "depth", *_RUN_DEFAULTS, "n_params", "status", "reason",
    "step_seconds", "step_forecast", "step_low", "step_high", "step_error", "within_interval", "interval_width",
    "step_error_profile_host",
    "device_seconds", "device_forecast", "device_error", "device_low", "device_high", "device_within",
    "host_seconds", "host_forecast", "host_error", "host_sigma",
    "peak_bytes", "peak_forecast", "peak_error", "kernels", "kernels_forecast", "bound",
    *(f"{group}_{what}" for group in GROUPS for what in ("seconds", "forecast", "error")),
    *(f"{method}_{what}" for method in baselines.METHODS for what in ("forecast", "error")),
    "measured_share", "host_calibrated", "used_in_fit", "used_in_intervals", "clock_mhz", "transformers", "torch",
)  # fmt: skip


def compare(
    measured: Iterable[Mapping[str, Any]],
    profile: Profile,
    *,
    stack: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """One row a real step, in the order of `measured` (rows of `run_steps`; of several of one step the last counts).

    Where the tiny models of the host calibration ran between the steps, the host of the forecast is the one of that
    run, as it was at that moment, else the profile's: one process differs from the next by more than the forecast is
    wrong. A step that did not run, or cannot be forecast, keeps its row with a reason. `stack`: the versions that the
    steps ran with; UsageError where they are not those of profile and streams. None: not asked.
    """
    found = list(measured)
    if stack is not None:
        check_stack(stack, profile)
    hosts = hosts_of_runs(found, profile)
    steps = {row["key"]: row for row in found if row["key"].startswith("step/")}
    parts = {row["key"].partition("/")[2]: row for row in found if row["key"].startswith("step_kernels/")}
    estimates = {row["key"].partition("/")[2]: row for row in found if row["key"].startswith("step_estimate/")}
    streams = _Streams()
    rows = []
    for number, (key, row) in enumerate(steps.items()):
        name = key.partition("/")[2]
        estimate = estimates.get(name, {})
        whole = {**row, **_device_part(parts.get(name)), "torch_estimate": estimate.get("value")}
        run_host = hosts.get(row.get("session"))
        host = None if run_host is None else run_host.at(row.get("host_samples_before"))
        rows.append(_compare(whole, profile, host, streams, stack))
        progress(number + 1, len(steps))
    return rows


def compare_runs(
    folder: Path,
    profile: Profile,
    *,
    estimates: Path | None = None,
    any_stack: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """As `compare`, of a folder of steps, or of one with those of several machines in run0, run1, ...: each run's host
    is its own. Raises what `read_steps` does, and UsageError for another stack unless `any_stack`."""
    from flopcast.microbench.records import records

    runs = step_folders(folder)
    if estimates is None and records.file_in(folder / ESTIMATES).is_file():
        estimates = folder / ESTIMATES
    rows: list[Row] = []
    for run in runs:
        stack = None if any_stack else records.read_machine(run)["stack"]
        rows += compare(read_steps(run, estimates), profile, stack=stack, progress=progress)
    return rows


def step_folders(folder: Path) -> list[Path]:
    """The folder itself, or the runs that lie in it."""
    from flopcast.roofline.gpu.fit.cards import run_folders

    return list(run_folders(folder).values()) or [folder]


def read_steps(folder: Path, estimates: Path | None = None) -> list[Row]:
    """The rows of a folder of real steps, and those of torch's estimates that were made apart (`validate
    --only-estimates`): in `estimates`, else in the folder's own "estimates" where it has one.

    Raises UsageError where another kind of GPU or release of torch made them than ran the steps, or none were made.
    """
    from flopcast.microbench.records import records

    rows = records.read(folder).rows
    if estimates is None:
        estimates = folder / ESTIMATES
        if not records.file_in(estimates).is_file():
            return rows
    if not records.file_in(estimates).is_file():
        raise UsageError(f"{estimates} holds no estimates: `flopcast validate --only-estimates` makes them")
    made, ran = (
        (machine["device"].get("name"), release(machine["stack"]["torch"]))
        for machine in map(records.read_machine, (estimates, folder))
    )
    if made != ran:
        raise UsageError(
            f"the estimates in {estimates} were made on {made[0]} with torch {made[1]}, the steps ran on {ran[0]} with "
            f"torch {ran[1]}: run `flopcast validate --only-estimates` on such a GPU"
        )
    found = [
        row for row in records.read(estimates).rows if row["key"].startswith("step_estimate/") and row["status"] == "ok"
    ]
    if not found:
        raise UsageError(f"{estimates} holds no estimate that was made: see `reason` in its rows")
    return rows + found


def _device_part(kernels: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the profiled run of a step adds to its times; nothing known where it was not run or failed."""
    empty: dict[str, Any] = {"device_seconds": None, "n_kernels": None, "ops": {}}
    if kernels is None or kernels["status"] != "ok":
        return empty
    return {name: kernels[name] for name in empty}


class _Streams:
    """The stream of the step at hand, kept for the next: neighbours often differ in their kernels alone."""

    def __init__(self) -> None:
        self._key: Any = None
        self._stream: Stream | None = None

    def of(self, plan: Mapping[str, Any], run: Run, profile: Profile) -> Stream:
        key = canonical_json([plan["config"], plan.get("module"), asdict(traced_of(run, profile))])
        if self._stream is None or key != self._key:
            self._stream = stream_of(plan, run, profile)
            self._key = key
        return self._stream


def stream_of(plan: Mapping[str, Any], run: Run, profile: Profile) -> Stream:
    """The op stream of a row's plan. Raises UsageError as `forecast` does."""
    if plan.get("module"):
        from flopcast.roofline.stream.tracer.trace import trace_module

        traced = asdict(traced_of(run, profile))
        traced.pop("fused")  # of Qwen3 alone, which is no module of a factory
        return trace_module(plan["module"], sizes={"batch": traced.pop("batch"), "seq": traced.pop("seq")}, **traced)
    return get_stream(plan["config"], traced_of(run, profile))


def run_of(plan: Mapping[str, Any]) -> Run:
    """How a plan of a row is run; rows of older versions lack what did not exist then."""
    names = ("batch", "seq", "precision", "optimizer", "attention", "matmul", "accumulate", "checkpoint", "fused")
    return run_from({name: plan.get(name) for name in names})


def _compare(
    row: Mapping[str, Any], profile: Profile, host: HostCosts | None, streams: _Streams, stack: Mapping[str, Any] | None
) -> Row:
    plan = row["plan"]
    config = plan["config"]
    base: Row = {
        **dict.fromkeys(COLUMNS),
        "name": plan["name"], "group": plan["group"], "width": config.get("hidden_size", config.get("n_embd")),
        "depth": config.get("num_hidden_layers", config.get("n_layer")),
        **{name: plan.get(name, default) for name, default in _RUN_DEFAULTS.items()},
        "status": row["status"], "reason": row.get("reason"), "used_in_fit": False,
        "used_in_intervals": plan["group"] == INTERVALS,
        "host_calibrated": "in the same run" if host is not None else "with the profile",
        "clock_mhz": row.get("clock_mhz"),
    }  # fmt: skip
    try:
        run = run_of(plan)
        run.check()
        stream = streams.of(plan, run, profile)
        if stack is not None:
            check_stream(stream, stack)
        found = forecast_stream(stream, run, profile, host=host)
        shipped = found if host is None else forecast_stream(stream, run, profile)
    except UsageError as fault:
        if stack is not None and "--any-stack" in str(fault):
            raise
        return {**base, "reason": base["reason"] or str(fault)}
    base |= {
        "n_params": found.n_params, "step_forecast": found.step_seconds, "step_low": found.step_seconds_low,
        "step_high": found.step_seconds_high, "device_forecast": found.device_seconds,
        "device_low": found.device_seconds_low, "device_high": found.device_seconds_high,
        "host_forecast": found.host_seconds, "peak_forecast": found.peak_bytes,
        "host_sigma": None if host is None else host.sigma,
        "kernels_forecast": found.kernels, "bound": found.bound,
        "measured_share": found.basis_shares.get("measured"),
        "torch": found.stack["stream"]["torch"], "transformers": found.stack["stream"]["transformers"],
        "roofline_forecast": baselines.roofline(stream, profile), "torch_forecast": row.get("torch_estimate"),
    }  # fmt: skip
    if not plan.get("module"):  # tokens of a module are not known
        tokens = run.batch * run.seq * run.accumulate
        base["six_n_forecast"] = baselines.six_n(found.n_params, tokens, found.peak_flops_per_second)
    base |= {f"{group}_forecast": seconds for group, seconds in _forecast_groups(found).items()}
    if row["status"] != "ok":
        if row["status"] == "oom" and not found.fits:
            base["reason"] = f"out of memory, as forecast ({found.needed_bytes / 1e9:.0f} GB needed): {row['reason']}"
        return base
    base |= {
        "step_seconds": row["value"], "device_seconds": row["device_seconds"],
        "host_seconds": row["host_seconds"], "peak_bytes": row["peak_bytes"], "kernels": row["n_kernels"],
        "within_interval": found.step_seconds_low <= row["value"] <= found.step_seconds_high,
        "interval_width": (found.step_seconds_high - found.step_seconds_low) / found.step_seconds,
    }  # fmt: skip
    if row["device_seconds"] is not None:
        base["device_within"] = found.device_seconds_low <= row["device_seconds"] <= found.device_seconds_high
    if is_synchronous(profile):  # an op runs when it is called: the host's share is what the operators leave
        left = None if row["device_seconds"] is None else row["value"] - row["device_seconds"]
        base |= {"host_seconds": left, "kernels": None, "kernels_forecast": None}
    if row["ops"]:
        base |= {f"{group}_seconds": seconds for group, seconds in _measured_groups(row["ops"]).items()}
    for name in ("step", "device", "host", *GROUPS):
        base[f"{name}_error"] = signed_error(base[f"{name}_forecast"], base[f"{name}_seconds"])
    for name in baselines.METHODS:
        base[f"{name}_error"] = signed_error(base[f"{name}_forecast"], base["step_seconds"])
    base["step_error_profile_host"] = signed_error(shipped.step_seconds, base["step_seconds"])
    is_long = (base["kernels"] or 0) > profile.ceiling("queue_depth", 1024)
    if is_long and row["host_seconds"] < row["device_seconds"]:
        base["host_error"] = None  # the queue was full: the host's time was the device's
    base["peak_error"] = signed_error(base["peak_forecast"], base["peak_bytes"])
    return base


def signed_error(forecast_value: float | None, measured: float | None) -> float | None:
    """forecast / measured - 1; None where either is missing or nothing was measured."""
    return None if forecast_value is None or not measured or measured <= 0 else forecast_value / measured - 1


def _forecast_groups(found: Forecast) -> dict[str, float]:
    by_class = {share.op_class: share.seconds for share in found.breakdown}
    return {group: sum(by_class.get(name, 0.0) for name in names) for group, names in GROUPS.items()}


def _measured_groups(ops: Mapping[str, Sequence[float]]) -> dict[str, float]:
    by_class: dict[str, float] = defaultdict(float)
    for op, (seconds, _count) in ops.items():
        by_class[op_class(op)] += seconds
    return {group: sum(by_class.get(name, 0.0) for name in names) for group, names in GROUPS.items()}


# What is summed up together: the forecast's own ground first, then each kind of step that is more than that.
SUMMED = {"options": "options", "patched": "patched with other kernels", "other families": "other families"}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Median and worst |error| of each component: of plain Qwen3 steps, all and by what bounds them, then of the other
    groups. `coverage`: the share inside the 90% interval, `interval_width` its mean width over the step.

    Steps that the intervals are estimated from (group "intervals") are in none.
    """
    done = [row for row in rows if row["status"] == "ok" and row["group"] != INTERVALS]
    plain = [row for row in done if row["group"] not in SUMMED]
    sets = {
        "all": plain,
        "device-bound": [row for row in plain if row["bound"] != "host"],
        "host-bound": [row for row in plain if row["bound"] == "host"],
        **{label: [row for row in done if row["group"] == group] for group, label in SUMMED.items()},
    }
    result = []
    for label, members in sets.items():
        entry: Row = {"rows": label, "n": len(members)}
        for name in ("step", "device", "host", "peak", *GROUPS):
            errors = [abs(row[f"{name}_error"]) for row in members if row[f"{name}_error"] is not None]
            entry[f"{name}_median"] = median(errors) if errors else None
            entry[f"{name}_worst"] = max(errors, default=None)
        for kind, field in (("", "within_interval"), ("device_", "device_within")):
            inside = [row[field] for row in members if row.get(field) is not None]
            entry[f"{kind}coverage"] = sum(inside) / len(inside) if inside else None
        widths = [row["interval_width"] for row in members if row.get("interval_width") is not None]
        entry["interval_width"] = sum(widths) / len(widths) if widths else None
        if members:
            result.append(entry)
    return result


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All columns, empty where there is no value. Raises UsageError when it cannot be written."""
    write_rows(path, COLUMNS, rows)
