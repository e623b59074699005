"""Makes the tables of the standard models' steps: on one GPU, where its page begins, and on all, for the index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter

from flopcast.roofline.base.units import count, gb_in_column, share, three_in_column
from flopcast.roofline.dollars.points import Ranged
from flopcast.roofline.dollars.standard import MODELS, SEQ, SETTING, StandardGpu, StandardStep
from flopcast.roofline.views.page.table import Column, Table, prose, ranged, text

STANDARD, GPUS = "standard", "gpus"  # names of the tables


def standard_table(found: StandardGpu | None) -> Table | None:
    """What each standard model costs on this GPU, a row a model."""
    if found is None:
        return None
    per_million = attrgetter("usd_per_million_tokens")
    columns = [
        text("model", "model"), Column("n_params", "parameters", count, attrgetter("forecast.n_params")),
        *ranged("step_seconds", "step, ms", _milliseconds, _if_fits("seconds")),
        *ranged("tokens_per_second", "tokens/s", _rounded, _if_fits("tokens_per_second")),
        *ranged("usd_per_million_tokens", "$ per million tokens", _rounded, per_million),
        *ranged("usd_for_training", "$ for 20 tokens per parameter", _rounded, attrgetter("usd_for_training")),
        Column("mfu", "MFU", share, lambda step: step.forecast.mfu if step.fits else None),
        Column("bound", "bound by", of=lambda step: step.forecast.bound if step.fits else None, is_number=False),
        Column("needed_bytes", "memory needed, GB", gb_in_column, attrgetter("forecast.needed_bytes")),
        prose("split", "micro-batches", _split),
    ]  # fmt: skip
    note = f"{SETTING}. Below each number: its 90% interval. " + (
        "No price of this GPU is known." if found.price is None else f"Price: {found.price.label}."
    )
    return Table(STANDARD, "What a model costs on this GPU", note, columns, found.steps)


def gpus_table(found: Sequence[StandardGpu], pages: Mapping[str, str]) -> Table | None:
    """What each standard model costs on each GPU, a row a GPU. `pages`: where a GPU's page is, by GPU."""
    if not found:
        return None
    columns = [
        Column("gpu", "GPU", of=attrgetter("gpu"), is_number=False, link_to=lambda row: pages.get(row.gpu)),
        text("basis", "basis"),
        Column("memory_bytes", "memory, GB", "{:.0f}".format, lambda row: row.memory_bytes / 1e9),
        Column("usd_per_hour", "$/hour", "{:.2f}".format, lambda row: row.price and row.price.usd_per_hour, below=_day),
        Column("price_date", "price of", of=lambda row: row.price and row.price.date, is_hidden=True),
    ]
    for model in MODELS:
        one = partial(_of, model)
        columns += [
            *ranged(f"{model}/step_seconds", "step, ms", _milliseconds, one("seconds"), group=model),
            *ranged(f"{model}/tokens_per_second", "tokens/s", _rounded, one("tokens_per_second"), group=model),
            *ranged(f"{model}/usd_per_mtoken", "$/Mtoken", _rounded, one("usd_per_million_tokens"), group=model),
        ]
    note = (
        f"{SETTING}, in as few micro-batches as the memory needs. A dash: the model does not fit, or no price is "
        "known. Below each number: its 90% interval; below a price: its day. Basis: measured on that GPU, refined by "
        "published times, or projected from the datasheet. Click a heading to sort."
    )
    return Table(GPUS, "What a training step costs on each GPU", note, columns, found)


def _if_fits(name: str) -> Callable[[StandardStep], Ranged | None]:
    return lambda step: getattr(step, name) if step.fits else None


def _of(model: str, name: str) -> Callable[[StandardGpu], Ranged | None]:
    return lambda row: _if_fits(name)(row.step_of(model))


def _day(row: StandardGpu) -> str:
    price = row.price
    if price is None:
        return ""
    old = f", {price.age_days} days old" if price.is_old else ""
    return ("about " if price.date_inferred else "") + price.date.isoformat() + old


def _milliseconds(seconds: float) -> str:
    return _rounded(seconds * 1e3)


def _rounded(value: float) -> str:
    """Three digits: an interval says that more are not known."""
    return three_in_column(float(f"{value:.3g}"))


def _split(step: StandardStep) -> str:
    if not step.fits:
        return "does not fit, not even one sequence at a time"
    run = step.run
    sequences = f"{run.batch} x {SEQ:,}"
    return sequences if run.accumulate == 1 else f"{run.accumulate} of {sequences}"
