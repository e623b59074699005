"""What to measure: shapes taken from op streams, so that what a step launches is what is measured.

A suite is a JSON file that a person can open, shipped in `data/suites` and made by `python -m
flopcast.roofline.gpu.suites.build` from the traces of the models named here; measuring needs no tracing. Every case has
a role: "fit" cases make the profile, "holdout" cases only judge it, and come from models of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flopcast.kernels.shapes import Attention, Call, Gemm, Shape
from flopcast.roofline.gpu.suites import attention as suites_attention
from flopcast.roofline.gpu.suites import calls as suites_calls
from flopcast.roofline.gpu.suites import gemms as suites_gemms
from flopcast.roofline.gpu.suites.attention import (
    CUDA_GRID,
    CUDA_GRID_HOLDOUT,
    AttentionPlan,
    Grid,
    and_hot,
    attention_cases,
)
from flopcast.roofline.gpu.suites.calls import CallPlan, call_cases
from flopcast.roofline.gpu.suites.gemms import GemmPlan, gemm_cases
from flopcast.roofline.gpu.suites.suite import SuiteCase
from flopcast.roofline.stream.library.streams import trace_now
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.model.models import load_config, make_config, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream
from flopcast.roofline.stream.ops.to_depth import at_depth


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model and a batch whose step is traced for its shapes: of the ladder by `width`, else a shipped `config`, or
    what a factory of `microbench.zoo` makes."""

    width: int = 0
    config: str = ""
    module: str = ""
    depth: int = FOLDED_DEPTH  # more layers change the optimizer's lists alone
    batch: int = 4
    seq: int = 256
    precision: str = "autocast-bf16"
    optimizer: str = "adamw"
    vocab: int = 151_936
    fused: str = "none"

    @property
    def label(self) -> str:
        """As a suite's file names it."""
        if self.module:
            return f"{self.module} {self.batch} {self.precision} {self.optimizer}"
        model = (self.config or f"w{self.width}") + f"-d{self.depth}"
        said = f"{model} {self.batch}x{self.seq} {self.precision} {self.optimizer}"
        return said if self.fused == "none" else f"{said} fused"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a suite is put together: from which steps, and how many cases of what."""

    device: str
    fit: tuple[Source, ...]
    holdout: tuple[Source, ...] = ()
    caches: tuple[str, ...] = ("cold", "hot")
    gemms: GemmPlan
    gemms_holdout: GemmPlan
    calls: CallPlan
    calls_holdout: CallPlan
    grid: Grid = ()  # of attention
    grid_holdout: Grid = ()
    attention: AttentionPlan = field(default_factory=AttentionPlan)
    attention_holdout: AttentionPlan = field(default_factory=AttentionPlan)
    attention_backends: tuple[str, ...] = ()
    triton_gemms: int = 0
    triton_attention: int = 0

    @property
    def labels(self) -> dict[str, list[str]]:
        """The sources by role, for the suite's file."""
        return {"fit": [s.label for s in self.fit], "holdout": [s.label for s in self.holdout]}


