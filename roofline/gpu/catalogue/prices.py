"""Reads and queries a price book of GPU rentals: dated, sourced rows from CSV or TOML, each checked.

Rented prices move by tens of percent within a year, so a `Price` never travels without its provider and date.
The shipped book (`data/prices.csv`) holds list prices collected from public catalogues. Where a catalogue
carries no date, its era was inferred from the versions around it: `date` is then a day that represents
the era, `date_inferred` is true and `source` says which era. Prices are per GPU; "per GPU of 8" in a source means
that the provider sells eight together.

A user's book is refused as a whole at its first bad row, with the line, because its author can correct it. Catalogues
that others publish are read by `price_catalogues`, which leaves out bad rows and reports them.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from flopcast.errors import DataError, UsageError
from flopcast.roofline.base.csv_files import named, parse_csv, read_text, write_rows
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.catalogue.datasheets import gpu_meant, load_specs

PRICES_FILE = DATA / "prices.csv"
DEFAULT_PROVIDER = "RunPod Secure Cloud"
OVERRIDE_PROVIDER = "given"  # a price from the command line
# Hundreds of times below the cheapest and above the most expensive GPU of the book: beyond these a row is garbled.
LEAST_USD_PER_HOUR, MOST_USD_PER_HOUR = 1e-4, 10_000.0
KINDS = ("on-demand", "spot")
GIVE_BOOK = "give a price book, CSV or TOML"
# Rented prices move by tens of percent within a year: an older one is said with its age, one older than a year decides
# no ranking.
OLD_DAYS, EXPIRED_DAYS = 180, 365
REQUIRED = ("gpu", "provider", "kind", "usd_per_hour", "date")
OPTIONAL = ("date_inferred", "source")
# The article whose question this project answers used the prices of late 2025: `latest(..., on=ARTICLE_DATE)`
# gives L4 0.39, A100 PCIe 1.64, H100 SXM 2.69, H200 3.59.
ARTICLE_DATE = date(2025, 11, 15)

Day = date  # within a Price, `date` is its own


@dataclass(frozen=True, kw_only=True)
class Price:
    """USD for one hour of one GPU, at one provider, on one day. `kind`: on-demand or spot. `asked_on`: the day for
    which it was looked up (`latest`, `newest`), from which its age is counted."""

    gpu: str
    provider: str
    kind: str
    usd_per_hour: float
    date: date
    date_inferred: bool
    source: str
    asked_on: Day | None = field(default=None, compare=False)

    @property
    def age_days(self) -> int:
        """Days from its date to the day for which it was looked up; 0 where it was given."""
        return 0 if self.asked_on is None else max(0, (self.asked_on - self.date).days)

    @property
    def is_old(self) -> bool:
        return self.age_days > OLD_DAYS

    @property
    def is_expired(self) -> bool:
        """Whether it is too old to decide which GPU is the better buy."""
        return self.age_days > EXPIRED_DAYS

    @property
    def label(self) -> str:
        """The price as figures and tables print it: "$2.69/h RunPod Secure Cloud on-demand, about 2025-11-15", and its
        age where it is old: "..., 372 days old"."""
        if self.provider == OVERRIDE_PROVIDER:
            return f"${self.usd_per_hour:g}/h as given"
        usd = f"{self.usd_per_hour:.2f}" if self.usd_per_hour >= 1 else f"{self.usd_per_hour:#.2g}"
        about = "about " if self.date_inferred else ""
        old = f", {self.age_days} days old" if self.is_old else ""
        return f"${usd}/h {self.provider} {self.kind}, {about}{self.date.isoformat()}{old}"

    def to_row(self) -> dict[str, Any]:
        """The price as a row of a price book, with its age."""
        row = {name: value for name, value in vars(self).items() if name != "asked_on"}
        return {**row, "date": self.date.isoformat(), "age_days": self.age_days}

    def to_json(self) -> dict[str, Any]:
        """The record of the price in other records."""
        return {"usd_per_hour": self.usd_per_hour, "provider": self.provider, "date": self.date.isoformat(),
                "age_days": self.age_days}  # fmt: skip


def load_prices(
    path: str | Path | None = None, *, known_gpus: Iterable[str] = (), today: date | None = None
) -> list[Price]:
    """Loads the shipped price book (`path` None), or one in CSV or TOML (by the file's suffix) with the same columns.

    `known_gpus` adds names (of the caller's own profiles) to the shipped GPUs and "cpu". `today` bounds the
    dates of a file given by path (default: the clock, plus a day for time zones); the shipped book's dates
    are not compared with the clock of the machine that reads it.

    Raises DataError with the line number: missing column, unknown GPU, one whose form factor is left out ("H100": PCIe
    or SXM?), unknown kind, a price that is not a positive finite number, an unreadable or future date, a row given
    twice, a spot price that is above the on-demand price of the same GPU, provider and day (the two columns of a
    catalogue swapped) or equal to it (one column copied to the other).
    """
    file = PRICES_FILE if path is None else Path(path)
    text = read_text(file, GIVE_BOOK)
    known = {*load_specs(), "cpu", *known_gpus}
    last = date.max if path is None else (today or date.today()) + timedelta(days=1)
    rows = _toml_rows(file, text) if file.suffix.lower() == ".toml" else _csv_rows(file, text)
    prices: list[tuple[int, Price]] = []
    for line, row in rows:
        try:
            prices.append((line, _parse(row, known, last, file.name)))
        except ValueError as error:
            raise DataError(f"{file} line {line}: {error}") from error
    if not prices:
        raise DataError(f"{file} holds no prices; its columns are {','.join((*REQUIRED, *OPTIONAL))}")
    _check_pairs(file, prices)
    return [price for _, price in prices]


def _csv_rows(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    first, header, rows = parse_csv(file, text, comments=True)
    _check_columns(f"{file} line {first}", header)
    for line, cells in rows:
        if not any(cells):
            continue
        if len(cells) != len(header):
            raise DataError(f"{file} line {line}: {len(cells)} fields where the header names {len(header)}")
        yield line, dict(zip(header, cells, strict=True))


def _toml_rows(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of `[[price]]` tables; a row's line is that of its header, since the parser does not report lines."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise DataError(f"{file} is not TOML: it is nested too deeply") from None
    except ValueError as error:  # also of an integer of more than 4,300 digits
        raise DataError(f"{file} is not TOML: {error}") from error
    rows = document.get("price")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file} holds no [[price]] tables; the keys of each: {', '.join((*REQUIRED, *OPTIONAL))}")
    headers = re.compile(r"\s*\[\[\s*[\"']?price[\"']?\s*\]\]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if headers.match(line)]
    for index, row in enumerate(rows):
        line = lines[index] if len(lines) == len(rows) else 1
        _check_columns(f"{file} line {line}", list(row))
        yield line, row


def _check_columns(where: str, columns: Sequence[str]) -> None:
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        raise DataError(
            f"{where}: missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"needed are {','.join(REQUIRED)} (optional: {','.join(OPTIONAL)}), given {named(columns)}"
        )


def _parse(row: dict[str, Any], known: set[str], last: date, file_name: str) -> Price:
    """Parses a row. Raises ValueError with what is wrong with it."""
    gpu = str(row["gpu"])
    try:
        gpu = gpu_meant(gpu, known)
    except UsageError as fault:
        raise ValueError(str(fault)) from None
    provider = str(row["provider"])
    if not provider:
        raise ValueError("no provider")
    kind = str(row["kind"])
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; valid are {', '.join(KINDS)}")
    inferred = row.get("date_inferred", False)
    if not isinstance(inferred, bool):
        texts = {"true": True, "false": False, "": False}
        if str(inferred).lower() not in texts:
            raise ValueError(f"date_inferred is {inferred!r}; valid are true and false")
        inferred = texts[str(inferred).lower()]
    return Price(
        gpu=gpu,
        provider=provider,
        kind=kind,
        usd_per_hour=_positive(row["usd_per_hour"]),
        date=_date(row["date"], last),
        date_inferred=inferred,
        source=str(row.get("source") or file_name),
    )


def _positive(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not LEAST_USD_PER_HOUR <= number <= MOST_USD_PER_HOUR:
        raise ValueError(
            f"usd_per_hour is {value!r}; it must be a number above zero, in dollars for one GPU, "
            f"{LEAST_USD_PER_HOUR:g} to {MOST_USD_PER_HOUR:,.0f}"
        )
    return number


def _date(value: Any, last: date) -> date:
    try:
        if isinstance(value, datetime):
            day = value.date()
        else:
            day = value if isinstance(value, date) else date.fromisoformat(str(value))
    except ValueError as error:
        raise ValueError(f"date is {value!r}; it must be of the form 2026-11-09") from error
    if day > last:
        raise ValueError(f"date {day.isoformat()} lies in the future")
    return day


def _check_pairs(file: Path, prices: Sequence[tuple[int, Price]]) -> None:
    seen: dict[tuple[str, str, date, str], tuple[int, Price]] = {}
    for line, price in prices:
        key = (price.gpu, price.provider, price.date, price.kind)
        if key in seen:
            raise DataError(
                f"{file} line {line}: {price.gpu} from {price.provider} ({price.kind}, {price.date}) "
                f"was given on line {seen[key][0]} already"
            )
        seen[key] = (line, price)
    for (gpu, provider, day, kind), (line, spot) in seen.items():
        pair = seen.get((gpu, provider, day, "on-demand")) if kind == "spot" else None
        if pair and spot.usd_per_hour >= pair[1].usd_per_hour:
            wrong = "equals" if spot.usd_per_hour == pair[1].usd_per_hour else "is above"
            doubt = "copied, no spot price" if wrong == "equals" else "swapped"
            raise DataError(
                f"{file} line {line}: spot price {spot.usd_per_hour:g} of {gpu} from {provider} on {day} "
                f"{wrong} its on-demand price {pair[1].usd_per_hour:g} on line {pair[0]}: {doubt}?"
            )


def latest(
    prices: Sequence[Price], gpu: str, provider: str | None = None, kind: str = "on-demand", on: date | None = None
) -> Price | None:
    """The newest price of a GPU, or the newest not after the day `on` (default: today), from which its age is counted;
    None if there is none.

    A price given on the command line (`with_overrides`) takes precedence. `provider` defaults to RunPod Secure Cloud,
    the provider that lists most of the GPUs, so that comparisons are not between providers. Only in a book without any
    row of it is another provider used, if it is the only one with this GPU. Raises UsageError for a provider or a kind
    that the book does not have.
    """
    if kind not in KINDS:
        raise UsageError(f"price kind {kind!r} is unknown; valid are {', '.join(KINDS)}")
    given = [p for p in prices if p.gpu == gpu and p.provider == OVERRIDE_PROVIDER]
    if given:
        return given[-1]
    providers = {p.provider for p in prices if p.provider != OVERRIDE_PROVIDER}
    if provider is not None and provider not in providers:
        raise UsageError(f"no prices from provider {provider!r}; known: {', '.join(sorted(providers)) or 'none'}")
    rows = [p for p in prices if p.gpu == gpu and p.kind == kind and (on is None or p.date <= on)]
    if provider is None:
        provider = DEFAULT_PROVIDER
        offers = {p.provider for p in rows}
        if DEFAULT_PROVIDER not in providers and len(offers) == 1:
            provider = offers.pop()
    newest = max((p for p in rows if p.provider == provider), key=lambda p: p.date, default=None)
    return newest and replace(newest, asked_on=on or date.today())


def find_price(
    gpu: str, usd_per_hour: float | None = None, provider: str | None = None, on: date | str | None = None
) -> Price | None:
    """The price given, else the newest of the shipped book as `latest` finds it; None where there is none. Raises
    UsageError for a price that is not above 0, a day that is none, and a provider that the book does not have."""
    if usd_per_hour is not None:
        return parse_override(f"{gpu}={usd_per_hour}", known_gpus=[gpu])
    try:
        day = date.fromisoformat(on) if isinstance(on, str) else on
    except ValueError as error:
        raise UsageError(f"on is {on!r}: valid is a day as YYYY-MM-DD") from error
    return latest(load_prices(), gpu, provider, on=day)


def newest(prices: Iterable[Price], on: date | None = None) -> list[Price]:
    """The newest price of each GPU, provider and kind (not after the day `on`), by GPU and price."""
    found: dict[tuple[str, str, str], Price] = {}
    for price in prices:
        key = (price.gpu, price.provider, price.kind)
        if (on is None or price.date <= on) and (key not in found or found[key].date < price.date):
            found[key] = price
    ordered = sorted(found.values(), key=lambda price: (price.gpu, price.kind, price.usd_per_hour))
    return [replace(price, asked_on=on or date.today()) for price in ordered]


def unranked(price: Price | None) -> str | None:
    """Why a GPU with this price is in no ranking by dollars; None where it is."""
    if price is None:
        return "no price"
    return f"its price is {price.age_days} days old" if price.is_expired else None


def advice(prices: Sequence[Price], gpu: str, used: Price | None, asked: str, on: date | None = None) -> str:
    """Says that a GPU has no price to rank by, or only `used`, and how to give one: what others offer, --price.

    `asked`: the kind and the provider asked for."""
    until = f" up to {on.isoformat()}" if on else ""
    problem = f"no {asked}" + until if used is None else f"{used.label}: more than a year, so it decides no ranking"
    others = [p for p in newest((p for p in prices if p.gpu == gpu), on) if used is None or p.date > used.date]
    offers = "; ".join(p.label for p in others)
    return (
        f"{gpu}: {problem}. "
        + (f"Others in the book: {offers} (choose with --provider). " if offers else "")
        + f"To give one: --price {gpu}=USD_PER_HOUR"
    )


def parse_override(text: str, *, known_gpus: Iterable[str] = (), today: date | None = None) -> Price:
    """Parses a price from the command line, as "nvidia-h100-sxm=2.49". Raises UsageError if it cannot."""
    gpu, equals, amount = text.partition("=")
    gpu, known = gpu.strip(), {*load_specs(), "cpu", *known_gpus}
    if not equals or not gpu:
        raise UsageError(f"price {text!r} is not of the form GPU=USD_PER_HOUR, as in nvidia-h100-sxm=2.49")
    try:
        gpu = gpu_meant(gpu, known)
    except UsageError as fault:
        raise UsageError(f"price {text!r}: {fault}") from None
    try:
        usd_per_hour = _positive(amount.strip())
    except ValueError as error:
        raise UsageError(f"price {text!r}: {error}") from error
    return Price(
        gpu=gpu,
        provider=OVERRIDE_PROVIDER,
        kind="on-demand",
        usd_per_hour=usd_per_hour,
        date=today or date.today(),
        date_inferred=False,
        source="command line",
    )


def write_prices(prices: Iterable[Price], path: Path) -> None:
    """Writes a price book in CSV that `load_prices` reads. Raises UsageError when it cannot be written, RunError
    without room."""
    columns = (*REQUIRED, *OPTIONAL)
    rows = (
        (price.gpu, price.provider, price.kind, f"{price.usd_per_hour:.6g}", price.date.isoformat(),
         price.date_inferred, price.source)
        for price in prices
    )  # fmt: skip
    write_rows(path, columns, (dict(zip(columns, row, strict=True)) for row in rows))


def with_overrides(prices: Sequence[Price], overrides: Iterable[Price]) -> list[Price]:
    """Adds prices from `parse_override` to the book; of several for one GPU the last is used."""
    return [*prices, *overrides]
