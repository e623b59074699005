"""Defines the record of a training step's forecast cost, which `priced_step` makes and `predict` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import ONE_GPU
from flopcast.roofline.base.tables import as_html, as_text
from flopcast.roofline.base.units import NONE, gigabytes, ms, parameters, short_name, three_digits, yes_no
from flopcast.roofline.gpu.catalogue.prices import Price, unranked
from flopcast.roofline.stream.model.models import CPU_VOCABULARY, VOCABULARY, make_config, n_params

_OF_INFERENCE = ("phase", "context", "turning_batch")  # fields that only its records have
_OF_PARALLEL = ("parallel", "num_gpus", "nodes", "link", "communication_seconds", "exposed_communication_seconds",
                "contention_seconds", "bubble_seconds")  # fmt: skip


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
    without token ids. `precision`, `optimizer`: as asked for; of a step function what was traced, the dtype of its
    products and the optimizer's class. `power_watts`: mean power of back-to-back steps, 0 where it is not known;
    `power_seconds`: what the part's power limit adds to the step, whose kernels then run at `clock_share` of the
    highest clock. `device_seconds` are at full clock, as a profiler reads them with pauses between the steps.
    `flops_hardware` and `hfu` (hardware FLOPs utilisation) count what checkpointing recomputes and the optimizer's
    products, `flops_counted` and `mfu` do not. `host_machines`: how many machines the host's costs are the mean of; 1
    is a machine that was measured by itself. Of inference: `phase` "prefill" or "decode" with `context` tokens a
    sequence, and `turning_batch` the batch from which a decode's roofline is bound by the matrix units, None where none
    is. `memory`: the peak by part. `imbalance`: of experts, the tokens of the fullest over the mean. Of `num_gpus`
    laid out as `parallel` says seconds, kernels, breakdown and memory are one GPU's, the slowest and the fullest;
    tokens, FLOPs and dollars all GPUs'. Collectives over `link`, among `nodes` hosts, run for
    `communication_seconds`, of which no kernel runs beside them for `exposed_communication_seconds`; those that do
    take `contention_seconds` longer for it. Of a pipeline seconds, kernels and breakdown are the last stage's,
    which has the head and the loss, and waits for others
    for `bubble_seconds`; memory is the fullest stage's."""

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
    reserved_bytes: int
    needed_bytes: int
    fits: bool
    kernels: int
    breakdown: tuple[ClassShare, ...]
    price: Price | None
    stack: Mapping[str, Any]
    basis_shares: Mapping[str, float]
    warnings: tuple[str, ...] = ()
    unit: str = "tokens"
    precision: str = ""
    optimizer: str = ""
    power_watts: float = 0.0
    power_seconds: float = 0.0
    clock_share: float = 1.0
    host_machines: int = 1
    phase: str = "train"
    context: int = 0
    imbalance: float = 1.0
    memory: Mapping[str, int] = field(default_factory=dict)
    turning_batch: float | None = None
    parallel: str = ONE_GPU
    num_gpus: int = 1
    nodes: int = 1
    link: str = ""
    communication_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    contention_seconds: float = 0.0
    bubble_seconds: float = 0.0

    @property
    def advice(self) -> str | None:
        """What would narrow the forecast: where the host bounds the step and was not measured, to measure it."""
        if self.bound != "host" or self.host_machines < 2:
            return None
        return (
            f"bound by the host, here the mean of {self.host_machines} machines; measure yours: "
            "`flopcast bench --suite host`, a minute"
        )

    @property
    def usd_per_step(self) -> float | None:
        """None without a price, and for a step that does not fit: what cannot run costs nothing."""
        if self.price is None or not self.fits:
            return None
        return self.price.usd_per_hour * self.num_gpus / 3600 * self.step_seconds

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
        record["price"] = self.price and self.price.to_json()
        record["advice"] = self.advice
        record["warnings"] = list(self.warnings)
        record["stack"] = dict(self.stack)
        record["memory"] = dict(self.memory)
        left_out = [
            *(["imbalance"] if self.imbalance == 1.0 else []),
            *(_OF_INFERENCE if self.phase == "train" else ()),
            *(_OF_PARALLEL if self.num_gpus == 1 else ()),
        ]
        for name in left_out:
            del record[name]
        record["basis_shares"] = dict(self.basis_shares)
        return record

    def __str__(self) -> str:
        return as_text(self._title(), (), self._facts(), [f"warning: {warning}" for warning in self.warnings])

    def _repr_html_(self) -> str:
        return as_html(self._title(), (), self._facts(), [f"warning: {warning}" for warning in self.warnings])

    def _title(self) -> str:
        depth = f", {self.depth} layers" if self.depth else ""
        return f"{self.gpu} ({self.profile_basis}): {parameters(self.n_params)} parameters{depth}"

    def _facts(self) -> list[tuple[str, str]]:
        """Returns what matters most, as names and texts."""
        usd = usd_per_million(self)
        facts = [
            ("step, 90% interval", f"{ms(self.step_seconds)} ms ({ms(self.step_seconds_low)} to "
             f"{ms(self.step_seconds_high)})"),
            ("bound by", self.bound),
            ("device, host", f"{ms(self.device_seconds)} ms, {ms(self.host_seconds)} ms on {self.host}"),
            (f"{self.unit} per second", three_digits(self.tokens_per_second)),
            ("MFU counted", f"{self.mfu:.1%}"),
            ("memory needed", f"{gigabytes(self.needed_bytes)}: {'fits' if self.fits else 'DOES NOT FIT'}"),
        ]  # fmt: skip
        if usd is not None and self.price is not None:
            facts.append(("cost", f"${three_digits(usd)} per million {self.unit} at {self.price.label}"))
        return facts


