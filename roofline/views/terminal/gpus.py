"""The profiles that are known, as the terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flopcast.roofline.gpu.library.profiles import Known
from flopcast.roofline.views.terminal.console import console, table


def print_known(found: Sequence[Known]) -> None:
    rows = [[entry.name, entry.basis, entry.source] for entry in found]
    console().print(table("Known GPUs", ("--gpu", "basis", "source"), rows))
