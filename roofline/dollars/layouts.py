"""Finds the layouts over several GPUs in which a step fits, and ranks them by time.

All layouts do the same work: the sequences of a step are divided among the data-parallel ranks of each. A layout takes
as few micro-batches as fit, without checkpointing and, where one micro-batch of all does not fit, also with it; of a
pipeline, whose bubble they shorten, as many as make it faster.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from flopcast.child import end_with_parent
from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.recipe.layout import DATA_KINDS, Layout
from flopcast.microbench.recipe.settings import ONE_GPU
from flopcast.roofline.dollars.curves import step_point, traced_step
from flopcast.roofline.dollars.points import Ranged
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.step.questions.many_gpus import Step, priced_steps
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.library.prefetch import prefetched
from flopcast.roofline.stream.library.streams import Vary
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import HOST_GPUS, Run, check_step
from flopcast.roofline.stream.ops.op_stream import Stream

MOST_GPUS = 4096
AUTO = "auto"  # in place of a layout: all of them
APART = 8  # steps: fewer take less time in one process than starting several
_AT_ONCE = 8  # steps whose kernels are estimated together, of 10 MB each
_LEADERS = 6  # layouts at most that are compared with the fastest

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is laid out: a model, how its steps run but for the layout, and how many `sequences` (of a module: samples)
    a step has on all GPUs."""

    model: Config | Module
    run: Run
    sequences: int
    profile: Profile
    host: HostCosts | None = None
    price: Price | None = None


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A step in one layout. `forecast`: None where there is none, for a `reason`. `least_of_twice`: of a pipeline, what
    a step with twice as many micro-batches takes at least."""

    run: Run
    forecast: Forecast | None = None
    reason: str = ""
    least_of_twice: float = 0.0

    @property
    def fits(self) -> bool:
        return self.forecast is not None and self.forecast.fits

    @property
    def seconds(self) -> float:
        """Of the step; raises ValueError where it was not forecast."""
        if self.forecast is None:
            raise ValueError(self.reason)
        return self.forecast.step_seconds

    def to_json(self) -> dict[str, Any]:
        run, found = self.run, self.forecast
        record: dict[str, Any] = {
            "parallel": run.parallel, "num_gpus": run.layout.world, "batch": run.batch, "accumulate": run.accumulate,
            "checkpoint": run.checkpoint,
        }  # fmt: skip
        names = ("step_seconds", "step_seconds_low", "step_seconds_high", "tokens_per_second", "bound",
                 "communication_seconds", "exposed_communication_seconds", "contention_seconds", "peak_bytes",
                 "needed_bytes", "fits", "usd_per_step", "mfu")  # fmt: skip
        record |= {name: getattr(found, name, None) for name in names}
        return {**record, "memory": dict(found.memory) if found else None, "reason": self.reason or None}


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Layouts of a step over so many GPUs, each as it is fastest: those that fit, the fastest first; those that do not,
    the smallest first; and those that cannot be. `undecided`: of the first layouts how many the fastest may be, by the
    intervals of their ratios; what they err in alike, as the host, cancels. `lead`: of the second over the first the
    ratio of their times."""

    num_gpus: int
    sequences: int
    fitting: tuple[LaidOut, ...]
    too_large: tuple[LaidOut, ...]
    refused: tuple[LaidOut, ...]
    undecided: int
    lead: Ranged | None = None

    @property
    def tried(self) -> int:
        return len(self.fitting) + len(self.too_large)

    def to_json(self) -> dict[str, Any]:
        return {
            "parallel": AUTO, "num_gpus": self.num_gpus, "sequences_per_step": self.sequences,
            "undecided": self.undecided,
            "second_over_first": self.lead and {name: getattr(self.lead, name) for name in ("value", "low", "high")},
            **{name: [one.to_json() for one in getattr(self, name)] for name in ("fitting", "too_large", "refused")},
        }  # fmt: skip


