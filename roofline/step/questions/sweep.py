"""Forecasts a table of steps on one GPU or several, for `flopcast sweep`.

A step is traced once for all GPUs, and the batches of one model are derived from two traced ones where it allows that.
A row that cannot be forecast is kept: its numbers are empty and `reason` says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.base.csv_files import Row, check_length, parse_cell
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.memory.peak import PARTS
from flopcast.roofline.step.questions.many_gpus import MANY_GPUS, Gpu, Step, forecasting
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.library.prefetch import prefetched
from flopcast.roofline.stream.model.models import MODEL_COLUMNS, Config, check_config, model_from
from flopcast.roofline.stream.model.run import Run, run_from
from flopcast.roofline.stream.ops.op_stream import Stream

RUN_COLUMNS: Mapping[str, type] = {name: type(value) for name, value in Run().to_json().items()}
SWEEP_OUT = (
    "gpu", "profile_basis", "mode", "n_params", "step_seconds", "step_seconds_low", "step_seconds_high",
    "device_seconds", "device_seconds_low", "device_seconds_high", "host_seconds", "host", "bound",
    "tokens_per_second", "flops_counted", "flops_6n", "mfu", "mfu_6n", "peak_flops_per_second", "peak_bytes", "fits",
    "usd_per_step", "flops_per_usd", "price_usd_per_hour", "price_provider", "price_date",
    "price_age_days", "warnings", "reason",
)  # fmt: skip
# Further columns where steps on several GPUs are among the rows.
_OF_PARALLEL = ("num_gpus", "communication_seconds", "exposed_communication_seconds", "contention_seconds",
                "bubble_seconds")  # fmt: skip
PARALLEL_OUT = (*_OF_PARALLEL, *(f"memory_{part}" for part in PARTS))
CHUNK = 32  # steps that are held at once, of 10 MB each


def sweep(
    rows: Sequence[Row],
    gpus: Sequence[Gpu],
    price_of: Callable[[str], Price | None],
    *,
    module: Module | None = None,
    host: HostCosts | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Forecasts each row on each GPU: the rows of the first step on all GPUs, then those of the second.

    `module`: whose steps all rows are; without it a row says which model. `price_of`: a GPU's price, by its name.
    Streams of configs that are neither shipped nor cached are traced in separate processes
    (`stream/library/prefetch.py`).
    """
    asked: dict[int, Asked] = {}
    reasons: dict[int, str] = {}
    for index, row in enumerate(rows):
        try:
            asked[index] = _asked(row, module)
        except UsageError as fault:
            reasons[index] = str(fault)
    gpus = [gpu.shared_by(one.run for one in asked.values()) for gpu in gpus]
    found: list[dict[Gpu, dict[str, Any]]] = [
        {gpu: {**row, "gpu": gpu.gpu} if len(gpus) > 1 else {**row} for gpu in gpus} for row in rows
    ]
    done, total = 0, len(rows) * len(gpus)

    def refuse(index: int, reason: str) -> None:
        nonlocal done
        done += len(gpus)
        for row in found[index].values():
            row["reason"] = reason

    for index, reason in reasons.items():
        refuse(index, reason)
    devices = sorted({gpu.device for gpu in gpus})
    with (
        forecasting(gpus, host, price_of) as forecast_on,
        _streams(list(asked.values()), module, devices, progress) as stream_of,
        no_garbage_collection(),
    ):
        at_once = CHUNK if len(gpus) >= MANY_GPUS else 1
        indices = list(asked)
        for part in (indices[start : start + at_once] for start in range(0, len(indices), at_once)):
            steps: dict[int, dict[str, Step]] = {}
            for index in part:
                try:
                    traced = {device: stream_of(asked[index], device) for device in devices}
                except UsageError as fault:
                    refuse(index, str(fault))
                    continue
                run = asked[index].run
                steps[index] = {device: Step(stream, run_of_stream(stream, run)) for device, stream in traced.items()}
            by_device = {device: [step[device] for step in steps.values()] for device in devices}
            for gpu, outcomes in forecast_on(by_device):
                for index, outcome in zip(steps, outcomes, strict=True):
                    found[index][gpu] |= {"reason": outcome} if isinstance(outcome, str) else scalars(outcome)
                done += len(outcomes)
                progress(done, total)
    return [row for by_gpu in found for row in by_gpu.values()]


