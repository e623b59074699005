"""The rows of a measurement file, field by field. Seconds, bytes, FLOP/s and what they make; pure Python.

A file holds rows of several kinds, told by `kind_of`; `select` gives those of one kind. Fields that are not marked as
required are missing in rows of versions that did not write them yet; None stands for what was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Required, TypedDict, TypeVar, cast

SCHEMA = 1
METHOD = 1  # raised whenever a change in how things are timed makes old rows incomparable

Status = Literal["ok", "oom", "unsupported", "incorrect", "error"]
STATUSES = ("ok", "oom", "unsupported", "incorrect", "error")
KEPT_SAMPLES = 100  # of a row


class Readings(TypedDict, total=False):
    """What every row says of its measurement; `EMPTY_FIELDS` says it of what was not measured."""

    status: Required[Status]
    reason: str | None  # why it is not "ok"
    note: str | None  # what was irregular about the measurement
    throttled: bool  # the device ran slower than asked: a power cap, heat
    seconds: float | None  # median of the samples: one execution by the timer, launch excluded; of a step its wall time
    kernel_seconds: float | None  # one execution by CUDA's profiler: the sum of its kernels' durations
    kernels: Sequence[Sequence[Any]]  # [name, seconds] of each kernel of one execution, in launch order
    samples: Sequence[float]  # seconds of one execution each; of a scalar in its own unit
    n: int  # how many samples were taken
    timer: str | None  # "graph", "events", "wall", "cupti", "profiler": what the samples are from
    relative_error: float | None  # of the result, against the reference
    tolerance: float | None  # up to which it is right
    clock_mhz: float | None  # of the multiprocessors (of a processor: the fastest core), while it ran
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_reasons: Sequence[str]  # NVML's clock event reasons, "gpu_idle" and user settings too


EMPTY_FIELDS: Readings = {
    "status": "ok", "reason": None, "note": None, "throttled": False, "seconds": None, "kernel_seconds": None,
    "kernels": [], "samples": [], "n": 0, "timer": None, "relative_error": None, "tolerance": None,
    "clock_mhz": None, "memory_clock_mhz": None, "power_w": None, "temperature_c": None,
    "throttle_reasons": [],
}  # fmt: skip


class Row(Readings, total=False):
    """What all rows have. The last five fields are the recorder's to fill in."""

    key: Required[str]  # of an operation its shape's key, else "scalar/...", "host/...", "step/..." (`kind_of`)
    backend: str  # "torch", "triton", "sdpa-flash", ...: whose kernels ran
    cache: str  # "cold": operands are not in the last-level cache; "hot"
    shape: dict[str, Any] | None  # of an operation, as `shape_to_json` gives it
    suite: str
    role: str  # "fit", "holdout": kept from fitting; of steps "validation", of torch's estimates "baseline"
    value: float | None  # what was measured, where it is no operation
    unit: str | None  # of `value` and `samples`: "seconds", "bytes_per_second", "flops_per_second", "launches"
    session: str  # the call of `run_steps` that wrote it
    schema: Required[int]
    method: Required[int]
    machine: Required[str]  # `Machine.machine`
    run: str  # when the process that wrote it began, UTC
    time: str  # when it was written, UTC


class OperationRow(Row, total=False):
    """An operation of one shape, on one backend, cold or hot."""

    kernels_of: str  # the sources, or the operands, that were measured (`kernel_sources.py`)
    sets: int  # operand sets that the timer rotated over
    calls_per_sample: int


class ScalarRow(Row, total=False):
    """A number of the machine itself, key scalar/<name>: a ceiling, or what a launch costs (`sweep/scalars.py`)."""

    bytes: int  # moved by one execution, of a bandwidth


class HostRow(Row, total=False):
    """Host seconds of a phase of tiny models, key host/<model>/depth<D>/<phase>; "steady": a step among others."""

    rounds: int  # the first sample of each round follows a pause and is slower
    counts: dict[str, float]  # ops of the phase by kind, where the row carries them


class OperatorRow(Row, total=False):
    """Host seconds of a call of an operator whose kernels are Triton's, key host_op/<operator>."""

    base_seconds: float | None  # of an ATen call that launches as much, timed in between
    rounds: int


class StepRow(Row, total=False):
    """A real training step's wall clock, key step/<plan>; `value` and `seconds` are the median step."""

    plan: Required[dict[str, Any]]  # the fields of `StepPlan`
    host_seconds: float  # median time to enqueue one step on an idle device
    host_samples: Sequence[float]
    phase_seconds: dict[str, float]  # of the host: "forward", "backward", "optimizer"
    peak_bytes: int | None  # as torch's allocator counted them, without what the tiny models hold
    n_params: int
    host_samples_before: int  # samples of the tiny models that came before it in its session


class StepKernelsRow(Row, total=False):
    """The same step under the profiler, key step_kernels/<plan>."""

    plan: Required[dict[str, Any]]
    device_seconds: float  # median over profiled steps of the summed kernel durations
    n_kernels: int
    n_params: int
    ops: dict[str, Sequence[float]]  # launching ATen call -> [seconds, kernels]
    products: Sequence[Sequence[Any]]  # of older rows: the step's products, one by one


class StepEstimateRow(Row, total=False):
    """What torch's own estimator says of the step, key step_estimate/<plan>."""

    plan: Required[dict[str, Any]]


KINDS: dict[str, type[Row]] = {
    "scalar": ScalarRow, "host": HostRow, "host_op": OperatorRow,
    "step": StepRow, "step_kernels": StepKernelsRow, "step_estimate": StepEstimateRow,
}  # fmt: skip

# Keys of the scalars that time the host, not the device: of several GPUs' processes only one that had the host to
# itself can tell them.
HOST_SCALARS = ("scalar/launch", "scalar/launch_inplace", "scalar/sync", "scalar/launch_queue")

AnyRow = TypeVar("AnyRow", bound=Row)
Fields = Mapping[str, object]  # some of a row's, on their way into one


def kind_of(row: Row) -> type[Row]:
    """By the first part of the key; what is none of `KINDS` is an operation."""
    return KINDS.get(row["key"].partition("/")[0], OperationRow)


def select(rows: Iterable[Row], kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of one kind."""
    return [cast(AnyRow, row) for row in rows if kind_of(row) is kind]


def merged(kind: type[AnyRow], *parts: Fields) -> AnyRow:
    """A row of fields, later parts over earlier ones; `tests/microbench/records` holds that the kind has them all."""
    return cast(AnyRow, {name: value for part in parts for name, value in part.items()})


def rounded(samples: Iterable[float]) -> list[float]:
    """Samples as rows keep them: to six digits."""
    return [float(f"{sample:.6g}") for sample in samples]


class Identity(NamedTuple):
    """What makes two rows the same measurement; a re-run skips the identities that are done."""

    key: str
    backend: str
    cache: str
    method: int
    machine: str


def identity(row: Row) -> Identity:
    return Identity(row["key"], row.get("backend", "torch"), row.get("cache", "cold"), row["method"], row["machine"])
