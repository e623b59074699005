"""What a profile says of how it came about, as far as anything reads it: `Profile.provenance`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Required, TypedDict

from flopcast.bounds import Count, Deviation, Positive, Share, Valid
from flopcast.roofline.stream.lowering.variants import SurfaceKey


class Card(TypedDict, total=False):
    """One of several cards; no factor where it has few rows."""

    uuid: str | None
    machine: str | None
    rows: Count
    rows_throttled: Count
    factor: Positive | None


class CardClass(TypedDict, total=False):
    """How far cards lie apart in a class of operations (`fit.cards.spread`)."""

    rows: Count
    sigma: Required[Deviation]
    median: float
    p90: float
    factors: Mapping[str, Positive]
    slowest: str
    slowest_factor: Positive
    worst: Sequence[Sequence[Any]]


class Cards(TypedDict, total=False):
    """The spread of this GPU's cards, or of another's, multiplied by `times`."""

    cards: Mapping[str, Card]
    classes: Mapping[str, CardClass]
    times: Positive
    slowest: str | None
    slowest_factor: Positive | None


SurfaceName = Annotated[str, Valid(lambda name: bool(SurfaceKey.parse(name)), "a surface's name")]


class ProjectedKinds(TypedDict, total=False):
    """Kinds of kernel taken `from` another GPU's profile."""

    sigma: Mapping[str, Deviation]
    surfaces: Required[Sequence[SurfaceName]]


class Published(TypedDict, total=False):
    """Published times that a projection was refined by: the number of rows by surface."""

    gpu: str
    source: Required[str]
    rows: Mapping[SurfaceName, Count]
    like: Sequence[SurfaceName]
    held_out: str


class MeasuredModel(TypedDict, total=False):
    """A model that was measured, and the shares of its device time by basis."""

    source: Required[str]
    basis_shares: Required[Mapping[str, Share]]


_When = TypedDict("_When", {"from": str | None, "to": str | None}, total=False)


class Provenance(_When, total=False):
    machine: str
    method: Count
    suites: Sequence[str]
    rows: Count
    rows_throttled: Count
    rows_held_out: Count
    shapes: Count
    sources: Sequence[MeasuredModel]
    gpus: Cards
    cards_lent: Cards
    projected_kinds: ProjectedKinds
    published: Published
    projected_from: str
    source: Mapping[str, Any]
    specs: Mapping[str, Any]
    sustained_fraction: Sequence[Positive]
    sigma: Mapping[str, Deviation]
    host: str
