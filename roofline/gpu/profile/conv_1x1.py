"""How long 1x1 convolutions take: each of their products by one of its algorithms. numpy only.

A profile has a surface of each product and algorithm. The product as it lies takes about what the law of products of
matrices says, the same kernels of cuBLAS; the converted one follows from its bytes and FLOPs (`laws/convolution.py`).
Which algorithm cuDNN takes, the nearest measured rows say, and where they differ rather that which is faster: rows left
out of 8,900 of an H200 were told by their five nearest in 92 of 100 cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import hypot, log, sqrt

import numpy as np

from flopcast.kernels.shapes import DTYPE_BYTES
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.profile.request import Estimate, Request, WorkLike
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.gpu.profile.unmeasured import OTHER_CACHE, SAME_CLASS, TWIN
from flopcast.roofline.stream.lowering.conv_1x1 import DIRECT, SIZES, is_1x1, product_of, ways_of
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import ConvVariant, GemmVariant, SurfaceKey, Variant, twin_of

NEAREST, SOFTENING = 5, 0.05  # measured rows that vote, each with 1 / (squared distance in octaves + SOFTENING)
LEAST_SHARE = 0.05  # of the votes that an algorithm is left with where none is for it
DIGITS = 4  # of log2 of a product's seconds


@dataclass(frozen=True)
class Part:
    """A product of a convolution by one algorithm, as a request asks for it: its own bytes, each tensor moved once, and
    FLOPs."""

    op_class: str
    variant: Variant
    features: tuple[float, ...]
    bytes: int
    flops: int


def part_of(work: WorkLike, variant: ConvVariant, surfaces: Mapping[SurfaceKey, Surface]) -> Part | None:
    """The product of a convolution that `variant` names, by its direction and algorithm; None for a direct one where no
    product of matrices like it was measured. A bias belongs to the result and to the gradient of the weights."""
    features = work.features[:SIZES]
    if variant.direction == "dgrad":
        features = (*features[:-1], 0.0)
    product = describe(product_of(variant, features))
    images, channels, results, places = (2.0**size for size in features[:4])
    numbers = images * places * (channels + results) + channels * results
    bytes_ = round(DTYPE_BYTES.get(variant.dtype, 2) * numbers)
    if variant.algorithm == DIRECT:
        assert isinstance(product.variant, GemmVariant), product
        law = surfaces.get(SurfaceKey("torch", "gemm", replace(product.variant, form=""), "cold"))
        if law is None:
            return None
        sizes = np.array([(*product.features, 0.0)[:4]])  # a batch of one where there is none
        took = law.law(sizes, np.array([float(product.bytes)]), np.array([float(product.flops)]))
        features = (*features, round(float(took[0]) / log(2.0), DIGITS))
    return Part(work.op_class, variant, features, bytes_, product.flops)


@dataclass(frozen=True)
class Conv1x1:
    """What a profile knows of 1x1 convolutions."""

    surfaces: Mapping[SurfaceKey, Surface]

    @cached_property
    def _parts(self) -> dict[tuple[WorkLike, ConvVariant], Part | None]:
        """What `part_of` found."""
        return {}

    @cached_property
    def _sizes(self) -> dict[SurfaceKey, Array]:
        """Sizes that decide which algorithm is taken, in octaves, of the measured points."""
        return {
            key: np.array(surface.features)[:, :4]
            for key, surface in self.surfaces.items()
            if isinstance(key.variant, ConvVariant) and key.variant.algorithm
        }

    def estimates(
        self, requests: Sequence[Request], estimate: Callable[[Sequence[Request]], list[Estimate]]
    ) -> dict[int, Estimate]:
        """The estimates of those requests that are 1x1 convolutions whose products were measured,
        by their place; `estimate` answers for products."""
        asked: list[Request] = []
        parts: list[tuple[int, float, list[tuple[SurfaceKey, int]]]] = []  # of a request: its place, doubt, products
        known: dict[Request, int] = {}
        for i, (work, backend, cache) in enumerate(requests):
            if not (self._sizes and is_1x1(work.variant)):
                continue
            for variant, state, doubt in _alike(work.variant, cache):
                ways = [self._known(work, own, backend, state) for own in ways_of(variant)]
                if all(ways):
                    for way in ways:
                        places = []
                        for key, part in way:
                            request = (part, backend, state)
                            if request not in known:
                                known[request] = len(asked)
                                asked.append(request)
                            places.append((key, known[request]))
                        parts.append((i, doubt, places))
                    break
        if not parts:
            return {}
        each = estimate(asked)
        found: dict[int, list[Estimate]] = {}
        doubts: dict[int, float] = {}
        for i, doubt, places in parts:
            found.setdefault(i, []).append(self._chosen([(key, asked[at][0], each[at]) for key, at in places]))
            doubts[i] = doubt
        return {i: _sum(own, doubts[i]) for i, own in found.items()}

    def _known(
        self, work: WorkLike, ways: Sequence[ConvVariant], backend: str, cache: str
    ) -> list[tuple[SurfaceKey, Part]]:
        """The surfaces of a product's algorithms, with what each is asked."""
        found = []
        for variant in ways:
            key = SurfaceKey(backend, work.op_class, variant, cache)
            if key in self._sizes:
                if (work, variant) not in self._parts:
                    self._parts[work, variant] = part_of(work, variant, self.surfaces)
                part = self._parts[work, variant]
                if part is not None:
                    found.append((key, part))
        return found

    def _chosen(self, ways: Sequence[tuple[SurfaceKey, WorkLike, Estimate]]) -> Estimate:
        """The estimate of the algorithm that is likeliest, by the votes of the nearest rows over its seconds; how much
        longer another would take is doubt, as likely as that one is."""
        measured = [one for key, part, one in ways if part.features in self.surfaces[key].measured]
        if measured or len(ways) == 1:
            return measured[0] if measured else ways[0][2]
        votes = self._votes([key for key, _, _ in ways], ways[0][1].features[:4])
        scores = np.clip(votes, LEAST_SHARE, 1.0) / np.array([one.seconds for _, _, one in ways])
        best = int(scores.argmax())
        chosen = ways[best][2]
        logs = np.log([one.seconds / chosen.seconds for _, _, one in ways])
        doubt = sqrt(float((scores / scores.sum()) @ logs**2))
        return chosen._replace(sigma=hypot(chosen.sigma, doubt))

    def _votes(self, keys: Sequence[SurfaceKey], sizes: tuple[float, ...]) -> Array:
        """The share of the nearest rows' votes that each surface has."""
        distances = [((self._sizes[key] - np.array(sizes)) ** 2).sum(axis=1) for key in keys]
        whose = np.repeat(np.arange(len(keys)), [len(own) for own in distances])
        every = np.concatenate(distances)
        nearest = np.argsort(every, kind="stable")[:NEAREST]
        weights = 1.0 / (every[nearest] + SOFTENING)
        votes = np.bincount(whose[nearest], weights, len(keys))
        return np.asarray(votes / votes.sum())


