"""The commands that say why: roofline (what a part reaches) and explain (where a step's time goes)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopcast.errors import UsageError
from flopcast.roofline.cli_options import AsJson, Gpu, refuse_unused

if TYPE_CHECKING:
    from flopcast.roofline.profile import Profile

FIGURES = (".png", ".svg")
PREDICT_ALONE = ("explain", "largest_batch")  # options of `predict` that `explain` does not take


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line. `explain` takes what `predict` takes."""
    from flopcast.roofline.cli import predict

    wanted = inspect.signature(predict, eval_str=True).parameters
    own = inspect.signature(_explain_options, eval_str=True).parameters
    options = [p.replace(kind=p.KEYWORD_ONLY) for name, p in wanted.items() if name not in PREDICT_ALONE]
    explain.__signature__ = inspect.Signature([*options, *own.values()])  # type: ignore[attr-defined]
    app.command()(roofline)
    app.command()(explain)


def _explain_options(
    *,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if", help="Trace the alternatives whose op stream is not at hand; takes seconds each."
        ),
    ] = False,
) -> None: ...


def explain(**options: Any) -> None:
    """Where a step's time goes, what bounds it, how far it is from the speed of light, and what would help."""
    from flopcast.roofline import advice, prepared, tables_explain
    from flopcast.roofline.batch import model_from
    from flopcast.roofline.cli import emit, module_sizes
    from flopcast.roofline.cli_cost import price_of
    from flopcast.roofline.explain import explain_stream
    from flopcast.roofline.forecast import run_from
    from flopcast.roofline.lookup import find_host, find_profile
    from flopcast.roofline.stream_cache import get_stream, is_at_hand
    from flopcast.roofline.waiting import waiting

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
            from flopcast.roofline import api

            api.check_sizes(str(module), sizes)
            stream = api.module_stream(module, None, run, profile, sizes=sizes)
            run, trace = api.run_of_stream(stream, run), False
        else:
            traced = advice.traced_of(run, profile)
            # where the step itself has to be traced, torch is there for the alternatives too
            trace = options.get("what_if", False) or not is_at_hand(model, traced)
            stream = get_stream(model, traced)
        found = explain_stream(stream, run, profile, host=host, price=priced)
        would_help = advice.advise(stream, run, profile, found.forecast, config=model, host=host, trace=trace)
    prepared.keep(profile)
    if options["as_json"]:
        emit({**found.to_json(), "alternatives": [a.to_json() for a in would_help]})
    else:
        tables_explain.print_explanation(found, would_help, run)


def roofline(
    gpu: Gpu,
    out: Annotated[Path | None, typer.Option(help="Figure to write: FILE.png or FILE.svg.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Whose points the figure shows; default: the dtype with most.")
    ] = None,
    theme: Annotated[str | None, typer.Option(help="Ground of the figure: light (default) or dark.")] = None,
    as_json: AsJson = False,
) -> None:
    """What this GPU can do: its roofs, the measured points below them, where they meet; and the figure."""
    from flopcast.roofline import roofs, tables, tables_roofs
    from flopcast.roofline.cli import emit
    from flopcast.roofline.lookup import find_profile
    from flopcast.roofline.text_files import check_writable
    from flopcast.roofline.waiting import waiting

    check_figure(out, theme or "light")
    check_writable(out)
    profile = find_profile(gpu)
    found = roofs.roofs_of(profile)
    if dtype is not None and found.of(dtype) is None:
        known = ", ".join(roof.dtype for roof in found.matrix) or "none"
        raise UsageError(f"--dtype {dtype!r}: {profile.gpu} has no such matrix roof; valid are {known}")
    if out is None:
        refuse_unused("without --out: it says how the figure is drawn", {"dtype": dtype, "theme": theme})
    if out is not None:
        with waiting("drawing"):
            write_figure(profile, out, dtype=dtype, theme=theme or "light")
        tables.say(f"wrote {out}")
    if as_json:
        emit(
            {
                **roofs.to_json(profile, found, roofs.points_of(profile)),
                "figure": None if out is None else str(out),
            }
        )
    else:
        tables_roofs.print_roofs(profile)


def check_figure(out: Path | None, theme: str, option: str = "--out") -> None:
    """Raises UsageError for a file that is no figure and a ground that there is not."""
    if out is not None and out.suffix.lower() not in FIGURES:
        raise UsageError(f"{option} {str(out)!r}: valid are files that end in {' or '.join(FIGURES)}")
    if theme not in ("light", "dark"):
        raise UsageError(f"--theme {theme!r}: valid are light, dark")


def write_figure(profile: Profile, out: Path, *, dtype: str | None = None, theme: str = "light") -> None:
    """The figure as a file. Raises UsageError where the profile has no roofs or the file cannot be written."""
    from flopcast.roofline.canvas import THEMES
    from flopcast.roofline.plots_kernels import both_figures

    try:  # a folder that cannot be made is told before the seconds of drawing
        out.parent.mkdir(parents=True, exist_ok=True)
        figure = both_figures(profile, dtype=dtype, theme=THEMES[theme])
        if figure is None:
            raise UsageError(
                f"{profile.gpu} has no matrix or memory roof to draw: `flopcast bench` measures them, `flopcast fit` "
                "makes the profile"
            )
        out.write_bytes(figure.png if out.suffix.lower() == ".png" else figure.svg_file.encode())
    except OSError as fault:
        raise UsageError(f"{out} cannot be written: {fault.strerror}; choose another --out") from fault
