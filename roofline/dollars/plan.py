"""Answers budget questions: how long training on T tokens takes and what it costs, and how large a model a budget
trains.

Plans are at the forecast's step time from first step to last: no evaluation, no checkpoints, no restarts, data always
ready. Intervals are the step's: a step time that is 10% wrong is so in every step, so errors do not average out over a
run. Of several GPUs the step is that of their layout, and all are paid for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp, log
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.dollars.curves import OWN, feeding_hosts, step_point, traced_step
from flopcast.roofline.dollars.points import CostCurve, CostPoint, Ranged
from flopcast.roofline.dollars.tables import price_cells
from flopcast.roofline.gpu.catalogue.prices import Price, unranked
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep, peak_for
from flopcast.roofline.step.questions.largest_batch import largest_batch
from flopcast.roofline.stream.library.modules import Module
from flopcast.roofline.stream.library.streams import Vary
from flopcast.roofline.stream.model.models import Config, context_of
from flopcast.roofline.stream.model.run import Run

# Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models" (arXiv 2203.15556), table 3: about 20 tokens
# per parameter at every size.
TOKENS_PER_PARAMETER = 20.0
DAY = 86_400.0
# Tokens per sequence that a run is planned with where none are asked for, if the model's context holds as many: Qwen3
# (arXiv 2505.09388), Llama 2 and OLMo 2 were pretrained at 4,096, and lengthened at the end where configs say more.
PRETRAINING_SEQ = 4096


def pretraining_seq(model: Config) -> int:
    """Returns the tokens per sequence to plan with: the model's own context, `PRETRAINING_SEQ` at most."""
    return min(context_of(model) or PRETRAINING_SEQ, PRETRAINING_SEQ)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Training one model on `tokens` tokens on one GPU, or on several laid out as `run` says; where that is not
    possible, `point` is None and `reason` says why. `is_largest`: whether the batch is the largest that fits."""

    gpu: str
    basis: str
    run: Run
    tokens: float
    price: Price | None = None
    unit: str = "tokens"
    is_largest: bool = False
    point: CostPoint | None = None
    mfu: float | None = None
    reason: str | None = None

    @property
    def steps(self) -> int | None:
        return None if self.point is None else ceil(self.tokens / self.point.step.tokens)

    @property
    def seconds(self) -> Ranged | None:
        return None if self.point is None or self.steps is None else self.point.step.seconds.scaled(self.steps)

    @property
    def usd(self) -> Ranged | None:
        seconds = self.seconds
        if seconds is None or self.price is None or self.point is None:
            return None
        return seconds.scaled(self.point.usd_per_hour / 3600.0)

    def tokens_for(self, usd: float) -> Ranged | None:
        """Returns the tokens that a budget buys; None where the plan is not possible, and without a price."""
        if self.point is None or self.price is None:
            return None
        per_million = self.point.usd_per_million_tokens
        return Ranged(usd / per_million.value * 1e6, usd / per_million.high * 1e6, usd / per_million.low * 1e6)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan's record, seconds and dollars with the ends of their 90% interval; these are None where the
        plan is not possible."""
        seconds, usd, step = self.seconds, self.usd, None if self.point is None else self.point.step
        return {
            "gpu": self.gpu,
            "profile_basis": self.basis,
            "batch": self.run.batch or None,
            "seq": self.run.seq,
            "is_largest_batch": self.is_largest,
            "accumulate": self.run.accumulate,
            "parallel": self.run.parallel if self.run.is_parallel else None,
            "num_gpus": self.run.layout.world,
            "tokens": self.tokens,
            "unit": self.unit,
            "tokens_per_step": None if step is None else step.tokens,
            "steps": self.steps,
            "step_seconds": None if step is None else step.step_seconds,
            "bound": None if step is None else step.bound,
            "tokens_per_second": None if self.point is None else self.point.tokens_per_second.value,
            "mfu": self.mfu,
            "needed_bytes": None if step is None else step.needed_bytes,
            **_ends("seconds", seconds),
            **_ends("days", None if seconds is None else seconds.scaled(1 / DAY)),
            **_ends("usd", usd),
            "usd_per_million_tokens": None
            if usd is None or self.point is None
            else self.point.usd_per_million_tokens.value,
            **price_cells(self.price),
            "unranked": unranked(self.price),
            "reason": self.reason,
        }


def _ends(name: str, found: Ranged | None) -> dict[str, float | None]:
    if found is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def plans(
    model: Config | Module,
    run: Run,
    profiles: Sequence[Profile],
    prices: Mapping[str, Price],
    *,
    tokens: float | None = None,
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
    auto_batch: bool = False,
    host: HostCosts | None = None,
    hosts: str = OWN,
    layouts: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Plan]:
    """Returns one plan per kind of GPU; of several `layouts` (default: the run's own) in that with the most tokens per
    second. `tokens` defaults to `tokens_per_parameter` times the parameters; `auto_batch` takes
    the largest micro-batch that fits on each GPU. Raises UsageError as `forecast` does, and for fewer than 1 token."""
    runs = [replace(run, parallel=layout) for layout in layouts] or [run]
    for one in runs:
        one.check()
    if tokens is not None and not tokens >= 1:
        raise UsageError(f"tokens is {tokens:g}: valid is a number of at least 1")
    found = []
    feeding = feeding_hosts(profiles, host, hosts)
    for index, (profile, fed) in enumerate(zip(profiles, feeding, strict=True)):
        planned = [
            _plan(model, one, profile, prices.get(profile.gpu), tokens, tokens_per_parameter, auto_batch, *fed)
            for one in runs
        ]
        found.append(max(planned, key=lambda plan: plan.point.tokens_per_second.value if plan.point else 0.0))
        progress(index + 1, len(profiles))
    return found


