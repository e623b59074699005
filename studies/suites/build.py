"""Puts suites together: shapes taken from op streams, so that what a step launches is what is measured, and drawn ones.

Needs torch and transformers, which trace the steps; what comes out ships in `data/suites`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from flopcast.kernels.shapes import Attention, Call, Gemm, Shape
from flopcast.microbench import images
from flopcast.roofline.gpu.suites import SuiteCase
from flopcast.roofline.stream.library.streams import trace_now
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.model.models import load_config, make_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream
from flopcast.roofline.stream.ops.to_depth import to_depth
from studies.suites.attention import and_hot, attention_cases
from studies.suites.calls import call_cases
from studies.suites.gemms import gemm_cases
from studies.suites.plans import Plan, Source


def build(plan: Plan) -> list[SuiteCase]:
    """Puts the suite together, tracing the plan's models (needs torch and transformers)."""
    rng = random.Random(1)
    fit, every = works(plan.fit.sources, plan.device), works(plan.holdout.sources, plan.device)
    fitted_shapes = {work.shape for work in fit}
    held = [work for work in every if work.shape not in fitted_shapes]
    cases = [
        *(calls := call_cases(fit, plan.fit.calls, "fit", plan.caches)),
        *call_cases(
            [*held, *_without_new(every, held)],
            plan.holdout.calls,
            "holdout",
            plan.caches,
            {shape for shape in (*fitted_shapes, *(c.shape for c in calls)) if isinstance(shape, Call)},
        ),
        *(products := gemm_cases(fit, plan.fit.gemms, "fit")),
        *gemm_cases(held, plan.holdout.gemms, "holdout", {c.shape for c in products if isinstance(c.shape, Gemm)}),
    ]
    fitted = attention_cases(plan.fit.grid, plan.fit.attention, "fit", plan.attention_backends)
    held_out = attention_cases(
        plan.holdout.grid, plan.holdout.attention, "holdout", plan.attention_backends,
        {c.shape for c in fitted if isinstance(c.shape, Attention)},
    )  # fmt: skip
    either = [*fitted, *held_out]
    cases += and_hot(either) if "hot" in plan.caches else either
    aligned = [c.shape for c in cases if isinstance(c.shape, Gemm) and c.role == "fit" and c.shape.dtype == "bf16"]
    aligned = [s for s in dict.fromkeys(aligned) if isinstance(s, Gemm) and s.batch == 1 and s.m * s.n * s.k <= 2**36]
    cases += [SuiteCase(s, "triton", "cold", "fit") for s in rng.sample(aligned, min(plan.triton_gemms, len(aligned)))]
    few = [
        shape
        for c in fitted
        if isinstance(shape := c.shape, Attention) and c.backend == plan.attention_backends[0]
        if shape.seq <= 2048 and shape.causal and shape.head_dim == 128
    ]
    cases += [SuiteCase(s, "triton", "cold", "fit") for s in rng.sample(few, min(plan.triton_attention, len(few)))]
    return list({(c.shape.key, c.backend, c.cache): c for c in reversed(cases)}.values())[::-1]


def _without_new(works: Sequence[Work], held: Sequence[Work]) -> list[Work]:
    """Those of `works` of whose kernels none is `held`: the loss of a batch is the same for every width, and what
    judges it are the sizes between."""
    known = {(work.op_class, work.variant) for work in held}
    return [work for work in works if (work.op_class, work.variant) not in known]


def works(sources: Iterable[Source], device: str) -> list[Work]:
    """Everything that the sources' steps run on the device, each shape once."""
    found: dict[tuple[Shape, str], Work] = {}
    for source in sources:
        stream = _trace(source, device)
        for op in stream.ops:
            lowered = lower(stream, op)
            if lowered is not None and op.kind != "sync":
                found.setdefault(lowered, describe(*lowered))
    return list(found.values())


def _trace(source: Source, device: str) -> Stream:
    if source.module:
        from flopcast.roofline.stream.library.modules import module_stream

        run = Run(precision=source.precision, optimizer=source.optimizer, clip=source.clip)
        known = images.named(source.module) if "@" in source.module else None
        module = source.module if known is not None else f"flopcast.microbench.zoo:{source.module}"
        return module_stream(module, run, device, sizes={"batch": source.batch})
    config = (
        load_config(source.config)
        if source.config
        else make_config(width=source.width, depth=FOLDED_DEPTH, vocab=source.vocab)
    )
    traced = Run(
        batch=source.batch, seq=source.seq, precision=source.precision, optimizer=source.optimizer,
        clip=source.clip, fused=source.fused, phase=source.phase, context=source.context, base_dtype=source.base_dtype,
    ).traced_on(device)  # fmt: skip
    return to_depth(trace_now(with_depth(config, FOLDED_DEPTH), traced), source.depth)
