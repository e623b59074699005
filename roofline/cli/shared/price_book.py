"""Turns the options about prices into a price book and the price of one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING

from flopcast.errors import UsageError

if TYPE_CHECKING:
    from flopcast.roofline.cli.shared.options import PriceOptions
    from flopcast.roofline.gpu.catalogue.price_catalogues import Collected
    from flopcast.roofline.gpu.catalogue.prices import Price
    from flopcast.roofline.gpu.profile.profile import Profile


def report_refused(found: Collected) -> None:
    """Prints to stderr which rows of a catalogue were refused, and why."""
    if not found.refused:
        return
    from flopcast.roofline.views.terminal import console

    for text in found.refused[:8]:
        console.say(f"refused {text}")
    if len(found.refused) > 8:
        console.say(f"refused {len(found.refused) - 8} more kinds of rows")


def checked_day(option: str, text: str | None) -> date | None:
    """Parses a day such as "2026-11-15"; None for None. Raises UsageError."""
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{option} is {text!r}: valid is a day as YYYY-MM-DD") from None


def gpu_names(text: str) -> list[str]:
    """Parses comma-separated names of GPUs, `all` for every known one; each is returned once, as it is known.

    Raises UsageError where there is none, and for one that is unknown or ambiguous.
    """
    from flopcast.roofline.gpu.library.profiles import name_meant, names

    given = [name.strip() for name in text.split(",") if name.strip()]
    found = [known for name in given for known in (names() if name == "all" else [name_meant(name)])]
    if not found:
        raise UsageError("--gpus names no GPU; `flopcast gpus` lists them")
    return list(dict.fromkeys(found))


def price_book(
    options: PriceOptions, gpus: Sequence[str], *, ranked: bool = False, kind: str = "on-demand"
) -> Mapping[str, Price]:
    """Maps each of `gpus` that has one to the price to use: the one given on the command line, else the provider's
    newest.

    A GPU of a profile file need not be known by name. Refused rows of a catalogue are named on stderr, with `ranked`
    also the GPUs whose price cannot decide a ranking, and what others offer. Raises UsageError.
    """
    from flopcast.roofline.gpu.catalogue.price_catalogues import load_any
    from flopcast.roofline.gpu.catalogue.prices import (
        DEFAULT_PROVIDER,
        advice,
        latest,
        parse_override,
        unranked,
        with_overrides,
    )
    from flopcast.roofline.gpu.library.profiles import names

    day = checked_day("--on", options.on)
    known = [*names(), *gpus]
    given = options.price or []
    overrides = [parse_override(text, known_gpus=known) for text in given]
    for text, override in zip(given, overrides, strict=True):
        if override.gpu not in gpus:
            raise UsageError(f"--price {text!r}: {override.gpu} is none of the GPUs asked for ({', '.join(gpus)})")
    collected = load_any(options.prices, known_gpus=known)
    report_refused(collected)
    book = with_overrides(collected.prices, overrides)
    asked = _providers(options.provider, gpus)
    found = {gpu: latest(book, gpu, asked.get(gpu), kind, on=day) for gpu in gpus}
    for gpu, price in found.items():
        if ranked and unranked(price):
            from flopcast.roofline.views.terminal.console import say

            say(advice(book, gpu, price, f"{kind} price from {asked.get(gpu) or DEFAULT_PROVIDER}", day))
    return {gpu: price for gpu, price in found.items() if price is not None}


def price_of(profile: Profile, options: PriceOptions) -> Price | None:
    """Returns the price of one GPU, as `price_book` finds it. If one was asked for but not found, stderr says so."""
    found = price_book(options, [profile.gpu])
    tell_missing([profile.gpu], found, options)
    return found.get(profile.gpu)


def tell_missing(gpus: Iterable[str], found: Mapping[str, Price], options: PriceOptions) -> None:
    """Says on stderr of which GPUs a price was asked for and not found."""
    missing = [gpu for gpu in gpus if gpu not in found]
    if missing and (options.on is not None or options.provider or options.prices is not None):
        # importing rich takes 25 ms: only where there is a message
        from flopcast.roofline.views.terminal import console

        console.say(f"no price of {', '.join(missing)} for what was asked: `flopcast prices` lists those known")


def _providers(given: Sequence[str] | None, gpus: Sequence[str]) -> dict[str, str]:
    """Maps each GPU to the provider asked for. Raises UsageError for a GPU that is not among `gpus`."""
    from flopcast.roofline.gpu.catalogue.datasheets import gpu_meant

    found: dict[str, str] = {}
    for text in sorted(given or [], key=lambda text: "=" in text):  # those for all GPUs first: a GPU's own overrides it
        gpu, equals, name = (part.strip() for part in text.partition("="))
        if not equals:
            found |= dict.fromkeys(gpus, gpu)
            continue
        try:
            found[gpu_meant(gpu, gpus)] = name
        except UsageError:
            raise UsageError(
                f"--provider {text!r}: {gpu!r} is none of the GPUs asked for ({', '.join(gpus)})"
            ) from None
    return found
