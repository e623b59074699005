"""Which attention calls a suite measures: a grid like the Qwen3 ladder's, and random ones for every mask and head size.

Time goes in rounds of thread blocks over the SMs, so what has to vary is the number of blocks: heads, batch and length
at random, not powers of two alone. Learning curves on an H200 (of 100 random configurations, judged by 38 others;
90th percentile of the error): 15 configurations cuDNN 6.6 and flash 10.4%, 25: 4.2 and 7.7%, 40: 4.0 and 7.2%,
60: 3.0 and 6.9%, 100: 2.9 and 7.1%.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.suites import HOT_BYTES, SuiteCase
from studies.suites.drawing import distinct, first

Grid = Sequence[tuple[int, int, int, int, int]]  # batch, heads, kv_heads, seq, head_dim: causal

# heads by kv_heads: the ladder's and the published Qwen3's; (batch, seq): from 1,024 tokens to 16,384
CUDA_GRID: Grid = tuple(
    (batch, heads, kv_heads, seq, 128)
    for heads, kv_heads in ((2, 1), (8, 4), (16, 8), (32, 8))
    for batch, seq in ((4, 256), (8, 512), (1, 1024), (8, 1024), (2, 2048), (4, 4096), (1, 8192))
)
CUDA_GRID_HOLDOUT: Grid = (
    (4, 12, 6, 256, 128), (2, 24, 8, 512, 128), (4, 16, 8, 768, 128), (8, 20, 10, 1024, 128),
    (2, 32, 16, 1536, 128), (1, 16, 8, 3072, 128), (2, 40, 8, 2048, 128), (1, 4, 2, 6144, 128),
)  # fmt: skip

KV_HEADS, GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16), (1, 2, 2, 2, 3, 4, 5, 7, 8)
MOST_HEADS = 64
LENGTHS = (64, 128, 197, 256, 320, 384, 512, 577, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
MAX_TOKENS, MAX_FLOPS = 32_768, 1e12  # 2 ms forward at 500 TFLOP/s
SEEDS = {"fit": 11, "holdout": 12}


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """How many random configurations, by mask and head size; each is measured forward and backward."""

    causal_128: int = 0
    full_128: int = 0
    causal_64: int = 0
    full_64: int = 0

    def kinds(self) -> Iterator[tuple[int, bool, int]]:
        """(how many, causal, head_dim)"""
        yield from (
            (self.causal_128, True, 128),
            (self.full_128, False, 128),
            (self.causal_64, True, 64),
            (self.full_64, False, 64),
        )


# Beside the grid, of which `standard` and `full` take all. The holdout has of each kind what a 90th percentile over all
# of them needs, half of it of the kind that a Qwen3 step runs.
PLANS = {
    ("quick", "fit"): AttentionPlan(causal_128=6),
    ("quick", "holdout"): AttentionPlan(),
    ("standard", "fit"): AttentionPlan(causal_128=24, full_128=10, causal_64=14, full_64=10),
    ("standard", "holdout"): AttentionPlan(causal_128=10, full_128=4, causal_64=5, full_64=3),
    ("full", "fit"): AttentionPlan(causal_128=60, full_128=30, causal_64=40, full_64=30),
    ("full", "holdout"): AttentionPlan(causal_128=24, full_128=10, causal_64=12, full_64=10),
}


@dataclass(frozen=True, kw_only=True)
class Range:
    """What configurations are drawn from, and the forward FLOPs that none may exceed."""

    batches: Sequence[int] = BATCHES
    kv_heads: Sequence[int] = KV_HEADS
    groups: Sequence[int] = GROUPS
    lengths: Sequence[int] = LENGTHS
    max_flops: float = MAX_FLOPS


# Triton's attention has a suite of its own, `bench --suite attention`, as the fused kernels have: about a minute, and
# its kernels change more often than torch's. Each kernel's tile goes by the nearest length of a table, 256 to 16,384.
TRITON_RANGE = Range(
    batches=(1, 2, 3, 4, 6, 8, 12, 16),
    kv_heads=(1, 2, 3, 4, 5, 6, 8, 10, 16),
    groups=(1, 2, 2, 2, 3, 4, 4, 8),
    lengths=(197, 256, 320, 384, 512, 640, 768, 1000, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
    max_flops=4e11,
)
TRITON_PLANS = {
    "fit": AttentionPlan(causal_128=100, full_128=20, causal_64=40, full_64=14),
    "holdout": AttentionPlan(causal_128=24, full_128=5, causal_64=10, full_64=4),
}


def triton_cases() -> list[SuiteCase]:
    """Of Triton's attention: random configurations of the fit and of the holdout, forward and backward, cold, and hot
    where an L2 holds their operands. None is of the grids, which have the shapes of the ladder's steps."""
    fit = attention_cases((), TRITON_PLANS["fit"], "fit", ["triton"], among=TRITON_RANGE)
    known = [case.shape for case in fit if isinstance(case.shape, Attention)]
    held = attention_cases((), TRITON_PLANS["holdout"], "holdout", ["triton"], known, among=TRITON_RANGE)
    return list(and_hot([*fit, *held]))


