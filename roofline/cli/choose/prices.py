"""`flopcast prices`: shows the price book, and refreshes it from published catalogues."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared.options import AsJson, PriceBook, PriceDay, refuse_unused
from flopcast.roofline.cli.shared.price_book import checked_day, report_refused


def prices(
    gpu: Annotated[str | None, Option("--gpu", help="Show the prices of this GPU alone.")] = None,
    book: PriceBook = None,
    source: Annotated[Path | None, Option("--from", help="Read a vms.csv of SkyPilot's catalogue.")] = None,
    refresh: Annotated[
        str | None,
        Option(help="Read today's prices from a catalogue: gpuhunt (an extra: pip install 'flopcast\\[prices]')."),
    ] = None,
    provider: Annotated[
        str | None,
        Option(
            help="Provider to show. With --from: whose file it is. With --refresh: those to read, separated by commas."
        ),
    ] = None,
    day: Annotated[str | None, Option("--date", help="Day of the file of --from. Default: the file's own.")] = None,
    alias: Annotated[
        list[str] | None,
        Option(help="What an ambiguous name in a catalogue means, as NAME=GPU: A100-80GB=nvidia-a100-80gb-pcie."),
    ] = None,
    on: PriceDay = None,
    out: Annotated[Path | None, Option(help="CSV to write, which --prices reads.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the newest price of each GPU, provider and kind in the price book or in a catalogue, checked row by row."""
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.gpu.catalogue.price_catalogues import (
        GPUHUNT_PROVIDERS,
        load_any,
        read_skypilot,
        refresh_gpuhunt,
    )
    from flopcast.roofline.gpu.catalogue.prices import newest, write_prices
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.prices import print_prices

    if refresh not in (None, "gpuhunt"):
        raise UsageError(f"--refresh {refresh!r}: valid is gpuhunt; --from reads a CSV of SkyPilot's catalogue")
    if sum(chosen is not None for chosen in (book, source, refresh)) > 1:
        raise UsageError("--prices, --from and --refresh each name a source: give one of them")
    if day is not None and source is None:
        raise UsageError("--date says of which day the file of --from is: give --from")
    if source is None and refresh is None:
        refuse_unused("without --from or --refresh: it is of a catalogue's names", {"alias": alias})
    check_writable(out)
    aliases = _aliases(alias)
    if refresh is not None:
        wanted = [name.strip() for name in (provider or "").split(",") if name.strip()]
        found = refresh_gpuhunt(wanted or GPUHUNT_PROVIDERS, aliases=aliases)
    elif source is not None:
        found = read_skypilot(source, provider=provider, day=checked_day("--date", day), aliases=aliases)
    else:
        found = load_any(book)
    report_refused(found)
    until = checked_day("--on", on)
    rows = [p for p in newest(found.prices, on=until) if gpu in (None, p.gpu)]
    if source is None and refresh is None and provider is not None:
        rows = [p for p in rows if p.provider == provider]
    if not rows:
        asked = {"--gpu": gpu, "--provider": provider if source is None and refresh is None else None, "--on": on}
        given = ", ".join(f"{option} {value}" for option, value in asked.items() if value is not None)
        raise UsageError(f"no price for {given or 'any GPU'}; `flopcast prices` without options lists all")
    if out is not None:
        write_prices(rows, out)
        say(f"wrote {out}: {len(rows)} prices")
    if as_json:
        emit({"prices": [price.to_row() for price in rows], "refused": found.refused, "other_rows": found.others})
    else:
        print_prices(rows)


def _aliases(given: list[str] | None) -> dict[str, str]:
    from flopcast.roofline.gpu.catalogue.datasheets import find_spec

    found = {}
    for text in given or []:
        name, equals, gpu = text.rpartition("=")
        if not equals or not name:
            raise UsageError(f"--alias {text!r}: valid is NAME=GPU, as in A100-80GB=nvidia-a100-80gb-pcie")
        found[name.strip()] = find_spec(gpu.strip()).name
    return found
