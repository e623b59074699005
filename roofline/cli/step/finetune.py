"""`flopcast finetune`: sets ways to fine-tune a model side by side."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.groups import Only
from flopcast.roofline.cli.shared.options import AsJson, Gpu, Host, ModelOptions, PriceOptions
from flopcast.roofline.stream.model.run import Run


def finetune(
    gpu: Gpu,
    *,
    ways: Annotated[
        str, Option(help="Ways, separated by commas: full, last=N (the last N layers), lora, qlora.")
    ] = "full,lora,qlora",
    model: Annotated[ModelOptions, Only("config", "depth")],
    run: Annotated[
        Run,
        Only("batch", "seq", "accumulate", "checkpoint", "precision", "optimizer", "clip", "lora_rank", "lora_targets",
             "base_dtype", "mode", "parallel", "nodes", "link"),
    ],
    host: Host = None,
    price: PriceOptions,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Sets ways to fine-tune a model side by side: time, memory, dollars, what each saves, which GPUs it fits on."""
    from dataclasses import replace

    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.price_book import price_of
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step.questions.fine_tuning import compare_ways

    named = [name.strip() for name in ways.split(",") if name.strip()]
    if not named:
        raise UsageError(f"--ways is {ways!r}: valid are full, last=N, lora and qlora, with commas between")
    config = model.to_config()
    replace(run, finetune="lora").check()
    profile = find_profile(gpu)
    priced, feeding = price_of(profile, price), find_host(host)
    with progress("forecasting"):
        found = compare_ways(config, run, named, profile, host=feeding, price=priced)
    profile_cache.keep(profile)
    if all(way.forecast is None for way in found):
        raise UsageError(found[0].reason)
    if as_json:
        first = next(way.forecast for way in found if way.forecast is not None)
        emit([way.to_json(first) for way in found])
        return
    from flopcast.roofline.views.terminal.side_by_side import print_ways

    print_ways(found, run)
