"""The commands that say why: roofline (what a part reaches) and explain (where a step's time goes)."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from flopcast.roofline.cli.step.predict import predict

PREDICT_ALONE = ("explain", "largest_batch")  # options of `predict` that `explain` does not take


def _explain_options(
    *,
    what_if: Annotated[
        bool,
        typer.Option("--what-if", help="Trace the alternatives whose op stream is not at hand; takes seconds each."),
    ] = False,
) -> None: ...


def explain(**options: Any) -> None:
    """Where a step's time goes, what bounds it, how far it is from the speed of light, and what would help."""
    from flopcast.roofline.cli.shared.options import module_sizes
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.price_options import price_of
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step import alternatives
    from flopcast.roofline.step.explain import explain_stream
    from flopcast.roofline.stream.library.streams import get_stream, is_at_hand
    from flopcast.roofline.stream.model.models import model_from
    from flopcast.roofline.stream.model.run import run_from
    from flopcast.roofline.views.terminal import explain as terminal_explain
    from flopcast.roofline.views.terminal.waiting import waiting

    module = options.get("module")
    sizes = module_sizes(options["context"], module, options["fused"])
    model = model_from(options) if module is None else None
    run = run_from(options)
    run.check()
    profile = find_profile(options["gpu"])
    priced = price_of(profile, *(options.get(name) for name in ("prices", "price", "provider", "on")))
    host = find_host(options.get("host"))
    with waiting("forecasting"):
        if model is None:
            from flopcast.roofline.stream.library import modules

            modules.check_sizes(str(module), sizes)
            stream = modules.module_stream(module, None, run, profile.device["type"], sizes=sizes)
            run, trace = modules.run_of_stream(stream, run), False
        else:
            traced = alternatives.traced_of(run, profile)
            # where the step itself has to be traced, torch is there for the alternatives too
            trace = options.get("what_if", False) or not is_at_hand(model, traced)
            stream = get_stream(model, traced)
        found = explain_stream(stream, run, profile, host=host, price=priced)
        would_help = alternatives.advise(stream, run, profile, found.forecast, config=model, host=host, trace=trace)
    profile_cache.keep(profile)
    if options["as_json"]:
        emit({**found.to_json(), "alternatives": [a.to_json() for a in would_help]})
    else:
        terminal_explain.print_explanation(found, would_help, run)


def _with_options_of_predict() -> None:
    """`explain` takes what `predict` takes, and its own."""
    wanted = inspect.signature(predict, eval_str=True).parameters
    own = inspect.signature(_explain_options, eval_str=True).parameters
    options = [p.replace(kind=p.KEYWORD_ONLY) for name, p in wanted.items() if name not in PREDICT_ALONE]
    explain.__signature__ = inspect.Signature([*options, *own.values()])  # type: ignore[attr-defined]


_with_options_of_predict()
