"""Defines the record of a training step's forecast cost, which `priced_step` makes and `predict` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.stream.model.models import CPU_VOCABULARY, VOCABULARY, make_config, n_params


@dataclass(frozen=True)
class ClassShare:
    """One operation class of a step."""

    op_class: str
    seconds: float
    flops: int
    bytes: int
    calls: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a training step is forecast to cost, in seconds, bytes and FLOPs; low and high bound a 90% interval.

    `n_params_trained`: those that the step writes; `n_params_active`: those that a token passes, fewer with experts.
    `unit`: what `tokens_per_second` and 6N count: "tokens", or "samples" or "steps" for modules and step functions
    without token ids. `power_watts`: mean power of back-to-back steps, 0 where it is not known; `power_seconds`: what
    the part's power limit adds to the step, whose kernels then run at `clock_share` of the highest clock.
    `device_seconds` are at full clock, as a profiler reads them with pauses between the steps. `flops_hardware` and
    `hfu` (hardware FLOPs utilisation) count what checkpointing recomputes, `flops_counted` and `mfu` do not."""

    gpu: str
    profile_basis: str
    mode: str
    n_params: int
    n_params_trained: int
    n_params_active: int
    depth: int | None
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    device_seconds: float
    device_seconds_low: float
    device_seconds_high: float
    host_seconds: float
    host: str
    bound: str
    tokens_per_second: float
    flops_counted: int
    flops_6n: int
    mfu: float
    mfu_6n: float
    flops_hardware: int
    hfu: float
    peak_flops_per_second: float
    peak_bytes: int
    needed_bytes: int
    fits: bool
    kernels: int
    breakdown: tuple[ClassShare, ...]
    price: Price | None
    stack: Mapping[str, Any]
    basis_shares: Mapping[str, float]
    warnings: tuple[str, ...] = ()
    unit: str = "tokens"
    power_watts: float = 0.0
    power_seconds: float = 0.0
    clock_share: float = 1.0

    @property
    def usd_per_step(self) -> float | None:
        return None if self.price is None else self.price.usd_per_hour / 3600 * self.step_seconds

    @property
    def flops_per_usd(self) -> float | None:
        usd = self.usd_per_step
        return None if usd is None else self.flops_counted / usd

    def to_json(self) -> dict[str, Any]:
        """Returns the record that `predict --json` prints; its fields are a public contract."""
        record = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("breakdown", "price")}
        record["breakdown"] = [
            {"class": share.op_class, "seconds": share.seconds, "flops": share.flops, "bytes": share.bytes,
             "calls": share.calls}
            for share in self.breakdown
        ]  # fmt: skip
        record["usd_per_step"], record["flops_per_usd"] = self.usd_per_step, self.flops_per_usd
        price = self.price
        record["price"] = price and {
            "usd_per_hour": price.usd_per_hour, "provider": price.provider, "date": str(price.date)
        }  # fmt: skip
        record["warnings"] = list(self.warnings)
        record["stack"] = dict(self.stack)
        record["basis_shares"] = dict(self.basis_shares)
        return record


def width_of(found: Forecast) -> int | None:
    """Returns the width of a forecast model of the ladder, from its parameter count and depth; None for any other
    model."""
    if not found.depth:
        return None
    for vocab in (VOCABULARY, CPU_VOCABULARY):
        for width in range(32, 8193, 32):
            if n_params(make_config(width=width, depth=found.depth, vocab=vocab)) == found.n_params:
                return width
    return None


def tokens_of(found: Forecast) -> int:
    """Returns the tokens per step."""
    return round(found.tokens_per_second * found.step_seconds)
