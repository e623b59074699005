"""Parts of the page that other modules know how to make: rules of widths, and the article's claims.

A part that its data do not suffice for is left out; a fault in making one is said on the page, and the page goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flopcast.errors import FlopcastError
from flopcast.roofline.views.page.data import Section
from flopcast.roofline.views.page.table import Column, Table, prose, text
from flopcast.roofline.views.page.widths import width_parts

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile


ECONOMICS = "economics"  # folder beside the pages, of `python -m studies.claims`


@dataclass(frozen=True)
class Extra:
    """Sections, (heading, sentence) for the summary, and what could not be made."""

    sections: Sequence[Section]
    advice: Sequence[tuple[str, str]]
    faults: Sequence[str]


def extra_parts(profile: Profile, out: Path, *, may_trace: bool) -> Extra:
    """`out`: the page's folder. `may_trace`: op streams that are not at hand, which takes torch."""
    sections: list[Section] = []
    advice: list[tuple[str, str]] = []
    faults: list[str] = []
    makers: tuple[tuple[str, Callable[[], Iterator[Section | tuple[str, str]]]], ...] = (
        ("the article's claims", lambda: claim_parts(out.resolve().parent / ECONOMICS)),
        ("rules of widths", lambda: width_parts(profile, out, may_trace)),
    )
    for name, make in makers:
        try:
            for part in make():
                if isinstance(part, Section):
                    sections.append(part)
                else:
                    advice.append(part)
        except (FlopcastError, ArithmeticError, LookupError, OSError, ValueError) as fault:
            faults.append(f"{name} could not be made: {type(fault).__name__}: {fault}")
    return Extra(sections, advice, faults)


# --- claims


def claim_parts(folder: Path) -> Iterator[Section]:
    """The verdicts of `claims.json`, by the printed depth law and each GPU on a host of its own."""
    path = folder / "claims.json"
    if not path.is_file():
        return
    from flopcast.roofline.dollars.curves import OWN

    found = json.loads(path.read_text(encoding="utf-8"))["claims"]
    rows = [row for row in found if row.get("depth_law") == "printed" and row.get("hosts") == OWN]
    if not rows:
        return
    columns = [
        text("claim", "claim"), text("prices", "prices"), text("verdict", "verdict"),
        Column("middle_for", "by middle estimates, models for it"), Column("models", "of"), prose("why", "why"),
    ]  # fmt: skip
    note = (
        "Decided at 90%, model by model of the ladder: it holds where every comparison is decided for it, it does not "
        "where one model decides against it. Other depth laws, hosts and the curves: reports/economics."
    )
    table = Table("claims", "The source article's claims under several price lists", note, columns, rows)
    yield Section("claims", "The article's claims", (), [table])
