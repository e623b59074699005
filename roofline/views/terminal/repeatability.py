"""Two runs compared row by row, as the terminal shows them."""

from __future__ import annotations

from collections.abc import Callable

from flopcast.roofline.validation.repeatability import TABLE_COLUMNS, Repeatability, remarks, table_rows


def show(found: Repeatability, say: Callable[[str], None]) -> None:
    from flopcast.roofline.views.terminal import console

    console.console().print(console.table("Two runs, |difference| row by row", TABLE_COLUMNS, table_rows(found)))
    for remark in remarks(found):
        say(remark)
