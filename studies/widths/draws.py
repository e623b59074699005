"""Products of steps whose widths are no multiples of 64, drawn step by step: what the law of unaligned products learns
from where models are.

A draw is a model and its tokens. One of its sizes (hidden, ffn or vocabulary) is off, near one that models have or
anywhere, and every product of the step that holds it follows, in the three layouts: the sides beside it are a model's.
Some draws are aligned, since a penalty is told against them. `studies.suites.gemms` draws sides one by one; its 100
products of 2 and 4 a layout left forecasts of those 0.7% short to 3.5% long by kind, and of single ones 2 to 3% off at
the median.

The loss's log-softmax over rows of an unaligned vocabulary follows (`losses`): near 151,936 it takes 0.7 to 1.2% of a
step more than between aligned ones, near 50,257 0.3% less, and forecasts were up to 1.8 points off there.

Sizes within NEAR of an unaligned size of set 3 (`sets.py`) are not drawn, so that its steps judge forecasts
between what was measured. In order of use: the first so many of them are spread as all are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flopcast.kernels.shapes import Call, Gemm, Operand
from studies.suites.gemms import LAYOUTS, MAX_BYTES, layer
from studies.widths.sets import SETS

SEED = 5
DRAWS = 1500  # 10,125 products
HOLDOUT_EVERY = 12  # of draws, one is held out
NEAR, BLIND_SET = 16, 3
# How often which size is off; a hidden size is in 18 products, ffn in 6, a vocabulary in 3.
AXES = {"hidden": 0.18, "ffn": 0.34, "vocab": 0.42, "aligned": 0.06}
POWERS = {1: 0.42, 2: 0.26, 4: 0.26, 8: 0.06}  # that divide the size that is off, and no higher one
HIDDEN = (768, 896, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120)
VOCABULARIES = (32_000, 50_257, 65_536, 100_277, 128_256, 151_936)
ALIGNED_VOCABULARIES = (32_000, 32_768, 50_304, 65_536, 100_352, 128_256, 151_936)
FFN_RATIOS = (2.5, 2.6875, 2.75, 3, 3, 3.5, 4, 5.375)
QUERY_RATIOS = (1, 1, 1, 1, 0.5, 2)
GROUPS = (1, 2, 2, 4, 8)  # query heads a key-value head
HEAD = 128
AROUND = 160  # a size that models have
ANYWHERE = 0.33
TOKENS = 1024, 24_576
TOKENS_STEP = 512
MAX_MACS = 2**40  # 20 ms a call of the slowest kernels


LOSSES = 120  # pairs of tokens and vocabulary, forward and backward each
LOSS_TOKENS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12_288)
LOSS_BYTES = 8 * 10**9
LOSS_POWERS = {1: 0.3, 2: 0.15, 4: 0.15, 8: 0.15, 16: 0.1, 32: 0.1, 64: 0.05}


@dataclass(frozen=True)
class Drawn:
    """A product, and for what: "fit" or "holdout"."""

    shape: Gemm
    role: str


def products(draws: int = DRAWS) -> list[Drawn]:
    """Those of so many draws, each once, in the order drawn; the same on every machine."""
    rng = random.Random(SEED)
    found: dict[Gemm, str] = {}
    for i in range(draws):
        role = "holdout" if i % HOLDOUT_EVERY == HOLDOUT_EVERY - 1 else "fit"
        for shape in _step(rng):
            if shape.m * shape.n * shape.k <= MAX_MACS and shape.bytes <= MAX_BYTES:
                found.setdefault(shape, role)
    return [Drawn(shape, role) for shape, role in found.items()]


def losses(pairs: int = LOSSES) -> list[Call]:
    """Log-softmax over the vocabulary and its gradient, fp32, as the losses of steps launch them."""
    rng = random.Random(SEED)
    found: dict[tuple[int, int], None] = {}
    while len(found) < pairs:
        tokens, vocab = rng.choice(LOSS_TOKENS), _off(rng, VOCABULARIES, 16_384, 204_800, LOSS_POWERS)
        if 3 * 4 * tokens * vocab <= LOSS_BYTES:
            found[tokens, vocab] = None
    return [call for tokens, vocab in found for call in log_softmax(tokens, vocab)]


def log_softmax(tokens: int, vocab: int) -> tuple[Call, Call]:
    """Forward and backward."""
    one = Operand((tokens, vocab), (vocab, 1), "fp32")
    return (
        Call("aten._log_softmax.default", (one,), (one,), '[{"t":0},1,false]'),
        Call("aten._log_softmax_backward_data.default", (one, one), (one,), '[{"t":0},{"t":1},1,{"d":"fp32"}]'),
    )


def _step(rng: random.Random) -> Iterator[Gemm]:
    """The products of one drawn model that hold its unaligned size; of an aligned one all."""
    (axis,) = rng.choices(list(AXES), list(AXES.values()))
    tokens = round(_log_uniform(rng, *TOKENS) / TOKENS_STEP) * TOKENS_STEP
    hidden = _off(rng, HIDDEN, 512, 8192) if axis == "hidden" else _aligned(rng)
    queries = max(1, round(hidden * rng.choice(QUERY_RATIOS) / HEAD)) * HEAD
    keys = max(1, queries // HEAD // rng.choice(GROUPS)) * HEAD
    ffn = max(1, round(hidden * rng.choice(FFN_RATIOS) / HEAD)) * HEAD
    vocab = rng.choice(ALIGNED_VOCABULARIES)
    if axis == "ffn":
        ffn = _off(rng, (ffn,), 1536, 24_576)
    if axis == "vocab":
        vocab = _off(rng, VOCABULARIES, 16_384, 204_800)
    pairs = {"ffn": ((hidden, ffn), (ffn, hidden)), "vocab": ((hidden, vocab),)}.get(
        axis, ((hidden, queries), (hidden, keys), (queries, hidden), (hidden, ffn), (ffn, hidden), (hidden, vocab))
    )
    for width_in, width_out in pairs:
        for layout in LAYOUTS:
            yield layer(layout, tokens, width_in, width_out)


def _aligned(rng: random.Random) -> int:
    """A hidden size: one that models have, or a multiple of 64 near to it or anywhere."""
    if rng.random() < 0.5:
        return rng.choice(HIDDEN)
    if rng.random() < ANYWHERE:
        return round(_log_uniform(rng, 512, 8192) / 64) * 64
    return round((rng.choice(HIDDEN) + rng.uniform(-AROUND, AROUND)) / 64) * 64


def _off(
    rng: random.Random,
    centers: tuple[int, ...],
    low: int,
    high: int,
    powers: Mapping[int, float] = MappingProxyType(POWERS),
) -> int:
    """A size that one of `powers` divides and no higher one: near one of `centers` or anywhere, near none of the blind
    set."""
    blind = _blind_sizes()
    while True:
        (power,) = rng.choices(list(powers), list(powers.values()))
        if rng.random() < ANYWHERE:
            near = _log_uniform(rng, low, high)
        else:
            near = rng.choice(centers) + rng.uniform(-AROUND, AROUND)
        size = (2 * int(near / (2 * power)) + 1) * power
        if all(abs(size - value) > NEAR for value in blind):
            return size


def _blind_sizes() -> list[int]:
    return [value for place in SETS[BLIND_SET].neighbourhoods for value in place.unaligned]


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())
