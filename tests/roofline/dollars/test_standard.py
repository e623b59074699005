"""The standard models' steps: the fewest micro-batches that fit, at the price given."""

from __future__ import annotations

from datetime import date

import pytest

from flopcast.roofline.dollars.standard import MODELS, SEQ, SEQUENCES, StandardGpu, standard_gpu
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import traced_of
from flopcast.roofline.stream.library.streams import is_at_hand
from flopcast.roofline.stream.model.models import load_config

PRICE = Price(
    gpu="nvidia-l4", provider="a shop", kind="on-demand", usd_per_hour=0.36, date=date(2026, 11, 1),
    date_inferred=False, source="a list",
)  # fmt: skip


@pytest.fixture(scope="module")
def l4() -> StandardGpu:
    return standard_gpu(find_profile("nvidia-l4"), PRICE)


def test_every_model_takes_the_same_tokens_on_every_gpu(l4: StandardGpu) -> None:
    for found in (l4, standard_gpu(find_profile("nvidia-h200"), None)):
        assert [step.model for step in found.steps] == list(MODELS)
        for step in found.steps:
            assert step.run.batch * step.run.accumulate == SEQUENCES
            assert step.run.tokens == SEQUENCES * SEQ
            assert step.tokens_per_second.value == pytest.approx(step.forecast.tokens_per_second)


def test_what_does_not_fit_has_no_price(l4: StandardGpu) -> None:
    small, large = l4.step_of("qwen3-0.6b"), l4.step_of("qwen3-4b")
    assert small.fits
    assert small.run.accumulate > 1  # 45 GB are needed for all eight sequences at once
    assert small.usd_per_million_tokens is not None
    per_token = 0.36 / 3600 * small.forecast.step_seconds / small.run.tokens
    assert small.usd_per_million_tokens.value == pytest.approx(1e6 * per_token)
    assert small.usd_for_training is not None
    assert small.usd_for_training.value == pytest.approx(20 * small.forecast.n_params * per_token)
    assert not large.fits
    assert large.run.accumulate == SEQUENCES
    assert large.usd_per_million_tokens is None
    assert large.usd_for_training is None


def test_their_streams_ship(l4: StandardGpu) -> None:
    for step in l4.steps:
        assert is_at_hand(load_config(step.model), traced_of(step.run, find_profile("nvidia-l4")))
