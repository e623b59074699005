"""Compares forecasts with real steps, component by component: device time by class, host, step, memory, kernels.

The measured side is the rows that `microbench.steps.run.run_steps` wrote; none of them is used in fitting. Errors are
signed, forecast / measured - 1: errors that cancel in the step show in its parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from flopcast.decode import show
from flopcast.errors import UsageError
from flopcast.kernels.shapes import canonical_json
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records.rows import KERNEL, Row, StepEstimateRow, StepKernelsRow, StepRow, is_busy, select
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.step.simulation import is_synchronous
from flopcast.roofline.stream.compiled.profiled import class_of_kernel
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.classes import GROUPS, op_class
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.validation import baselines
from flopcast.roofline.validation.comparable import check_stack, check_stream, release
from flopcast.roofline.validation.host_of_run import hosts_of_runs
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from flopcast.roofline.validation.step_plans import INTERVALS, factories

FindStream = Callable[[StepPlan, Run, Profile], Stream]

ESTIMATES = "estimates"  # folder inside a folder of steps, of torch's estimates that were made separately


def compare(
    measured: Iterable[Row],
    profile: Profile,
    *,
    stack: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[StepComparison]:
    """Compares each real step with its forecast, in the order of `measured` (rows of `run_steps`; a step's last row
    counts).

    If the tiny models of the host calibration ran between the steps, the forecast takes the host costs of that run at
    that moment, else the profile's: processes differ from one another by more than the forecast is wrong. A step that
    did not run, or cannot be forecast, keeps its row with a reason. `stack` holds the versions that the steps ran with
    (None: not checked). Raises UsageError if they do not match those of the profile and the streams.
    """
    return _compared(_jobs(measured, profile, stack), progress, None)


@dataclass(frozen=True)
class _Job:
    """A step that ran, and what it is compared with. `host`: of its own run, None where it was not calibrated."""

    row: StepRow
    kernels: StepKernelsRow | None
    torch_estimate: float | None
    profile: Profile
    host: HostCosts | None
    stack: Mapping[str, Any] | None

    @cached_property
    def plan(self) -> StepPlan:
        return plan_of(self.row)

    @cached_property
    def traced(self) -> str:
        """The same for steps of one op stream."""
        return canonical_json(
            {name: value for name, value in asdict(self.plan).items() if name not in (*_NAMES, *_KERNELS)}
        )


_NAMES = ("name", "group")
_KERNELS = ("matmul", "attention", "fused")  # which may run without another trace


def _jobs(measured: Iterable[Row], profile: Profile, stack: Mapping[str, Any] | None) -> list[_Job]:
    found = list(measured)
    if stack is not None:
        check_stack(stack, profile)
    hosts = hosts_of_runs(found, profile)
    steps = {_name(row): row for row in select(found, StepRow)}
    kernels = {_name(row): row for row in select(found, StepKernelsRow) if row["status"] == "ok"}
    estimates = {_name(row): row.get("value") for row in select(found, StepEstimateRow)}
    jobs = []
    for name, row in steps.items():
        run_host = hosts.get(row.get("session"))
        host = None if run_host is None else run_host.at(row.get("host_samples_before"), row.get("host_pace") or ())
        jobs.append(_Job(row, kernels.get(name), estimates.get(name), profile, host, stack))
    return jobs


def _compared(
    jobs: Sequence[_Job], progress: Callable[[int, int], None], find_stream: FindStream | None
) -> list[StepComparison]:
    """In the order of the jobs; steps of one op stream are worked on together, whatever machine ran them."""
    together: dict[str, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        together[job.traced].append(index)
    found: dict[int, StepComparison] = {}
    for indices in together.values():
        forecasts = _Forecasts(find_stream or stream_of)
        for index in indices:
            found[index] = _compare(jobs[index], forecasts)
            progress(len(found), len(jobs))
    return [found[index] for index in range(len(jobs))]


def _name(row: Row) -> str:
    """The name that the rows of one step share: the key without its kind."""
    return row["key"].partition("/")[2]


def compare_runs(
    folder: Path,
    profile: Profile,
    *,
    estimates: Path | None = None,
    any_stack: bool = True,
    own: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
    warn: Callable[[Iterable[str]], None] = lambda warnings: None,
) -> list[StepComparison]:
    """Compares as `compare` does the steps of a folder, or of its subfolders run0, run1, ... for several machines, each
    run with its own host costs. `own`: as in `stream_of`. Calls `warn` with what was wrong in the files. Raises what
    `read_steps` raises, and UsageError for another stack unless `any_stack`.
    """
    given = StepsFolder(folder, profile, estimates)
    (rows,) = compare_folders(
        [given], any_stack=any_stack, progress=progress, warn=warn, find_stream=partial(stream_of, own=own)
    )
    return rows


@dataclass(frozen=True)
class StepsFolder:
    """Steps of one folder to compare with their forecasts by one profile; `estimates`: folder of torch's estimates of
    them; `is_wanted`: of which plans."""

    folder: Path
    profile: Profile
    estimates: Path | None = None
    is_wanted: Callable[[StepPlan], bool] = lambda plan: True


def compare_folders(
    folders: Sequence[StepsFolder],
    *,
    any_stack: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
    warn: Callable[[Iterable[str]], None] = lambda warnings: None,
    find_stream: FindStream | None = None,
) -> list[list[StepComparison]]:
    """Compares as `compare_runs` does several folders, each with its profile: a step that several machines ran, or that
    several profiles forecast, is traced once, or taken from `find_stream`. Returns the rows of each folder."""
    from flopcast.microbench.records import records

    jobs: list[_Job] = []
    ends = []
    for one in folders:
        made = one.folder / ESTIMATES
        estimates = made if one.estimates is None and records.file_in(made).is_file() else one.estimates
        for run in step_folders(one.folder):
            stack = None if any_stack else records.read_machine(run)["stack"]
            found = _jobs(read_steps(run, estimates, warn), one.profile, stack)
            jobs += [job for job in found if one.is_wanted(job.plan)]
        ends.append(len(jobs))
    rows = _compared(jobs, progress, find_stream)
    return [rows[start:end] for start, end in pairwise([0, *ends])]


def step_folders(folder: Path) -> list[Path]:
    """The run folders inside a folder, or the folder itself if it has none."""
    from flopcast.roofline.gpu.fit.cards import run_folders

    return list(run_folders(folder).values()) or [folder]


def read_steps(
    folder: Path, estimates: Path | None = None, warn: Callable[[Iterable[str]], None] = lambda warnings: None
) -> list[Row]:
    """Reads the rows of a folder of real steps, and of torch's estimates if they were made separately (`validate
    --only-estimates`): from `estimates`, else from the folder's own "estimates" where it has one.

    Raises UsageError if the estimates were made on another kind of GPU or with another release of torch than the
    steps, or if there are none.
    """
    from flopcast.microbench.records import records

    steps = records.read(folder)
    warn(steps.warnings)
    rows = steps.rows
    if estimates is None:
        estimates = folder / ESTIMATES
        if not records.file_in(estimates).is_file():
            return rows
    if not records.file_in(estimates).is_file():
        raise UsageError(f"{estimates} holds no estimates: `flopcast validate --only-estimates` makes them")
    made, ran = (
        (machine["device"].get("name"), release(machine["stack"].get("torch", "?")))
        for machine in map(records.read_machine, (estimates, folder))
    )
    if made != ran:
        raise UsageError(
            f"the estimates in {estimates} were made on {made[0]} with torch {made[1]}, the steps ran on {ran[0]} with "
            f"torch {ran[1]}: run `flopcast validate --only-estimates` on such a GPU"
        )
    estimated = records.read(estimates)
    warn(estimated.warnings)
    found = [row for row in select(estimated.rows, StepEstimateRow) if row["status"] == "ok"]
    if not found:
        raise UsageError(f"{estimates} holds no estimate that was made: see `reason` in its rows")
    return [*rows, *found]


@dataclass(frozen=True)
class _Measured:
    """The measured quantities of a step: None or empty where it did not run, or was not profiled."""

    step: float | None = None
    host: float | None = None
    device: float | None = None
    peak: int | None = None
    kernels: int | None = None
    classes: Mapping[str, float] = field(default_factory=dict)


def _measured(row: StepRow, kernels: StepKernelsRow | None) -> _Measured:
    if row["status"] != "ok":
        return _Measured()
    times = _Measured(row["value"], row["host_seconds"], peak=row["peak_bytes"])
    if kernels is None:
        return times
    classes = _classes(kernels["ops"]) if kernels["ops"] else {}
    return replace(times, device=kernels["device_seconds"], kernels=kernels["n_kernels"], classes=classes)


class _Forecasts:
    """Keeps the op streams and forecasts of one step for the same step on another machine or with other kernels."""

    def __init__(self, find_stream: FindStream) -> None:
        self._find_stream = find_stream
        self._streams: dict[str, Stream] = {}
        self._rooflines: dict[tuple[str, int], float | None] = {}
        self._priced: dict[tuple[str, Run, int], PricedStep] = {}

    def stream(self, plan: StepPlan, run: Run, profile: Profile) -> Stream:
        key = self._key(plan, run, profile)
        if key not in self._streams:
            self._streams[key] = self._find_stream(plan, run, profile)
        return self._streams[key]

    def priced(self, plan: StepPlan, run: Run, profile: Profile) -> PricedStep:
        """With the profile's own host."""
        key = (self._key(plan, run, profile), run, id(profile))
        if key not in self._priced:
            self._priced[key] = PricedStep(self.stream(plan, run, profile), run, profile)
        return self._priced[key]

    def roofline(self, plan: StepPlan, run: Run, profile: Profile) -> float | None:
        key = (self._key(plan, run, profile), id(profile))
        if key not in self._rooflines:
            self._rooflines[key] = baselines.roofline(self.stream(plan, run, profile), profile)
        return self._rooflines[key]

    def _key(self, plan: StepPlan, run: Run, profile: Profile) -> str:
        return canonical_json([plan.config, plan.module, asdict(traced_of(run, profile))])


def stream_of(plan: StepPlan, run: Run, profile: Profile, *, own: str = "") -> Stream:
    """The op stream of a real step. `own`: the name of the user's factory. Raises UsageError as `forecast` does, and
    for a factory that is neither that nor one of flopcast's: a plan comes from a file, and nothing that a file names is
    imported."""
    if plan.module:
        from flopcast.microbench import images

        if plan.module not in {own, *factories()} and plan.module.partition("@")[0] not in images.MODELS:
            raise UsageError(
                f"the step's row names the module {show(plan.module)}: only {', '.join(sorted(factories()))} are run"
                " for a row, and the one that `flopcast validate --module` names"
            )
        from flopcast.roofline.stream.library.modules import module_stream

        return module_stream(plan.module, run, run.device_of(profile.device), sizes=plan.sizes)
    return get_stream(plan.config, traced_of(run, profile), vary="width")


def plan_of(row: StepRow | StepKernelsRow) -> StepPlan:
    """The plan of a row of `run_steps`; settings that a row of an older version lacks take their defaults."""
    return StepPlan(**{name: value for name, value in row["plan"].items() if name in StepPlan.__dataclass_fields__})


def _compare(job: _Job, forecasts: _Forecasts) -> StepComparison:
    row, profile, host, stack, plan = job.row, job.profile, job.host, job.stack, job.plan
    compared = StepComparison(
        plan,
        row["status"],
        row.get("reason"),
        host_calibrated="in the same run" if host is not None else "with the profile",
        used_in_intervals=plan.group == INTERVALS,
        clock_mhz=row.get("clock_mhz"),
        rounds=row.get("n"),
        others_share=row.get("others_share"),
        is_busy=is_busy(row.get("others_share"), profile.device["type"]),
    )
    try:
        run = Run(**plan.settings)
        run.check()
        stream = forecasts.stream(plan, run, profile)
        if stack is not None:
            check_stream(stream, stack)
        priced = forecasts.priced(plan, run, profile)
        shipped = priced.interval
        beside = priced if host is None else priced.on_host(host)
        found = beside.forecast()
    except UsageError as fault:
        if stack is not None and "--any-stack" in str(fault):
            raise
        return replace(compared, reason=compared.reason or str(fault))
    measured = _measured(row, job.kernels)
    reason = compared.reason
    if row["status"] == "oom" and not found.fits:
        reason = f"out of memory, as forecast ({found.needed_bytes / 1e9:.0f} GB needed): {reason}"
    others = {"roofline": forecasts.roofline(plan, run, profile), "six_n": None, "torch": job.torch_estimate}
    if not plan.module and run.phase == "train":  # the number of tokens of a module is not known
        tokens = run.batch * run.seq * run.accumulate
        others["six_n"] = baselines.six_n(found.n_params, tokens, found.peak_flops_per_second)
    return replace(
        compared,
        reason=reason,
        n_params=found.n_params,
        step=Part(measured.step, found.step_seconds, found.step_seconds_low, found.step_seconds_high),
        profile_host_step=Part(measured.step, *shipped),
        in_a_row=Part() if plan.mode == "eager" else Part(measured.step, in_a_row(row, beside)),
        device=_device_part(measured.device, found, priced),
        host=_host_part(measured, found, profile),
        peak=Part(measured.peak, found.peak_bytes),
        kernels=Part() if is_synchronous(profile) else Part(measured.kernels, found.kernels),
        classes={
            name: Part(measured.classes.get(name), seconds)
            for name, seconds in _grouped(_profiled_classes(priced)).items()
        },
        baselines={name: Part(measured.step, seconds) for name, seconds in others.items()},
        host_sigma=None if host is None else beside.host_sigma,
        own_sigmas=priced.own_sigmas,
        bound=found.bound,
        measured_share=found.basis_shares.get("measured"),
        torch=found.stack["stream"]["torch"],
        transformers=found.stack["stream"]["transformers"],
    )


MOST_IN_A_ROW = 20  # of more the wait for the last is a hundredth of the step or less


def in_a_row(row: StepRow, step: PricedStep) -> float:
    """The step's seconds as one of so many as a round of the measurement had."""
    usual = max(2, min(5, int(0.6 / max(row["value"] or 0.0, 1e-9))))
    return step.timeline.seconds_in_a_row(min(row.get("steps_per_round", usual), MOST_IN_A_ROW))


def _host_part(measured: _Measured, found: Forecast, profile: Profile) -> Part:
    step, host, device = measured.step, measured.host, measured.device
    if is_synchronous(profile):  # operators run when called: host time is the rest of the step
        return Part(None if step is None or device is None else step - device, found.host_seconds)
    is_full = (measured.kernels or 0) > profile.ceiling("queue_depth", 1024)
    is_waiting = is_full and host is not None and device is not None and host < device  # for the device
    return Part(host, found.host_seconds, is_comparable=not is_waiting)


def _device_part(measured: float | None, found: Forecast, priced: PricedStep) -> Part:
    """As the profiler reads it."""
    seconds = sum(_profiled_classes(priced).values())
    longer = seconds / found.device_seconds if found.device_seconds else 1.0
    return Part(measured, seconds, found.device_seconds_low * longer, found.device_seconds_high * longer)


def _profiled_classes(priced: PricedStep) -> dict[str, float]:
    """Device seconds by operation class of a step that the profiler follows, on a device that has rested: in a long one
    a power limit begins to act. Not in an eager one, which the host launches so slowly with the profiler on that its
    device is idle in between: hot and rested, ten on two cards took as long (`studies.power.table`)."""
    after_rest = priced.timeline.seconds_after_rest if priced.run.mode != "eager" else None
    found: dict[str, float] = defaultdict(float)
    for number, op in enumerate(priced.ops):
        if op.work is not None and op.collective is None:
            found[op.work.op_class] += op.seconds if after_rest is None else after_rest[number]
    return found


def _classes(ops: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Sums [seconds, kernels] by launching call, or by kernel, to seconds by group of classes."""
    by_class: dict[str, float] = defaultdict(float)
    for op, (seconds, _count) in ops.items():
        name = op.removeprefix(KERNEL)
        by_class[op_class(op) if name == op else class_of_kernel(name)] += seconds
    return _grouped(by_class)


def _grouped(by_class: Mapping[str, float]) -> dict[str, float]:
    return {group: sum(by_class.get(name, 0.0) for name in names) for group, names in GROUPS.items()}