def ranking(work: Workload, num_gpus: int, progress: Progress = lambda done, total: None) -> Ranking:
    """Ranks all layouts over `num_gpus` GPUs. Raises UsageError for an invalid number of GPUs or nodes."""
    check_gpus(num_gpus, work.run.nodes)
    every = layouts_on(num_gpus, gpus_of_a_host(num_gpus, work.run.nodes))
    layouts = [layout for layout in every if _is_of(work.model, layout)]
    return ranked(work, num_gpus, try_all(work, layouts, progress))


def ranked(work: Workload, num_gpus: int, found: Sequence[LaidOut]) -> Ranking:
    """Ranks steps that were tried."""
    fitting = _each_once(sorted((one for one in found if one.fits), key=lambda one: one.seconds))
    hold = {one.run.parallel for one in fitting}
    done = [one for one in found if one.forecast is not None and one.run.parallel not in hold]
    too_large = _each_once(sorted(done, key=lambda one: one.forecast.needed_bytes if one.forecast else 0))
    ratios = _over_the_first(work, fitting)
    return Ranking(
        num_gpus=num_gpus, sequences=work.sequences, fitting=fitting, too_large=too_large,
        refused=tuple(one for one in found if one.forecast is None),
        undecided=min(len(fitting), 1 + sum(ratio.low <= 1.0 for ratio in ratios)), lead=next(iter(ratios), None),
    )  # fmt: skip


def _each_once(found: Iterable[LaidOut]) -> tuple[LaidOut, ...]:
    """The first of each layout."""
    first: dict[str, LaidOut] = {}
    for one in found:
        first.setdefault(one.run.parallel, one)
    return tuple(first.values())


def check_gpus(num_gpus: int, nodes: int) -> None:
    """Raises UsageError for numbers of GPUs and hosts that cannot be."""
    if not 1 <= num_gpus <= MOST_GPUS:
        raise UsageError(f"num_gpus is {num_gpus}: valid are 1 to {MOST_GPUS}")
    if nodes and num_gpus % nodes:
        valid = ", ".join(str(n) for n in range(1, num_gpus + 1) if num_gpus % n == 0)
        raise UsageError(f"nodes is {nodes}: it does not divide {num_gpus} GPUs; valid are {valid}")


def gpus_of_a_host(num_gpus: int, nodes: int) -> int:
    run = Run(parallel=f"ddp={num_gpus}" if num_gpus > 1 else ONE_GPU, nodes=nodes)
    return num_gpus // run.hosts if num_gpus > 1 else 1


