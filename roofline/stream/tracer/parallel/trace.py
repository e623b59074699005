"""Traces what one rank launches of a step on several GPUs: the recipe of `microbench.recipe.parallel_step` on fake
tensors and a fake process group."""

from __future__ import annotations

import contextlib
from typing import Any

from flopcast.microbench.recipe.parallel_step import build_parallel, mesh_of
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.parallel.ddp import fake_reducers
from flopcast.roofline.stream.tracer.parallel.world import fake_world, followed_streams, real_meshes, unseen_shapes
from flopcast.roofline.stream.tracer.trace import faking
from flopcast.roofline.stream.tracer.unmodelled import Topic, modelled


def trace_rank(config: Config, traced: Traced, bucket_mib: float | None = None) -> Stream:
    """Returns the op stream of one rank. `meta["parallel"]` says of which layout and rank.

    `bucket_mib`: the size of DistributedDataParallel's buckets in place of torch's; at BUCKET_EACH every gradient has
    one, so that layers are alike (`ops/to_buckets`)."""
    device, layout, rank = traced.device, traced.layout, traced.rank
    meta: dict[str, Any] = {
        "config": dict(config), "batch": traced.batch, "seq": traced.seq, "precision": traced.precision,
        "optimizer": traced.optimizer, "accumulate": traced.accumulate, "checkpoint": traced.checkpoint,
        "device": device, "parallel": {"layout": str(layout), "rank": rank},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_world(layout.world, rank))
        mesh = mesh_of(layout, device)
        stack.enter_context(modelled(Topic.SEVERAL_GPUS))
        record = stack.enter_context(faking(device, casts_in_order=True))
        stack.enter_context(real_meshes())
        stack.enter_context(unseen_shapes())
        stack.enter_context(fake_reducers())
        lanes = stack.enter_context(followed_streams()) if device == "cuda" else None
        step = build_parallel(
            config, layout, mesh, device, batch=traced.batch, seq=traced.seq, precision=traced.precision,
            optimizer=traced.optimizer, accumulate=traced.accumulate, checkpoint=traced.checkpoint,
            foreach=True if device == "cuda" else None, bucket_mib=bucket_mib,
        )  # fmt: skip
        return record(step, meta, first=step.warm_up, lanes=lanes)
