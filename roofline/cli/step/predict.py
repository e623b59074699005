"""`flopcast predict`: forecasts what one training step costs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson, Gpu, Host, ModelOptions, PriceOptions, RunOptions
from flopcast.roofline.cli.shared.output import emit
from flopcast.roofline.cli.shared.price_book import price_of
from flopcast.roofline.cli.step.asked import asked_step
from flopcast.roofline.cli.step.explain import explain as explain_step


def predict(
    context: Context,
    gpu: Gpu,
    *,
    model: ModelOptions,
    run: RunOptions,
    host: Host = None,
    price: PriceOptions,
    explain: Annotated[bool, Option("--explain", help="Print what `flopcast explain` prints.")] = False,
    largest_batch: Annotated[
        bool, Option("--largest-batch", help="Find the largest micro-batch that fits, too. Takes seconds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forecasts one training step: time, memory, FLOPs and dollars, each with what it rests on."""
    if explain:
        if largest_batch:
            raise UsageError("--largest-batch with --explain: ask for one of the two")
        explain_step(context, gpu, model=model, run=run, host=host, price=price, as_json=as_json)
        return
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step.priced_step import PricedStep
    from flopcast.roofline.stream.library.trace_process import tracing_apart

    step = asked_step(context, model, run)
    largest: int | None = None
    with ExitStack() as stack:
        trace = None
        if step.config is not None and not largest_batch:  # the search traces twice more, in one process
            likely = step.run.traced_on("cpu" if gpu == "cpu" else "cuda")
            # another process imports torch while this one looks up the profile
            trace = stack.enter_context(tracing_apart(step.config, likely))
        profile = find_profile(gpu)
        priced = price_of(profile, price)
        feeding = find_host(host)
        stack.enter_context(progress("forecasting"))
        with no_garbage_collection():
            stream, asked = step.traced(profile.device["type"], trace)
            result = PricedStep(stream, asked, profile, feeding, priced).forecast()
        if largest_batch:
            from flopcast.roofline.step import largest_batch as search

            if step.config is not None:
                largest = search.largest_batch(step.config, asked, profile)
            else:
                largest = search.largest_module_batch(step.module, asked, profile, step.sizes)
    profile_cache.keep(profile)
    if as_json:
        emit(result.to_json() if largest is None else {**result.to_json(), "largest_batch": largest})
        return
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.forecast import batch_words, print_forecast

    print_forecast(result, asked)
    if largest is not None:
        say(f"largest micro-batch that fits: {batch_words(largest, asked.seq, result.unit)}")
