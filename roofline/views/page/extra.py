"""Makes sections from files beside the page or from other packages' results: the article's claims, rules of widths.

A section without sufficient data is left out; an error in making one is reported on the page, and the rest is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from flopcast.bounds import Count
from flopcast.decode import load
from flopcast.errors import FlopcastError
from flopcast.roofline.views.page.data import Section, section
from flopcast.roofline.views.page.on_kernels import on_kernels_section
from flopcast.roofline.views.page.several_gpus import several_section
from flopcast.roofline.views.page.table import Column, Table, prose, text
from flopcast.roofline.views.page.widths import width_section

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile


ECONOMICS = "economics"  # folder beside the pages, written by `python -m studies.claims`


class _Claim(TypedDict):
    """A claim's verdict by one price list, depth law and set of hosts: what the page shows of it."""

    claim: str
    prices: str
    depth_law: str
    hosts: str
    verdict: str
    middle_for: Count
    models: Count
    why: str


class _Claims(TypedDict):
    claims: list[_Claim]


def extra_sections(profile: Profile, out: Path, *, may_trace: bool) -> tuple[list[Section], list[str]]:
    """Returns the sections, and a sentence for each that could not be made.

    `out`: the page's folder. `may_trace`: whether op streams that are not at hand may be traced, which needs torch.
    """
    makers: dict[str, Callable[[], Section | None]] = {
        "the article's claims": partial(claim_section, out.resolve().parent / ECONOMICS),
        "several GPUs": partial(several_section, profile, may_trace=may_trace),
        "steps on our kernels": partial(on_kernels_section, profile.gpu, out),
        "rules of widths": partial(width_section, profile, out, may_trace=may_trace),
    }
    sections, faults = [], []
    for name, make in makers.items():
        try:
            sections.append(make())
        except (FlopcastError, ArithmeticError, LookupError, OSError, ValueError) as fault:
            faults.append(f"{name} could not be made: {type(fault).__name__}: {fault}")
    return [part for part in sections if part is not None], faults


def claim_section(folder: Path) -> Section | None:
    """The section of verdicts from `claims.json`, by the printed depth law and with each GPU on a host of its own."""
    path = folder / "claims.json"
    if not path.is_file():
        return None
    from flopcast.roofline.dollars.curves import OWN

    found = load(_Claims, path, "the verdicts on the claims", hint="`python -m studies.claims` makes it")["claims"]
    columns = [
        text("claim", "claim"), text("prices", "prices"), text("verdict", "verdict"),
        Column("middle_for", "by middle estimates, models for it"), Column("models", "of"), prose("why", "why"),
    ]  # fmt: skip
    note = (
        "Decided at 90%, model by model of the ladder: it holds where every comparison is decided for it, it does not "
        "where one model decides against it. Other depth laws, hosts and the curves: reports/economics."
    )
    rows = [row for row in found if (row["depth_law"], row["hosts"]) == ("printed", OWN)]
    table = Table("claims", "The source article's claims under several price lists", note, columns, rows)
    return section("claims", "The article's claims", [], [table] if rows else [])
