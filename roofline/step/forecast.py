"""One step's forecast: op stream + profile + host -> seconds, bytes, FLOPs, dollars, and what is behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.profile.host import NO_HOST, HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step import power_limit
from flopcast.roofline.step.device_work import Backends, device_work
from flopcast.roofline.step.memory import needed_bytes, peak_bytes, workspace_bytes
from flopcast.roofline.step.simulation import Item
from flopcast.roofline.step.uncertainty import device_log_sigma, is_synchronous, step_interval
from flopcast.roofline.stream.library.streams import Trace, get_stream
from flopcast.roofline.stream.lowering.classes import OP_CLASSES
from flopcast.roofline.stream.lowering.lower import recomputed
from flopcast.roofline.stream.lowering.variants import KernelKind
from flopcast.roofline.stream.model.models import VOCABULARY, make_config, n_params
from flopcast.roofline.stream.model.run import PEAK_OF, Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream

WORTH_A_WARNING = 0.02  # share of the device time in kernels that were not measured


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
    """What a training step is forecast to cost. Seconds, bytes, FLOPs; low and high bound a 90% interval. `unit`: what
    `tokens_per_second` and 6N count, "samples" or "steps" for modules and step functions without token ids.

    `power_watts`: the mean of steps one after the other, 0 where it is not known; `power_seconds`: what the part's
    power limit adds to the step, whose kernels run at `clock_share` of the highest clock then. `device_seconds` are
    those of the full clock, as a profiler reads them with pauses between the steps."""

    gpu: str
    profile_basis: str
    mode: str
    n_params: int
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
        """The contract of `predict --json`."""
        record = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("breakdown", "price")}
        record["breakdown"] = [
            {"class": s.op_class, "seconds": s.seconds, "flops": s.flops, "bytes": s.bytes, "calls": s.calls}
            for s in self.breakdown
        ]
        record["usd_per_step"], record["flops_per_usd"] = self.usd_per_step, self.flops_per_usd
        record["price"] = (
            None
            if self.price is None
            else {
                "usd_per_hour": self.price.usd_per_hour,
                "provider": self.price.provider,
                "date": str(self.price.date),
            }
        )
        record["warnings"] = list(self.warnings)
        record["stack"] = dict(self.stack)
        record["basis_shares"] = dict(self.basis_shares)
        return record


@no_garbage_collection()
def forecast(
    config: Mapping[str, Any],
    run: Run,
    profile: Profile,
    *,
    host: HostCosts | None = None,
    price: Price | None = None,
    trace: Trace | None = None,
) -> Forecast:
    """Forecasts one step of `config` on the part that `profile` describes; `trace` makes an op stream that is not at
    hand (`get_stream`).

    Raises UsageError for what is invalid, not modelled, or not a model.
    """
    run.check()
    stream = get_stream(config, traced_of(run, profile), trace=trace)
    return forecast_stream(stream, run, profile, host=host, price=price)


def traced_of(run: Run, profile: Profile) -> Traced:
    """What of the run and the device decides the op stream."""
    return run.traced_on(profile.device["type"])


def forecast_stream(
    stream: Stream, run: Run, profile: Profile, *, host: HostCosts | None = None, price: Price | None = None
) -> Forecast:
    """As `forecast`, for an op stream at hand."""
    host = host or profile.host or NO_HOST
    items = device_work(stream, profile, host, Backends(matmul=run.matmul, attention=run.attention))
    return forecast_items(items, stream, run, profile, host=host, price=price)


def forecast_items(
    items: Sequence[Item], stream: Stream, run: Run, profile: Profile, *, host: HostCosts, price: Price | None = None
) -> Forecast:
    """As `forecast_stream`, for its ops with their seconds at hand (`device_work`)."""
    device_seconds = sum(item.seconds for item in items)
    host_seconds = sum(item.host_seconds for item in items)
    device_sigma = device_log_sigma(items, profile)
    step, low, high = step_interval(items, profile, host, device_sigma)
    power = power_limit.power_of(items, profile, step)
    tokens = run.batch * run.seq * run.accumulate
    # model FLOPs, as MFU's convention has it: what checkpointing computes again is time but no work done
    again = recomputed(stream)
    counted = sum(
        item.work.flops * item.count
        for item, is_repeated in zip(items, again, strict=True)
        if item.work is not None and not is_repeated
    )
    six_n = 6 * stream.n_params * tokens
    peak = peak_for(profile, run.precision)
    capability = profile.device.get("capability")
    peak_memory = peak_bytes(stream, workspace_bytes(capability and tuple(capability)))
    needed = needed_bytes(peak_memory)
    breakdown = by_class(items)
    spread = exp(Z_90 * device_sigma)
    return Forecast(
        gpu=profile.gpu,
        profile_basis=profile.basis,
        mode=run.mode,
        n_params=stream.n_params,
        depth=stream.depth,
        step_seconds=step,
        step_seconds_low=low,
        step_seconds_high=high,
        device_seconds=device_seconds,
        device_seconds_low=device_seconds / spread,
        device_seconds_high=device_seconds * spread,
        host_seconds=host_seconds,
        host=host.name,
        bound=what_bounds(breakdown, device_seconds, host_seconds, is_synchronous(profile)),
        tokens_per_second=tokens / step,
        flops_counted=counted,
        flops_6n=six_n,
        mfu=counted / step / peak,
        mfu_6n=six_n / step / peak,
        peak_flops_per_second=peak,
        peak_bytes=peak_memory,
        needed_bytes=needed,
        fits=needed <= profile.device["memory_bytes"],
        kernels=sum(item.launches for item in items),
        breakdown=breakdown,
        price=price,
        unit=stream.meta.get("unit", "tokens"),
        power_watts=power.watts,
        power_seconds=power.seconds,
        clock_share=power.clock_share,
        stack={
            "profile": dict(profile.stack),
            "stream": {name: stream.meta.get(name) for name in ("torch", "transformers")},
        },
        basis_shares=basis_shares(items),
        warnings=(*_warnings(items, stream, profile), *_host_warnings(run, host)),
    )


def peak_for(profile: Profile, precision: str) -> float:
    """Dense FLOP/s that a step of this precision is held against. Raises UsageError where the part has none."""
    dtype = PEAK_OF[precision]
    if dtype not in profile.peaks:
        raise UsageError(
            f"precision {precision!r}: {profile.gpu} has no {dtype} rate; valid are precisions of "
            f"{', '.join(sorted(profile.peaks))}"
        )
    return profile.peaks[dtype].value


def by_class(items: Sequence[Item]) -> tuple[ClassShare, ...]:
    """Device seconds, FLOPs, bytes and calls of each operation class, in the order of OP_CLASSES."""
    found: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        if item.work is not None:
            found[item.work.op_class].append(item)
    return tuple(
        ClassShare(
            name,
            sum(item.seconds for item in found[name]),
            sum(item.work.flops * item.count for item in found[name] if item.work is not None),
            sum(item.work.bytes * item.count for item in found[name] if item.work is not None),
            sum(item.count for item in found[name]),
        )
        for name in OP_CLASSES
        if name in found
    )


def basis_shares(items: Sequence[Item]) -> dict[str, float]:
    """Share of the device time by how it came about: measured, interpolated, extrapolated, and published where
    published times refined the profile. Adds up to 1.

    What an op gains because its operands lie in L2 counts by the hot curve's basis, the rest by the cold one's.
    """
    seconds = dict.fromkeys(("measured", "interpolated", "extrapolated"), 0.0)
    for item in items:
        if item.basis:
            seconds[item.basis] = seconds.get(item.basis, 0.0) + item.seconds - item.hot_seconds
        if item.hot_basis:
            seconds[item.hot_basis] = seconds.get(item.hot_basis, 0.0) + item.hot_seconds
    total = sum(seconds.values())
    return {basis: value / total if total else 0.0 for basis, value in seconds.items()}


def what_bounds(
    breakdown: Sequence[ClassShare], device_seconds: float, host_seconds: float, is_synchronous: bool
) -> str:
    """ "host" where handing over takes longer than the kernels, else their larger part: "matrix" or "memory"."""
    if host_seconds > device_seconds and not is_synchronous:
        return "host"
    matrix = sum(share.seconds for share in breakdown if share.op_class in ("gemm", "attention", "conv"))
    return "matrix" if matrix > device_seconds / 2 else "memory"


def _warnings(items: Sequence[Item], stream: Stream, profile: Profile) -> tuple[str, ...]:
    """What the forecast does not know well: kernels of no measured kind that matter."""
    if profile.basis != "measured":
        return ()
    lent_from = (profile.provenance.get("projected_kinds") or {}).get("from")
    lent_kinds = {key.kind for key in profile.projected_kinds}
    total = sum(item.seconds for item in items) or 1.0
    lent: dict[str, float] = defaultdict(float)
    unknown: dict[str, float] = defaultdict(float)
    for item in items:
        if item.work is not None and item.basis == "extrapolated":
            kind = KernelKind(item.work.op_class, item.work.variant)
            (lent if kind in lent_kinds else unknown)[f"{kind.op_class} {kind.variant}"] += item.seconds
    return tuple(
        f"{share:.0%} of device time is in kernels {how}: {_largest(found)}"
        for found, how in (
            (unknown, "of no measured kind, costed by bytes"),
            (lent, f"that were not measured on this GPU, projected from {lent_from}'s"),
        )
        if (share := sum(found.values()) / total) > WORTH_A_WARNING
    )


def _largest(kinds: Mapping[str, float]) -> str:
    return ", ".join(name for name, _ in sorted(kinds.items(), key=lambda pair: -pair[1])[:3])


def _host_warnings(run: Run, host: HostCosts) -> tuple[str, ...]:
    """What the host's time leaves out."""
    if host.triton or host is NO_HOST or "triton" not in (run.matmul, run.attention, run.fused):
        return ()
    return (
        f"host time is low: what Triton's operators cost {host.name} beyond torch's was not measured "
        "(`flopcast bench --suite host` there measures it)",
    )


def width_of(found: Forecast) -> int | None:
    """The width of a forecast of the ladder, from its parameters and depth; None for any other model."""
    from flopcast.roofline.stream.model.models import CPU_VOCABULARY

    if not found.depth:
        return None
    for vocab in (VOCABULARY, CPU_VOCABULARY):
        for width in range(32, 8193, 32):
            if n_params(make_config(width=width, depth=found.depth, vocab=vocab)) == found.n_params:
                return width
    return None


def tokens_of(found: Forecast) -> int:
    return round(found.tokens_per_second * found.step_seconds)