def _alike(variant: ConvVariant, cache: str) -> list[tuple[ConvVariant, str, float]]:
    """Variants and cache states that answer, the own first, with what each adds to the deviation of log seconds."""
    twin = twin_of(variant)
    alike = [(variant, 0.0), (twin, TWIN)] if isinstance(twin, ConvVariant) else [(variant, 0.0)]
    if variant.dtype not in ("bf16", "fp16"):
        alike.append((replace(variant, dtype="bf16"), SAME_CLASS))
    other = "hot" if cache == "cold" else "cold"
    states = ((cache, 0.0), (other, OTHER_CACHE))
    return [(own, state, hypot(doubt, more)) for state, more in states for own, doubt in alike]


def _sum(parts: Sequence[Estimate], doubt: float) -> Estimate:
    """The estimate of products that follow one another."""
    seconds = sum(one.seconds for one in parts)
    sigma = sqrt(sum((one.seconds * one.sigma) ** 2 for one in parts)) / seconds
    bases = {one.basis for one in parts}
    basis = bases.pop() if len(bases) == 1 else "extrapolated" if "extrapolated" in bases else "interpolated"
    launches = sum(one.launches for one in parts) if all(one.launches for one in parts) else 0
    source = " + ".join(one.source for one in parts)
    return Estimate(seconds, hypot(sigma, doubt), "extrapolated" if doubt else basis, source, launches)
