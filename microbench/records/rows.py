"""Defines the fields of a measurement file's rows. Units are seconds, bytes, FLOP/s and their ratios; pure Python.

A file holds rows of several kinds, distinguished by `kind_of`; `select` returns those of one kind. Fields that are not
marked as required are missing in rows written by versions that did not have them yet; None stands for what was not
measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Required, TypedDict, TypeVar, cast

from flopcast.bounds import ByValue, Count, Finite, Kept, NonNegative, Positive, Seconds, Share, Size, Valid, Within
from flopcast.decode import Wrong, decode_each
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records.row_shapes import Shape

SCHEMA = 1
METHOD = 1  # raised whenever a change in how things are timed makes old rows incomparable

Status = Literal["ok", "oom", "unsupported", "incorrect", "error"]
KEPT_SAMPLES = 100  # samples per row


OpSeconds = Annotated[dict[str, Sequence[float]], Kept(dict[str, tuple[NonNegative, NonNegative]])]
Kernels = Annotated[Sequence[Sequence[Any]], Kept(Sequence[tuple[str, Annotated[float, Within(0.0, 1e9)]]])]


class Readings(TypedDict, total=False):
    """The fields of a measurement that every row has; `EMPTY_FIELDS` holds their values where nothing was measured."""

    status: Required[Status]
    reason: str | None  # why the status is not "ok"
    note: str | None  # what was irregular about the measurement
    throttled: bool  # the device ran slower than asked: a power cap, heat
    seconds: Seconds | None  # median of the samples: one execution by the timer, launch excluded; a step's wall time
    kernel_seconds: NonNegative | None  # one execution by CUDA's profiler: the sum of its kernels' durations
    kernels: Kernels  # [name, seconds] of each kernel of one execution, in launch order
    samples: Sequence[NonNegative]  # seconds per execution; for a scalar in its own unit
    n: Count  # how many samples were taken
    timer: str | None  # "graph", "events", "wall", "cupti", "profiler": where the samples come from
    relative_error: NonNegative | None  # of the result, against the reference
    tolerance: NonNegative | None  # the relative error up to which the result counts as correct
    clock_mhz: Positive | None  # of the multiprocessors (on a processor: of the fastest core) during the measurement
    memory_clock_mhz: Positive | None
    power_w: NonNegative | None
    temperature_c: Finite | None
    others_share: Share | None  # of the cores that other processes kept busy; on a GPU in rows of steps alone
    throttle_reasons: Sequence[str]  # NVML's clock event reasons, including "gpu_idle" and user settings


EMPTY_FIELDS: Readings = {
    "status": "ok", "reason": None, "note": None, "throttled": False, "seconds": None, "kernel_seconds": None,
    "kernels": [], "samples": [], "n": 0, "timer": None, "relative_error": None, "tolerance": None,
    "clock_mhz": None, "memory_clock_mhz": None, "power_w": None, "temperature_c": None,
    "others_share": None, "throttle_reasons": [],
}  # fmt: skip


class Row(Readings, total=False):
    """The fields common to all rows. The recorder fills in the last five."""

    key: Required[str]  # for an operation its shape's key, else "scalar/...", "host/...", "step/..." (`kind_of`)
    backend: str  # "torch", "triton", "sdpa-flash", ...: whose kernels ran
    cache: str  # "cold": operands are not in the last-level cache; "hot"
    shape: Shape | None  # for an operation, as `shape_to_json` returns it
    suite: str
    role: str  # "fit"; "holdout": not used in fitting; for steps "validation", for torch's estimates "baseline"
    value: NonNegative | None  # what was measured, for rows other than operations
    unit: str | None  # of `value` and `samples`: "seconds", "bytes_per_second", "flops_per_second", "launches"
    session: str  # identifies the call of `run_steps` that wrote the row
    schema: Required[int]
    method: Required[Count]
    machine: Required[str]  # `Machine.machine`
    run: str  # when the process that wrote the row began, UTC
    time: str  # when the row was written, UTC


class OperationRow(Row, total=False):
    """The measurement of an operation of one shape on one backend, with a cold or hot cache."""

    kernels_of: str  # fingerprint of the kernels' sources, or version of the operands (`kernel_sources.py`)
    sets: Size  # operand sets that the timer rotated over
    calls_per_sample: Size


class ScalarRow(Row, total=False):
    """A property of the machine itself, key scalar/<name>: a ceiling, or the cost of a launch (`sweep/scalars.py`)."""

    bytes: Count  # bytes moved per execution, for bandwidths


class HostRow(Row, total=False):
    """Host seconds of one phase of a tiny model's step, key host/<model>/depth<D>/<phase>. Phase "steady" is a whole
    step in a sequence of steps without synchronisation."""

    rounds: Size  # the first sample of each round follows a pause and is slower
    counts: dict[str, NonNegative]  # number of ops of the phase by kind, where the row has them
    host_pace: Sequence[NonNegative]  # of a compiled one: as `StepRow`'s, before each round


class OperatorRow(Row, total=False):
    """Host seconds per call of an operator whose kernels are Triton's, key host_op/<operator>."""

    base_seconds: NonNegative | None  # of an ATen call that launches equivalent work, timed alternately with it
    rounds: Size


