"""Which matrix products a suite measures: those of op streams, those like them, unaligned ones and random ones.

Every drawn shape is one of a linear layer's three products: forward nt [tokens, in] x [out, in]^T, dgrad nn
[tokens, out] x [out, in], wgrad tn [tokens, out]^T x [tokens, in], except random ones, whose three sides know nothing
of one another. Draws depend on the plan and the role alone, so that a suite is the same wherever it is made.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.suites import HOT_BYTES, SuiteCase
from flopcast.roofline.stream.lowering.describe import Work
from studies.suites.drawing import distinct, first

LAYOUTS = ("nt", "nn", "tn")
TOKENS = 256, 65_536
WIDTHS = 256, 12_288
RATIOS = (0.125, 0.25, 0.5, 1, 1, 1, 1.5, 2, 2.5, 3, 3.5, 4)  # of a layer's two widths, in use by published models
VOCABULARIES = (32_000, 50_304, 128_256, 151_936)
VOCABULARY_SHARE = 0.04
ODD_VOCABULARIES = (32_003, 50_257, 100_277, 151_643)  # 50,257 is GPT-2's, 100,277 and 151,643 tokenizers' own counts
ODD_VOCABULARY_SHARE = 0.2
ANCHORS, OFFSETS = (64, 128, 256), (-8, -1, 1, 8)
HALF_OFFSETS = (-4, -2, 2, 4)  # rows of bf16 that begin at multiples of 4 or 8 bytes, for 16 that loads of tiles need
MAX_MACS, MAX_BYTES = 2**39, 4 * 10**9  # 1.5 ms a call at 700 TFLOP/s
RANDOM_MACS = 2**38
SIDES = 8.0, 14.0  # log2 of the least and the greatest side of a random product
SEEDS = {"fit": 1, "holdout": 2}
HALF_SEEDS = {"fit": 3, "holdout": 4}  # of their own: the draws before them stay as they were measured


@dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """How many products of each kind, cold. `stream`: of the traced steps, at most; the others are for each layout.
    `hot`: the share of all that is measured hot as well."""

    stream: int = 400
    like_stream: int = 0
    unaligned: int = 0
    half_aligned: int = 0
    random: int = 0
    hot: float = 1.0


# Learning curves on an H200 (cross-validated, by points of a surface, that is, a layout): nt 2.7% at the median with
# 90 and with 220, 1.9% from 450 on; tn 3.2, 2.9, 2.7 and 2.6% with 90, 230, 460 and 920; unaligned 5.0, 4.2 and 4.0%
# with 70, 140 and 300.
PLANS = {
    ("quick", "fit"): GemmPlan(stream=90, hot=0.0),
    ("quick", "holdout"): GemmPlan(stream=0, hot=0.0),
    ("standard", "fit"): GemmPlan(stream=400, like_stream=220, unaligned=110, half_aligned=12, random=280, hot=0.25),
    ("standard", "holdout"): GemmPlan(stream=100, like_stream=20, unaligned=20, half_aligned=4, random=40, hot=0.5),
    ("full", "fit"): GemmPlan(stream=800, like_stream=600, unaligned=300, half_aligned=100, random=1200, hot=0.25),
    ("full", "holdout"): GemmPlan(stream=150, like_stream=40, unaligned=40, half_aligned=15, random=80, hot=0.5),
    ("cpu-quick", "fit"): GemmPlan(stream=70, hot=0.0),
    ("cpu-quick", "holdout"): GemmPlan(stream=70, hot=0.0),
}


def gemm_cases(works: Sequence[Work], plan: GemmPlan, role: str, without: Collection[Gemm] = ()) -> list[SuiteCase]:
    """The products among `works` (those of one role's op streams) and those that are drawn, each once; for a hold-out,
    `without` names what is fitted, and none of it is drawn."""
    rng = random.Random(SEEDS[role])
    stream = list(dict.fromkeys(w.shape for w in works if isinstance(w.shape, Gemm) and w.shape not in without))
    shapes = dict.fromkeys(rng.sample(stream, plan.stream) if len(stream) > plan.stream else stream)
    taken = {*without, *shapes}
    kinds = (draw_like_stream, plan.like_stream), (draw_unaligned, plan.unaligned), (draw_random, plan.random)
    for draw, count in kinds:
        for layout in LAYOUTS:
            shapes |= dict.fromkeys(distinct(partial(draw, rng, layout), taken, count))
    cases = _with_hot(shapes, rng, plan, role)
    rng = random.Random(HALF_SEEDS[role])
    halves = [
        shape
        for layout in LAYOUTS
        for shape in distinct(partial(draw_half_aligned, rng, layout), taken, plan.half_aligned)
    ]
    return cases + _with_hot(halves, rng, plan, role)


def _with_hot(shapes: Iterable[Gemm], rng: random.Random, plan: GemmPlan, role: str) -> list[SuiteCase]:
    cases = []
    for shape in shapes:
        cases.append(SuiteCase(shape, "torch", "cold", role))
        if rng.random() < plan.hot and shape.bytes <= HOT_BYTES:
            cases.append(SuiteCase(shape, "torch", "hot", role))
    return cases


def draw_like_stream(rng: random.Random, layout: str) -> Gemm:
    """Tokens and widths as steps have them: multiples of 64, the two widths in a ratio that models use."""
    return first(lambda: layer(layout, _tokens(rng), *_widths(rng)), _is_affordable)


def draw_unaligned(
    rng: random.Random, layout: str, offsets: Sequence[int] = OFFSETS, odd_vocabularies: float = 0.0
) -> Gemm:
    """As `draw_like_stream` with a width, or both, one of `offsets` (-8, -1, 1, 8) beside a multiple of 64, 128 or 256;
    of a share of them out is an odd vocabulary."""

    def draw() -> Gemm:
        widths = list(_widths(rng))
        for i in rng.choice(((0,), (1,), (0, 1))):
            anchor = rng.choice(ANCHORS)
            widths[i] = max(anchor, round(widths[i] / anchor) * anchor) + rng.choice(offsets)
        if odd_vocabularies and rng.random() < odd_vocabularies:
            widths[1] = rng.choice(ODD_VOCABULARIES)
        return layer(layout, _tokens(rng), *widths)

    return first(draw, _is_affordable)


def draw_half_aligned(rng: random.Random, layout: str) -> Gemm:
    """As `draw_unaligned` with offsets of -4, -2, 2 and 4, and with odd vocabularies.

    Forecasts of whole steps were 5 points off the measured penalty there, and 6 at odd vocabularies (widths.csv)."""
    return draw_unaligned(rng, layout, HALF_OFFSETS, ODD_VOCABULARY_SHARE)


def draw_random(rng: random.Random, layout: str) -> Gemm:
    """256 to 16,384 a side, evenly in the logarithm; half of them aligned to 64, half each side as it comes.

    cuBLAS's choice follows the worst alignment of the three operands, so sides are off by themselves and together.
    """

    def side(multiple: int) -> int:
        return max(multiple, round(2 ** rng.uniform(*SIDES) / multiple) * multiple)

    is_aligned = rng.random() < 0.5

    def draw() -> Gemm:
        m, n, k = (side(64 if is_aligned else rng.choice((1, 1, 2, 8, 64))) for _ in range(3))
        return Gemm(m=m, n=n, k=k, layout=layout)

    return first(draw, lambda shape: shape.m * shape.n * shape.k <= RANDOM_MACS)


def _tokens(rng: random.Random) -> int:
    return _rounded(_log_uniform(rng, *TOKENS), rng.choice((64, 128, 256)))


def _widths(rng: random.Random) -> tuple[int, int]:
    """(in, out) of a layer; now and then out is a vocabulary."""
    multiple = rng.choice((64, 128, 128, 256))
    width = _rounded(_log_uniform(rng, *WIDTHS), multiple)
    if rng.random() < VOCABULARY_SHARE:
        return width, rng.choice(VOCABULARIES)
    pair = width, _rounded(width * rng.choice(RATIOS), multiple)
    return pair if rng.random() < 0.5 else pair[::-1]


def layer(layout: str, tokens: int, width_in: int, width_out: int) -> Gemm:
    """The product of a linear layer that has this layout."""
    m, n, k = {
        "nt": (tokens, width_out, width_in),
        "nn": (tokens, width_in, width_out),
        "tn": (width_out, width_in, tokens),
    }[layout]
    return Gemm(m=m, n=n, k=k, layout=layout)


def _is_affordable(shape: Gemm) -> bool:
    return shape.m * shape.n * shape.k <= MAX_MACS and shape.bytes <= MAX_BYTES


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def _rounded(size: float, multiple: int) -> int:
    return max(multiple, round(size / multiple) * multiple)