# Of `bench --suite bands`, windows and packed documents: (configurations, head_dim, windows, numbers of documents), all
# forward and backward, cold. A window is a constant of the kernels, each of which is compiled for it, in seconds: few
# are measured, one judges alone.
BANDED = {
    "fit": ((12, 128, (128, 1024, 4096), (0,)), (8, 128, (0,), (2, 4, 8, 16, 32)), (4, 128, (1024,), (4, 16)),
            (4, 64, (1024,), (0,)), (4, 64, (0,), (4, 16))),
    "holdout": ((6, 128, (512,), (0,)), (5, 128, (0,), (3, 6, 12, 24)), (3, 128, (512,), (3, 12))),
}  # fmt: skip
BANDED_RANGE = replace(TRITON_RANGE, lengths=(1000, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384))


def banded_cases() -> list[SuiteCase]:
    """Of Triton's attention where windows and documents hide keys; none of the holdout's shapes is among the fit's."""
    taken: set[Attention] = set()
    cases = []
    for role in ("fit", "holdout"):
        rng = random.Random(SEEDS[role] + 100)
        for count, head_dim, windows, documents in BANDED[role]:
            for number in range(count):
                window, packed = windows[number % len(windows)], documents[number % len(documents)]
                drawn = partial(_banded, rng, head_dim, window, packed)
                (shape,) = distinct(drawn, taken, 1)
                cases += [SuiteCase(both, "triton", "cold", role) for both in directions(shape)]
    return cases


def _banded(rng: random.Random, head_dim: int, window: int, documents: int) -> Attention:
    whole = first(partial(draw, rng, True, head_dim, BANDED_RANGE), lambda shape: shape.seq > window)
    return replace(whole, window=window, documents=documents)


# Of `bench --suite heads`, by head size and mask: those of Phi-2 and ViT-H (80), Phi-3 (96), DeepSeek-V3's queries and
# keys (192), Gemma, Pythia and Qwen3-Next (256). Without a causal mask too: compiled steps give theirs as a tensor, by
# which a whole call takes longer. cuDNN and flash, forward and backward, cold.
HEADS = {
    "fit": ((10, True, 80), (8, False, 80), (14, True, 96), (10, True, 192), (24, True, 256),
            (8, False, 96), (8, False, 192), (16, False, 256)),
    "holdout": ((4, True, 80), (3, False, 80), (5, True, 96), (4, True, 192), (8, True, 256),
                (3, False, 96), (3, False, 192), (6, False, 256)),
}  # fmt: skip
HEADS_RANGE = Range(groups=(1, 1, 2, 4, 4, 8), max_flops=4e11)
# Of it too, as (configurations, causal, what is another than usual): DeepSeek-V3's values have fewer columns than its
# queries, which flash does not take; in fp32 neither flash nor cuDNN take any, nor does the memory-efficient kernel
# take heads in groups.
_NARROW: dict[str, Any] = {"head_dim": 192, "value_dim": 128}
_SMALL: dict[str, Any] = {"head_dim": 64, "dtype": "fp32"}
_LARGE: dict[str, Any] = {"head_dim": 128, "dtype": "fp32"}
OTHER_HEADS: dict[str, dict[str, tuple[tuple[int, bool, dict[str, Any]], ...]]] = {
    "sdpa-cudnn": {"fit": ((10, True, _NARROW), (6, False, _NARROW)),
                   "holdout": ((4, True, _NARROW), (3, False, _NARROW))},
    "sdpa-efficient": {
        "fit": ((9, True, _SMALL), (9, True, _LARGE), (5, False, _SMALL), (5, False, _LARGE)),
        "holdout": ((4, True, _SMALL), (4, True, _LARGE), (2, False, _SMALL), (2, False, _LARGE)),
    },
}  # fmt: skip
OTHER_RANGE = replace(HEADS_RANGE, groups=(1,))


def head_cases() -> list[SuiteCase]:
    """Of torch's attention with other heads than 64 and 128 columns of bf16; none of the holdout's is of the fit's."""
    taken: set[Attention] = set()
    cases = []
    for role, kinds in HEADS.items():
        rng = random.Random(SEEDS[role] + 200)
        for count, causal, head_dim in kinds:
            shapes = list(distinct(partial(draw, rng, causal, head_dim, HEADS_RANGE), taken, count))
            cases += [
                SuiteCase(both, backend, "cold", role)
                for backend in ("sdpa-cudnn", "sdpa-flash")
                for shape in shapes
                for both in directions(shape)
            ]
    return cases + _other_heads()


def _other_heads() -> list[SuiteCase]:
    taken: set[Attention] = set()
    cases = []
    for backend, of_roles in OTHER_HEADS.items():
        for role, kinds in of_roles.items():
            rng = random.Random(f"{SEEDS[role]} {backend}")
            for count, causal, other in kinds:
                drawn = partial(_drawn, rng, causal, other)
                cases += [
                    SuiteCase(both, backend, "cold", role)
                    for shape in distinct(drawn, taken, count)
                    for both in directions(shape)
                ]
    return cases