class Asked(NamedTuple):
    """A parsed row of `sweep`. `sizes`: those of a module's factory that the row names; `config`: None for a module."""

    config: Config | None
    run: Run
    sizes: Mapping[str, int]


def _asked(row: Row, module: Module | None) -> Asked:
    """Parses a row. Raises UsageError for what is not valid."""
    kinds = {**({} if module else MODEL_COLUMNS), **RUN_COLUMNS}
    check_length(row)
    options = {n: parse_cell(n, row[n], kinds[n]) for n in kinds if row.get(n)}
    run = run_from(options)
    if run.phase != "train" and "precision" not in options:
        run = replace(run, precision="bf16")  # as `predict` takes it
    run.check()
    if module is not None:
        return Asked(None, run, {name: options[name] for name in ("batch", "seq") if name in options})
    config = model_from(**{name: options[name] for name in MODEL_COLUMNS if name in options})
    check_config(config)
    return Asked(config, run, {})


@contextmanager
def _streams(
    asked: Sequence[Asked], module: Module | None, devices: Sequence[str], progress: Callable[[int, int], None]
) -> Iterator[Callable[[Asked, str], Stream]]:
    """Yields a function that returns the stream of a row on a device; it raises UsageError."""
    if module is not None:
        yield _module_streams(asked, module)
        return
    wanted = []
    for one in asked:
        with suppress(UsageError):  # raised again when the row's turn comes
            wanted += [(one.config or {}, one.run.traced_on(device)) for device in devices]
    with prefetched(wanted, progress) as stream_of:
        yield lambda one, device: stream_of(one.config or {}, one.run.traced_on(device))


def _module_streams(asked: Sequence[Asked], module: Module) -> Callable[[Asked, str], Stream]:
    batches: dict[tuple[Any, ...], set[int]] = defaultdict(set)

    def key_of(one: Asked) -> tuple[Any, ...]:
        rest = {name: size for name, size in one.sizes.items() if name != "batch"}
        return replace(one.run, batch=1), *sorted(rest.items())

    for one in asked:
        if "batch" in one.sizes:
            batches[key_of(one)].add(one.sizes["batch"])

    @cache
    def at_batches(run: Run, *sizes_and_device: Any) -> Callable[[int], Stream]:
        *sizes, device = sizes_and_device
        return module.resized(**dict(sizes)).at_batches(run, device, batches[run, *sizes])

    def stream_of(one: Asked, device: str) -> Stream:
        if "batch" not in one.sizes:
            return module.resized(**one.sizes).stream(one.run, device)
        module.resized(batch=one.sizes["batch"])  # raises where the factory takes none
        return at_batches(*key_of(one), device)(one.sizes["batch"])

    return stream_of


def scalars(result: Forecast) -> dict[str, Any]:
    """Returns the scalar fields of a forecast, as `sweep` writes them. `reason` stays empty: it marks rows that could
    not be forecast."""
    record = result.to_json()
    price = {f"price_{name}": value for name, value in (record["price"] or {}).items()}
    of_parallel = {}
    if result.num_gpus > 1:
        of_parallel = {name: record[name] for name in _OF_PARALLEL}
        of_parallel |= {f"memory_{part}": size for part, size in result.memory.items()}
    return {
        **{name: record.get(name) for name in SWEEP_OUT},
        **price,
        **of_parallel,
        "depth": result.depth,
        "unit": result.unit,
        "warnings": "; ".join(result.warnings) or None,
    }
