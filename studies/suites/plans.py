"""Defines the plan of each suite: which steps are traced for their shapes, and how many cases of each kind are taken
and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH
from studies.suites import attention, calls, gemms
from studies.suites.attention import CUDA_GRID, CUDA_GRID_HOLDOUT, AttentionPlan, Grid
from studies.suites.calls import CallPlan
from studies.suites.gemms import GemmPlan


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model and a batch whose step is traced for its shapes: a model of the ladder by `width`, a shipped `config`, or
    the result of a factory of `microbench.zoo`."""

    width: int = 0
    config: str = ""
    module: str = ""
    depth: int = FOLDED_DEPTH  # more layers change the optimizer's lists alone
    batch: int = 4
    seq: int = 256
    precision: str = "autocast-bf16"
    optimizer: str = "adamw"
    clip: float = 0.0
    vocab: int = 151_936
    fused: str = "none"
    phase: str = "train"
    context: int = 0  # of a phase of inference, in place of `seq`
    base_dtype: str = "auto"

    @property
    def label(self) -> str:
        """As a suite's file names it."""
        clip = f" clip {self.clip:g}" if self.clip else ""
        if self.module:
            return f"{self.module} {self.batch} {self.precision} {self.optimizer}{clip}"
        model = (self.config or f"w{self.width}") + f"-d{self.depth}"
        if self.phase != "train":
            weights = "" if self.base_dtype == "auto" else f" {self.base_dtype}"
            return f"{model} {self.batch}x{self.context} {self.precision} {self.phase}{weights}"
        label = f"{model} {self.batch}x{self.seq} {self.precision} {self.optimizer}{clip}"
        return label if self.fused == "none" else f"{label} fused"


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """The contents of the fit or the holdout of a suite: traced steps, and the number of cases of each kind."""

    sources: tuple[Source, ...] = ()
    gemms: GemmPlan
    calls: CallPlan
    grid: Grid = ()  # of attention
    attention: AttentionPlan = field(default_factory=AttentionPlan)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The composition of a suite. `triton_gemms`, `triton_attention`: how many of its shapes Triton runs as well."""

    device: str = "cuda"
    fit: RolePlan
    holdout: RolePlan
    caches: tuple[str, ...] = ("cold", "hot")
    attention_backends: tuple[str, ...] = ("sdpa-cudnn", "sdpa-flash")
    triton_gemms: int = 0
    triton_attention: int = 0

    @property
    def sources(self) -> dict[str, tuple[Source, ...]]:
        """The traced steps by role."""
        return {"fit": self.fit.sources, "holdout": self.holdout.sources}


def labels(sources: Mapping[str, Sequence[Source]]) -> dict[str, list[str]]:
    """The sources by role, as a suite's file names them."""
    return {role: [source.label for source in own] for role, own in sources.items()}


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
_PRECISIONS_HOLDOUT = tuple(Source(width=896, batch=8, precision=precision) for precision in ("bf16", "tf32", "fp32"))


def _role_plan(suite: str, role: str, sources: tuple[Source, ...] = (), grid: Grid = ()) -> RolePlan:
    return RolePlan(
        sources=sources,
        gemms=gemms.PLANS[suite, role],
        calls=calls.PLANS[suite, role],
        grid=grid,
        attention=attention.PLANS.get((suite, role), AttentionPlan()),
    )


PLANS = {
    "standard": Plan(
        fit=_role_plan("standard", "fit", _QWEN3, CUDA_GRID),
        holdout=_role_plan("standard", "holdout", _QWEN3_HOLDOUT, CUDA_GRID_HOLDOUT),
        triton_gemms=40,
        triton_attention=10,
    ),
    "full": Plan(
        fit=_role_plan("full", "fit", (*_QWEN3, *_PRECISIONS, *_FAMILIES), CUDA_GRID),
        holdout=_role_plan(
            "full", "holdout", (*_QWEN3_HOLDOUT, *_FAMILIES_HOLDOUT, *_PRECISIONS_HOLDOUT), CUDA_GRID_HOLDOUT
        ),
        triton_gemms=80,
        triton_attention=20,
    ),
    "quick": Plan(
        fit=_role_plan(
            "quick",
            "fit",
            (*(Source(width=width) for width in (256, 1024, 2048)), Source(width=1024, batch=8, seq=1024)),
            CUDA_GRID[::4],
        ),
        holdout=_role_plan("quick", "holdout"),
        caches=("cold",),
    ),
    "cpu-quick": Plan(
        device="cpu",
        fit=_role_plan(
            "cpu-quick",
            "fit",
            tuple(Source(width=width, batch=1, seq=128, vocab=4096) for width in (64, 128, 256)),
            ((1, 1, 1, 128, 128), (1, 2, 1, 128, 128), (1, 2, 1, 256, 128)),
        ),
        holdout=_role_plan("cpu-quick", "holdout", (Source(width=160, batch=1, seq=128, vocab=4096),)),
        caches=("cold",),
        attention_backends=("sdpa-cpu",),
    ),
}


def _fused(width: int, batch: int, seq: int, precision: str = "autocast-bf16") -> Source:
    return Source(width=width, batch=batch, seq=seq, precision=precision, optimizer="adamw-fused", fused="triton")


# Qwen3 steps of the fused kernels, from 1,024 to 16,384 tokens.
FUSED_SOURCES = {
    "fit": (
        *(_fused(width, 4, 256) for width in (256, 512, 1024, 2048, 4096)),
        *(_fused(width, 8, 1024) for width in (512, 1024, 2048)),
        _fused(256, 2, 4096), _fused(640, 2, 1024), _fused(1792, 4, 512),
        _fused(2560, 4, 1024), _fused(4096, 2, 2048), _fused(1024, 4, 4096),
        _fused(512, 4, 256, "bf16"), _fused(1024, 16, 256, "bf16"), _fused(2048, 8, 1024, "bf16"),
    ),
    "holdout": (_fused(896, 4, 256), _fused(1280, 4, 512), _fused(2304, 4, 768)),
}  # fmt: skip


def _stepped(*models: tuple[str | int, int] | tuple[int, int, int]) -> tuple[Source, ...]:
    """Steps of flopcast's AdamW, with clipping and without, over the parameters of (config or width, depth and, where
    it is not Qwen3's, vocabulary)."""
    return tuple(
        Source(
            width=of if isinstance(of, int) else 0, config=of if isinstance(of, str) else "", depth=depth,
            vocab=vocab[0] if vocab else Source.vocab, batch=1, seq=16, optimizer="adamw-triton", clip=clip,
        )
        for of, depth, *vocab in models
        for clip in (0.0, 1.0)
    )  # fmt: skip


# From 0.1 M parameters to 4 B, in 25 to 663 tensors: few layers and many of one width, wide models and narrow ones.
OPTIMIZER_SOURCES = {
    "fit": _stepped(
        (64, 2, 512), (64, 24, 2048), (128, 60, 4096), (256, 4), (256, 28), (512, 12, 32_000), (768, 4), (1024, 28),
        (2048, 2), (2048, 6), (4096, 3), ("gpt2", 12), ("gpt2", 48), ("llama-3.2-1b", 4), ("llama-3.2-1b", 16),
        ("qwen3-1.7b", 28), ("qwen3-4b", 36),
    ),
    "holdout": _stepped(
        (128, 6, 1024), (384, 6), (896, 14), (2304, 4), ("gpt2", 24), ("llama-3.2-1b", 9), ("qwen3-1.7b", 14),
    ),
}  # fmt: skip
