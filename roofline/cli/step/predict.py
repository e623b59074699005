"""`flopcast predict`: forecasts what one training step costs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.progress import progress
from flopcast.roofline.cli.shared.completion import one_of
from flopcast.roofline.cli.shared.gpus import asked_gpus, check_one, prices_of
from flopcast.roofline.cli.shared.options import (
    AsJson,
    Host,
    ModelOptions,
    NumGpus,
    OneGpu,
    PriceOptions,
    SeveralGpus,
    refuse_unused,
)
from flopcast.roofline.cli.shared.output import emit
from flopcast.roofline.cli.shared.price_book import price_of
from flopcast.roofline.cli.step.asked import asked_step
from flopcast.roofline.cli.step.explain import explain as explain_step
from flopcast.roofline.cli.step.layouts import AUTO, rank_layouts
from flopcast.roofline.stream.model.run import Run


def predict(
    typed: Context,
    gpu: OneGpu = None,
    *,
    gpus: SeveralGpus = None,
    sort: Annotated[
        str,
        Option(
            help="Order of --gpus: asked (as given), time, memory, dollars (the least first) or gpu (by name).",
            autocompletion=one_of(("asked", "time", "memory", "dollars", "gpu")),
        ),
    ] = "asked",
    model: ModelOptions,
    run: Run,
    host: Host = None,
    price: PriceOptions,
    explain: Annotated[bool, Option("--explain", help="Print what `flopcast explain` prints.")] = False,
    largest_batch: Annotated[
        bool,
        Option(
            "--largest-batch",
            help="Find the largest micro-batch that fits, too. Takes seconds, of compiled steps minutes.",
        ),
    ] = False,
    num_gpus: NumGpus = None,
    input: Annotated[
        str | None,
        Option(
            help="Add loading and copying batches to the step: tokens or images (what the step is called with), or the "
            "bytes of a sample. Says what pin_memory and non_blocking buy."
        ),
    ] = None,
    load_ms: Annotated[float, Option(help="Of --input: milliseconds in which one process loads a sample.")] = 0.0,
    workers: Annotated[int, Option(help="Of --input: the DataLoader's workers; 0: the training process loads.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Forecasts one training step: time, memory, FLOPs and dollars, each with what it rests on."""
    if input is None:
        refuse_unused("without --input", {"load_ms": load_ms or None, "workers": workers or None})
    elif gpus is not None or explain or run.parallel == AUTO:
        raise UsageError("--input with --gpus, --explain or --parallel auto: it is of one step on one GPU")
    if run.parallel == AUTO:
        refuse_unused(
            "with --parallel auto: it ranks the layouts of one kind of GPU",
            {"gpus": gpus, "explain": explain, "largest_batch": largest_batch},
        )
        rank_layouts(typed, check_one(gpu), num_gpus, model=model, run=run, host=host, price=price, as_json=as_json)
        return
    refuse_unused("without --parallel auto: a layout says its number of GPUs", {"num_gpus": num_gpus})
    if gpus is not None:
        refuse_unused("with --gpus: it is of one GPU", {"gpu": gpu, "explain": explain})
        _predict_several(typed, gpus, sort, model, run, host, price, largest_batch=largest_batch, as_json=as_json)
        return
    refuse_unused("without --gpus: it orders several", {"sort": None if sort == "asked" else sort})
    gpu = check_one(gpu)
    if explain:
        if largest_batch:
            raise UsageError("--largest-batch with --explain: ask for one of the two")
        explain_step(typed, gpu, model=model, run=run, host=host, price=price, as_json=as_json)
        return
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step.priced_step import PricedStep
    from flopcast.roofline.step.questions import input_pipeline
    from flopcast.roofline.step.questions import largest_batch as search
    from flopcast.roofline.stream.library.trace_process import tracing_apart

    step = asked_step(typed, model, run)
    if gpu == "cpu":
        step.run.traced_on("cpu")  # refuses what does not run there, whether or not it has a profile
    largest: int | None = None
    with ExitStack() as stack:
        trace = None
        if step.config is not None and not largest_batch:  # the search traces twice more, in one process
            # another process imports torch while this one looks up the profile; compiled steps need the eager one too
            likely = replace(step.run, mode="eager").traced_on("cpu" if gpu == "cpu" else "cuda")
            trace = stack.enter_context(tracing_apart(step.config, likely))
        profile = find_profile(gpu)
        priced = price_of(profile, price)
        feeding = find_host(host)
        stack.enter_context(progress("forecasting"))
        with no_garbage_collection():
            stream, asked = step.traced(step.run.device_of(profile.device), trace, profile.device)
            found = PricedStep(stream, asked, profile, feeding, priced)
            result = found.forecast()
            fed = None if input is None else input_pipeline.fed(
                found, input_pipeline.feeding_of(input, found, load_ms * 1e-3, workers)
            )  # fmt: skip
        if largest_batch:
            largest = search.largest_batch(step.model, step.run, profile)
    profile_cache.keep(profile)
    if as_json:
        more = {"largest_batch": largest, "input": None if fed is None else fed.to_json()}
        emit({**result.to_json(), **{name: value for name, value in more.items() if value is not None}})
        return
    from flopcast.roofline.views.terminal.forecast import print_forecast, print_input

    print_forecast(result, asked, largest)
    if fed is not None:
        print_input(fed)


def _predict_several(
    typed: Context,
    gpus: str,
    sort: str,
    model: ModelOptions,
    run: Run,
    host: str | None,
    price: PriceOptions,
    *,
    largest_batch: bool,
    as_json: bool,
) -> None:
    """Forecasts one step on several GPUs: it is traced once for all of a kind."""
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step.forecast import ORDERS, Forecasts
    from flopcast.roofline.step.questions import largest_batch as search
    from flopcast.roofline.step.questions.many_gpus import Step, forecasting

    if sort not in ORDERS:
        raise UsageError(f"--sort is {sort!r}: valid are {', '.join(ORDERS)}")
    step = asked_step(typed, model, run)
    asked = [one.shared_by([step.run]) for one in asked_gpus(None, gpus)]
    price_of = prices_of(asked, price)
    with progress("forecasting") as shown, forecasting(asked, find_host(host), price_of) as forecast_on:
        steps = {device: [Step(*step.traced(device))] for device in {one.device for one in asked}}
        found = {}
        for one, (outcome,) in forecast_on(steps):
            if isinstance(outcome, str):
                raise UsageError(f"{one.gpu}: {outcome}")
            found[one] = outcome
            shown.update(len(found), len(asked))
        ran = steps[asked[0].device][0].run
        largest = None
        if largest_batch:
            largest = {one.gpu: search.largest_batch(step.model, step.run, find_profile(one.name)) for one in asked}
    ordered = Forecasts(found[one] for one in asked).ordered(sort)
    if as_json:
        more = {} if largest is None else {"largest_batch": largest}
        emit([{**one.to_json(), **{name: by[one.gpu] for name, by in more.items()}} for one in ordered])
        return
    from flopcast.roofline.views.terminal.forecast import print_forecasts

    print_forecasts(ordered, ran, largest)
