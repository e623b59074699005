"""`plan`: days and dollars to train a model, and the largest model that a budget trains."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared import options as shared
from flopcast.roofline.cli.shared.price_options import GPUS, gpu_names, price_book

# Far above anything trained (tens of 1e12 tokens); beyond them tables tear and infinities come through.
MOST_TOKENS, MOST_PER_PARAMETER, MOST_USD = 1e18, 1e9, 1e12
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def plan(
    config: shared.ConfigName = None, width: shared.Width = None, depth: shared.Depth = None,
    depth_law: shared.DepthLaw = None,
    tokens: Annotated[str | None, typer.Option(
        help="Tokens to train on, as 10B or 1e10; default: 20 a parameter."
    )] = None,
    budget_usd: Annotated[float | None, typer.Option(
        help="With a model: the tokens it buys; without: the largest model of the ladder that it trains."
    )] = None,
    widths: Annotated[str | None, typer.Option(
        help="The ladder of --budget-usd: comma-separated widths; default: 256 to 4096 by 256."
    )] = None,
    tokens_per_param: Annotated[float | None, typer.Option(
        help="Tokens a parameter, where --tokens is not given; default: 20."
    )] = None,
    gpus: Annotated[str, typer.Option(help="Comma-separated GPUs.")] = GPUS,
    num_gpus: Annotated[int, typer.Option(help="1; several are not modelled yet.")] = 1,
    batch: Annotated[str, typer.Option(help="Sequences a micro-batch, or auto: the largest that fits.")] = "4",
    seq: shared.Seq = 256, accumulate: shared.Accumulate = 1, checkpoint: shared.Checkpoint = "none",
    precision: shared.Precision = "autocast-bf16", optimizer: shared.Optimizer = "adamw", mode: shared.Mode = "eager",
    host: Annotated[str | None, typer.Option(help="One host for all GPUs, as in `cost`.")] = None,
    hosts: Annotated[str, typer.Option(help="own or same, as in `cost`.")] = "own",
    prices: shared.PriceFile = None, price: shared.PriceGiven = None, provider: shared.Provider = None,
    on: shared.PriceDate = None, kind: shared.PriceKind = "on-demand", as_json: shared.AsJson = False,
) -> None:  # fmt: skip
    """Days and dollars to train on each of several GPUs, one device at a time; or the largest model for a budget."""
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.dollars.plan import TOKENS_PER_PARAMETER, check_devices, plans
    from flopcast.roofline.gpu.library.profiles import find_host, find_profiles
    from flopcast.roofline.stream.model.models import model_from
    from flopcast.roofline.stream.model.run import Run
    from flopcast.roofline.views.terminal import console
    from flopcast.roofline.views.terminal.dollars import plan_document, print_plans

    check_devices(num_gpus)
    if tokens is not None and tokens_per_param is not None:
        raise UsageError("--tokens with --tokens-per-param: give one of the two")
    if tokens_per_param is None:
        tokens_per_param = TOKENS_PER_PARAMETER
    if not 0 < tokens_per_param <= MOST_PER_PARAMETER:
        raise UsageError(
            f"--tokens-per-param is {tokens_per_param:g}: valid is a number above 0, at most {MOST_PER_PARAMETER:g}"
        )
    if budget_usd is not None and not 0 < budget_usd <= MOST_USD:
        raise UsageError(f"--budget-usd is {budget_usd:g}: valid is a number above 0, at most {MOST_USD:g}")
    sequences = _batch(batch)
    run = Run(batch=1 if sequences is None else sequences, seq=seq, accumulate=accumulate, checkpoint=checkpoint,
              precision=precision, optimizer=optimizer, mode=mode)  # fmt: skip
    run.check()
    is_ladder = config is None and width is None
    if is_ladder:
        if budget_usd is None:
            raise UsageError("which model? give --config or --width, or --budget-usd for the largest of the ladder")
        if sequences is None or tokens is not None:
            given = "--tokens" if tokens is not None else "--batch auto"
            raise UsageError(f"{given} with --budget-usd needs a model: give --config or --width")
        if depth is not None:
            raise UsageError(f"--depth {depth} of which model? Give --config or --width")
        models = _ladder(widths, depth_law or "printed")
    else:
        if widths is not None:
            raise UsageError("--widths is the ladder of --budget-usd without a model: leave it or the model out")
        model = model_from({"config": config, "width": width, "depth": depth, "depth_law": depth_law})
        wanted = None if tokens is None else token_count(tokens)
    profiles = find_profiles(gpu_names(gpus))
    book = price_book(prices, price, provider, on, gpus=[profile.gpu for profile in profiles], required=True, kind=kind)
    feeding: dict[str, Any] = {"host": find_host(host), "hosts": hosts}
    if is_ladder and budget_usd is not None:
        _budget(run, profiles, book, budget_usd, tokens_per_param, models, feeding, as_json)
        return
    with console.progress("forecasting") as advance:
        found = plans(
            model, run, profiles, book, tokens=wanted, auto_batch=sequences is None, progress=advance, **feeding,
            tokens_per_parameter=tokens_per_param,
        )  # fmt: skip
    if as_json:
        emit(plan_document(found, budget_usd))
    else:
        print_plans(found, budget_usd)


def _budget(
    run: Any, profiles: Any, book: Any, usd: float, tokens_per_param: float, models: Any,
    feeding: dict[str, Any], as_json: bool,
) -> None:  # fmt: skip
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.dollars.curves import cost_curves
    from flopcast.roofline.dollars.plan import largest_models
    from flopcast.roofline.views.terminal import console
    from flopcast.roofline.views.terminal.dollars import largest_document, print_largest

    with console.progress("forecasting the ladder") as advance:
        curves = cost_curves(profiles, models, run, book, progress=advance, **feeding)
    found = largest_models(curves, usd, tokens_per_param)
    if as_json:
        emit(largest_document(found, curves, tokens_per_param))
    else:
        print_largest(found, curves, tokens_per_param, run)


def _ladder(widths: str | None, depth_law: str) -> Any:
    from flopcast.roofline.cli.shared.options import whole_numbers
    from flopcast.roofline.stream.model.models import LADDER_WIDTHS, ladder

    chosen = LADDER_WIDTHS if widths is None else tuple(sorted(set(whole_numbers("--widths", widths))))
    return ladder(chosen, depth_law)


def _batch(text: str) -> int | None:
    """Sequences, None for auto. Raises UsageError."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--batch is {text!r}: valid are an integer of at least 1 and auto") from None


def token_count(text: str) -> float:
    """ "10B" -> 1e10. Raises UsageError."""
    match = re.fullmatch(r"([0-9_.]+(?:[eE][+]?[0-9]+)?)([KMBGT]?)", text.strip().replace(",", ""), re.IGNORECASE)
    try:
        count = float(match[1].replace("_", "")) * _SCALES[match[2].upper()] if match else 0.0
    except ValueError:
        count = 0.0
    if not 1 <= count <= MOST_TOKENS:
        raise UsageError(f"--tokens is {text!r}: valid is a number such as 10B, 300M or 1e10, at most {MOST_TOKENS:g}")
    return count