def layouts_on(num_gpus: int, per_host: int = HOST_GPUS) -> Iterator[str]:
    """Yields every layout over so many GPUs whose steps can be built, as `Layout` writes it. What divides layers,
    experts and sequences stays within a host."""
    if num_gpus == 1:
        yield ONE_GPU
        return
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    for pp, cp, ep, tp in product(sizes, repeat=4):
        inside = prod((cp, ep, tp))
        if num_gpus % (pp * inside) or inside > per_host:
            continue
        for kind, replicas, shards in _data_parts(num_gpus // (pp * inside)):
            layout = str(Layout(pp=pp, cp=cp, ep=ep, tp=tp, kind=kind, replicas=replicas, shards=shards))
            with suppress(UsageError):
                Layout.parse(layout).check_built()
                yield layout


def _is_of(model: Config | Module, layout: str) -> bool:
    """Whether a model has what a layout divides: a dense one no experts, and a module's layers are not known."""
    if layout == ONE_GPU:
        return True
    parts = Layout.parse(layout)
    if isinstance(model, Module):
        return parts.world == parts.data
    return parts.ep == 1 or bool(model.get("num_experts") or model.get("num_local_experts"))


def _data_parts(ranks: int) -> Iterator[tuple[str, int, int]]:
    """Yields (kind, replicas, shards) of so many data-parallel ranks."""
    if ranks == 1:
        yield "", 1, 1
        return
    for kind in DATA_KINDS:
        if kind != "hsdp":
            yield kind, 1, ranks
    for replicas in range(2, ranks // 2 + 1):
        if ranks % replicas == 0:
            yield "hsdp", replicas, ranks // replicas


# --- one layout's micro-batches and checkpointing -----------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """A step to be forecast. `least`: micro-batches that its layout begins with; `before`: the seconds with half as
    many."""

    run: Run
    least: int
    before: float | None = None


def try_all(
    work: Workload, layouts: Sequence[str], progress: Progress = lambda done, total: None, *, vary: Vary | None = None
) -> list[LaidOut]:
    """Forecasts a workload in each of `layouts`, with as many micro-batches and as much checkpointing as it takes;
    several forecasts of a layout where fewer did not fit. `vary`: as in `get_stream`."""
    found: list[LaidOut] = []
    waiting: list[_Trial] = []
    for layout in layouts:
        one = _first(work, layout)
        if isinstance(one, LaidOut):
            found.append(one)
        else:
            waiting.append(one)
    done, total = 0, len(waiting)
    with _forecasting(work, len(waiting), vary) as forecast:
        while waiting:
            following: list[_Trial] = []
            for trial, outcome in zip(waiting, forecast([trial.run for trial in waiting]), strict=True):
                found.append(outcome)
                more = _next(work, trial, outcome)
                following += more
                done, total = done + 1, total + len(more)
                progress(done, total)
            waiting = following
    return found


def _first(work: Workload, parallel: str) -> _Trial | LaidOut:
    """The step with the fewest micro-batches; or why there is none."""
    run = replace(work.run, parallel=parallel)
    layout = run.layout
    share, rest = divmod(work.sequences, layout.data)
    least = layout.pp if layout.schedule == "1f1b" else 1
    run = replace(run, batch=max(share // least, 1), accumulate=least)
    try:
        if rest or not share:
            raise UsageError(f"{work.sequences} sequences per step do not divide among {layout.data} GPUs")
        if share % least:
            raise UsageError(f"{share} sequences do not make {least} micro-batches, one per stage at least")
        run.check()
        if not isinstance(work.model, Module):
            check_step(work.model, traced_of(run, work.profile))
    except UsageError as fault:
        return LaidOut(run=run, reason=str(fault))
    return _Trial(run, least)


def _next(work: Workload, trial: _Trial, outcome: LaidOut) -> list[_Trial]:
    """What to try after a trial."""
    run, found = trial.run, outcome.forecast
    if found is None or not _can_vary(work.model):
        return []
    is_faster = trial.before is None or found.step_seconds < trial.before
    is_faster &= outcome.least_of_twice < found.step_seconds
    more = replace(run, batch=run.batch // 2, accumulate=2 * run.accumulate)
    tries = []
    if run.batch % 2 == 0 and (not found.fits or (run.layout.pp > 1 and is_faster)):
        tries.append(_Trial(more, trial.least, found.step_seconds if found.fits else None))
    if not found.fits and run.checkpoint == "none" and run.accumulate == trial.least:
        tries.append(_Trial(replace(run, checkpoint="full"), trial.least))
    return tries


def _can_vary(model: Config | Module) -> bool:
    return not isinstance(model, Module) or model.takes("batch")


Forecaster = Callable[[Sequence[Run]], Iterator[LaidOut]]


@contextmanager
def _forecasting(work: Workload, count: int, vary: Vary | None) -> Iterator[Forecaster]:
    """Yields a function that forecasts runs of a workload, in their order. From APART runs on, `count` to begin with,
    processes trace and forecast side by side."""
    processes = min(os.cpu_count() or 1, count // 2)
    if count < APART or processes < 2 or isinstance(work.model, Module):
        yield lambda runs: forecast_runs(work, runs, vary)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawning, initializer=_begin, initargs=(os.getpid(), work, vary)) as pool:

        def apart(runs: Sequence[Run]) -> Iterator[LaidOut]:
            futures = [pool.submit(_forecast_one, run) for run in runs]
            for run, future in zip(runs, futures, strict=True):
                try:
                    yield future.result()
                except (BrokenProcessPool, OSError):  # none can be started, or one was killed
                    yield from forecast_runs(work, [run], vary)

        try:
            yield apart
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_given: tuple[Workload, Vary | None] | None = None  # of a process that forecasts


def _begin(parent: int, work: Workload, vary: Vary | None) -> None:
    global _given
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that waits for this one, too
    _given = work, vary


@no_garbage_collection()  # until the step is forgotten: the collection that follows looks at all that is left
def _forecast_one(run: Run) -> LaidOut:
    assert _given is not None
    (found,) = forecast_runs(_given[0], [run], _given[1])
    return found


def forecast_runs(work: Workload, runs: Sequence[Run], vary: Vary | None = None) -> Iterator[LaidOut]:
    """Forecasts a workload run in several ways, in their order, in this process."""
    with _streams(work, runs, vary) as stream_of, no_garbage_collection():
        for start in range(0, len(runs), _AT_ONCE):
            some = runs[start : start + _AT_ONCE]
            steps = [_step(work, run, stream_of) for run in some]
            traced = [step for step in steps if not isinstance(step, str)]
            priced = priced_steps(traced, work.profile, work.host, work.price)
            for run, step in zip(some, steps, strict=True):
                yield LaidOut(run=run, reason=step) if isinstance(step, str) else _laid_out(run, next(priced))


def _laid_out(run: Run, step: PricedStep) -> LaidOut:
    try:
        found = step.forecast()
    except UsageError as fault:
        return LaidOut(run=run, reason=str(fault))
    return LaidOut(run=run, forecast=found, least_of_twice=step.least_of_twice if run.layout.pp > 1 else 0.0)


def _step(work: Workload, run: Run, stream_of: Callable[[Run], Stream]) -> Step | str:
    try:
        stream = stream_of(run)
    except UsageError as fault:
        return str(fault)
    return Step(stream, run_of_stream(stream, run) if isinstance(work.model, Module) else run)


@contextmanager
def _streams(work: Workload, runs: Sequence[Run], vary: Vary | None) -> Iterator[Callable[[Run], Stream]]:
    """Yields a function that returns the stream of one of `runs`; those that are not at hand are traced side by
    side."""
    model = work.model
    if isinstance(model, Module):
        how: Vary | None = "batch" if model.takes("batch") else None
        yield lambda run: traced_step(model, run, work.profile, how)[0]
        return
    with prefetched([(model, traced_of(run, work.profile)) for run in runs], vary=vary) as stream_of:
        yield lambda run: stream_of(model, traced_of(run, work.profile))


def trace_ahead(wanted: Sequence[tuple[Workload, str]], vary: Vary | None = None) -> None:
    """Traces what the first steps of workloads of one model in these layouts need, side by side where it is not at
    hand."""
    runs = [first.run for work, layout in wanted if isinstance(first := _first(work, layout), _Trial)]
    if not runs or isinstance(wanted[0][0].model, Module):  # a module keeps its streams
        return
    with _streams(wanted[0][0], runs, vary) as stream_of:
        for run in runs:
            with suppress(UsageError):  # raised again when its turn comes
                stream_of(run)


# --- the first among them -----------------------------------------------------------------------------


def seconds_of(work: Workload, found: LaidOut, vary: Vary | None = None) -> Ranged:
    """Returns a step's seconds with their interval and what it shares with other layouts': kernels' biases and the
    host."""
    how: Vary | None = "batch" if isinstance(work.model, Module) and work.model.takes("batch") else vary
    stream, run = traced_step(work.model, found.run, work.profile, how)
    step = PricedStep(stream, run, work.profile, work.host, work.price)
    return step_point(step, work.model, shares_host=True).seconds


def _over_the_first(work: Workload, fitting: Sequence[LaidOut]) -> list[Ranged]:
    """Returns the times of the next layouts over that of the first, up to the one after which it is decided."""
    found: list[Ranged] = []
    first = seconds_of(work, fitting[0]) if len(fitting) > 1 else None
    for other in fitting[1:_LEADERS]:
        assert first is not None
        found.append(seconds_of(work, other).over(first))
        if found[-1].low > 1.0:
            break
    return found
