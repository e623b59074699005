"""Makes the index of pages, with each GPU's main numbers and links, from the `report.json` beside each page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

from flopcast import files
from flopcast.bounds import Valid
from flopcast.decode import load
from flopcast.errors import DataError
from flopcast.roofline.dollars.standard import StandardGpu
from flopcast.roofline.views.page.page import NUMBERS, asset, template
from flopcast.roofline.views.page.standard import gpus_table

INDEX = "index.html"
MARK = '<meta name="generator" content="flopcast index">'
FILES = ("validation.csv", "widths-3.csv", "widths-2.csv", "widths.csv", "kernels.csv")  # beside a page
LOCAL = "local"  # `make report`'s folder: this machine's own page, of no interest to others


class Shown(TypedDict, total=False):
    """A number, as the index shows it."""

    value: Required[str]
    what: Required[str]
    note: Required[str]


class PageNumbers(TypedDict, total=False):
    """What is read of the `report.json` beside a page (`page.main_numbers` writes it)."""

    gpu: Required[str]
    name: Required[str]
    basis: Required[str]
    page: Required[Annotated[str, Valid(lambda name: Path(name).name == name != "", "a file beside it")]]
    numbers: Required[Sequence[Shown]]
    summary: Sequence[Annotated[Sequence[str], Valid(lambda pair: len(pair) == 2, "a heading and a sentence")]]
    date: str | None
    torch: str | None


def keep(out: Path, folder: Path | None = None, gpus: Callable[[], Sequence[StandardGpu]] = tuple) -> Path | None:
    """Makes the index of `folder`; without `folder`, updates the index of OUT's parent if flopcast made one there.

    A page in a folder named "local" is not listed and changes nothing. `gpus` forecasts what the table of GPUs shows,
    and is called where an index is made. Returns the index that was written. Raises UsageError if it cannot be written.
    """
    if folder is None:
        if out.resolve().name == LOCAL or not is_index(out.resolve().parent / INDEX):
            return None
        folder = out.parent
    return write(folder, gpus())


def is_index(path: Path) -> bool:
    """Whether flopcast made this file."""
    try:
        return path.is_file() and MARK in path.read_text(encoding="utf-8")[:2000]
    except (OSError, UnicodeDecodeError):
        return False


def write(folder: Path, gpus: Sequence[StandardGpu] = ()) -> Path:
    """Writes FOLDER/index.html: a table of the GPUs, and the pages in its folders. Raises UsageError if it cannot be
    written."""
    listed = pages(folder)
    links = {page["gpu"]: f"{page['folder']}/{page['page']}" for page in listed}
    page = template("index.html.j2").render(
        mark=MARK,
        css=asset("report.css"),
        js=asset("report.js"),
        gpus=gpus_table(gpus, links),
        pages=listed,
        others=others(folder),
    )
    target = folder / INDEX
    with files.write_errors(target, "--index"):
        target.write_text(page, encoding="utf-8")
    return target


def others(folder: Path) -> list[str]:
    """Names, in order, of FOLDER's folders that hold a README.md but no page."""
    found = sorted(path.parent.name for path in folder.glob("*/README.md"))
    return [name for name in found if name != LOCAL and not (folder / name / NUMBERS).is_file()]


def pages(folder: Path) -> list[dict[str, Any]]:
    """The main numbers of each page in FOLDER, measured ones first, then by name; `files` lie beside it."""
    found = []
    for path in sorted(folder.glob(f"*/{NUMBERS}")):
        if path.parent.name == LOCAL:
            continue
        try:
            record = load(PageNumbers, path, "the numbers of a page", hint="`flopcast report` makes it")
        except DataError:
            continue  # incomplete, or not written by flopcast
        beside = [name for name in FILES if (path.parent / name).is_file()]
        found.append(
            {"summary": [], "date": None, "torch": None, **record, "folder": path.parent.name, "files": beside}
        )
    return sorted(found, key=lambda page: (page["basis"] != "measured", page["gpu"]))
