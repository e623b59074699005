"""Sets ways to fine-tune one model side by side: time, memory and dollars, what each saves, and which GPUs it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast, usd_per_million
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Run

# Of a run, what is of adapters alone: left out where there are none.
_OF_LORA = ("lora_rank", "lora_targets")


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to fine-tune. `forecast` is None where it cannot be forecast: `reason` says why. `fits_on`: the GPUs with
    a datasheet whose memory is enough."""

    finetune: str
    run: Run
    forecast: Forecast | None
    reason: str = ""
    fits_on: tuple[str, ...] = ()

    def to_json(self, first: Forecast | None) -> dict[str, Any]:
        """`saves`: relative to `first`, 0.25 for a quarter less of step seconds, needed bytes and dollars a token."""
        record = {"finetune": self.finetune, "reason": self.reason, "fits_on": list(self.fits_on)}
        found = self.forecast
        saves = None if found is None or first is None else savings(found, first)
        return {**record, "saves": saves, "forecast": None if found is None else found.to_json()}


def savings(found: Forecast, first: Forecast) -> Mapping[str, float | None]:
    """What one way saves against another, as shares of that; None for dollars that are not known."""
    usd, of_first = usd_per_million(found), usd_per_million(first)
    return {
        "step_seconds": 1 - found.step_seconds / first.step_seconds,
        "needed_bytes": 1 - found.needed_bytes / first.needed_bytes,
        "usd": None if usd is None or not of_first else 1 - usd / of_first,
    }


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
        plain = {} if finetune == "lora" else {name: getattr(Run, name) for name in _OF_LORA}
        asked = replace(run, finetune=finetune, **plain)
        try:
            asked.check()
            stream = get_stream(config, traced_of(asked, profile))
            forecast = PricedStep(stream, asked, profile, host, price).forecast()
        except UsageError as fault:
            found.append(Way(finetune=finetune, run=asked, forecast=None, reason=str(fault)))
            continue
        fits_on = tuple(name for name, spec in load_specs().items() if forecast.needed_bytes <= spec.memory_bytes)
        found.append(Way(finetune=finetune, run=asked, forecast=forecast, fits_on=fits_on))
    return found
