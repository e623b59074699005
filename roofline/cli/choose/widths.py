"""`flopcast widths`: which widths to choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.groups import Only
from flopcast.roofline.cli.shared.options import AsJson, Gpu, Host, ModelOptions, Theme, given, refuse_unused
from flopcast.roofline.cli.step.asked import check_module_options
from flopcast.roofline.stream.model.run import Run

AXIS, SPAN = "hidden,ffn,vocab,heads", 128
COMPILED_AXIS = "hidden,ffn,vocab"  # each of the sizes has to be compiled


def widths(
    context: Context,
    gpu: Gpu,
    *,
    around: Annotated[
        int | None,
        Option(help="Hidden size to try others around (the ladder's other sizes follow), or --module's width."),
    ] = None,
    model: Annotated[
        ModelOptions,
        Only("config", "module", "depth", "depth_law", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied"),
    ],
    run: Annotated[
        Run,
        Only(
            "batch", "seq", "accumulate", "checkpoint", "precision", "optimizer", "clip", "mode", "matmul", "attention"
        ),
    ],
    host: Host = None,
    axis: Annotated[
        str | None,
        Option(
            help="Axes, separated by commas: hidden, ffn, vocab, heads. Default: all, of compiled steps all but heads."
        ),
    ] = None,
    span: Annotated[int, Option(help="How far from a size its multiples of 64 are tried.")] = SPAN,
    constraint: Annotated[
        str | None,
        Option(help="Number of parameters of the shapes: 'params=600M±2%' (or +-2%). Default: the model's, 2%."),
    ] = None,
    shapes: Annotated[
        bool | None,
        Option(
            "--shapes/--no-shapes",
            help="Whether to try shapes of equal parameters. Default: yes; of compiled steps with --constraint only.",
        ),
    ] = None,
    forward_only: Annotated[
        bool, Option("--forward-only", help="Forecast the forward pass alone, in bf16 where no --precision is given.")
    ] = False,
    tolerate: Annotated[float, Option(help="Median penalty, in percent, that a multiple may cost.")] = 1.0,
    out: Annotated[Path | None, Option(help="CSV to write, one forecast per row.")] = None,
    figure: Annotated[Path | None, Option(help="Figure to write: FILE.png or FILE.svg.")] = None,
    theme: Theme = None,
    as_json: AsJson = False,
) -> None:
    """Says which multiple to keep each width to, what ignoring it costs, and the best shapes of equal parameters.

    Of a compiled step (--mode) nine sizes of an axis at most are tried. Each is compiled once, some ten seconds of
    processor time, side by side on all cores; what was compiled is kept.
    """
    from flopcast.roofline.base.csv_files import check_writable, write_rows
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.gpu.library.profiles import find_host, find_profile
    from flopcast.roofline.stream.library.modules import Module
    from flopcast.roofline.views.figures.file import check_figure, save
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.widths import print_answer
    from flopcast.roofline.widths import answer
    from flopcast.roofline.widths.module import answer_of_module
    from flopcast.roofline.widths.penalties import AXES, HEADS
    from flopcast.roofline.widths.shapes import parse_constraint

    is_eager = run.mode == "eager"
    if shapes is None:
        shapes = is_eager or constraint is not None
    if model.module is not None:
        check_module_options(context, model, run)
        config_only = {"axis": axis, "span": span != SPAN and span, "constraint": constraint,
                       "no_shapes": not shapes and is_eager, "figure": figure}  # fmt: skip
        refuse_unused("with --module: it is of a config's sizes, the factory has its `width`", config_only)
    if not is_eager:
        refuse_unused(f"with --mode {run.mode}, of which few sizes are tried", {"span": span != SPAN and span})
    axis = axis if axis is not None else AXIS if is_eager else COMPILED_AXIS
    axes = tuple(dict.fromkeys(name.strip() for name in axis.split(",") if name.strip()))
    valid = (*AXES, HEADS)
    if not axes or set(axes) - set(valid):
        raise UsageError(f"--axis is {axis!r}: valid are {', '.join(valid)}, with commas between")
    if figure is not None and "hidden" not in axes:
        raise UsageError("--figure draws hidden sizes: valid with --axis hidden among the axes")
    check_figure(figure, theme or "light", "--figure")
    if figure is None:
        refuse_unused("without --figure: it says how the figure is drawn", {"theme": theme})
    check_writable(out)
    check_writable(figure, "--figure")
    if not 0.0 < tolerate < 100.0:
        raise UsageError(f"--tolerate is {tolerate:g}: valid are percent, above 0 and below 100")
    if not 64 <= span <= 1024:
        raise UsageError(f"--span is {span}: valid is 64 to 1024")
    if constraint is not None and not shapes:
        raise UsageError("--constraint with --no-shapes: the constraint is on shapes, leave one of the two")
    held = None if constraint is None else parse_constraint(constraint)
    if model.config is None and model.module is None and around is None:
        raise UsageError(
            "no model: give --around with a hidden size, --config (a name or a config.json), or --module with a "
            "factory that takes a `width`"
        )
    config = {} if model.module is not None else replace(model, width=around).to_config()
    if forward_only and "precision" not in given(context, run):
        run = replace(run, precision="bf16")
    asked = run.checked()
    profile = find_profile(gpu)
    with progress("forecasting widths") as shown:
        settings: dict[str, Any] = {
            "forward": forward_only, "tolerated": tolerate / 100.0, "host": find_host(host), "progress": shown.update
        }  # fmt: skip
        if model.module is None:
            found = answer.answer(
                config, asked, profile, axes=axes, span=span, constraint=held, with_shapes=shapes, **settings
            )
        else:
            sizes = {name: value for name, value in given(context, run).items() if name in ("batch", "seq")}
            module = Module(model.module).resized(**sizes)
            found = answer_of_module(module, asked, profile, around=around, **settings)
    if out is not None:
        write_rows(out, found.columns, found.csv_rows())
        say(f"wrote {out}")
    if figure is not None:
        from flopcast.roofline.views.figures.colours import THEMES
        from flopcast.roofline.views.figures.widths import sawtooth_figure

        drawn = sawtooth_figure(found.points["hidden"], profile, theme=THEMES[theme or "light"])
        if drawn is None:
            raise UsageError(f"--figure: no hidden size near {config['hidden_size']} to draw")
        save(drawn, figure, "--figure")
        say(f"wrote {figure}")
    if as_json:
        emit(found.to_json())
    else:
        print_answer(found)