# The ladder from 256 tokens a step to 65,536; the two largest published Qwen3 for widths beyond it. No step of
# `ladders.validation_plans` is here for its own sake: widths of the ladder at its default batch are in both.
_QWEN3 = (
    *(Source(width=width) for width in (256, 512, 1024, 1536, 2048, 3072, 4096)),
    *(Source(width=width, batch=8, seq=1024, optimizer="adamw-fused") for width in (512, 1024, 2048)),
    Source(width=256, batch=2, seq=4096),
    Source(width=1024, batch=1, seq=4096),
    Source(width=4096, batch=2, seq=2048, optimizer="adamw-fused"),
    Source(width=256, optimizer="adamw-fused"),
    Source(width=640, batch=2, seq=1024),
    Source(width=1792, batch=4, seq=512),
    Source(width=768, batch=1, seq=256),
    Source(width=256, depth=28),
    Source(width=768, depth=16, optimizer="adamw-fused"),
    Source(width=512, batch=8, seq=4096),
    Source(width=256, batch=16, seq=4096, optimizer="adamw-fused"),
    Source(config="qwen3-14b"),
    Source(config="qwen3-32b", batch=1, seq=1024),
)
_QWEN3_HOLDOUT = (
    Source(width=896),
    Source(width=2304),
    Source(width=1280, batch=4, seq=512, optimizer="adamw-fused"),
    Source(config="qwen3-1.7b", batch=8, seq=512),
)
# Other families at batches that no validation step runs.
_FAMILIES = (
    *(Source(config="llama-3.2-1b", batch=b, seq=s, optimizer=o) for b, s, o in (
        (2, 512, "adamw"), (4, 1024, "adamw-fused"), (1, 2048, "adamw"))),
    *(Source(config="gpt2", batch=b, seq=s, optimizer=o) for b, s, o in (
        (4, 256, "adamw"), (16, 512, "adamw-fused"), (2, 1024, "adamw"))),
    *(Source(config="qwen3-moe", batch=b, seq=s, optimizer=o) for b, s, o in (
        (4, 256, "adamw"), (4, 1024, "adamw-fused"), (2, 512, "adamw"))),
    *(Source(module="vit_b16", batch=batch) for batch in (16, 32, 128)),
    *(Source(module="resnet50", batch=batch) for batch in (16, 32, 128)),
    *(Source(module="resnet50_channels_last", batch=batch) for batch in (32, 128)),
    *(Source(module="mlp", batch=batch) for batch in (1024, 8192)),
    *(Source(module="train_mlp", batch=batch) for batch in (1024, 8192)),
    *(Source(module="transformer_encoder", batch=batch) for batch in (16, 64)),
)  # fmt: skip
_FAMILIES_HOLDOUT = (
    Source(config="llama-3.2-1b", batch=2, seq=768, optimizer="adamw-fused"),
    Source(config="gpt2", batch=4, seq=512),
    Source(module="vit_b16", batch=48),
    Source(module="resnet50", batch=48),
    Source(module="mlp", batch=2048),
)
# Other precisions, in which all sizes of a ladder's step are other kernels.
_PRECISIONS = tuple(
    Source(width=width, batch=batch, seq=256, precision=precision, optimizer=optimizer)
    for precision, optimizer in (("bf16", "adamw-fused"), ("bf16", "adamw"), ("tf32", "adamw"), ("fp32", "adamw"))
    for width, batch in ((512, 4), (1024, 16), (2048, 4))
)


def _each(most: int) -> CallPlan:
    return CallPlan(pointwise=most, copy=most, reduction=most, embedding=most, optimizer=most, others=most)


