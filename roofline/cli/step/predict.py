"""`flopcast predict`: what one training step costs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared import options as shared
from flopcast.roofline.cli.shared.options import module_sizes
from flopcast.roofline.cli.shared.output import emit
from flopcast.roofline.cli.shared.price_options import price_of


def predict(
    context: typer.Context, gpu: shared.Gpu, config: shared.ConfigName = None, module: shared.ModuleName = None,
    width: shared.Width = None, depth: shared.Depth = None, depth_law: shared.DepthLaw = None,
    heads: shared.Heads = None, kv_heads: shared.KvHeads = None, head_dim: shared.HeadDim = None,
    ffn: shared.Ffn = None, vocab: shared.Vocab = None, tied: shared.Tied = None,
    batch: shared.Batch = 4, seq: shared.Seq = 256, accumulate: shared.Accumulate = 1,
    checkpoint: shared.Checkpoint = "none", precision: shared.Precision = "autocast-bf16",
    optimizer: shared.Optimizer = "adamw", mode: shared.Mode = "eager", matmul: shared.Matmul = "torch",
    attention: shared.Attention = "sdpa", fused: shared.Fused = "none", host: shared.Host = None,
    prices: shared.PriceFile = None, price: shared.PriceGiven = None, provider: shared.Provider = None,
    on: shared.PriceDate = None,
    explain: Annotated[bool, typer.Option("--explain", help="As `flopcast explain`.")] = False,
    largest_batch: Annotated[bool, typer.Option(
        "--largest-batch", help="The largest micro-batch that fits, too (traces two: seconds)."
    )] = False,
    as_json: shared.AsJson = False,
) -> None:  # fmt: skip
    """One training step: time, memory, FLOPs, dollars, each with what it rests on."""
    if explain:
        if largest_batch:
            raise UsageError("--largest-batch with --explain: ask for one of the two")
        left_out = ("largest_batch",)
        options = {name: value for name, value in locals().items() if name not in (*left_out, "left_out")}
        from flopcast.roofline.cli.step import explain as step_explain

        step_explain.explain(**options)
        return
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step.forecast import forecast
    from flopcast.roofline.stream.library.trace_process import tracing_apart
    from flopcast.roofline.stream.model.models import model_from
    from flopcast.roofline.stream.model.run import Run, traced_on
    from flopcast.roofline.views.terminal.waiting import waiting

    described = {
        "config": config, "width": width, "depth": depth, "depth_law": depth_law, "heads": heads,
        "kv_heads": kv_heads, "head_dim": head_dim, "ffn": ffn, "vocab": vocab, "tied": tied,
    }  # fmt: skip
    sizes = module_sizes(context, module, fused)
    model = model_from(described) if module is None else {}
    run = Run(batch=batch, seq=seq, accumulate=accumulate, checkpoint=checkpoint, precision=precision,
              optimizer=optimizer, mode=mode, matmul=matmul, attention=attention, fused=fused)  # fmt: skip
    run.check()
    with ExitStack() as stack:
        trace = None
        if module is None and not largest_batch:  # which needs two more traces, in one process with torch
            likely = traced_on(run, "cpu" if gpu == "cpu" else "cuda")
            # another process imports torch while this one looks the profile up
            trace = stack.enter_context(tracing_apart(model, likely))
        profile = find_profile(gpu)
        priced = price_of(profile, prices, price, provider, on)
        own: dict[str, Any] = {"host": find_host(host), "price": priced}
        largest: int | None = None
        stack.enter_context(waiting("forecasting"))
        if module is None:
            result = forecast(model, run, profile, **own, trace=trace)
        else:
            from flopcast.roofline.step.forecast import forecast_stream
            from flopcast.roofline.stream.library import modules

            modules.check_sizes(module, sizes)
            stream = modules.module_stream(module, None, run, profile.device["type"], sizes=sizes)
            run = modules.run_of_stream(stream, run)
            result = forecast_stream(stream, run, profile, **own)
        if largest_batch:
            from flopcast.roofline.step import largest_batch as step_largest_batch

            if module is None:
                largest = step_largest_batch.largest_batch(model, run, profile)
            else:
                largest = step_largest_batch.largest_module_batch(module, run, profile, sizes)
    profile_cache.keep(profile)
    if as_json:
        emit(result.to_json() if largest is None else {**result.to_json(), "largest_batch": largest})
        return
    from flopcast.roofline.views.terminal import console
    from flopcast.roofline.views.terminal import forecast as terminal_forecast

    terminal_forecast.print_forecast(result, run)
    if largest is not None:
        console.say(f"largest micro-batch that fits: {terminal_forecast.batch_words(largest, run.seq, result.unit)}")
