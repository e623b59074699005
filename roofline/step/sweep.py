"""Forecasts many steps on one GPU or several, for `flopcast sweep` and `predict --gpus`.

A step is traced once for all GPUs, and the batches of one model are derived from two traced ones where it allows that.
For many GPUs, processes read the profiles while the steps are traced, and then forecast side by side (`forecasting`).

A row that cannot be forecast is kept: its numbers are empty and `reason` says why.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from flopcast.child import end_with_parent
from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.base.csv_files import Row, check_length, parse_cell
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.library import profile_cache, profiles
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import estimate_together
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.library.prefetch import prefetched
from flopcast.roofline.stream.model.models import MODEL_COLUMNS, Config, check_config, model_from
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

RUN_COLUMNS = {"batch": int, "seq": int, "accumulate": int, "checkpoint": str, "precision": str, "optimizer": str,
               "mode": str, "matmul": str, "attention": str, "fused": str}  # fmt: skip
SWEEP_OUT = (
    "gpu", "profile_basis", "mode", "n_params", "step_seconds", "step_seconds_low", "step_seconds_high",
    "device_seconds", "device_seconds_low", "device_seconds_high", "host_seconds", "host", "bound",
    "tokens_per_second", "flops_counted", "flops_6n", "mfu", "mfu_6n", "peak_flops_per_second", "peak_bytes", "fits",
    "usd_per_step", "flops_per_usd", "price_usd_per_hour", "price_provider", "price_date",
    "price_age_days", "warnings", "reason",
)  # fmt: skip


MANY_GPUS = 4  # from so many on processes forecast side by side: each takes half a second to start
CHUNK = 32  # steps that are held at once, of 10 MB each


class Gpu(NamedTuple):
    """A GPU to forecast on. `name`: of a known profile or of a file; `gpu`: what the profile calls it; `device`: its
    type, "cuda" or "cpu"."""

    name: str
    gpu: str
    device: str


def gpu_of(name: str) -> Gpu:
    """Raises UsageError as `find_profile` does; it reads no profile of a GPU that has a datasheet."""
    known = profiles.name_meant(name)
    if known in load_specs():
        return Gpu(known, known, "cuda")
    profile = profiles.find_profile(known)
    return Gpu(known, profile.gpu, profile.device["type"])


class Step(NamedTuple):
    """A traced step, and how it is run."""

    stream: Stream
    run: Run


Outcome = Forecast | str  # a forecast, or why there is none
ForecastOn = Callable[[Mapping[str, Sequence[Step]]], Iterator[tuple[Gpu, list[Outcome]]]]


@no_garbage_collection()
def forecast_steps(
    steps: Sequence[Step], profile: Profile, host: HostCosts | None = None, price: Price | None = None
) -> list[Outcome]:
    """Forecasts steps on one GPU. Their kernels are estimated together, which takes half the time of one by one."""
    for backends in {(step.run.matmul, step.run.attention) for step in steps if len(steps) > 1}:
        alike = [step for step in steps if (step.run.matmul, step.run.attention) == backends]
        estimate_together([step.stream for step in alike], alike[0].run, profile)
    found: list[Outcome] = []
    for stream, run in steps:
        try:
            found.append(PricedStep(stream, run, profile, host, price).forecast())
        except UsageError as fault:
            found.append(str(fault))
    return found


@contextmanager
def forecasting(
    gpus: Sequence[Gpu], host: HostCosts | None = None, price_of: Callable[[str], Price | None] = lambda gpu: None
) -> Iterator[ForecastOn]:
    """Yields a function that forecasts steps, given by type of device, on each GPU; it yields each GPU's as they come.

    From MANY_GPUS on, processes read the profiles from now on, so that steps may be traced meanwhile.
    """

    def here(steps: Mapping[str, Sequence[Step]], some: Collection[Gpu] = gpus) -> Iterator[tuple[Gpu, list[Outcome]]]:
        for one in some:
            profile = profiles.find_profile(one.name)
            yield one, forecast_steps(steps[one.device], profile, host, price_of(one.gpu))
            profile_cache.keep(profile)

    processes = min(os.cpu_count() or 1, len(gpus))
    if len(gpus) < MANY_GPUS or processes < 2:
        yield here
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    spawning = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawning, initializer=_begin, initargs=(os.getpid(),))

    def apart(steps: Mapping[str, Sequence[Step]]) -> Iterator[tuple[Gpu, list[Outcome]]]:
        pickled = {device: pickle.dumps(list(some), protocol=5) for device, some in steps.items()}
        left = set(gpus)
        try:
            futures: dict[Future[list[Outcome]], Gpu] = {
                pool.submit(_forecast_pickled, one.name, pickled[one.device], host, price_of(one.gpu)): one
                for one in gpus
            }
            for future in as_completed(futures):
                one = futures[future]
                found = future.result()
                left.remove(one)
                yield one, found
        except (BrokenProcessPool, OSError):  # no process can be started, or one was killed: this one forecasts
            yield from here(steps, [one for one in gpus if one in left])

    try:
        with suppress(BrokenProcessPool, OSError), _one_thread_each():
            for one in gpus:
                pool.submit(_make_ready, one.name)
        yield apart
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Lets the processes that are started within it compute with one thread each: they share the processors."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _begin(parent: int) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that waits for this one, too


@lru_cache(maxsize=MANY_GPUS)
def _profile(name: str) -> Profile:
    return profiles.find_profile(name)


def _make_ready(name: str) -> None:
    """Leaves a profile in the cache, where it is read in a hundredth of the time that a projection takes."""
    with suppress(UsageError):  # raised again when it is forecast on
        profile_cache.keep(_profile(name))


@lru_cache(maxsize=2)
def _unpickled(pickled: bytes) -> list[Step]:
    return pickle.loads(pickled)  # type: ignore[no-any-return]


def _forecast_pickled(name: str, pickled: bytes, host: HostCosts | None, price: Price | None) -> list[Outcome]:
    profile = _profile(name)
    found = forecast_steps(_unpickled(pickled), profile, host, price)
    profile_cache.keep(profile)
    return found


# --- rows


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
    found: list[dict[Gpu, dict[str, Any]]] = [
        {gpu: {**row, "gpu": gpu.gpu} if len(gpus) > 1 else {**row} for gpu in gpus} for row in rows
    ]
    asked: dict[int, Asked] = {}
    for index, row in enumerate(rows):
        try:
            asked[index] = _asked(row, module)
        except UsageError as fault:
            for one in found[index].values():
                one["reason"] = str(fault)
    devices = sorted({gpu.device for gpu in gpus})
    total = len(rows) * len(gpus)
    done = total - len(asked) * len(gpus)
    with (
        forecasting(gpus, host, price_of) as forecast_on,
        _streams(list(asked.values()), module, devices) as stream_of,
        no_garbage_collection(),
    ):
        at_once = CHUNK if len(gpus) >= MANY_GPUS else 1
        indices = list(asked)
        for part in (indices[i : i + at_once] for i in range(0, len(indices), at_once)):
            steps: dict[str, list[Step]] = {device: [] for device in devices}
            forecast: list[int] = []
            for index in part:
                try:
                    traced = {device: stream_of(asked[index], device) for device in devices}
                except UsageError as fault:
                    done += len(gpus)
                    for one in found[index].values():
                        one["reason"] = str(fault)
                    continue
                forecast.append(index)
                for device, stream in traced.items():
                    steps[device].append(Step(stream, run_of_stream(stream, asked[index].run)))
            for gpu, outcomes in forecast_on(steps):
                for index, outcome in zip(forecast, outcomes, strict=True):
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
    run = Run(**{name: options[name] for name in RUN_COLUMNS if name in options})
    run.check()
    if module is not None:
        return Asked(None, run, {name: options[name] for name in ("batch", "seq") if name in options})
    config = model_from(**{name: options[name] for name in MODEL_COLUMNS if name in options})
    check_config(config)
    return Asked(config, run, {})


@contextmanager
def _streams(
    asked: Sequence[Asked], module: Module | None, devices: Sequence[str]
) -> Iterator[Callable[[Asked, str], Stream]]:
    """Yields a function that returns the stream of a row on a device; it raises UsageError."""
    if module is not None:
        yield _module_streams(asked, module)
        return
    wanted = [(one.config, one.run.traced_on(device)) for one in asked for device in devices if one.config is not None]
    with prefetched(wanted) as stream_of:
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
    return {
        **{name: record.get(name) for name in SWEEP_OUT},
        **price,
        "depth": result.depth,
        "unit": result.unit,
        "warnings": "; ".join(result.warnings) or None,
    }
