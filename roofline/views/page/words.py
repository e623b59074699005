"""Writes the text of the report page: its summary, its key numbers, where its numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import count, duration, rate, short_name, three_digits
from flopcast.roofline.dollars.crossovers import best_gpu
from flopcast.roofline.dollars.points import CostCurve
from flopcast.roofline.step.forecast import tokens_of, width_of
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.validation.summary import busy_words, errors_of, inside
from flopcast.roofline.views.page.data import ReportData

if TYPE_CHECKING:
    from flopcast.roofline.base.numbers import Number
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.step.forecast import Forecast


SIX_HUNDRED_MILLION = 0.6e9


def summary_lines(data: ReportData) -> Iterator[tuple[str, str]]:
    """Yields (heading, sentence) of the summary that a manager reads."""
    yield "What this is", _what_it_is(data.profile)
    reached = _what_it_reaches(data.profile)
    if reached:
        yield "What it reaches", reached
    if data.anatomy:
        yield "What a step costs", _what_a_step_costs(data)
    yield from (part.advice for part in data.extra if part.advice[1])
    if data.validation:
        yield "How wrong the forecasts were", how_wrong(data.validation)
    if data.curves:
        yield "FLOPs per dollar", " ".join(filter(None, (who_leads(data.curves), _this_one(data))))
    if data.largest_batch is not None and data.batches:
        yield "What fits", _what_fits(data)


def name_of(profile: Profile) -> str:
    return str(profile.device.get("name") or profile.gpu)


def _what_it_is(profile: Profile) -> str:
    device, stack = profile.device, profile.stack
    parts = [name_of(profile)]
    cores = device.get("sm_count")
    if cores:
        parts.append(f"{cores} {'cores' if device.get('type') == 'cpu' else 'SMs'}")
    if device.get("memory_bytes"):
        parts.append(f"{device['memory_bytes'] / 1e9:.0f} GB")
    if device.get("power_limit_w"):
        parts.append(f"{device['power_limit_w']:.0f} W")
    text = ", ".join(parts)
    if profile.basis == "projected":
        return f"{text}: not measured, projected from its datasheet and another GPU's measurements."
    first, last = (str(profile.provenance.get(name) or "")[:10] for name in ("from", "to"))
    when = f"{first} to {last}" if last > first else first
    software = f" with torch {stack['torch']}" if stack.get("torch") else ""
    host = f", fed by {profile.host.name}" if profile.host is not None and device.get("type") != "cpu" else ""
    return f"{text}; measured{f' {when}' if when else ''}{software}{host}."


def _matrix_roof(profile: Profile) -> tuple[str, Number | None, Number | None, Number | None]:
    """(dtype, burst, sustained, published peak) of the matrix products that the summary mentions."""
    dtype = "bf16" if "matrix_burst/bf16" in profile.ceilings else next(iter(profile.peaks), "")
    burst, sustained = (profile.ceilings.get(f"matrix_{kind}/{dtype}") for kind in ("burst", "sustained"))
    peak = profile.peaks.get(dtype)
    return dtype, burst, sustained, None if peak is None or peak.basis == "measured" else peak


def _what_it_reaches(profile: Profile) -> str:
    found = []
    dtype, burst, sustained, peak = _matrix_roof(profile)
    if burst is not None:
        text = f"{dtype} matrix products {rate(burst.value, 'FLOP/s')} in bursts"
        if sustained is not None:
            text += f", {rate(sustained.value, 'FLOP/s')} sustained"
        if peak is not None:
            best = (sustained or burst).value
            text += f" ({best / peak.value:.0%} of the {peak.basis} {rate(peak.value, 'FLOP/s')})"
        found.append(text)
    if (copy := profile.ceilings.get("hbm_copy")) is not None:
        found.append(f"memory copy {rate(copy.value, 'B/s')}")
    for name, words in (("kernel_floor", "shortest kernel"), ("launch", "host time of a launch")):
        if (number := profile.ceilings.get(name)) is not None:
            found.append(f"{words} {duration(number.value)}")
    return "; ".join(found) + (f" ({profile.basis})." if found else "")


def _what_a_step_costs(data: ReportData) -> str:
    step = reference_step(data.anatomy)
    width = width_of(step)
    model = f"width {width}, {step.depth} layers, " if width else ""
    text = (
        f"A {count(step.n_params)}-parameter model ({model}{tokens_of(step):,} tokens per step): "
        f"{_ms(step.step_seconds)} ({_ms(step.step_seconds_low)} to {_ms(step.step_seconds_high)}), "
        f"bound by {step.bound}, forecast"
    )
    own = own_curve(data)
    price = step.price or (own.price if own else None)
    if price is not None and step.fits:
        usd = price.usd_per_hour / 3600
        text += (
            f"; ${usd * step.step_seconds * 1000:.3g} per 1,000 steps, "
            f"${usd / step.tokens_per_second * 1e6:.3g}/Mtoken at {price.label}"
        )
    real = next((row for row in data.validation if row.plan.name == "qwen3-0.6b" and row.step.measured), None)
    if real is not None and real.step.measured and real.step.forecast:
        text += (
            f". Qwen3-0.6B itself ({real.depth} layers, {real.plan.batch * real.plan.seq:,} tokens): "
            f"measured {_ms(real.step.measured)}, forecast {_ms(real.step.forecast)}"
        )
    return text + "."


def _ms(seconds: float) -> str:
    return f"{three_digits(seconds * 1e3)} ms"


def how_wrong(rows: Sequence[StepComparison]) -> str:
    """The median, worst and signed errors over the steps that ran, and which did not run, in words."""
    done = [row for row in rows if row.step.error is not None]
    left = len(rows) - len(done)
    rest = f" {left} of {len(rows)} steps could not be compared (see the table)." if left else ""
    if not done:
        return f"No step could be compared.{rest}"
    all_errors = errors_of(row.step for row in done)
    worst = max(done, key=lambda row: abs(row.step.error or 0.0))
    bounds = (
        ("host", [row for row in done if row.is_host_bound]),
        ("device", [row for row in done if not row.is_host_bound]),
    )
    by_bound = ", ".join(
        f"{errors_of(row.step for row in members).median:.1%} over {len(members)} bound by the {name}"
        for name, members in bounds
        if members and len(members) < len(done)
    )
    return (
        f"Over {len(done)} real steps, none used in fitting: median |error| {all_errors.median:.1%}"
        + (f" ({by_bound})" if by_bound else "")
        + f", median signed {all_errors.signed:+.1%}, worst {worst.step.error:+.1%} ({worst.label_with_optimizer}); "
        f"{inside(done).words}.{rest}" + (f" {busy}" if (busy := busy_words(rows)) else "")
    )


def who_leads(curves: Sequence[CostCurve]) -> str:
    """The leader by range of model size, and whether the intervals separate it from the next, in words."""
    sizes = sorted({float(p.step.n_params) for curve in curves for p in curve.fitting})
    found = [best for size in sizes if (best := best_gpu(curves, size)) is not None]
    if not found:
        return "No model fits into the memory of any GPU compared."
    if len(curves) == 1:
        ends = [f"{b.flops_per_usd.value / 1e15:.3g} PFLOP/$ at {count(b.n_params)}" for b in (found[0], found[-1])]
        only = curves[0]
        price = only.price.label if only.price else "no price"
        return (
            f"{only.gpu} ({only.basis}): {' and '.join(dict.fromkeys(ends))} parameters, at {price}; "
            "no other GPU is compared."
        )
    basis = {curve.gpu: curve.basis for curve in curves}
    parts = []
    rivals: list[str] = []
    for gpu, stretch in groupby(found, key=lambda best: best.gpu):
        members = list(stretch)
        span = f"from {count(members[0].n_params)} to {count(members[-1].n_params)}"
        if len(members) == 1:
            span = f"at {count(members[0].n_params)}"
        rivals += [name for best in members for name in best.contenders]
        parts.append(f"{gpu} ({basis[gpu]}) {span} parameters")
    leaders = {best.gpu for best in found}
    others = [name for name in dict.fromkeys(rivals) if name not in leaders]
    doubt = f" In places the 90% intervals do not decide between {_listed(['these', *others])}." if rivals else ""
    return f"Most for the money: {', '.join(parts)}.{doubt} Prices: {_where_from(curves)}."


def _listed(names: Sequence[str]) -> str:
    """Joins names: a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _this_one(data: ReportData) -> str:
    """How this GPU compares at the largest model that fits both it and another, in words."""
    own = own_curve(data)
    if own is None or len(data.curves) < 2 or not own.fitting:
        return ""
    last = max(own.fitting, key=lambda point: point.step.n_params)
    best = best_gpu(data.curves, float(last.step.n_params))
    if best is None or best.gpu == own.gpu:
        return ""
    share = last.flops_per_usd.value / best.flops_per_usd.value
    return f"{name_of(data.profile)} gives {share:.0%} of the best at {count(last.step.n_params)}."