ORDERS = ("asked", "time", "memory", "dollars", "gpu")  # of several GPUs


class Forecasts(tuple[Forecast, ...]):
    """One step on several GPUs: a tuple of forecasts that prints as a table."""

    __slots__ = ()

    def ordered(self, by: str) -> Forecasts:
        """Returns them in one of ORDERS: as asked for, or from the least time, memory or dollars on; those that do not
        fit, or have no price younger than a year, come last. Raises UsageError for another order."""
        if by not in ORDERS:
            raise UsageError(f"order {by!r}: valid are {', '.join(ORDERS)}")
        if by == "asked":
            return self
        if by == "gpu":
            return Forecasts(sorted(self, key=lambda found: found.gpu))
        keys: dict[str, Callable[[Forecast], float]] = {
            "time": lambda found: found.step_seconds,
            "memory": lambda found: found.needed_bytes,
            "dollars": lambda found: inf if unranked(found.price) else usd_per_million(found) or inf,
        }
        return Forecasts(sorted(self, key=lambda found: (not found.fits, keys[by](found))))

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `rows`."""
        unit = self[0].unit if self else "tokens"
        return ("GPU", "basis", "step, ms", "90% interval", "memory needed", "fits", f"{unit}/s", f"$/M {unit}",
                "bound by")  # fmt: skip

    def rows(self) -> list[list[str]]:
        """Returns a row of texts per GPU; a step that does not fit has no throughput and no cost."""
        return [
            [
                short_name(found.gpu), found.profile_basis, ms(found.step_seconds),
                f"{ms(found.step_seconds_low)} to {ms(found.step_seconds_high)}", gigabytes(found.needed_bytes),
                yes_no(found.fits), three_digits(found.tokens_per_second) if found.fits else NONE,
                NONE if (usd := usd_per_million(found)) is None else three_digits(usd), found.bound,
            ]
            for found in self
        ]  # fmt: skip

    @property
    def prices(self) -> list[str]:
        """The price of each GPU, with its provider and day."""
        return [f"{short_name(one.gpu)}: {one.price.label}" for one in self if one.price is not None]

    def _title(self) -> str:
        depth = f", {self[0].depth} layers" if self and self[0].depth else ""
        return f"{parameters(self[0].n_params)} parameters{depth}" if self else "no forecasts"

    def __str__(self) -> str:
        return as_text(self._title(), self.columns, self.rows(), self.prices)

    def _repr_html_(self) -> str:
        return as_html(self._title(), self.columns, self.rows(), self.prices)


def usd_per_million(found: Forecast) -> float | None:
    """Returns the dollars per million of the forecast's unit; None without a price, and for what does not fit."""
    usd = found.usd_per_step
    return None if usd is None or not found.fits else usd / tokens_of(found) * 1e6


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