def _drawn(rng: random.Random, causal: bool, other: Mapping[str, Any]) -> Attention:
    return replace(draw(rng, causal, other["head_dim"], OTHER_RANGE), **other)


# Of `bench --suite masks`, by backend, role and dtype: (configurations, head_dim, value_dim). With a mask cuDNN runs
# other kernels than without; flash takes none, and in fp32 the memory-efficient kernel runs. Heads are in no groups:
# transformers repeats keys and values where it hands over a mask.
MASKS: dict[tuple[str, str], dict[str, tuple[tuple[int, int, int], ...]]] = {
    ("sdpa-cudnn", "bf16"): {
        "fit": ((90, 128, 0), (70, 64, 0), (8, 80, 0), (10, 96, 0), (8, 192, 0), (10, 256, 0), (8, 192, 128)),
        "holdout": ((30, 128, 0), (24, 64, 0), (3, 80, 0), (4, 96, 0), (3, 192, 0), (4, 256, 0), (3, 192, 128)),
    },
    ("sdpa-efficient", "fp32"): {"fit": ((10, 128, 0), (10, 64, 0)), "holdout": ((4, 128, 0), (4, 64, 0))},
}
MASKED_RANGE = Range(
    batches=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    kv_heads=(2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48),
    groups=(1,),
    lengths=(
        128,
        192,
        256,
        320,
        384,
        448,
        512,
        640,
        768,
        896,
        1024,
        1152,
        1280,
        1536,
        1792,
        2048,
        2304,
        2560,
        3072,
        3584,
        4096,
    ),
    max_flops=6e11,
)


def masked_cases() -> list[SuiteCase]:
    """Of torch's attention with a mask, forward and backward, cold, and in bf16 of the usual heads hot where an L2
    holds their operands; none of the holdout's shapes is among the fit's."""
    taken: set[Attention] = set()
    cases: list[SuiteCase] = []
    for (backend, dtype), of_roles in MASKS.items():
        for role, kinds in of_roles.items():
            rng = random.Random(f"{SEEDS[role]} {backend} masked")
            for count, head_dim, value_dim in kinds:
                drawn = partial(_masked, rng, head_dim, value_dim, dtype)
                cold = [
                    SuiteCase(both, backend, "cold", role)
                    for shape in distinct(drawn, taken, count)
                    for both in directions(shape)
                ]
                cases += and_hot(cold) if head_dim in (64, 128) and dtype == "bf16" else cold
    return cases


def _masked(rng: random.Random, head_dim: int, value_dim: int, dtype: str) -> Attention:
    return replace(draw(rng, False, head_dim, MASKED_RANGE), mask=True, value_dim=value_dim, dtype=dtype)


def and_hot(cases: Iterable[SuiteCase]) -> Iterator[SuiteCase]:
    """The cases, and again hot where their operands leave room in a cache: queries, keys and values come from it."""
    for case in cases:
        yield case
        if case.shape.bytes <= HOT_BYTES / 4:
            yield replace(case, cache="hot")


def attention_cases(
    grid: Grid, plan: AttentionPlan, role: str, backends: Iterable[str], without: Collection[Attention] = (),
    *, among: Range = Range(),
) -> list[SuiteCase]:  # fmt: skip
    """Every configuration of `grid` and those that `plan` draws, forward and backward, cold, for each of `backends`;
    none is drawn that is among `without` (forward) or in either grid. Draws depend on the plan and the role alone."""
    rng = random.Random(SEEDS[role])
    shapes = _grid_shapes(grid)
    taken = {*without, *shapes, *_grid_shapes(CUDA_GRID), *_grid_shapes(CUDA_GRID_HOLDOUT)}
    for count, causal, head_dim in plan.kinds():
        shapes += distinct(partial(draw, rng, causal, head_dim, among), taken, count)
    return [
        SuiteCase(both, backend, "cold", role) for backend in backends for shape in shapes for both in directions(shape)
    ]


def _grid_shapes(grid: Grid) -> list[Attention]:
    return [Attention(batch=b, heads=h, kv_heads=kv, seq=s, head_dim=d) for b, h, kv, s, d in grid]


def directions(shape: Attention) -> tuple[Attention, Attention]:
    """A forward and its backward."""
    return replace(shape, direction="fwd"), replace(shape, direction="bwd")


def draw(rng: random.Random, causal: bool, head_dim: int, among: Range) -> Attention:
    """A configuration of at most MAX_TOKENS and `max_flops`; 197 and 577 are a vision transformer's lengths."""

    def configuration() -> Attention:
        kv_heads, group = rng.choice(among.kv_heads), rng.choice(among.groups)
        return Attention(
            batch=rng.choice(among.batches),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            seq=rng.choice(among.lengths),
            head_dim=head_dim,
            causal=causal,
        )

    return first(
        configuration, lambda s: s.batch * s.seq <= MAX_TOKENS and s.flops <= among.max_flops and s.heads <= MOST_HEADS
    )
