"""Lists the benchmark cases of one model's own step and records the model beside its measurements.

`flopcast bench --config` measures the cases of `step_cases` and keeps the op stream in the folder (`keep`), so that
`flopcast fit`, here or on another machine, can say without tracing again how much of that step the profile holds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flopcast.errors import RunError, UsageError
from flopcast.kernels.shapes import canonical_json
from flopcast.microbench.records.machine import Device
from flopcast.roofline.gpu.catalogue.device import attention_alias
from flopcast.roofline.gpu.suites import SuiteCase
from flopcast.roofline.step.device_work import L2_SHARE, backend_of, describe_ops, l2_shares
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import model_from, name_of
from flopcast.roofline.stream.model.run import Run, run_from
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.ops.op_stream import Stream

SOURCES = "sources"  # folder of the kept streams, below the measurements
_PICKED = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-cpu")  # what torch's SDPA may pick by itself


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """A model and how its step is run, for which a folder's measurements were made. Only the backends of `run` are
    used; the stream's meta holds the rest."""

    name: str
    stream: Stream
    run: Run = field(default_factory=Run)

    @property
    def label(self) -> str:
        """Names the model, batch x tokens per sequence, and what differs from the defaults."""
        meta = self.stream.meta
        odd = [meta.get("precision"), meta.get("optimizer"), self.run.matmul, self.run.attention]
        usual = ("autocast-bf16", "adamw", "torch", "sdpa")
        batch = f"{meta.get('batch')}" + (f"x{meta['seq']}" if meta.get("seq", 1) > 1 else "")
        return " ".join([self.name, batch, *(str(o) for o, u in zip(odd, usual, strict=True) if o not in (u, None))])

    @property
    def file_name(self) -> str:
        """Names the model's file; models of the same name but of other sizes get different files."""
        marked = canonical_json([self.stream.meta, self.stream.depth, self.run.matmul, self.run.attention])
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.label).strip("-.")[:80]
        return f"{readable}-{hashlib.sha256(marked.encode()).hexdigest()[:8]}.json.gz"


@dataclass(frozen=True)
class ModelOptions:
    """A model as the command line names it, and how its step is run. `given`: the options that were given, by name."""

    given: Mapping[str, Any]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Returns the command-line arguments that name it."""
        return tuple(word for name, value in self.given.items() for word in (f"--{name}", str(value)))

    @property
    def run(self) -> Run:
        return run_from(self.given)

    def model(self, device_type: str) -> MeasuredModel:
        """Finds or traces the step as `device_type` ("cuda" or "cpu") runs it. Raises UsageError."""
        name, stream = self._module(device_type) if "module" in self.given else self._config(device_type)
        return MeasuredModel(name=name, stream=stream, run=self.run)

    def _config(self, device_type: str) -> tuple[str, Stream]:
        source, depth = self.given["config"], self.given.get("depth")
        stream = get_stream(model_from(config=source, depth=depth), self.run.traced_on(device_type))
        return name_of(source, None, depth), stream

    def _module(self, device_type: str) -> tuple[str, Stream]:
        """Returns (name, stream) of the factory's module, with the factory's own sizes except those that were given."""
        from flopcast.roofline.stream.library.modules import module_stream

        run, module = self.run, str(self.given["module"])
        if run.fused != "none":
            raise UsageError(
                f"--module with --fused {run.fused}: a factory patches its own model, leave one of the two out"
            )
        sizes = {name: self.given[name] for name in ("batch", "seq") if name in self.given}
        return module.rpartition(":")[2], module_stream(module, run, device_type, sizes=sizes)


def model_options(options: Mapping[str, Any]) -> ModelOptions | None:
    """Returns the model that the options ask for, or None where they ask for none. A value of None means that the
    option was not given.

    Raises UsageError for run options without a model, for two models, and as `Run.check` does.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if "config" not in given and "module" not in given:
        if given:
            raise UsageError(
                f"--{next(iter(given))} without a model: it says how the step of a --config or a --module is run;"
                " a suite has its own sizes"
            )
        return None
    if "module" in given and (both := {"config", "depth"} & given.keys()):
        raise UsageError(f"--module and --{min(both)}: a factory makes the whole model, leave one of the two out")
    for name in ("matmul", "attention"):
        if given.get(name) == "best":
            raise UsageError(f"--{name} best picks by a profile, which measurements make: give the backend to measure")
    found = ModelOptions(given)
    found.run.check()
    return found


def step_cases(model: MeasuredModel, device: Device, stack: Mapping[str, Any]) -> list[SuiteCase]:
    """Returns a cold case for every distinct operation of the step, and a hot one where its operands lie in L2 during
    the step.

    `device`, `stack`: as in machine.json; they decide what lies in L2 and which attention torch picks. On a GPU,
    reading a value back to the host is left out, since its time is the wait for the device.
    """
    stream = model.stream
    works = describe_ops(stream)
    capacity = L2_SHARE * float(device.get("l2_bytes") or 0.0)
    shares = l2_shares(stream, [work is not None for work in works], capacity)
    sdpa = attention_alias(device, stack, {*_PICKED})["sdpa"]
    cases: dict[tuple[str, str, str], SuiteCase] = {}  # by key, as strides of size-1 dimensions change no kernel
    for op, work, share in zip(stream.ops, works, shares, strict=True):
        if work is None or (op.kind == "sync" and device["type"] != "cpu"):
            continue
        backend = backend_of(work, model.run, sdpa)
        for cache in ("cold", "hot") if share > 0 else ("cold",):
            cases.setdefault((work.shape.key, backend, cache), SuiteCase(work.shape, backend, cache, "fit"))
    return list(cases.values())


# --- beside the measurements


def keep(folder: Path, model: MeasuredModel) -> Path:
    """Writes the model's stream into the folder of its measurements. Raises RunError when it cannot be written."""
    path = folder / SOURCES / model.file_name
    source = {"name": model.name, "matmul": model.run.matmul, "attention": model.run.attention}
    try:
        streams.save(replace(model.stream, meta={**model.stream.meta, "source": source}), path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}; all finished rows are kept") from error
    return path


def kept(folder: Path) -> list[MeasuredModel]:
    """Returns the models that a folder was measured for, ordered by file name. Raises DataError where a file is not a
    stream."""
    found = []
    for path in sorted((folder / SOURCES).glob("*.json.gz")):
        stream = streams.load(path)
        meta = dict(stream.meta)
        source = meta.pop("source")
        found.append(MeasuredModel(name=source["name"], stream=replace(stream, meta=meta), run=run_from(source)))
    return found


def cases_kept(folder: Path, model: MeasuredModel, cases: Sequence[SuiteCase]) -> Iterator[SuiteCase]:
    """Yields the cases and writes the model into the folder when the first case is requested, which a benchmark sweep
    does only once the folder is its own."""
    keep(folder, model)
    yield from cases


def promote(
    rows: Iterable[Mapping[str, Any]], models: Sequence[MeasuredModel], machine: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """Turns held-out rows of the models' own operations into rows to fit; returns (rows, how many were turned).

    A user who measures a model's own operations wants them in the profile; they then no longer validate it.
    """
    wanted = {
        (case.shape.key, case.backend, case.cache)
        for model in models
        for case in step_cases(model, machine["device"], machine.get("stack", {}))
    }
    turned, count = [], 0
    for row in rows:
        is_wanted = (row["key"], row.get("backend", "torch"), row.get("cache", "cold")) in wanted
        if is_wanted and row.get("role") == "holdout":
            row, count = {**row, "role": "fit"}, count + 1
        turned.append(dict(row))
    return turned, count
