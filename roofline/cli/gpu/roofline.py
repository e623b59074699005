"""`flopcast roofline`: shows what a GPU can do, as a table and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson, Gpu, Theme, refuse_unused
from flopcast.roofline.views.figures.file import check_figure, write_figure


def roofline(
    gpu: Gpu,
    out: Annotated[Path | None, Option(help="Figure to write: FILE.png or FILE.svg.")] = None,
    dtype: Annotated[
        str | None, Option(help="Dtype whose points the figure shows. Default: the one with most points.")
    ] = None,
    theme: Theme = None,
    as_json: AsJson = False,
) -> None:
    """Shows what a GPU can do: its roofs, the measured points below them, where they meet; and the figure."""
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.gpu.library.profiles import find_profile
    from flopcast.roofline.gpu.profile import roofs
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.roofs import print_roofs

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
        with progress("drawing"):
            write_figure(profile, out, dtype=dtype, theme=theme or "light")
        say(f"wrote {out}")
    if as_json:
        emit({**roofs.to_json(profile, found, roofs.points_of(profile)), "figure": None if out is None else str(out)})
    else:
        print_roofs(profile)
