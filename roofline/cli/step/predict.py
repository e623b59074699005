"""`flopcast predict`: what one training step costs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson, Gpu, Host, ModelOptions, PriceOptions, RunOptions, module_sizes
from flopcast.roofline.cli.shared.output import emit
from flopcast.roofline.cli.shared.price_book import price_of
from flopcast.roofline.cli.step import explain as explaining


def predict(
    context: typer.Context,
    gpu: Gpu,
    *,
    model: ModelOptions,
    run: RunOptions,
    host: Host = None,
    price: PriceOptions,
    explain: Annotated[bool, typer.Option("--explain", help="As `flopcast explain`.")] = False,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="The largest micro-batch that fits, too (traces two: seconds).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """One training step: time, memory, FLOPs, dollars, each with what it rests on."""
    if explain:
        if largest_batch:
            raise UsageError("--largest-batch with --explain: ask for one of the two")
        explaining.explain(context, gpu, model=model, run=run, host=host, price=price, as_json=as_json)
        return
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step.priced_step import PricedStep, forecast
    from flopcast.roofline.stream.library.trace_process import tracing_apart

    sizes = module_sizes(context, model, run)
    config = model.to_config() if model.module is None else {}
    asked = run.to_run()
    with ExitStack() as stack:
        trace = None
        if model.module is None and not largest_batch:  # which needs two more traces, in one process with torch
            likely = asked.traced_on("cpu" if gpu == "cpu" else "cuda")
            # another process imports torch while this one looks the profile up
            trace = stack.enter_context(tracing_apart(config, likely))
        profile = find_profile(gpu)
        priced = price_of(profile, price)
        own: dict[str, Any] = {"host": find_host(host), "price": priced}
        largest: int | None = None
        stack.enter_context(progress("forecasting"))
        if model.module is None:
            result = forecast(config, asked, profile, **own, trace=trace)
        else:
            from flopcast.roofline.stream.library import modules

            modules.check_sizes(model.module, sizes)
            stream = modules.module_stream(model.module, asked, profile.device["type"], sizes=sizes)
            asked = modules.run_of_stream(stream, asked)
            result = PricedStep(stream, asked, profile, **own).forecast()
        if largest_batch:
            from flopcast.roofline.step import largest_batch as step_largest_batch

            if model.module is None:
                largest = step_largest_batch.largest_batch(config, asked, profile)
            else:
                largest = step_largest_batch.largest_module_batch(model.module, asked, profile, sizes)
    profile_cache.keep(profile)
    if as_json:
        emit(result.to_json() if largest is None else {**result.to_json(), "largest_batch": largest})
        return
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.forecast import batch_words, print_forecast

    print_forecast(result, asked)
    if largest is not None:
        say(f"largest micro-batch that fits: {batch_words(largest, asked.seq, result.unit)}")