PLANS = {
    "standard": Plan(
        device="cuda",
        fit=_QWEN3,
        holdout=_QWEN3_HOLDOUT,
        gemms=suites_gemms.PLANS["standard", "fit"],
        gemms_holdout=suites_gemms.PLANS["standard", "holdout"],
        calls=suites_calls.PLANS["standard", "fit"],
        calls_holdout=suites_calls.PLANS["standard", "holdout"],
        grid=CUDA_GRID,
        grid_holdout=CUDA_GRID_HOLDOUT,
        attention=suites_attention.PLANS["standard", "fit"],
        attention_holdout=suites_attention.PLANS["standard", "holdout"],
        attention_backends=("sdpa-cudnn", "sdpa-flash"),
        triton_gemms=40,
        triton_attention=10,
    ),
    "full": Plan(
        device="cuda",
        fit=(*_QWEN3, *_PRECISIONS, *_FAMILIES),
        holdout=(
            *_QWEN3_HOLDOUT,
            *_FAMILIES_HOLDOUT,
            *(Source(width=896, batch=8, precision=precision) for precision in ("bf16", "tf32", "fp32")),
        ),
        gemms=suites_gemms.PLANS["full", "fit"],
        gemms_holdout=suites_gemms.PLANS["full", "holdout"],
        calls=suites_calls.PLANS["full", "fit"],
        calls_holdout=suites_calls.PLANS["full", "holdout"],
        grid=CUDA_GRID,
        grid_holdout=CUDA_GRID_HOLDOUT,
        attention=suites_attention.PLANS["full", "fit"],
        attention_holdout=suites_attention.PLANS["full", "holdout"],
        attention_backends=("sdpa-cudnn", "sdpa-flash"),
        triton_gemms=80,
        triton_attention=20,
    ),
    "quick": Plan(
        device="cuda",
        fit=(*(Source(width=width) for width in (256, 1024, 2048)), Source(width=1024, batch=8, seq=1024)),
        caches=("cold",),
        gemms=suites_gemms.PLANS["quick", "fit"],
        gemms_holdout=suites_gemms.PLANS["quick", "holdout"],
        calls=suites_calls.PLANS["quick", "fit"],
        calls_holdout=suites_calls.PLANS["quick", "holdout"],
        grid=CUDA_GRID[::4],
        attention=suites_attention.PLANS["quick", "fit"],
        attention_backends=("sdpa-cudnn", "sdpa-flash"),
    ),
    "cpu-quick": Plan(
        device="cpu",
        fit=tuple(Source(width=width, batch=1, seq=128, vocab=4096) for width in (64, 128, 256)),
        holdout=(Source(width=160, batch=1, seq=128, vocab=4096),),
        caches=("cold",),
        gemms=suites_gemms.PLANS["cpu-quick", "fit"],
        gemms_holdout=suites_gemms.PLANS["cpu-quick", "holdout"],
        calls=_each(3),
        calls_holdout=_each(1),
        grid=((1, 1, 1, 128, 128), (1, 2, 1, 128, 128), (1, 2, 1, 256, 128)),
        attention_backends=("sdpa-cpu",),
    ),
}
FUSED_SOURCES = {
    role: tuple(
        Source(width=w, batch=b, seq=s, precision=p, optimizer="adamw-fused", fused="triton") for w, b, s, p in sources
    )
    for role, sources in (("fit", suites_calls.FIT), ("holdout", suites_calls.HOLDOUT))
}


def build(plan: Plan) -> list[SuiteCase]:
    """Puts the suite together, tracing the plan's models (needs torch and transformers)."""
    rng = random.Random(1)
    fit, held = works(plan.fit, plan.device), works(plan.holdout, plan.device)
    fitted_shapes = {work.shape for work in fit}
    every, held = held, [work for work in held if work.shape not in fitted_shapes]
    cases = [
        *(calls := call_cases(fit, plan.calls, "fit", plan.caches)),
        *call_cases(
            [*held, *_without_new(every, held)],
            plan.calls_holdout,
            "holdout",
            plan.caches,
            {shape for shape in (*fitted_shapes, *(c.shape for c in calls)) if isinstance(shape, Call)},
        ),
        *(products := gemm_cases(fit, plan.gemms, "fit")),
        *gemm_cases(held, plan.gemms_holdout, "holdout", {c.shape for c in products if isinstance(c.shape, Gemm)}),
    ]
    fitted = attention_cases(plan.grid, plan.attention, "fit", plan.attention_backends)
    held_out = attention_cases(
        plan.grid_holdout, plan.attention_holdout, "holdout", plan.attention_backends,
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
        from flopcast.roofline.stream.tracer.trace import trace_module

        return trace_module(
            f"flopcast.microbench.zoo:{source.module}", sizes={"batch": source.batch}, precision=source.precision,
            optimizer=source.optimizer, device=device,
        )  # fmt: skip
    config = (
        load_config(source.config)
        if source.config
        else make_config(width=source.width, depth=FOLDED_DEPTH, vocab=source.vocab)
    )
    traced = Traced(
        batch=source.batch, seq=source.seq, precision=source.precision, optimizer=source.optimizer, device=device,
        fused=source.fused,
    )  # fmt: skip
    return at_depth(trace_now(with_depth(config, FOLDED_DEPTH), traced), source.depth)
