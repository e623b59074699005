"""`flopcast explain`: where a step's time goes, and what would help."""

from __future__ import annotations

from typing import Annotated

import typer

from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson, Gpu, Host, ModelOptions, PriceOptions, RunOptions, module_sizes


def explain(
    context: typer.Context,
    gpu: Gpu,
    *,
    model: ModelOptions,
    run: RunOptions,
    host: Host = None,
    price: PriceOptions,
    as_json: AsJson = False,
    what_if: Annotated[
        bool,
        typer.Option("--what-if", help="Trace the alternatives whose op stream is not at hand; takes seconds each."),
    ] = False,
) -> None:
    """Where a step's time goes, what bounds it, how far it is from the speed of light, and what would help."""
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.price_book import price_of
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step import alternatives
    from flopcast.roofline.step.explain import explain_step
    from flopcast.roofline.step.priced_step import PricedStep
    from flopcast.roofline.stream.library.streams import get_stream, is_at_hand
    from flopcast.roofline.views.terminal.explain import print_explanation

    sizes = module_sizes(context, model, run)
    config = model.to_config() if model.module is None else None
    asked = run.to_run()
    profile = find_profile(gpu)
    priced = price_of(profile, price)
    feeding = find_host(host)
    with progress("forecasting"):
        if model.module is not None:
            from flopcast.roofline.stream.library import modules

            modules.check_sizes(model.module, sizes)
            stream = modules.module_stream(model.module, asked, profile.device["type"], sizes=sizes)
            asked, trace = modules.run_of_stream(stream, asked), False
        else:
            assert config is not None
            traced = asked.traced_on(profile.device["type"])
            # where the step itself has to be traced, torch is there for the alternatives too
            trace = what_if or not is_at_hand(config, traced)
            stream = get_stream(config, traced)
        step = PricedStep(stream, asked, profile, feeding, priced)
        found = explain_step(step)
        would_help = alternatives.advise(step, config=config, trace=trace)
    profile_cache.keep(profile)
    if as_json:
        emit({**found.to_json(), "alternatives": [a.to_json() for a in would_help]})
    else:
        print_explanation(found, would_help, asked)