def _plan(
    model: Config | Module, run: Run, profile: Profile, price: Price | None, tokens: float | None,
    tokens_per_parameter: float, auto_batch: bool, host: HostCosts, shares_host: bool,
) -> Plan:  # fmt: skip
    batch = largest_batch(model, run, profile) if auto_batch else run.batch
    # the search for the largest batch has traced two batches, from which the stream of any other is derived
    vary: Vary | None = "batch" if auto_batch else None
    stream, own_run = traced_step(model, replace(run, batch=max(batch, 1)), profile, vary)
    unit = stream.meta.get("unit", "tokens")
    if tokens is None and unit != "tokens":
        raise UsageError(f"how many {unit}? The batch of this module holds no token ids: give their number as --tokens")
    wanted = tokens_per_parameter * stream.n_params if tokens is None else tokens
    own_run = own_run if batch else replace(own_run, batch=0)
    plan = Plan(
        gpu=profile.gpu, basis=profile.basis, run=own_run, tokens=wanted, price=price, is_largest=auto_batch, unit=unit,
        reason="out of memory",
    )  # fmt: skip
    if not batch:
        return plan
    step = step_point(PricedStep(stream, own_run, profile, host), model, shares_host=shares_host)
    if not step.fits:
        return plan
    point = CostPoint(profile.gpu, step, price)
    mfu = point.flops_per_second.value / (peak_for(profile, run.precision) * step.num_gpus)
    return replace(plan, point=point, mfu=mfu, reason=None)


def cheapest(found: Sequence[Plan]) -> tuple[Plan, tuple[str, ...]] | None:
    """Returns the cheapest plan and the GPUs that may be cheaper by the intervals, of those whose prices decide; None
    where there is none."""
    done = [(plan, usd) for plan in found if (usd := plan.usd) is not None and unranked(plan.price) is None]
    if not done:
        return None
    best, usd = min(done, key=lambda pair: pair[1].value)
    rivals = [plan.gpu for plan, other in done if plan is not best and usd.over(other).high >= 1.0]
    return best, tuple(rivals)


# --- the largest model that a budget trains ------------------------------------------------------------------

BUDGET, MEMORY, LADDER, NOTHING, NO_PRICE = "budget", "memory", "ladder", "nothing fits", "no price"


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest model of the ladder that `usd` trains on a GPU at a given number of tokens per parameter.

    `limited_by`: budget; memory (the largest model that fits costs `cost_usd`, less than the budget); ladder (the
    ladder's largest model costs less than the budget); nothing fits (not even the smallest is within budget and memory;
    n_params is None); no price (n_params is None). `low` and `high`: by the interval of the step, cut off at the limit
    of memory and the end of the ladder; low is None where even the smallest model might cost more than the budget.
    """

    gpu: str
    usd: float
    limited_by: str
    n_params: float | None = None
    low: float | None = None
    high: float | None = None
    cost_usd: float | None = None
    days: float | None = None


def largest_models(
    curves: Sequence[CostCurve], usd: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER
) -> list[Largest]:
    """Returns one row per curve, interpolating logarithms between models. Raises UsageError for a budget that is not
    above 0."""
    if not usd > 0:
        raise UsageError(f"--budget-usd is {usd:g}: valid is a number above 0")
    return [_largest(curve, usd, tokens_per_parameter) for curve in curves]


def _largest(curve: CostCurve, usd: float, tokens_per_parameter: float) -> Largest:
    if curve.price is None:
        return Largest(gpu=curve.gpu, usd=usd, limited_by=NO_PRICE)
    sizes = [float(point.step.n_params) for point in curve.fitting]
    rates = [point.usd_per_million_tokens for point in curve.fitting]
    costs = {
        end: [n * tokens_per_parameter / 1e6 * getattr(rate, end) for n, rate in zip(sizes, rates, strict=True)]
        for end in ("value", "low", "high")
    }
    if not sizes or costs["value"][0] > usd:
        return Largest(gpu=curve.gpu, usd=usd, limited_by=NOTHING)
    size = _reach(sizes, costs["value"], usd) or sizes[0]
    cost = min(usd, costs["value"][-1])
    limited = BUDGET if costs["value"][-1] > usd else MEMORY if curve.smallest_failing else LADDER
    return Largest(
        gpu=curve.gpu, usd=usd, limited_by=limited, n_params=size, low=_reach(sizes, costs["high"], usd),
        high=_reach(sizes, costs["low"], usd), cost_usd=cost, days=cost / curve.fitting[0].usd_per_hour / 24,
    )  # fmt: skip


def _reach(sizes: Sequence[float], costs: Sequence[float], usd: float) -> float | None:
    """Returns the largest size up to which every model costs at most `usd`; None if the smallest costs more."""
    if costs[0] > usd:
        return None
    for (n, a), (m, b) in pairwise(zip(sizes, costs, strict=True)):
        if b > usd:
            return exp(log(n) + log(m / n) * log(usd / a) / log(b / a))
    return sizes[-1]
