"""`flopcast plan`: days and dollars to train a model, and the largest model that a budget trains."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.groups import Only
from flopcast.roofline.cli.shared.options import (
    ALL_GPUS,
    AsJson,
    Gpus,
    HostsOptions,
    ModelOptions,
    PriceKind,
    PriceOptions,
    ladder_of,
    refuse_unused,
)
from flopcast.roofline.cli.shared.price_book import gpu_names, price_book
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.roofline.stream.library.modules import Module
    from flopcast.roofline.stream.model.models import Config

# Far above anything trained (tens of 1e12 tokens); larger values break the tables' columns and give infinities.
MOST_TOKENS, MOST_PER_PARAMETER, MOST_USD = 1e18, 1e9, 1e12
AUTO = "auto"
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def plan(
    *,
    model: Annotated[ModelOptions, Only("config", "module", "width", "depth", "depth_law")],
    tokens: Annotated[
        str | None,
        Option(
            "--tokens",
            "--samples",
            help="Tokens to train on, such as 10B or 1e10; of a module without token ids, samples. Default: 20 tokens "
            "per parameter.",
        ),
    ] = None,
    budget_usd: Annotated[
        float | None,
        Option(help="With a model: find the tokens it buys. Without: the largest model of the ladder that it trains."),
    ] = None,
    widths: Annotated[
        str | None, Option(help="Ladder of --budget-usd: widths, separated by commas. Default: 256 to 4096 by 256.")
    ] = None,
    tokens_per_param: Annotated[
        float | None, Option(help="Tokens per parameter, where --tokens is not given. Default: 20.")
    ] = None,
    gpus: Gpus = ALL_GPUS,
    num_gpus: Annotated[
        int | None,
        Option(
            help="GPUs of a kind that train together, as --parallel lays them out; by default the faster of ddp and "
            "fsdp, each with its batch."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        Option(help="Sequences per micro-batch. Default: auto, the largest that fits on each GPU; 4 for the ladder."),
    ] = None,
    seq: Annotated[
        int | None,
        Option(help="Tokens per sequence. Default: the model's own context, 4096 at most; 256 for the ladder."),
    ] = None,
    run: Annotated[
        Run,
        Only(
            "accumulate",
            "checkpoint",
            "precision",
            "optimizer",
            "clip",
            "mode",
            "finetune",
            "lora_rank",
            "lora_targets",
            "base_dtype",
            "parallel",
            "nodes",
            "link",
        ),
    ],
    feeding: HostsOptions,
    price: PriceOptions,
    kind: PriceKind = "on-demand",
    as_json: AsJson = False,
) -> None:
    """Plans training on each of several GPUs, one at a time: days and dollars, or the largest model for a budget."""
    from flopcast.roofline.cli.choose import documents
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.dollars.curves import cost_curves
    from flopcast.roofline.dollars.plan import TOKENS_PER_PARAMETER, largest_models, plans, pretraining_seq
    from flopcast.roofline.gpu.library.profiles import find_host, find_profiles
    from flopcast.roofline.stream.library.modules import Module
    from flopcast.roofline.stream.model.models import context_of
    from flopcast.roofline.views.terminal.plan import print_largest, print_plans

    layouts = _layouts(num_gpus, run)
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
    config: Config | Module | None = None
    if model.module is not None:
        config = _module_of(model, widths, seq)
    elif model.config is not None or model.width is not None:
        config = model.to_config()
    if config is None:
        if budget_usd is None:
            raise UsageError(
                "which model? give --config, --module or --width, or --budget-usd for the largest of the ladder"
            )
        if batch == AUTO or tokens is not None:
            given = "--tokens" if tokens is not None else "--batch auto"
            raise UsageError(f"{given} with --budget-usd needs a model: give --config or --width")
        if model.depth is not None:
            raise UsageError(f"--depth {model.depth} of which model? Give --config or --width")
        sequences, length = _batch(batch or str(run.batch)), run.seq
    else:
        if widths is not None:
            raise UsageError("--widths is the ladder of --budget-usd without a model: leave it or the model out")
        if isinstance(config, Module):
            sequences, length = _batch(batch or (AUTO if config.takes("batch") else "1")), run.seq
            config = config if batch in (None, AUTO) or sequences is None else config.resized(batch=sequences)
        else:
            sequences, length = _batch(batch or AUTO), pretraining_seq(config)
    if layouts:
        run = replace(run, parallel=layouts[0])
    asked = replace(run, batch=1 if sequences is None else sequences, seq=length if seq is None else seq).checked()
    models = ladder_of(widths, model.depth_law or "printed") if config is None else []
    wanted = None if tokens is None else token_count(tokens)
    profiles = find_profiles(gpu_names(gpus))
    book = price_book(price, [profile.gpu for profile in profiles], ranked=True, kind=kind)
    host = find_host(feeding.host)
    if config is None:
        assert budget_usd is not None
        with progress("forecasting the ladder") as shown:
            curves = cost_curves(profiles, models, asked, book, progress=shown.update, host=host, hosts=feeding.hosts)
        largest = largest_models(curves, budget_usd, tokens_per_param)
        if as_json:
            emit(documents.largest_document(largest, curves, tokens_per_param))
        else:
            print_largest(largest, curves, tokens_per_param, asked)
        return
    with progress("forecasting") as shown:
        found = plans(
            config, asked, profiles, book, tokens=wanted, auto_batch=sequences is None, progress=shown.update,
            host=host, hosts=feeding.hosts, tokens_per_parameter=tokens_per_param, layouts=layouts,
        )  # fmt: skip
    if as_json:
        emit(documents.plan_document(found, budget_usd))
    else:
        context = context_of(config) if seq is None and not isinstance(config, Module) else None
        print_plans(found, budget_usd, context=context)


def _layouts(num_gpus: int | None, run: Run) -> list[str]:
    """The layouts of --num-gpus, of which the fastest is taken; none for one GPU and where --parallel names one. Raises
    UsageError."""
    from flopcast.roofline.dollars.layouts import AUTO, check_gpus, gpus_of_a_host
    from flopcast.roofline.dollars.scaling import layouts_of

    if num_gpus is None:
        return []
    check_gpus(num_gpus, run.nodes)
    if run.is_parallel:
        if (world := run.layout.world) != num_gpus:
            raise UsageError(
                f"--num-gpus {num_gpus} with --parallel {run.parallel}, which is {world}: give one of the two"
            )
        return []
    return [] if num_gpus == 1 else list(layouts_of(AUTO, num_gpus, gpus_of_a_host(num_gpus, run.nodes)))


def _module_of(model: ModelOptions, widths: str | None, seq: int | None) -> Module:
    """Returns the module of --module. Raises UsageError where another model is given too."""
    from flopcast.roofline.stream.library.modules import Module

    refuse_unused(
        "with --module: the factory makes the model",
        {"config": model.config, "width": model.width, "depth": model.depth, "depth_law": model.depth_law,
         "widths": widths},
    )  # fmt: skip
    module = Module(model.module)
    return module if seq is None else module.resized(seq=seq)


def _batch(text: str) -> int | None:
    """Parses a number of sequences; None for auto. Raises UsageError."""
    if text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--batch is {text!r}: valid are an integer of at least 1 and auto") from None


def token_count(text: str) -> float:
    """Parses a number of tokens: "10B" -> 1e10. Raises UsageError."""
    match = re.fullmatch(r"([0-9_.]+(?:[eE][+]?[0-9]+)?)([KMBGT]?)", text.strip().replace(",", ""), re.IGNORECASE)
    try:
        count = float(match[1].replace("_", "")) * _SCALES[match[2].upper()] if match else 0.0
    except ValueError:
        count = 0.0
    if not 1 <= count <= MOST_TOKENS:
        raise UsageError(f"--tokens is {text!r}: valid is a number such as 10B, 300M or 1e10, at most {MOST_TOKENS:g}")
    return count
