"""Computes how much of a step's device time a profile has measured, by basis, and which kinds of operation it lacks.

    python -m studies.shipped.coverage [GPU]

An operation's time is "measured" where that very operation was measured, "interpolated" where operations of its kind
and about its size were, and "extrapolated" where only others were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopcast.roofline.gpu.profile.host import NO_HOST
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.measured_model import MeasuredModel, kept
from flopcast.roofline.step.priced_step import PricedStep

WORST_KINDS = 3


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Device seconds of one step and their shares by basis.

    `lacking`: the extrapolated kinds that take the most time, with their shares. `fits`: whether the step fits into the
    device's memory.
    """

    label: str
    device_seconds: float
    shares: Mapping[str, float]
    lacking: tuple[tuple[str, float], ...]
    fits: bool

    @property
    def in_measured_kinds(self) -> float:
        """The share of the time in kinds of operation that were measured at or about that size, each part of an
        operation's time by the curve, cold or hot, that it is taken from."""
        return 1.0 - self.shares["extrapolated"]

    def to_json(self) -> dict[str, Any]:
        return {"source": self.label, "device_seconds": self.device_seconds, "basis_shares": dict(self.shares)}


def coverage(profile: Profile, model: MeasuredModel) -> Coverage:
    """Returns the coverage of one step by one profile."""
    step = PricedStep(model.stream, model.run, profile, NO_HOST)
    total = step.timeline.device_seconds or 1.0
    lacking: dict[str, float] = defaultdict(float)
    for op in step.ops:
        if op.work is not None:
            kind = f"{op.work.op_class} {op.work.variant}"
            lacking[kind] += sum(seconds for basis, seconds in op.parts if basis == "extrapolated") / total
    worst = sorted(((kind, share) for kind, share in lacking.items() if share), key=lambda pair: -pair[1])
    return Coverage(
        label=model.label,
        device_seconds=step.timeline.device_seconds,
        shares=step.basis_shares,
        lacking=tuple(worst[:WORST_KINDS]),
        fits=step.fits,
    )


# --- what a profile holds directly


def held_shapes(rows: Iterable[Mapping[str, Any]]) -> int:
    """Counts the distinct operations that were measured and are not held out."""
    return len({r["key"] for r in rows if r["status"] == "ok" and r.get("shape") and r.get("role") != "holdout"})


def with_sources(profile: Profile, folder: Path, rows: Iterable[Mapping[str, Any]]) -> Profile:
    """Returns the profile with what it was measured for added to its provenance: `shapes`, the number of shapes held
    directly, and `sources`, the models measured with the measured share of each one's device time."""
    found = [coverage(profile, model).to_json() for model in kept(folder)]
    return replace(profile, provenance={**profile.provenance, "shapes": held_shapes(rows), "sources": found})


def holdings(profile: Profile) -> str:
    """Says how many shapes a profile holds directly, and what share of each source's device time is measured."""
    parts = [f"holds {profile.provenance.get('shapes', 0):,} shapes directly"]
    for source in profile.provenance.get("sources", ()):
        measured = source["basis_shares"]["measured"]
        parts.append(f"{floor_percent(measured)} of the device time of {source['source']} measured")
    return "; ".join(parts)


def floor_percent(share: float) -> str:
    """Formats a share as a percentage, never rounded up: 99.996% is not 100%."""
    return f"{int(share * 10_000 + 1e-6) / 100:g}%"


def rows_of(found: Sequence[Coverage]) -> list[list[str]]:
    """Returns the cells of the table that `python -m studies.shipped.coverage` prints."""
    return [
        [
            c.label, f"{c.device_seconds * 1e3:.1f}", *(f"{c.shares[b]:.1%}" for b in c.shares),
            f"{c.in_measured_kinds:.2%}", "yes" if c.fits else "no",
            "; ".join(f"{kind} {share:.1%}" for kind, share in c.lacking if share > 1e-3),
        ]
        for c in found
    ]  # fmt: skip
