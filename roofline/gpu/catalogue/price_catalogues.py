"""Reads price catalogues of SkyPilot (CSV files) and gpuhunt (an optional extra) as rows of a price book.

Catalogues hold bad rows (SkyPilot's RunPod files: an L40S with its two price columns swapped, a version whose
SpotPrice column repeats Price, "A100-80GB" without PCIe or SXM). A bad row is left out and named with its line; the
others are used. What is refused:

- a price that is no positive finite number; a spot price above the on-demand price (both are then in doubt);
- a spot price equal to the on-demand price (the on-demand price is kept);
- a GPU whose board neither its name nor its instance nor its description determines; `aliases` can name it;
- an accelerator without a machine (SkyPilot's GCP rows price the two separately).

GPUs that flopcast does not know are counted and left out. SkyPilot's files carry no date: without `day` the file's
modification date is used and marked as inferred (prices are at most that new).
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from flopcast.errors import DataError, RunError, UsageError
from flopcast.roofline.base.csv_files import read_csv, read_text
from flopcast.roofline.gpu.catalogue.datasheets import load_specs, spec_of_device
from flopcast.roofline.gpu.catalogue.prices import GIVE_BOOK, Price, load_prices

SKYPILOT_COLUMNS = ("AcceleratorName", "AcceleratorCount", "Price")
# The shipped book's name of a provider, by SkyPilot's folder or gpuhunt's provider.
PROVIDERS = {
    "aws": "AWS", "azure": "Azure", "gcp": "GCP", "lambda": "Lambda", "lambdalabs": "Lambda", "nebius": "Nebius",
    "runpod": "RunPod", "vast": "Vast.ai", "vastai": "Vast.ai", "hyperstack": "Hyperstack", "oci": "OCI",
}  # fmt: skip
_TIERS = {"_SECURE": "Secure Cloud", "_COMMUNITY": "Community Cloud"}
# Machine types that are sold with only one kind of board, as the sources of the shipped book list them.
_BOARDS = {
    "p4d.": "a100-40gb-sxm", "p4de.": "a100-80gb-sxm", "p5.": "h100-sxm", "a3-highgpu": "h100-sxm",
    "a3-ultragpu": "h200", "nc24ads_a100_v4": "a100-80gb-pcie", "nd96asr": "a100-40gb-sxm", "nd96isr_h100": "h100-sxm",
}  # fmt: skip
_PLAIN = {
    "L4": "nvidia-l4", "L40S": "nvidia-l40s", "A10G": "nvidia-a10g", "A6000": "nvidia-rtx-a6000",
    "RTXA6000": "nvidia-rtx-a6000", "RTX4090": "nvidia-rtx-4090", "RTX3090": "nvidia-rtx-3090", "H200": "nvidia-h200",
    "H200SXM": "nvidia-h200", "H200141GB": "nvidia-h200", "B200": "nvidia-b200", "B200SXM": "nvidia-b200",
}  # fmt: skip
GPUHUNT_PROVIDERS = ("runpod", "lambdalabs", "aws", "azure", "gcp", "nebius")


@dataclass(frozen=True)
class Offer:
    """One row of a catalogue. Prices are for the whole machine of `count` GPUs; None where the row has none."""

    where: str  # "line 12"
    name: str
    count: float
    usd_per_hour: float | None
    spot_usd_per_hour: float | None
    provider: str
    region: str = ""
    instance: str = ""
    description: str = ""
    memory_gb: float | None = None


@dataclass(frozen=True)
class Collected:
    """Usable prices of a catalogue; the reasons for refusals, with lines; the number of rows of unknown or no GPUs."""

    prices: tuple[Price, ...]
    refused: tuple[str, ...]
    others: int


class Ambiguous(ValueError):
    """A name that leaves open which board is meant."""


def is_skypilot(text: str) -> bool:
    """Whether the text of a file is a catalogue of SkyPilot's, by its first line."""
    columns = [name.strip().strip('"') for name in text[: text.find("\n")].split(",")]
    return all(column in columns for column in SKYPILOT_COLUMNS)


