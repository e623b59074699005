"""Traces what one rank launches of a step on several GPUs: the recipe of `microbench.recipe.parallel_step` on fake
tensors and a fake process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flopcast.errors import UsageError
from flopcast.microbench.recipe.layout import OWN, Layout
from flopcast.microbench.recipe.parallel_model import divided_names
from flopcast.microbench.recipe.parallel_step import build_parallel, build_parallel_module, mesh_of
from flopcast.microbench.recipe.training_step import FunctionStep, TrainingStep
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.collectives import BARRIER, KINDS, collectives
from flopcast.roofline.stream.ops.op_stream import Stream, packet
from flopcast.roofline.stream.ops.to_buckets import with_buckets
from flopcast.roofline.stream.tracer.gpu_machine import Gpu
from flopcast.roofline.stream.tracer.lanes import COLLECTIVES, Lanes
from flopcast.roofline.stream.tracer.parallel.ddp import fake_reducers
from flopcast.roofline.stream.tracer.parallel.world import (
    as_launched,
    dividing_modules,
    fake_world,
    followed_streams,
    known_shapes,
    parts_of_one_rank,
    real_meshes,
    reduced_by_layer,
    unseen_shapes,
)
from flopcast.roofline.stream.tracer.trace import Recording, faking, meta_of, trace_made
from flopcast.roofline.stream.tracer.unmodelled import Topic, modelled


def trace_rank(config: Config, traced: Traced, bucket_mib: float | None = None) -> Stream:
    """Returns the op stream of one rank. `meta["parallel"]` says of which layout and rank, and what the modules are
    called that tensor parallel divides.

    `bucket_mib`: the size of DistributedDataParallel's buckets in place of torch's; at BUCKET_EACH every gradient has
    one, so that layers are alike (`ops/to_buckets`)."""
    device, layout = traced.device, traced.layout
    meta = {"config": dict(config), **meta_of(traced, device)}
    with among_ranks(layout, traced.rank, device) as record:
        step = build_parallel(
            config, layout, record.mesh, device, traced, foreach=True if device == "cuda" else None,
            bucket_mib=bucket_mib,
        )  # fmt: skip
        return record(step, meta)


def trace_module_rank(
    source: Any,
    traced: Traced,
    *,
    batch: Any = None,
    loss_fn: Callable[[Any], Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    gpu: Mapping[str, Any] | None = None,
    bucket_mib: float | None = None,
) -> Stream:
    """As `trace_rank`, of a module, a factory or a step function as `trace.trace_module` takes them. What lays itself
    out (`own=N`) runs as it is written, as the first rank. Raises UsageError as `trace_module` does, for a step
    function in another layout, and for a rank that sends to another one alone, whose own step is not traced."""
    ranks = among_ranks(traced.layout, traced.rank, traced.device, Gpu.of(gpu) if gpu else None, bucket_mib)
    stream = trace_made(source, batch, loss_fn, sizes or {}, traced, traced.accumulate, ranks)
    if traced.layout.is_own:
        _check_first_rank(stream)
    return stream


def _check_first_rank(stream: Stream) -> None:
    """Raises UsageError where the first rank does not stand for all, or sends what is not modelled."""
    name = stream.meta["module"]
    unknown = {packet(op.name) for op in stream.ops if op.name.startswith(f"{COLLECTIVES}.")} - {*KINDS, BARRIER}
    if unknown:
        raise UsageError(
            f"{name} calls {', '.join(sorted(unknown))}, of which no time is known; use all_reduce, "
            "all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single or broadcast"
        )
    if any(sent.kind == "send_recv" for sent in collectives(stream)):
        raise UsageError(
            f"{name} sends from one rank to another: only the first rank is traced of a layout of one's own; pipelines "
            "are forecast with --config and --parallel pp=N"
        )


@dataclass(frozen=True)
class RankRecording(Recording):
    """Builds and records the step of a rank."""

    _: KW_ONLY
    layout: Layout
    rank: int
    mesh: DeviceMesh
    lanes: Lanes | None
    bucket_mib: float | None
    reducers: Sequence[Any]  # of DistributedDataParallel, those made so far

    def build(self, module: torch.nn.Module, batch: Any, traced: Traced, **given: Any) -> TrainingStep:
        if self.layout.is_own:
            return super().build(module, batch, traced, **given)
        return build_parallel_module(
            module, batch, self.layout, self.mesh, traced.device, traced, bucket_mib=self.bucket_mib, **given
        )

    def build_function(self, function: Callable[[], Any], device: str) -> FunctionStep:
        if self.layout.is_own:
            return super().build_function(function, device)
        raise UsageError(
            f"parallel {self.layout} of a step function, whose module cannot be laid out anew: give a factory that "
            f"returns (module, batch), or, where it lays itself out, {OWN}={self.layout.world}"
        )

    def __call__(
        self, step: Any, meta: Mapping[str, Any], first: Callable[[], Any] | None = None, lanes: Lanes | None = None
    ) -> Stream:
        told: dict[str, Any] = {"layout": str(self.layout), "rank": self.rank}
        if self.layout.tp > 1:
            told["divided"] = divided_names(step.model)
        meta = {**meta, "parallel": told}
        if not self.layout.is_own:
            return super().__call__(step, meta, first=first or step.settle, lanes=lanes or self.lanes)
        with dividing_modules() as divided:
            stream = super().__call__(step, meta, first=lambda: (step.run(), step.run()), lanes=lanes or self.lanes)
        told["divided"] = sorted(divided)
        return with_buckets(stream) if self.reducers else stream


def _refuse_to_join(layout: Layout) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError(
            f"parallel {layout} of code that joins a process group by itself: give {OWN}={layout.world} where it lays "
            "itself out, or a factory that returns (module, batch) of one GPU"
        )

    return refuse


@contextlib.contextmanager
def among_ranks(
    layout: Layout, rank: int, device: str, gpu: Gpu | None = None, bucket_mib: float | None = None
) -> Iterator[RankRecording]:
    """As `trace.faking`, in a process that is one rank of a layout."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_world(layout.world, rank))
        stack.enter_context(as_launched() if layout.is_own else as_launched(_refuse_to_join(layout)))
        mesh = DeviceMesh(device, torch.arange(layout.world)) if layout.is_own else mesh_of(layout, device)
        stack.enter_context(modelled(Topic.SEVERAL_GPUS))
        record = stack.enter_context(faking(device, gpu, casts_in_order=True))
        stack.enter_context(real_meshes())
        stack.enter_context(unseen_shapes())
        stack.enter_context(known_shapes())
        reducers = stack.enter_context(fake_reducers())
        stack.enter_context(parts_of_one_rank())
        if layout.pp > 1:
            stack.enter_context(reduced_by_layer())
        lanes = stack.enter_context(followed_streams()) if device == "cuda" else None
        yield RankRecording(
            record.values, record.watch_compiler, record.hosts, layout=layout, rank=rank, mesh=mesh, lanes=lanes,
            bucket_mib=bucket_mib, reducers=reducers,
        )  # fmt: skip
