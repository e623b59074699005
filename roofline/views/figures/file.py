"""A figure as a file: which endings are valid, and writing one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flopcast.errors import UsageError

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile


FIGURES = (".png", ".svg")


def check_figure(out: Path | None, theme: str, option: str = "--out") -> None:
    """Raises UsageError for a file that is no figure and a ground that there is not."""
    if out is not None and out.suffix.lower() not in FIGURES:
        raise UsageError(f"{option} {str(out)!r}: valid are files that end in {' or '.join(FIGURES)}")
    if theme not in ("light", "dark"):
        raise UsageError(f"--theme {theme!r}: valid are light, dark")


def write_figure(profile: Profile, out: Path, *, dtype: str | None = None, theme: str = "light") -> None:
    """The figure as a file. Raises UsageError where the profile has no roofs or the file cannot be written."""
    from flopcast.roofline.views.figures.canvas import THEMES
    from flopcast.roofline.views.figures.kernels import both_figures

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
