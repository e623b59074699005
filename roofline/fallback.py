"""What to answer for work that has no surface of its own: the nearest relative's law, and a wider error bar.

In order, each with the standard deviation of log seconds that is added to what the surface itself says:

the other cache state      0.15   times the ratio of the two states, where the class was measured in both
same class and dtypes      0.25   the median of the relatives' laws (bytes and FLOPs put in) and their spread
same class                 0.35   the same; a matrix rate is scaled by the peaks of the dtypes
bytes and FLOPs alone      0.50   kernel floor + bytes at copy bandwidth, or FLOPs at half the peak

The added deviations are judgements until held-out variants tell: the spread among variants of one class
seen on an H200 is twofold in bandwidth, 0.3 in log seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from flopcast.roofline.surface import Surface

if TYPE_CHECKING:
    from flopcast.roofline.profile import Request, WorkLike

OTHER_CACHE, SAME_DTYPES, SAME_CLASS, NOTHING = 0.15, 0.25, 0.35, 0.50
OTHER_BACKEND = 0.15
RELATIVES = 7  # at most so many, the most alike
# Where nothing was measured: a kernel of 2 us, 1 TB/s, 100 TFLOP/s.
DEFAULT_FLOOR, DEFAULT_BANDWIDTH, DEFAULT_PEAK = 2e-6, 1e12, 1e14
DEFAULT_EFFICIENCY = 0.5

Answer = tuple[float, float, str]  # seconds, sigma, source


@dataclass(frozen=True)
class Name:
    """A surface's name taken apart."""

    backend: str
    op_class: str
    variant: str
    cache: str

    @classmethod
    def parse(cls, name: str) -> Name:
        backend, op_class, rest = name.split("/", 2)
        variant, cache = rest.rsplit("/", 1)
        return cls(backend, op_class, variant, cache)

    def __str__(self) -> str:
        return f"{self.backend}/{self.op_class}/{self.variant}/{self.cache}"

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(self.variant.replace("|", "/").split("/"))

    @property
    def dtypes(self) -> str:
        """The token of the variant that names dtypes; empty where there is none."""
        return next(
            (t for t in self.tokens if any(d in t for d in ("fp", "bf16", "tf32", "int", "bool"))), ""
        )


