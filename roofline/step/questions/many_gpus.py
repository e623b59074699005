"""Forecasts many steps on one GPU or several.

For many GPUs, processes read the profiles while the steps are traced, and then forecast side by side (`forecasting`).
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple

from flopcast.child import end_with_parent
from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.library import profile_cache, profiles
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import estimate_together
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.model.run import Run, chip_of
from flopcast.roofline.stream.ops.op_stream import Stream

MANY_GPUS = 4  # from so many on processes forecast side by side: each takes half a second to start


class Gpu(NamedTuple):
    """A GPU to forecast on. `name`: of a known profile or of a file; `gpu`: what the profile calls it; `device`: the
    kind of devices whose streams it shares, its type or `chip`; `chip`: as `run.chip_of` makes it."""

    name: str
    gpu: str
    device: str
    chip: str = ""

    def shared_by(self, runs: Iterable[Run]) -> Gpu:
        """The same for these runs: compiled steps share streams with GPUs of the same chip alone."""
        return self if all(run.mode == "eager" for run in runs) else self._replace(device=self.chip or self.device)


def gpu_of(name: str) -> Gpu:
    """Raises UsageError as `find_profile` does; it reads no profile of a GPU that has a datasheet."""
    known = profiles.name_meant(name)
    if spec := load_specs().get(known):
        device = {"type": "cuda", "capability": spec.capability, "sm_count": spec.sm_count}
        return Gpu(known, known, "cuda", chip_of(device))
    profile = profiles.find_profile(known)
    return Gpu(known, profile.gpu, profile.device["type"], chip_of(profile.device))


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
    found: list[Outcome] = []
    for step in priced_steps(steps, profile, host, price):
        try:
            found.append(step.forecast())
        except UsageError as fault:
            found.append(str(fault))
    return found


def priced_steps(
    steps: Sequence[Step], profile: Profile, host: HostCosts | None = None, price: Price | None = None
) -> Iterator[PricedStep]:
    """Yields steps on one GPU, whose kernels are estimated together."""
    for backends in {(step.run.matmul, step.run.attention) for step in steps if len(steps) > 1}:
        alike = [step for step in steps if (step.run.matmul, step.run.attention) == backends]
        estimate_together([step.stream for step in alike], alike[0].run, profile)
    for stream, run in steps:
        yield PricedStep(stream, run, profile, host, price)


@contextmanager
def forecasting(
    gpus: Sequence[Gpu], host: HostCosts | None = None, price_of: Callable[[str], Price | None] = lambda gpu: None
) -> Iterator[ForecastOn]:
    """Yields a function that forecasts steps, given by kind of device, on each GPU; it yields each GPU's as they come.

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