def read_skypilot(
    path: Path,
    *,
    provider: str | None = None,
    day: date | None = None,
    aliases: Mapping[str, str] | None = None,
    today: date | None = None,
) -> Collected:
    """Prices of one `vms.csv`; `provider` defaults to the folder's name. `aliases`: flopcast's name by the file's.

    Raises UsageError where there is no such file, DataError for one that is no catalogue or holds no usable price.
    """
    _, columns, rows = read_csv(path)
    if not set(SKYPILOT_COLUMNS) <= set(columns):
        raise DataError(f"{path} is no catalogue of SkyPilot: needed are columns {','.join(SKYPILOT_COLUMNS)}")
    name = provider or path.resolve().parent.name
    offers, refused = [], []
    for line, cells in rows:
        try:
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells where the header names {len(columns)}")
            row = dict(zip(columns, cells, strict=True))
            offers.append(_skypilot_offer(f"line {line}", row, PROVIDERS.get(name.lower(), name)))
        except ValueError as fault:
            refused.append((f"line {line}", str(fault)))
    stands = day or date.fromtimestamp(path.stat().st_mtime)
    last = (today or date.today()) + timedelta(days=1)
    if stands > last:
        raise DataError(f"{path}: date {stands.isoformat()} lies in the future")
    found = collect(
        offers, day=stands, inferred=day is None, source=f"SkyPilot catalogue {path.name} of {name}",
        aliases=aliases, refused=refused,
    )  # fmt: skip
    if not found.prices:
        why = "; ".join(found.refused[:3]) or f"{found.others} rows of GPUs that flopcast does not know"
        raise DataError(f"{path} holds no usable price: {why}")
    return found


def _skypilot_offer(where: str, row: Mapping[str, str | None], provider: str) -> Offer:
    name = (row.get("AcceleratorName") or "").strip()
    instance = (row.get("InstanceType") or "").strip()
    count = _number(row.get("AcceleratorCount"), "AcceleratorCount") if name else 1.0
    if name and "InstanceType" in row and not instance:
        raise ValueError(f"{name} without a machine: its price is not that of an instance")
    tier = next((words for end, words in _TIERS.items() if instance.upper().endswith(end)), "")
    return Offer(
        where=where,
        name=name,
        count=count or 0.0,
        usd_per_hour=_number(row.get("Price"), "Price"),
        spot_usd_per_hour=_number(row.get("SpotPrice"), "SpotPrice"),
        provider=f"{provider} {tier}".strip(),
        region=(row.get("Region") or "").strip(),
        instance=instance,
        description=row.get("GpuInfo") or "",
    )


def _number(text: str | None, column: str) -> float | None:
    """Parses a cell; None for an empty one. Raises ValueError for text that is no number."""
    if text is None or not text.strip() or text.strip().lower() == "nan":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{column} is {text!r}, not a number") from None


