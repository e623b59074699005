"""Sets ways to fine-tune one model side by side: time, memory and dollars, what each saves, and which GPUs it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import ADAPTERS
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.step.questions.side_by_side import Side
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Run

# Of a run, what is of adapters alone: left out where there are none.
_OF_LORA = ("lora_rank", "lora_targets")


@dataclass(frozen=True, kw_only=True)
class Way(Side):
    """One way to fine-tune, named as `Run.finetune`. `fits_on`: the GPUs with a datasheet whose memory is enough."""

    fits_on: tuple[str, ...] = ()

    def to_json(self, first: Forecast | None) -> dict[str, Any]:
        record = super().to_json(first)
        return {"finetune": record.pop("name"), "fits_on": list(self.fits_on), **record}


def compare_ways(
    config: Config,
    run: Run,
    ways: Sequence[str],
    profile: Profile,
    *,
    host: HostCosts | None = None,
    price: Price | None = None,
) -> list[Way]:
    """Forecasts a step of `config` fine-tuned in each of `ways`, all else as in `run`, whose settings of LoRA are taken
    where there are adapters. A way that cannot be forecast is kept, with the reason."""
    found = []
    for finetune in ways:
        plain = {} if finetune in ADAPTERS else {name: getattr(Run, name) for name in _OF_LORA}
        asked = replace(run, finetune=finetune, **plain)
        try:
            asked.check()
            stream = get_stream(config, traced_of(asked, profile))
            forecast = PricedStep(stream, asked, profile, host, price).forecast()
        except UsageError as fault:
            found.append(Way(name=finetune, reason=str(fault)))
            continue
        fits_on = tuple(name for name, spec in load_specs().items() if forecast.needed_bytes <= spec.memory_bytes)
        found.append(Way(name=finetune, forecast=forecast, fits_on=fits_on))
    return found
