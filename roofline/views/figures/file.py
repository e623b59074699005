"""Writes a figure to a file, and checks the file's ending beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flopcast import files
from flopcast.errors import UsageError

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.views.figures.canvas import Figure


FIGURES = (".png", ".svg")


def check_figure(out: Path | None, theme: str, option: str = "--out") -> None:
    """Raises UsageError for a file whose ending is no figure's and for an unknown theme."""
    if out is not None and out.suffix.lower() not in FIGURES:
        raise UsageError(f"{option} {str(out)!r}: valid are files that end in {' or '.join(FIGURES)}")
    if theme not in ("light", "dark"):
        raise UsageError(f"--theme {theme!r}: valid are light, dark")


def save(figure: Figure, path: Path, option: str = "--out") -> None:
    """Writes a figure in the format of its file's ending. Raises UsageError if it cannot be written, RunError without
    room."""
    with files.write_errors(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(figure.png if path.suffix.lower() == ".png" else figure.svg_file.encode())


def write_figure(profile: Profile, out: Path, *, dtype: str | None = None, theme: str = "light") -> None:
    """Writes the roofline to a file. Raises UsageError where the profile has no roofs or the file cannot be written."""
    from flopcast.roofline.views.figures.colours import THEMES
    from flopcast.roofline.views.figures.kernels import both_figures

    figure = both_figures(profile, dtype=dtype, theme=THEMES[theme])
    if figure is None:
        raise UsageError(
            f"{profile.gpu} has no matrix or memory roof to draw: `flopcast bench` measures them, `flopcast fit` "
            "makes the profile"
        )
    save(figure, out)