def collect(
    offers: Iterable[Offer],
    *,
    day: date,
    inferred: bool,
    source: str,
    aliases: Mapping[str, str] | None = None,
    refused: Sequence[tuple[str, str]] = (),
) -> Collected:
    """Turns offers into prices per GPU: those of machines with fewest GPUs, one row per region if regions differ."""
    problems: dict[str, list[str]] = defaultdict(list)
    for where, text in refused:
        problems[text].append(where)
    kept: dict[tuple[str, str, str], list[tuple[Offer, float]]] = defaultdict(list)
    others = 0
    for offer in offers:
        try:
            gpu = gpu_of(offer, aliases or {})
            if gpu is None:
                others += 1
                continue
            usd, spot = _checked(offer)
        except ValueError as fault:
            problems[str(fault)].append(offer.where)
            continue
        if spot is not None and usd is not None and spot == usd:
            problems[f"SpotPrice of {offer.name} equals Price: no spot price (the on-demand price is kept)"].append(
                offer.where
            )
            spot = None
        for kind, value in (("on-demand", usd), ("spot", spot)):
            if value is not None:
                kept[gpu, offer.provider, kind].append((offer, value / offer.count))
    prices = []
    for (gpu, provider, kind), found in sorted(kept.items()):
        fewest = min(offer.count for offer, _ in found)
        by_region: dict[str, float] = {}
        for offer, value in found:
            if offer.count == fewest:
                by_region[offer.region] = min(value, by_region.get(offer.region, math.inf))
        note = source if fewest == 1 else f"{source}; per GPU of {fewest:g}"
        alike = len({round(value, 4) for value in by_region.values()}) == 1
        named = {"": next(iter(by_region.values()))} if alike else by_region
        prices += [
            Price(
                gpu=gpu, provider=f"{provider} {region}".strip(), kind=kind, usd_per_hour=round(value, 4), date=day,
                date_inferred=inferred, source=note,
            )
            for region, value in sorted(named.items())
        ]  # fmt: skip
    paid = {(p.gpu, p.provider): p.usd_per_hour for p in prices if p.kind == "on-demand"}
    for price in [p for p in prices if p.kind == "spot"]:
        usd = paid.get((price.gpu, price.provider))
        if usd is not None and price.usd_per_hour >= usd:
            prices.remove(price)
            problems[
                f"spot price {price.usd_per_hour:g} of {price.gpu} is not below its on-demand price {usd:g}"
            ].append(price.provider)
    told = [
        f"{lines[0]}{f' (and {len(lines) - 1} more)' if len(lines) > 1 else ''}: {text}"
        for text, lines in problems.items()
    ]
    return Collected(tuple(prices), tuple(told), others)


def _checked(offer: Offer) -> tuple[float | None, float | None]:
    """The (on-demand, spot) prices of the machine. Raises ValueError for values that cannot be prices."""
    if not offer.count or not math.isfinite(offer.count) or offer.count < 0:
        raise ValueError(f"AcceleratorCount of {offer.name} is {offer.count:g}")
    for value, column in ((offer.usd_per_hour, "Price"), (offer.spot_usd_per_hour, "SpotPrice")):
        if value is not None and (not math.isfinite(value) or value <= 0):
            raise ValueError(f"{column} of {offer.name} is {value:g}; it must be above zero")
    usd, spot = offer.usd_per_hour, offer.spot_usd_per_hour
    if usd is None and spot is None:
        raise ValueError(f"{offer.name} without a price")
    if usd is not None and spot is not None and spot > usd:
        raise ValueError(f"SpotPrice {spot:g} of {offer.name} is above its Price {usd:g}: swapped?")
    return usd, spot


def gpu_of(offer: Offer, aliases: Mapping[str, str]) -> str | None:
    """The GPU that a row offers; None for one that flopcast does not know. Raises Ambiguous (a ValueError)."""
    if offer.name in aliases:
        return aliases[offer.name]
    spec = spec_of_device(offer.instance) or spec_of_device(offer.name)
    if spec is not None:
        return spec.name
    bare = re.sub(r"[^A-Z0-9]", "", offer.name.upper())
    if bare in _PLAIN:
        return _PLAIN[bare]
    family = re.match(r"(A100|H100)", bare)
    if family is None:
        return None
    texts = " ".join((offer.name, offer.instance, offer.description)).lower()
    if "nvl" in texts:
        return None  # 94 GB: another board, which flopcast does not know
    board = _board(offer.instance)
    if board is None:
        forms = {form for form in ("sxm", "pcie") if form in texts}
        if len(forms) != 1:
            raise Ambiguous(
                f"{offer.name} is ambiguous: neither its name nor its machine says whether it is PCIe or SXM"
            )
        (form,) = forms
        is_80 = "80" in bare or (offer.memory_gb or 0) > 60
        size = "" if family[1] == "H100" else "-80gb" if is_80 else "-40gb"
        board = f"{family[1].lower()}{size}-{form}"
    name = f"nvidia-{board}"
    return name if name in load_specs() else None