def _what_fits(data: ReportData) -> str:
    """Which batch of the batched model, and which model of the ladder, is the largest that fits, in words."""
    most = f"{data.largest_batch:,} sequences of {data.batched_seq} tokens"
    text = f"{data.batched_model} trains with up to {most} per step"
    fitting = [step for step in data.anatomy if step.fits]
    if fitting:
        last = max(fitting, key=lambda step: step.n_params)
        beyond = " (the ladder's largest)" if len(fitting) == len(data.anatomy) else ""
        text += (
            f"; at {tokens_of(last):,} tokens a model of {count(last.n_params)} parameters{beyond} takes "
            f"{last.peak_bytes / 1e9:.3g} GB"
        )
    return text + " (fp32 weights, AdamW)."


def _where_from(curves: Sequence[CostCurve]) -> str:
    """The source and dates of prices: RunPod Secure Cloud on-demand, 2026-06-15 to 2026-11-09."""
    prices = [c.price for c in curves if c.price is not None]
    offers = ", ".join(sorted({f"{price.provider} {price.kind}" for price in prices}))
    days = sorted({price.date.isoformat() for price in prices})
    old = [f"{short_name(p.gpu)}'s is {p.age_days} days old" + (", so it is not ranked" if p.is_expired else "")
           for p in prices if p.is_old]  # fmt: skip
    return "; ".join([f"{offers}, {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""), *old])


def own_curve(data: ReportData) -> CostCurve | None:
    return next((curve for curve in data.curves if curve.gpu == data.profile.gpu), None)


def warnings(data: ReportData) -> list[str]:
    """The warnings of the fit and of the forecasts, each once."""
    own = data.fit.warnings if data.fit is not None else []
    return list(dict.fromkeys([*own, *(text for found in data.anatomy for text in found.warnings)]))


# --- key numbers


@dataclass(frozen=True)
class KeyNumber:
    """A number in large type: `value` with its unit, what it is, and what it is compared with."""

    value: str
    what: str
    note: str


def key_numbers(data: ReportData) -> Iterator[KeyNumber]:
    """Yields the numbers that a manager reads first; those without data are left out."""
    profile = data.profile
    dtype, burst, sustained, peak = _matrix_roof(profile)
    if (number := sustained or burst) is not None:
        of = f"{number.value / peak.value:.0%} of its {peak.basis} peak" if peak else ""
        yield KeyNumber(rate(number.value, "FLOP/s"), f"{dtype} matrix products, sustained", of)
    copy = profile.ceilings.get("hbm_copy")
    if copy is not None:
        yield KeyNumber(rate(copy.value, "B/s"), "memory, read and written", copy.basis)
    if data.standard is not None:
        first = data.standard.steps[0]
        if first.fits:
            low, high = first.seconds.low, first.seconds.high
            yield KeyNumber(
                _ms(first.seconds.value),
                f"a step of {first.model}",
                f"{first.run.tokens:,} tokens, {_ms(low)} to {_ms(high)}, bound by {first.forecast.bound}",
            )
        usd = first.usd_per_million_tokens
        if usd is not None and first.price is not None:
            yield KeyNumber(f"${usd.value:.3g}", "per million tokens, the same step", first.price.label)
    elif data.anatomy:
        step = reference_step(data.anatomy)
        yield KeyNumber(
            _ms(step.step_seconds),
            f"a step of {count(step.n_params)} parameters",
            f"{tokens_of(step):,} tokens, bound by {step.bound}",
        )
    done = errors_of(row.step for row in data.validation)
    if done.n:
        device = errors_of(row.device for row in data.validation)
        note = f"device time {device.median:.1%}" if device.n else ""
        yield KeyNumber(f"{done.median:.1%}", f"median error over {done.n} real steps", note)


def reference_step(found: Sequence[Forecast]) -> Forecast:
    """The step nearest to 600 M parameters."""
    return min(found, key=lambda f: abs(log(f.n_params / SIX_HUNDRED_MILLION)))