class StepRow(Row, total=False):
    """A real training step's wall clock, key step/<plan>; `value` and `seconds` are the median step."""

    plan: Required[Annotated[dict[str, Any], Kept(StepPlan)]]  # the fields of `StepPlan`
    host_seconds: NonNegative  # median time to enqueue one step on an idle device
    host_samples: Sequence[NonNegative]
    phase_seconds: dict[str, NonNegative]  # host seconds of "forward", "backward", "optimizer"
    peak_bytes: Count | None  # as torch's allocator counted them, without the tiny models' memory
    reserved_bytes: Count | None  # what the allocator took of the device at most, the tiny models' memory included
    n_params: Count
    host_samples_before: Count  # samples of the tiny models taken before this step in its session
    host_pace: Sequence[NonNegative]  # seconds of the middle one's step, before each round and after the last
    steps_per_round: Count  # timed in a row; five of short ones, two at least of long ones, where a row does not say


class FedStepRow(Row, total=False):
    """A real step whose batches a DataLoader brings, key fed_step/<plan>/<how>: `value` and `seconds` are the median
    step."""

    plan: Required[Annotated[dict[str, Any], Kept(StepPlan)]]
    way: Required[str]  # of `roofline.step.questions.input_pipeline.WAYS`
    bytes: Required[Size]  # of a step's batch, each tensor once
    workers: Required[Count]  # 0: the training process loads
    load_seconds: NonNegative  # one process's for a sample, its part of putting the batch together included
    asked_load_seconds: NonNegative  # of them those for which a sample keeps a core busy
    unfed_seconds: NonNegative  # the median step with its batch on the GPU already
    unfed_samples: Sequence[NonNegative]
    steps_per_round: Count


KERNEL = "kernel::"  # before the name of a kernel that no ATen call launched


class StepKernelsRow(Row, total=False):
    """The same step under the profiler, key step_kernels/<plan>."""

    plan: Required[Annotated[dict[str, Any], Kept(StepPlan)]]
    device_seconds: NonNegative  # median over profiled steps of the summed kernel durations
    n_kernels: Count
    n_params: Count
    ops: OpSeconds  # launching ATen call, or KERNEL and the kernel's name -> [seconds, kernels]
    mean_clock_mhz: NonNegative | None  # of the multiprocessors, while the kernels ran
    products: Sequence[Sequence[Any]]  # in older rows only: each matrix product of the step


class StepEstimateRow(Row, total=False):
    """The step time that torch's own estimator gives, key step_estimate/<plan>."""

    plan: Required[Annotated[dict[str, Any], Kept(StepPlan)]]


class GroupRow(Row, total=False):
    """What every row of a group of GPUs tells of it. `settings`: the environment's variables that NCCL obeys."""

    gpus: Required[Size]
    nodes: Required[Size]
    nccl: str  # NCCL's version; "" for gloo
    nvls: bool  # whether NCCL was free to let NVSwitch add up
    settings: dict[str, str]


class CollectiveRow(GroupRow, total=False):
    """A collective among a group, key collective/<kind>/<dtype>/<gpus>x<nodes>/<bytes>; `seconds` and `value` are those
    of the slowest of them, samples those of the first."""

    bytes: Required[Size]  # the whole, as nccl-tests counts it
    fastest_seconds: NonNegative
    calls_per_sample: Size


class RegimeRow(GroupRow, total=False):
    """What NCCL logged of the collective, key regime/... as that of its time. `channels`: blocks of its kernel."""

    bytes: Required[Size]
    algorithm: str  # as NCCL spells it: "RING"; "" where it logs none, as for sends
    protocol: str
    channels: Count


class LaunchCostRow(GroupRow, total=False):
    """Host seconds per collective of 1 KiB that is launched from Python (`value`) and of one node of a replayed CUDA
    graph, key launch_cost/<kind>/<gpus>x<nodes>."""

    captured_seconds: NonNegative | None


class BesideRow(GroupRow, total=False):
    """A kernel beside a long collective on another stream, key beside/<work>/<kind>/<gpus>x<nodes>: `value` its seconds
    there."""

    alone_seconds: Required[NonNegative]
    collective_alone_seconds: Required[NonNegative]
    collective_beside_seconds: Required[NonNegative]
    collective_bytes: Size


class CopyRow(GroupRow, total=False):
    """A copy between host and device while `gpus` do it at once, key copy/<direction>/<memory>/<gpus>x<nodes>/<bytes>:
    `value` the slowest's seconds."""

    bytes: Required[Size]


