"""Forecasts three standard models on a GPU, at 8,192 tokens per step: what pages begin with, and what compares GPUs.

Each model is trained as most are: autocast to bf16, fused AdamW, sequences of 1,024 tokens. A GPU whose memory cannot
hold the eight sequences of a step takes them in two, four or eight micro-batches, the fewest that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.dollars.plan import TOKENS_PER_PARAMETER
from flopcast.roofline.dollars.points import Ranged
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config
from flopcast.roofline.stream.model.run import Run

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
SEQUENCES, SEQ = 8, 1024  # of a step
MICRO_BATCHES = (1, 2, 4, 8)
SETTING = f"{SEQUENCES * SEQ:,} tokens per step (sequences of {SEQ:,}), autocast to bf16, fused AdamW, eager"


@dataclass(frozen=True)
class StandardStep:
    """A standard model's step on one GPU, at a price where one is known.

    `run`: with the fewest micro-batches that fit, or with the most where none does: `fits` is then False.
    """

    model: str
    run: Run
    forecast: Forecast
    price: Price | None

    @property
    def fits(self) -> bool:
        return self.forecast.fits

    @property
    def seconds(self) -> Ranged:
        """Seconds per step."""
        step = self.forecast
        return Ranged(step.step_seconds, step.step_seconds_low, step.step_seconds_high)

    @property
    def tokens_per_second(self) -> Ranged:
        step, tokens = self.seconds, self.run.tokens
        return Ranged(tokens / step.value, tokens / step.high, tokens / step.low)

    @property
    def usd_per_million_tokens(self) -> Ranged | None:
        """None without a price, and where the step does not fit."""
        if self.price is None or not self.fits:
            return None
        return self.seconds.scaled(1e6 / self.run.tokens * self.price.usd_per_hour / 3600.0)

    @property
    def usd_for_training(self) -> Ranged | None:
        """USD for training on 20 tokens per parameter (`plan.TOKENS_PER_PARAMETER`)."""
        per_million = self.usd_per_million_tokens
        tokens = TOKENS_PER_PARAMETER * self.forecast.n_params
        return None if per_million is None else per_million.scaled(tokens / 1e6)


@dataclass(frozen=True)
class StandardGpu:
    """A GPU with the steps of the standard models. `basis`: its profile's (measured, published, projected)."""

    gpu: str
    name: str
    basis: str
    memory_bytes: int
    price: Price | None
    steps: Sequence[StandardStep]

    def step_of(self, model: str) -> StandardStep:
        return next(step for step in self.steps if step.model == model)


def standard_gpu(profile: Profile, price: Price | None) -> StandardGpu:
    """Forecasts the standard models on a GPU."""
    return StandardGpu(
        profile.gpu,
        str(profile.device.get("name") or profile.gpu),
        profile.basis,
        int(profile.device["memory_bytes"]),
        price,
        [_standard_step(model, profile, price) for model in MODELS],
    )


def standard_gpus(
    names: Sequence[str], prices: Mapping[str, Price], progress: Callable[[int, int], None] = lambda done, total: None
) -> list[StandardGpu]:
    """Forecasts the standard models on the GPUs of these names; `prices` by name, of those that have one."""
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_profile

    found = []
    for done, name in enumerate(names, start=1):
        profile = find_profile(name)
        found.append(standard_gpu(profile, prices.get(name)))
        profile_cache.keep(profile)
        progress(done, len(names))
    return found


@no_garbage_collection()
def _standard_step(model: str, profile: Profile, price: Price | None) -> StandardStep:
    """Of steps that do not fit no more than the memory is forecast, but for the last."""
    config = load_config(model)
    for count in MICRO_BATCHES:
        run = Run(batch=SEQUENCES // count, seq=SEQ, accumulate=count, optimizer="adamw-fused")
        step = PricedStep(get_stream(config, traced_of(run, profile)), run, profile, price=price)
        if step.fits:
            break
    return StandardStep(model, run, step.forecast(), price)