def _board(instance: str) -> str | None:
    low = instance.lower().removeprefix("standard_")
    return next((board for start, board in _BOARDS.items() if low.startswith(start)), None)


# --- gpuhunt ------------------------------------------------------------------------------------------------


def refresh_gpuhunt(
    providers: Sequence[str] = GPUHUNT_PROVIDERS, *, aliases: Mapping[str, str] | None = None, today: date | None = None
) -> Collected:
    """Today's prices from gpuhunt's catalogue, or from the CSV files of the folder that $GPUHUNT_CATALOG_DIR names.

    Raises UsageError where gpuhunt is not installed or lacks a provider, RunError where the catalogue cannot be had.
    """
    try:
        import gpuhunt
    except ImportError as fault:
        raise UsageError(
            f"gpuhunt is not installed ({fault}): `pip install 'flopcast[prices]'`; without it, --from reads a CSV of "
            "SkyPilot's catalogue, and --prices a file of your own"
        ) from None
    catalog = gpuhunt.Catalog(balance_resources=False, auto_reload=False)
    local = os.environ.get("GPUHUNT_CATALOG_DIR")
    wanted = list(providers)
    if local is not None:
        wanted = [name for name in wanted if (Path(local) / f"{name}.csv").is_file()]
        if not wanted:
            raise UsageError(f"GPUHUNT_CATALOG_DIR={local} holds none of {', '.join(f'{n}.csv' for n in providers)}")
    logging.getLogger("gpuhunt").setLevel(logging.CRITICAL)  # it prints tracebacks of errors that are raised below
    try:
        if local is None:
            catalog.load()
        items = catalog.query(provider=wanted, min_gpu_count=1)
    except ValueError as fault:
        raise UsageError(f"gpuhunt: {fault}") from fault
    except Exception as fault:  # its own errors, urllib's, zipfile's
        raise RunError(f"gpuhunt's catalogue cannot be had: {fault}; is the network up?") from fault
    day, where = today or date.today(), "its catalogue"
    if local is not None:  # such files carry no date of their own
        day = date.fromtimestamp(max((Path(local) / f"{name}.csv").stat().st_mtime for name in wanted))
        where = "files of $GPUHUNT_CATALOG_DIR"
    return collect(
        gpuhunt_offers(items), day=day, inferred=local is not None, aliases=aliases, source=f"gpuhunt, {where}"
    )


def gpuhunt_offers(items: Iterable[Any]) -> list[Offer]:
    """gpuhunt's `CatalogItem`s as offers. Clusters of several machines are left out."""
    return [
        Offer(
            where=f"{item.provider} {item.instance_name} in {item.location}",
            name=str(item.gpu_name),
            count=float(item.gpu_count),
            usd_per_hour=None if item.spot else float(item.price),
            spot_usd_per_hour=float(item.price) if item.spot else None,
            provider=_gpuhunt_provider(str(item.provider), str(item.location)),
            region=str(item.location),
            instance=str(item.instance_name),
            memory_gb=item.gpu_memory,
        )
        for item in items
        if item.gpu_name and not any("cluster" in flag for flag in item.flags)
    ]


def _gpuhunt_provider(name: str, location: str) -> str:
    """The provider as the book names it. RunPod locates secure machines by data centre (US-TX-1), community ones by
    country (US)."""
    known = PROVIDERS.get(name, name)
    if name != "runpod":
        return known
    return f"{known} {'Secure' if '-' in location else 'Community'} Cloud"


# --- any file -----------------------------------------------------------------------------------------------


def load_any(path: Path | None, *, known_gpus: Iterable[str] = ()) -> Collected:
    """Loads the shipped book (`path` None), a user's book, or a SkyPilot catalogue, recognized by its first line.

    Raises as `prices.load_prices` and `read_skypilot` do."""
    if path is not None and path.is_file() and is_skypilot(read_text(path, GIVE_BOOK)):
        return read_skypilot(path)
    return Collected(tuple(load_prices(path, known_gpus=known_gpus)), (), 0)