@dataclass(frozen=True)
class Fallback:
    surfaces: Mapping[str, Surface]
    peaks: Mapping[str, float]
    ceilings: Mapping[str, float]
    aliases: Mapping[str, str]

    @cached_property
    def _names(self) -> dict[str, list[Name]]:
        by_class: dict[str, list[Name]] = {}
        for text in self.surfaces:
            name = Name.parse(text)
            by_class.setdefault(name.op_class, []).append(name)
        return by_class

    @cached_property
    def _ratios(self) -> dict[str, float]:
        """log(hot / cold) by class: the median over the points of the surfaces that were measured in both
        states."""
        ratios: dict[str, list[float]] = {}
        for op_class, names in self._names.items():
            for name in names:
                hot = self.surfaces.get(str(Name(name.backend, op_class, name.variant, "hot")))
                cold = self.surfaces.get(str(Name(name.backend, op_class, name.variant, "cold")))
                if name.cache == "cold" and hot is not None and cold is not None:
                    of = np.array(cold.features), np.array(cold.bytes), np.array(cold.flops)
                    ratios.setdefault(op_class, []).extend((hot.law(*of) - cold.law(*of)).tolist())
        return {op_class: float(np.median(values)) for op_class, values in ratios.items()}

    def estimate(self, requests: Sequence[Request]) -> list[Answer]:
        """Grouped by what is asked for, so that each relative is evaluated once a group."""
        groups: dict[Name, list[int]] = {}
        for i, (work, backend, cache) in enumerate(requests):
            wanted = Name(self.aliases.get(backend, backend), work.op_class, work.variant, cache)
            groups.setdefault(wanted, []).append(i)
        out: dict[int, Answer] = {}
        for wanted, members in groups.items():
            answers = self._group(wanted, [requests[i][0] for i in members])
            out.update(zip(members, answers, strict=True))
        return [out[i] for i in range(len(requests))]

    def _group(self, wanted: Name, works: Sequence[WorkLike]) -> list[Answer]:
        other = Name(
            wanted.backend, wanted.op_class, wanted.variant, "hot" if wanted.cache == "cold" else "cold"
        )
        surface = self.surfaces.get(str(other))
        if surface is not None and _fits(surface, works):
            return self._other_cache(wanted, other, surface, works)
        # laws take any number of sizes of their class, but one that counts a third size has to be given it
        sizes = min(len(work.features) for work in works)
        relatives = [
            name
            for name in self._names.get(wanted.op_class, [])
            if sizes > 2 or "each" not in self.surfaces[str(name)].params
        ]
        if relatives:
            return self._relatives(wanted, relatives, works)
        return [self._nothing(wanted, work) for work in works]

    def _other_cache(
        self, wanted: Name, other: Name, surface: Surface, works: Sequence[WorkLike]
    ) -> list[Answer]:
        ratio = self._ratios.get(wanted.op_class, 0.0)
        ratio = ratio if wanted.cache == "hot" else -ratio
        found = surface.predict(*_columns(works))
        seconds, sigma = found.seconds * np.exp(ratio), np.hypot(found.sigma, OTHER_CACHE)
        return [
            (t, s, f"{other}, other cache") for t, s in zip(seconds.tolist(), sigma.tolist(), strict=True)
        ]

    def _relatives(self, wanted: Name, relatives: list[Name], works: Sequence[WorkLike]) -> list[Answer]:
        best = max(_likeness(wanted, name) for name in relatives)
        chosen = [name for name in relatives if _likeness(wanted, name) == best]
        # of equals, those with most points
        chosen = sorted(chosen, key=lambda name: -len(self.surfaces[str(name)].seconds))[:RELATIVES]
        columns = _columns(works)
        logs = np.stack([self.surfaces[str(n)].law(*columns) + self._shift(wanted, n) for n in chosen])
        spread = logs.std(axis=0)
        same_dtypes = all(name.dtypes == wanted.dtypes for name in chosen)
        added = SAME_DTYPES if same_dtypes else SAME_CLASS
        if all(name.backend != wanted.backend for name in chosen):
            added = float(np.hypot(added, OTHER_BACKEND))
        seconds, sigma = np.exp(np.median(logs, axis=0)), np.hypot(spread, added)
        source = f"{wanted.op_class} like {chosen[0].backend} {chosen[0].variant}"
        return [(t, s, source) for t, s in zip(seconds.tolist(), sigma.tolist(), strict=True)]

    def _shift(self, wanted: Name, name: Name) -> float:
        """log of what a relative's time is multiplied by: cache state, and the dtypes' matrix rates."""
        shift = 0.0
        if wanted.cache != name.cache:
            ratio = self._ratios.get(wanted.op_class, 0.0)
            shift += ratio if wanted.cache == "hot" else -ratio
        if wanted.op_class in ("gemm", "attention") and wanted.dtypes != name.dtypes:
            own, its = self.peaks.get(wanted.dtypes), self.peaks.get(name.dtypes)
            if own and its:
                shift += float(np.log(its / own))
        return shift

    def _nothing(self, wanted: Name, work: WorkLike) -> Answer:
        floor = self.ceilings.get("kernel_floor", DEFAULT_FLOOR)
        bandwidth = self.ceilings.get("hbm_copy", DEFAULT_BANDWIDTH)
        seconds = floor + work.bytes / bandwidth
        if work.flops:
            peak = self.peaks.get(wanted.dtypes) or self.peaks.get("bf16") or DEFAULT_PEAK
            seconds = max(seconds, floor + work.flops / (peak * DEFAULT_EFFICIENCY))
        return seconds, NOTHING, "bytes and FLOPs alone"


def _likeness(wanted: Name, name: Name) -> tuple[bool, bool, int, bool]:
    """Greater is more alike: dtypes first, then backend, shared tokens of the variant, cache."""
    shared = len(set(wanted.tokens) & set(name.tokens))
    return name.dtypes == wanted.dtypes, name.backend == wanted.backend, shared, name.cache == wanted.cache


def _fits(surface: Surface, works: Sequence[WorkLike]) -> bool:
    return len(surface.features[0]) == len(works[0].features)


def _columns(works: Sequence[WorkLike]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([work.features for work in works], float),
        np.array([work.bytes for work in works], float),
        np.array([work.flops for work in works], float),
    )
