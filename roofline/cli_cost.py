"""The commands about dollars: `cost` (FLOPs per dollar of several GPUs) and `prices` (the price book, and catalogues
that others publish); and the options of prices that every command with a price has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopcast.errors import UsageError
from flopcast.roofline.cli_options import (
    AsJson,
    PriceDate,
    PriceFile,
    PriceGiven,
    PriceKind,
    Provider,
    refuse_unused,
)

if TYPE_CHECKING:
    from flopcast.roofline.price_sources import Collected
    from flopcast.roofline.prices import Price
    from flopcast.roofline.profile import Profile

GPUS = "nvidia-l4,nvidia-a100-80gb-pcie,nvidia-h100-sxm,nvidia-h200"


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command()(cost)
    app.command()(prices)


def cost(
    gpus: Annotated[str, typer.Option(help="Comma-separated GPUs.")] = GPUS,
    depth_law: Annotated[str, typer.Option(help="Layers of each width: printed, ln or qwen3.")] = "printed",
    widths: Annotated[str | None, typer.Option(help="Comma-separated widths; default: 256 to 4096 by 256.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences a micro-batch.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 256,
    optimizer: Annotated[str, typer.Option(help="adamw or adamw-fused.")] = "adamw",
    mode: Annotated[str, typer.Option(help="eager; compile is not modelled yet.")] = "eager",
    host: Annotated[str | None, typer.Option(
        help="One host for all GPUs: one of `flopcast gpus --hosts`, a profile's, `none`."
    )] = None,
    hosts: Annotated[str, typer.Option(
        help="own: each GPU in a machine of its own; same: in one machine, whose pace cancels in comparisons."
    )] = "own",
    what_if: Annotated[bool, typer.Option(
        "--what-if", help="Larger batches too, 4 and 16 times (traces what is not at hand: seconds each)."
    )] = False,
    prices: PriceFile = None, price: PriceGiven = None, provider: Provider = None, on: PriceDate = None,
    kind: PriceKind = "on-demand",
    out: Annotated[Path | None, typer.Option(help="Folder for the tables (CSV) and the figure.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """FLOPs per dollar against model size, for several GPUs: curves, crossovers, break-even prices."""
    from dataclasses import replace

    from flopcast.roofline import tables, tables_cost
    from flopcast.roofline.cli import emit, whole_numbers
    from flopcast.roofline.curves import SAME, cost_curves, what_if_rows, write_cost
    from flopcast.roofline.forecast import Run
    from flopcast.roofline.lookup import find_host, find_profiles
    from flopcast.roofline.models import LADDER_WIDTHS, ladder
    from flopcast.roofline.rebatch import stream_of
    from flopcast.roofline.text_files import check_writable

    if mode == "compile":
        raise UsageError(
            "mode 'compile' is not modelled yet: use eager, whose table of other hosts also gives the bound with no "
            "host at all (what CUDA graphs of these kernels would reach; fused kernels may go beyond it)"
        )
    chosen = LADDER_WIDTHS if widths is None else tuple(sorted(set(whole_numbers("--widths", widths))))
    models = ladder(chosen, depth_law)
    profiles = find_profiles(gpu_names(gpus))
    book = price_book(
        prices, price, provider, on, gpus=[profile.gpu for profile in profiles], required=True, kind=kind
    )
    run = Run(batch=batch, seq=seq, optimizer=optimizer, mode=mode)
    run.check()
    check_writable(out, is_folder=True)
    feeding = find_host(host)
    with tables.progress("forecasting the ladder") as advance:
        curves = cost_curves(
            profiles, models, run, book, host=feeding, hosts=hosts, what_if=True, progress=advance
        )
        larger = {}
        for factor in (4, 16) if what_if else ():
            larger[factor] = cost_curves(
                profiles, models, replace(run, batch=batch * factor), book, host=feeding, hosts=hosts,
                streams=stream_of, progress=advance,
            )  # fmt: skip
    scenarios = what_if_rows(curves, larger, batch)
    if out is not None:
        for path in write_cost(curves, out, scenarios=scenarios):
            tables.say(f"wrote {path}")
    if as_json:
        emit(tables_cost.document(curves, models, run, hosts=hosts, host=host, scenarios=scenarios))
    else:
        tables_cost.print_cost(curves, run, scenarios, one_host=host is not None or hosts == SAME)


def prices(
    gpu: Annotated[str | None, typer.Option("--gpu", help="This GPU's prices alone.")] = None,
    book: PriceFile = None,
    source: Annotated[Path | None, typer.Option("--from", help="A vms.csv of SkyPilot's catalogue.")] = None,
    refresh: Annotated[str | None, typer.Option(
        help="gpuhunt: today's prices from its catalogue (an extra: pip install 'flopcast\\[prices]')."
    )] = None,
    provider: Annotated[str | None, typer.Option(
        help="Of the book: this provider's prices; with --from: whose file it is; with --refresh: comma-separated."
    )] = None,
    day: Annotated[str | None, typer.Option(
        "--date", help="Day of the file of --from; default: the file's own."
    )] = None,
    alias: Annotated[list[str] | None, typer.Option(
        help="NAME=GPU: what an ambiguous name in a catalogue means, e.g. A100-80GB=nvidia-a100-80gb-pcie."
    )] = None,
    on: PriceDate = None,
    out: Annotated[Path | None, typer.Option(help="CSV to write, for --prices.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """The price book: newest price of each GPU, provider and kind; or a catalogue's, checked row by row."""
    from flopcast.roofline import tables, tables_cost
    from flopcast.roofline.cli import emit
    from flopcast.roofline.price_sources import GPUHUNT_PROVIDERS, load_any, read_skypilot, refresh_gpuhunt
    from flopcast.roofline.prices import newest, write_prices
    from flopcast.roofline.text_files import check_writable

    if refresh not in (None, "gpuhunt"):
        raise UsageError(
            f"--refresh {refresh!r}: valid is gpuhunt; --from reads a CSV of SkyPilot's catalogue"
        )
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
        found = read_skypilot(source, provider=provider, day=_day("--date", day), aliases=aliases)
    else:
        found = load_any(book)
    _tell(found)
    until = _day("--on", on)
    rows = [p for p in newest(found.prices, on=until) if gpu in (None, p.gpu)]
    if source is None and refresh is None and provider is not None:
        rows = [p for p in rows if p.provider == provider]
    if not rows:
        asked = {
            "--gpu": gpu,
            "--provider": provider if source is None and refresh is None else None,
            "--on": on,
        }
        given = ", ".join(f"{option} {value}" for option, value in asked.items() if value is not None)
        raise UsageError(f"no price for {given or 'any GPU'}; `flopcast prices` without options lists all")
    if out is not None:
        write_prices(rows, out)
        tables.say(f"wrote {out}: {len(rows)} prices")
    if as_json:
        emit(
            {"prices": [vars(price) for price in rows], "refused": found.refused, "other_rows": found.others}
        )
    else:
        tables_cost.print_prices(rows)


