"""`flopcast explain`: says where a step's time goes, and what would help."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson, Gpu, Host, ModelOptions, PriceOptions, Theme, refuse_unused
from flopcast.roofline.cli.step.asked import asked_step, stream_of_config
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.roofline.step.questions.side_by_side import Side
    from flopcast.roofline.stream.ops.op_stream import Stream


def explain(
    typed: Context,
    gpu: Gpu,
    *,
    model: ModelOptions,
    run: Run,
    host: Host = None,
    price: PriceOptions,
    out: Annotated[
        Path | None,
        Option(help="Figure of a call of inference: its roofline over batches. FILE.png or FILE.svg. Takes seconds."),
    ] = None,
    theme: Theme = None,
    as_json: AsJson = False,
    what_if: Annotated[
        bool, Option("--what-if", help="Trace the alternatives whose op stream is not at hand. Takes seconds each.")
    ] = False,
    precisions: Annotated[
        bool, Option("--precisions", help="Set the precisions side by side. Traces those that are not at hand.")
    ] = False,
) -> None:
    """Says where a step's time goes, what bounds it, how far it is from the speed of light, and what would help."""
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.price_book import price_of
    from flopcast.roofline.gpu.library import profile_cache
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.step.priced_step import PricedStep
    from flopcast.roofline.step.questions import alternatives, modes
    from flopcast.roofline.step.questions.call_roofline import call_roofline
    from flopcast.roofline.step.questions.experts import experts_of
    from flopcast.roofline.step.questions.explain import explain_step
    from flopcast.roofline.step.questions.precisions import precisions_of
    from flopcast.roofline.stream.library.streams import get_stream, is_at_hand
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.explain import print_explanation

    asked = asked_step(typed, model, run)
    if out is None:
        refuse_unused("without --out: it says how the figure is drawn", {"theme": theme})
    elif asked.run.phase == "train" or asked.config is None:
        raise UsageError("--out draws the roofline of a config's call of inference: give --phase prefill or decode")
    else:
        from flopcast.roofline.base.csv_files import check_writable
        from flopcast.roofline.views.figures.file import check_figure

        check_figure(out, theme or "light")
        check_writable(out)
    profile = find_profile(gpu)
    priced = price_of(profile, price)
    feeding = find_host(host)
    device = asked.run.device_of(profile.device)
    with progress("forecasting"):
        # where the step itself has to be traced, torch is loaded for the alternatives too
        trace = asked.config is not None and (what_if or not is_at_hand(asked.config, asked.run.traced_on(device)))
        stream, ran = asked.traced(device, gpu=profile.device)
        step = PricedStep(stream, ran, profile, feeding, priced)
        found = explain_step(step)
        would_help = alternatives.advise(step, config=asked.config, trace=trace)
        in_precisions: tuple[Side, ...] = ()
        if precisions:
            in_precisions = precisions_of(step, partial(asked.stream_of, device=profile.device, trace=True))
        in_modes = None
        if not ran.is_parallel:  # which are eager
            in_modes = modes.modes_of(step, lambda run: asked.stream_of(run, profile.device, trace=what_if))
        experts = experts_of(step, asked.config, partial(stream_of_config, device=profile.device, trace=trace))
        calls = None
        if asked.config is not None and ran.phase != "train":
            # compiled ones of other batches only where they are at hand: each takes a minute
            trace_calls = ran.mode == "eager" and (what_if or out is not None)

            def stream_of(run: Run) -> Stream | None:
                traced = run.traced_on(device)
                if not trace_calls and not is_at_hand(asked.config or {}, traced, vary="batch"):
                    return None
                return get_stream(asked.config or {}, traced, vary="batch")

            calls = call_roofline(step, stream_of)
    profile_cache.keep(profile)
    if out is not None:
        from flopcast.roofline.views.figures.anatomy import calls_figure
        from flopcast.roofline.views.figures.colours import THEMES
        from flopcast.roofline.views.figures.file import save

        figure = calls_figure(calls, theme=THEMES[theme or "light"]) if calls is not None else None
        if figure is None:
            raise UsageError(f"--out: {profile.gpu} has no roofs of precision {ran.precision} to draw")
        save(figure, out)
        say(f"wrote {out}")
    if as_json:
        emit({
            **found.to_json(), "alternatives": [a.to_json() for a in would_help],
            "modes": in_modes and in_modes.to_json(),
            **({"precisions": [p.to_json(in_precisions[0].forecast) for p in in_precisions]} if precisions else {}),
            **({"experts": [one.to_json(found.forecast) for one in experts]} if experts else {}),
            **({"calls": calls.to_json()} if calls is not None else {}),
        })  # fmt: skip
    else:
        print_explanation(found, would_help, ran, in_modes, experts, in_precisions, calls)