class ParallelStepRow(GroupRow, total=False):
    """A real step on several GPUs, key parallel_step/<plan>: `value` and `seconds` are the median step of the ranks;
    lists have a value per rank."""

    plan: Required[Annotated[dict[str, Any], Kept(StepPlan)]]
    host_seconds: NonNegative  # to enqueue one step on idle GPUs, the mean of ranks
    rank_host_seconds: Sequence[NonNegative]
    peak_bytes: Sequence[Count]  # as torch's allocator counts them
    reserved_bytes: Sequence[Count]  # what it takes of the device
    used_bytes: Sequence[Count]  # as the driver does, with NCCL's own


class ParallelKernelsRow(GroupRow, total=False):
    """How the ranks spent the same step under the profiler (`ranks.measure.Spent`), key parallel_step_kernels/<plan>; a
    value per rank."""

    plan: Required[Annotated[dict[str, Any], Kept(StepPlan)]]
    span_seconds: Sequence[NonNegative]
    compute_seconds: Sequence[NonNegative]
    communication_seconds: Sequence[NonNegative]
    waiting_seconds: Sequence[Finite]
    overlapped_seconds: Sequence[Finite]
    exposed_seconds: Sequence[Finite]
    idle_seconds: Sequence[Finite]
    n_kernels: Sequence[Count]


KINDS: dict[str, type[Row]] = {
    "parallel_step": ParallelStepRow, "parallel_step_kernels": ParallelKernelsRow,
    "collective": CollectiveRow, "regime": RegimeRow, "launch_cost": LaunchCostRow, "beside": BesideRow,
    "copy": CopyRow,
    "scalar": ScalarRow, "host": HostRow, "host_op": OperatorRow,
    "step": StepRow, "step_kernels": StepKernelsRow, "step_estimate": StepEstimateRow, "fed_step": FedStepRow,
}  # fmt: skip

# Keys of the scalars that time the host, not the device. Where several GPUs are measured at once, they are valid only
# from a process that had the host to itself.
HOST_SCALARS = ("scalar/launch", "scalar/launch_inplace", "scalar/sync", "scalar/launch_queue")


def is_busy(others_share: float | None, device_type: str) -> bool:
    """Whether that share makes what is timed longer: on a processor any tenth of it does, while the host of a GPU needs
    two cores of many."""
    return others_share is not None and others_share > (0.1 if device_type == "cpu" else 0.75)


AnyRow = TypeVar("AnyRow", bound=Row)
Fields = Mapping[str, object]  # some of the fields of a row


def kind_of(row: Row) -> type[Row]:
    """The kind of a row, by the first part of its key; a row that is none of `KINDS` is an operation."""
    return KINDS.get(row["key"].partition("/")[0], OperationRow)


# What a row of status "ok" has to hold beyond the fields that every row has.
_MEASURED: dict[type[Row], tuple[str, ...]] = {
    StepRow: ("value", "host_seconds"), StepKernelsRow: ("device_seconds", "n_kernels", "ops"),
    ScalarRow: ("value",), HostRow: ("value",), CollectiveRow: ("value",), LaunchCostRow: ("value",),
    BesideRow: ("value",), CopyRow: ("value",), ParallelStepRow: ("value", "peak_bytes"),
    ParallelKernelsRow: ("compute_seconds", "communication_seconds"),
    FedStepRow: ("value", "load_seconds", "unfed_seconds"),
}  # fmt: skip


def _kind_of_any(value: Any) -> type[Row]:
    key = value.get("key") if isinstance(value, dict) else None
    return KINDS.get(key.partition("/")[0], OperationRow) if isinstance(key, str) else OperationRow


def _is_whole(row: Row) -> bool:
    for name in _MEASURED.get(kind_of(row), ()) if row["status"] == "ok" else ():
        if row.get(name) is None:
            raise Wrong("is missing, in a row of status ok", name)
    return True


_ANY_ROW: Any = Annotated[Row, ByValue(_kind_of_any), Valid(_is_whole, "")]


def decoded(values: Sequence[Any]) -> list[Row | Wrong]:
    """Each value as a row of the kind that its key says, or why it is none: a field is missing, of another type, or
    beyond what can be measured."""
    return decode_each(_ANY_ROW, values)


def select(rows: Iterable[Row], kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of one kind."""
    return [cast(AnyRow, row) for row in rows if kind_of(row) is kind]


def merged(kind: type[AnyRow], *parts: Fields) -> AnyRow:
    """Merges fields into a row, later parts over earlier ones; `tests/microbench/records` checks that the kind declares
    all of them."""
    return cast(AnyRow, {name: value for part in parts for name, value in part.items()})


def rounded(samples: Iterable[float]) -> list[float]:
    """Samples rounded to six significant digits, as rows store them."""
    return [float(f"{sample:.6g}") for sample in samples]


class Identity(NamedTuple):
    """The fields by which two rows are the same measurement; a re-run skips the identities that are done."""

    key: str
    backend: str
    cache: str
    method: int
    machine: str


def identity(row: Row) -> Identity:
    return Identity(row["key"], row.get("backend", "torch"), row.get("cache", "cold"), row["method"], row["machine"])