def _aliases(given: list[str] | None) -> dict[str, str]:
    from flopcast.roofline.gpus import find_spec

    found = {}
    for text in given or []:
        name, equals, gpu = text.rpartition("=")
        if not equals or not name:
            raise UsageError(f"--alias {text!r}: valid is NAME=GPU, as in A100-80GB=nvidia-a100-80gb-pcie")
        found[name.strip()] = find_spec(gpu.strip()).name
    return found


def _tell(found: Collected) -> None:
    if not found.refused:
        return
    from flopcast.roofline import tables

    for text in found.refused[:8]:
        tables.say(f"refused {text}")
    if len(found.refused) > 8:
        tables.say(f"refused {len(found.refused) - 8} more kinds of rows")


def _day(option: str, text: str | None) -> date | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{option} is {text!r}: valid is a day as YYYY-MM-DD") from None


def gpu_names(text: str) -> list[str]:
    """Comma-separated GPUs, each once. Raises UsageError where there is none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError("--gpus names no GPU; `flopcast gpus` lists them")
    return names


def price_book(
    path: Path | None,
    given: list[str] | None,
    provider: Sequence[str] | None,
    on: str | None,
    *,
    gpus: Sequence[str],
    required: bool = False,
    kind: str = "on-demand",
) -> Mapping[str, Price]:
    """GPU -> the price to use: given on the command line, else the provider's newest; of `gpus` alone.

    `provider`: one for all, or "GPU=PROVIDER" for one GPU, repeated. A GPU of a profile file need not be known by name.
    What a catalogue's rows were refused for is told on stderr. Raises UsageError, if `required` also for a GPU of no
    price.
    """
    from flopcast.roofline.lookup import names
    from flopcast.roofline.price_sources import load_any
    from flopcast.roofline.prices import latest, parse_override, require, with_overrides

    day = _day("--on", on)
    known = [*names(), *gpus]
    overrides = [parse_override(text, known_gpus=known) for text in given or []]
    for text, override in zip(given or [], overrides, strict=True):
        if override.gpu not in gpus:
            raise UsageError(
                f"--price {text!r}: {override.gpu} is none of the GPUs asked for ({', '.join(gpus)})"
            )
    collected = load_any(path, known_gpus=known)
    _tell(collected)
    book = with_overrides(collected.prices, overrides)
    asked = _providers(provider, gpus)
    if required:
        return {gpu: require(book, gpu, asked.get(gpu), kind, on=day) for gpu in gpus}
    found = {gpu: latest(book, gpu, asked.get(gpu), kind, on=day) for gpu in gpus}
    return {gpu: price for gpu, price in found.items() if price is not None}


def price_of(
    profile: Profile,
    path: Path | None,
    given: list[str] | None,
    provider: Sequence[str] | None,
    on: str | None,
) -> Price | None:
    """The price of one GPU, as `price_book` finds it; where one was asked for and there is none, stderr is told."""
    found = price_book(path, given, provider, on, gpus=[profile.gpu]).get(profile.gpu)
    if found is None and (on is not None or provider or path is not None):
        from flopcast.roofline import tables  # and rich with it, 25 ms, where there is something to say

        tables.say(f"no price of {profile.gpu} for what was asked: `flopcast prices` lists those known")
    return found


def _providers(given: Sequence[str] | None, gpus: Sequence[str]) -> dict[str, str]:
    """GPU -> the provider asked for. Raises UsageError for a GPU that is not among `gpus`."""
    found: dict[str, str] = {}
    for text in sorted(
        given or [], key=lambda text: "=" in text
    ):  # one for all first, so that a GPU's own wins
        gpu, equals, name = (part.strip() for part in text.partition("="))
        if not equals:
            found |= dict.fromkeys(gpus, gpu)
        elif gpu not in gpus:
            raise UsageError(
                f"--provider {text!r}: {gpu!r} is none of the GPUs asked for ({', '.join(gpus)})"
            )
        else:
            found[gpu] = name
    return found
