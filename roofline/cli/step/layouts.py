"""`flopcast predict --parallel auto --num-gpus N`: ranks all layouts over N GPUs in which the step fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from typer import Context

from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import ONE_GPU
from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import ModelOptions, PriceOptions
from flopcast.roofline.cli.step.asked import asked_step
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.roofline.dollars.layouts import Workload

AUTO = "auto"


def workload(
    typed: Context, gpu: str, model: ModelOptions, run: Run, host: str | None, price: PriceOptions
) -> Workload:
    """Returns what is laid out: the step that the options describe on one GPU, with the sequences of one micro-batch.
    Raises UsageError."""
    from flopcast.roofline.cli.shared.price_book import price_of
    from flopcast.roofline.dollars.layouts import Workload
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile

    asked = asked_step(typed, model, replace(run, parallel=ONE_GPU, nodes=0, link=Run.link))
    sequences = run.batch * run.accumulate
    if asked.module is not None:
        sequences = (asked.module.size("batch") or run.batch if asked.module.takes("batch") else 1) * run.accumulate
    profile = find_profile(gpu)
    laid_out = replace(asked.run, nodes=run.nodes, link=run.link)
    return Workload(
        model=asked.model, run=laid_out, sequences=sequences, profile=profile, host=find_host(host),
        price=price_of(profile, price),
    )  # fmt: skip


def rank_layouts(
    typed: Context,
    gpu: str,
    num_gpus: int | None,
    *,
    model: ModelOptions,
    run: Run,
    host: str | None,
    price: PriceOptions,
    as_json: bool,
) -> None:
    """Prints the layouts over `num_gpus` GPUs, the fastest first, all with `--batch` times `--accumulate` sequences per
    GPU and step."""
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.dollars.layouts import ranking
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.views.terminal.several_gpus import print_ranking

    if num_gpus is None:
        raise UsageError("--parallel auto: over how many GPUs? give --num-gpus, such as --num-gpus 8")
    each = workload(typed, gpu, model, run, host, price)
    with progress("laying out") as shown:
        found = ranking(replace(each, sequences=each.sequences * num_gpus), num_gpus, shown.update)
    profile_cache.keep(each.profile)  # what three processes compute anew in 0.6 s each
    if as_json:
        emit({"gpu": each.profile.gpu, **found.to_json()})
    else:
        print_ranking(found, each)
