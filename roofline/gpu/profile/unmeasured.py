"""Estimates work that has no surface of its own: by the nearest relatives' laws, with a wider error bar.

In order, each with the standard deviation of log seconds that is added to what the surface itself says:

bf16's, of one in fp16     0.10   the same kernel for the other 16 bits; a matrix rate is scaled as below
the other cache state      0.15   times the ratio of the two states, where the class was measured in both
same class and dtypes      0.25   the median of the relatives' laws (bytes and FLOPs put in) and their spread
same class                 0.35   the same; a matrix rate is scaled by the peaks of the dtypes
bytes and FLOPs alone      0.50   kernel floor + bytes at copy bandwidth, or FLOPs at half the peak

Kernels whose time follows from neither bytes nor FLOPs are given a least and a most (`unlike_bytes.py`).
Where no kernel of theirs was measured, normalisations, convolutions and the fused kernels are costed by the passes that
they make over their tensors (`passes.py`), with the deviation of bytes and FLOPs alone. A matrix rate is that sustained
in its dtype where one was measured.

The added deviations are judgements, not yet checked with held-out variants: the spread among variants of one class
seen on an H200 is twofold in bandwidth, 0.3 in log seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flopcast.roofline.gpu.laws.smooth import median
from flopcast.roofline.gpu.profile.passes import COSTS, Rates, plain_seconds
from flopcast.roofline.gpu.profile.request import Request, WorkLike, arrays_of
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.gpu.profile.unlike_bytes import Rule, rule_of
from flopcast.roofline.stream.lowering.variants import ConvVariant, SurfaceKey, twin_of

TWIN, OTHER_CACHE, SAME_DTYPES, SAME_CLASS, NOTHING = 0.10, 0.15, 0.25, 0.35, 0.50
OTHER_BACKEND = 0.15
RELATIVES = 7  # at most so many, the most alike
REACH = 16.0
Answer = tuple[float, float, str]  # seconds, sigma, source


@dataclass(frozen=True)
class Fallback:
    """What is known of a device, to answer from. `aliases`: backends that stand for another."""

    surfaces: Mapping[SurfaceKey, Surface]
    rates: Rates
    aliases: Mapping[str, str]

    @cached_property
    def _of_class(self) -> dict[str, list[SurfaceKey]]:
        by_class: dict[str, list[SurfaceKey]] = {}
        for key in self.surfaces:
            if isinstance(key.variant, ConvVariant) and key.variant.algorithm:  # a part of a convolution is like none
                continue
            by_class.setdefault(key.op_class, []).append(key)
        return by_class

    @cached_property
    def _ratios(self) -> dict[str, float]:
        """What `_ratio` found."""
        return {}

    def _ratio(self, op_class: str) -> float:
        """log(hot / cold) of a class: the median over the points of the surfaces that were measured in both
        states."""
        if op_class not in self._ratios:
            ratios: list[float] = []
            for key in self._of_class.get(op_class, ()):
                hot, cold = (self.surfaces.get(key.with_cache(cache)) for cache in ("hot", "cold"))
                if key.cache == "cold" and hot is not None and cold is not None:
                    of = np.array(cold.features), np.array(cold.bytes), np.array(cold.flops)
                    ratios.extend((hot.law(*of) - cold.law(*of)).tolist())
            self._ratios[op_class] = float(median(np.array(ratios))) if ratios else 0.0
        return self._ratios[op_class]

    def estimate(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer per request, in order; requests are grouped, so that each relative is evaluated once per group."""
        groups: dict[SurfaceKey, list[int]] = {}
        for i, (work, backend, cache) in enumerate(requests):
            wanted = SurfaceKey(self.aliases.get(backend, backend), work.op_class, work.variant, cache)
            groups.setdefault(wanted, []).append(i)
        out: dict[int, Answer] = {}
        for wanted, members in groups.items():
            answers = self._group(wanted, [requests[i][0] for i in members])
            out.update(zip(members, answers, strict=True))
        return [out[i] for i in range(len(requests))]

    def _group(self, wanted: SurfaceKey, works: Sequence[WorkLike]) -> list[Answer]:
        variant = twin_of(wanted.variant)
        if variant is not None:
            twin = replace(wanted, variant=variant)
            if any(twin.with_cache(cache) in self.surfaces for cache in ("cold", "hot")):
                return self._by_twin(wanted, twin, works)
        other = wanted.with_cache("hot" if wanted.cache == "cold" else "cold")
        surface = self.surfaces.get(other)
        if surface is not None and len(surface.features[0]) == len(works[0].features):
            return self._other_cache(wanted, other, surface, works)
        rule = rule_of(wanted.op_class, wanted.variant)
        if rule is not None:
            return self._ruled(wanted, rule, works)
        known = self._of_class.get(wanted.op_class, [])
        kind = operation if (operation := wanted.variant.tokens[0]) in COSTS else wanted.op_class
        if kind in COSTS and not any(kind in (key.op_class, key.variant.tokens[0]) for key in known):
            cost, source = COSTS[kind]
            return [(cost(self.rates, wanted.variant, work), NOTHING, source) for work in works]
        # laws take any number of sizes of their class, but one that counts a third size has to be given it
        sizes = min(len(work.features) for work in works)
        relatives = [key for key in known if sizes > 2 or "each" not in self.surfaces[key].params]
        if relatives:
            return self._relatives(wanted, relatives, works)
        return [(plain_seconds(self.rates, wanted.variant, work), NOTHING, "bytes and FLOPs alone") for work in works]

    def _by_twin(self, wanted: SurfaceKey, twin: SurfaceKey, works: Sequence[WorkLike]) -> list[Answer]:
        surface = self.surfaces.get(twin)
        if surface is None or len(surface.features[0]) != len(works[0].features):
            answers = self._group(twin, works)
        else:
            found = surface.predict(*arrays_of(works))
            answers = [(t, s, str(twin)) for t, s in zip(found.seconds.tolist(), found.sigma.tolist(), strict=True)]
        factor = float(np.exp(self._shift(wanted, twin)))
        return [(seconds * factor, float(np.hypot(sigma, TWIN)), source) for seconds, sigma, source in answers]

    def _ruled(self, wanted: SurfaceKey, rule: Rule, works: Sequence[WorkLike]) -> list[Answer]:
        """Answers by the rule, but where the operation was measured in other variants by these, of which the rule's
        deviation is halved: it is known how the kernel goes about it, not what else its time depends on."""
        operation = wanted.variant.tokens[0]
        alike = (
            [key for key in self.surfaces if key.variant.tokens[0] == operation] if wanted.op_class != "conv" else []
        )
        ruled = [rule.estimate(self.rates, wanted.variant, work) for work in works]
        if not alike:
            return [(seconds, sigma, rule.words) for seconds, sigma in ruled]
        found = self._relatives(wanted, alike, works)
        return [
            (seconds, float(np.hypot(own, sigma / 2)), source)
            for (seconds, own, source), (_, sigma) in zip(found, ruled, strict=True)
        ]

    def _other_cache(
        self, wanted: SurfaceKey, other: SurfaceKey, surface: Surface, works: Sequence[WorkLike]
    ) -> list[Answer]:
        ratio = self._ratio(wanted.op_class)
        ratio = ratio if wanted.cache == "hot" else -ratio
        found = surface.predict(*arrays_of(works))
        seconds, sigma = found.seconds * np.exp(ratio), np.hypot(found.sigma, OTHER_CACHE)
        return [(t, s, f"{other}, other cache") for t, s in zip(seconds.tolist(), sigma.tolist(), strict=True)]

    def _relatives(self, wanted: SurfaceKey, relatives: list[SurfaceKey], works: Sequence[WorkLike]) -> list[Answer]:
        if wanted.op_class == "reduction":  # those of few results, which leave most of a GPU idle, tell none of many
            relatives = [name for name in relatives if self._reaches(name, works)] or relatives
        best = max(_likeness(wanted, name) for name in relatives)
        chosen = [name for name in relatives if _likeness(wanted, name) == best]
        # of equals, those with most points
        chosen = sorted(chosen, key=lambda name: -len(self.surfaces[name].seconds))[:RELATIVES]
        columns = arrays_of(works)
        logs = np.stack([self.surfaces[n].law(*columns) + self._shift(wanted, n) for n in chosen])
        spread = logs.std(axis=0)
        same_dtypes = all(name.variant.dtypes == wanted.variant.dtypes for name in chosen)
        added = SAME_DTYPES if same_dtypes else SAME_CLASS
        if all(name.backend != wanted.backend for name in chosen):
            added = float(np.hypot(added, OTHER_BACKEND))
        seconds, sigma = np.exp(median(logs)), np.hypot(spread, added)
        source = f"{wanted.op_class} like {chosen[0].backend} {chosen[0].variant}"
        return [(t, s, source) for t, s in zip(seconds.tolist(), sigma.tolist(), strict=True)]

    def _reaches(self, name: SurfaceKey, works: Sequence[WorkLike]) -> bool:
        """Whether some work is of sizes within a factor of REACH of those that were measured of this relative."""
        points = np.array(self.surfaces[name].features)
        width = min(points.shape[1], len(works[0].features))
        asked = np.array([work.features[:width] for work in works])
        low, high = points[:, :width].min(axis=0) - np.log2(REACH), points[:, :width].max(axis=0) + np.log2(REACH)
        return bool(((asked >= low) & (asked <= high)).all(axis=1).any())

    def _shift(self, wanted: SurfaceKey, name: SurfaceKey) -> float:
        """log of the factor on a relative's time: cache state, and the dtypes' matrix rates."""
        shift = 0.0
        if wanted.cache != name.cache:
            ratio = self._ratio(wanted.op_class)
            shift += ratio if wanted.cache == "hot" else -ratio
        if wanted.op_class in ("gemm", "attention") and wanted.variant.dtypes != name.variant.dtypes:
            own, its = (self.rates.ceilings.get(f"matrix_sustained/{key.variant.dtypes}") for key in (wanted, name))
            if not (own and its):
                own, its = (self.rates.peaks.get(key.variant.dtypes) for key in (wanted, name))
            if own and its:
                shift += float(np.log(its / own))
        return shift


def _likeness(wanted: SurfaceKey, name: SurfaceKey) -> tuple[bool, bool, bool, float, bool, bool]:
    """Greater is more alike: dtypes first, then backend, shared tokens of the variant, cache. Experts' grouped
    products, of three points a layout, are like each other alone."""
    # a sum over dimensions between others strides as one over the first does: no row of its own for each result
    own, its = ({token.replace("mix", "col") for token in n.variant.tokens} for n in (wanted, name))
    plain, others = ({token.rstrip("~") for token in tokens} for tokens in (own, its))  # of results in order
    shared = len(own & its) / 2 + len(plain & others) / 2
    results = [n.variant.dtypes.rpartition(">")[2] for n in (wanted, name)]
    return (
        name.variant.dtypes == wanted.variant.dtypes,
        wanted.op_class == "fill" and results[0] == results[1],  # a fill reads nothing
        name.backend == wanted.backend,
        shared,
        "grouped" not in its - own,
        name.cache == wanted.cache,
    )
