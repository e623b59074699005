"""What to answer for work that has no surface of its own: the nearest relative's law, and a wider error bar.

In order, each with the standard deviation of log seconds that is added to what the surface itself says:

the other cache state      0.15   times the ratio of the two states, where the class was measured in both
same class and dtypes      0.25   the median of the relatives' laws (bytes and FLOPs put in) and their spread
same class                 0.35   the same; a matrix rate is scaled by the peaks of the dtypes
bytes and FLOPs alone      0.50   kernel floor + bytes at copy bandwidth, or FLOPs at half the peak

Normalisations, convolutions and the fused kernels are unlike the relatives of their class (sums) or have none: where
none of theirs was measured, they are costed by the passes that torch's, cuDNN's and Triton's kernels make over their
tensors (`NORM_PASSES`, `CONV_PASSES`, `fused.FUSED_PASSES`), at copy bandwidth, with the deviation of bytes and FLOPs
alone. A matrix rate is that sustained in its dtype where one was measured.

The added deviations are judgements until held-out variants tell: the spread among variants of one class
seen on an H200 is twofold in bandwidth, 0.3 in log seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from flopcast.roofline.gpu.laws.smooth import median
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.fused import FUSED_LAUNCHES, FUSED_PASSES
from flopcast.roofline.stream.lowering.variants import CallVariant, SurfaceKey

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.request import Request, WorkLike


OTHER_CACHE, SAME_DTYPES, SAME_CLASS, NOTHING = 0.15, 0.25, 0.35, 0.50
OTHER_BACKEND = 0.15
RELATIVES = 7  # at most so many, the most alike
# Where nothing was measured: a kernel of 2 us, 1 TB/s, 100 TFLOP/s.
DEFAULT_FLOOR, DEFAULT_BANDWIDTH, DEFAULT_PEAK = 2e-6, 1e12, 1e14
DEFAULT_EFFICIENCY = 0.5

# What torch's kernels move, over what they would if each tensor were read or written once, and how many they are
# (2.11, layer_norm_kernel.cu and Normalization.cuh). Forward: x for the statistics and again for the result (3 passes,
# not 2). Backward: x and its gradient for the sums and again for the result, and in layer norm once more for the
# weights' gradients (5 and 7, not 3).
NORM_PASSES = {
    "native_layer_norm": (3 / 2, 1), "native_layer_norm_backward": (7 / 3, 2),
    "native_group_norm": (3 / 2, 2), "native_group_norm_backward": (7 / 3, 3),
    "native_batch_norm": (3 / 2, 3), "native_batch_norm_backward": (5 / 3, 1),
}  # fmt: skip
# Batch norm's sums: a block of 512 threads a channel, which waits for each of its loads and divides. 600 cycles a round
# is an assumption of the right size for a load that misses L2, not a measurement.
CHANNEL_THREADS, LOAD_CYCLES, SM_THREADS = 512, 600, 2048
DEFAULT_CLOCK_MHZ, DEFAULT_SM_COUNT = 1700, 132
# cuDNN's kernels for 16 bits want channels last: otherwise every tensor is laid out anew, a read and a write more.
CONV_PASSES = {"nchw": 3, "nhwc": 1}

Answer = tuple[float, float, str]  # seconds, sigma, source


@dataclass(frozen=True)
class Fallback:
    surfaces: Mapping[SurfaceKey, Surface]
    peaks: Mapping[str, float]
    ceilings: Mapping[str, float]
    aliases: Mapping[str, str]
    clock_mhz: float = DEFAULT_CLOCK_MHZ
    sm_count: int = DEFAULT_SM_COUNT

    @cached_property
    def _of_class(self) -> dict[str, list[SurfaceKey]]:
        by_class: dict[str, list[SurfaceKey]] = {}
        for key in self.surfaces:
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
        """Grouped by what is asked for, so that each relative is evaluated once a group."""
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
        other = wanted.with_cache("hot" if wanted.cache == "cold" else "cold")
        surface = self.surfaces.get(other)
        if surface is not None and _fits(surface, works):
            return self._other_cache(wanted, other, surface, works)
        operation = _operation(wanted)
        known = self._of_class.get(wanted.op_class, [])
        if operation in NORM_PASSES and all(_operation(key) != operation for key in known):
            return [self._norm(operation, wanted, work) for work in works]
        if wanted.op_class == "fused" and not known:
            return [self._fused(operation, work) for work in works]
        if wanted.op_class == "conv" and not known:
            return [self._convolution(wanted, work) for work in works]
        # laws take any number of sizes of their class, but one that counts a third size has to be given it
        sizes = min(len(work.features) for work in works)
        relatives = [key for key in known if sizes > 2 or "each" not in self.surfaces[key].params]
        if relatives:
            return self._relatives(wanted, relatives, works)
        return [self._nothing(wanted, work) for work in works]

    def _other_cache(
        self, wanted: SurfaceKey, other: SurfaceKey, surface: Surface, works: Sequence[WorkLike]
    ) -> list[Answer]:
        ratio = self._ratio(wanted.op_class)
        ratio = ratio if wanted.cache == "hot" else -ratio
        found = surface.predict(*_columns(works))
        seconds, sigma = found.seconds * np.exp(ratio), np.hypot(found.sigma, OTHER_CACHE)
        return [(t, s, f"{other}, other cache") for t, s in zip(seconds.tolist(), sigma.tolist(), strict=True)]

    def _relatives(self, wanted: SurfaceKey, relatives: list[SurfaceKey], works: Sequence[WorkLike]) -> list[Answer]:
        best = max(_likeness(wanted, name) for name in relatives)
        chosen = [name for name in relatives if _likeness(wanted, name) == best]
        # of equals, those with most points
        chosen = sorted(chosen, key=lambda name: -len(self.surfaces[name].seconds))[:RELATIVES]
        columns = _columns(works)
        logs = np.stack([self.surfaces[n].law(*columns) + self._shift(wanted, n) for n in chosen])
        spread = logs.std(axis=0)
        same_dtypes = all(name.variant.dtypes == wanted.variant.dtypes for name in chosen)
        added = SAME_DTYPES if same_dtypes else SAME_CLASS
        if all(name.backend != wanted.backend for name in chosen):
            added = float(np.hypot(added, OTHER_BACKEND))
        seconds, sigma = np.exp(median(logs)), np.hypot(spread, added)
        source = f"{wanted.op_class} like {chosen[0].backend} {chosen[0].variant}"
        return [(t, s, source) for t, s in zip(seconds.tolist(), sigma.tolist(), strict=True)]

    def _shift(self, wanted: SurfaceKey, name: SurfaceKey) -> float:
        """log of what a relative's time is multiplied by: cache state, and the dtypes' matrix rates."""
        shift = 0.0
        if wanted.cache != name.cache:
            ratio = self._ratio(wanted.op_class)
            shift += ratio if wanted.cache == "hot" else -ratio
        if wanted.op_class in ("gemm", "attention") and wanted.variant.dtypes != name.variant.dtypes:
            own, its = (self.ceilings.get(f"matrix_sustained/{n.variant.dtypes}") for n in (wanted, name))
            if not (own and its):
                own, its = self.peaks.get(wanted.variant.dtypes), self.peaks.get(name.variant.dtypes)
            if own and its:
                shift += float(np.log(its / own))
        return shift

    def _norm(self, operation: str, wanted: SurfaceKey, work: WorkLike) -> Answer:
        """Passes over the tensors at copy bandwidth; batch norm's sums no faster than a channel's block loads."""
        passes, kernels = NORM_PASSES[operation]
        bandwidth = self.ceilings.get("hbm_copy", DEFAULT_BANDWIDTH)
        seconds = work.bytes * passes / bandwidth
        if "batch_norm" in operation and wanted.variant.tokens[-1].startswith("mix"):
            count, channels = (round(2**size) for size in work.features[1:3])
            waves = ceil(channels * CHANNEL_THREADS / (SM_THREADS * self.sm_count))
            loop = waves * count / CHANNEL_THREADS * LOAD_CYCLES / (self.clock_mhz * 1e6)
            is_backward = operation.endswith("_backward")  # in one kernel; forward the result has one of its own
            seconds = max(seconds, 2 * loop if is_backward else loop + work.bytes / bandwidth)
        return kernels * self._floor + seconds, NOTHING, "passes over its tensors"

    def _fused(self, operation: str, work: WorkLike) -> Answer:
        """Its kernels' floors, and its bytes at copy bandwidth as often as they are moved."""
        seconds = work.bytes / self.ceilings.get("hbm_copy", DEFAULT_BANDWIDTH) * FUSED_PASSES.get(operation, 1.0)
        return FUSED_LAUNCHES.get(operation, 1) * self._floor + seconds, NOTHING, "passes over its tensors"

    def _convolution(self, wanted: SurfaceKey, work: WorkLike) -> Answer:
        """Its FLOPs at the rate sustained by products of its dtype, and its tensors laid out for it."""
        dtype = wanted.variant.tokens[1]
        bandwidth = self.ceilings.get("hbm_copy", DEFAULT_BANDWIDTH)
        passes = CONV_PASSES.get(wanted.variant.tokens[2], 1) if dtype in ("bf16", "fp16") else 1
        moving = work.bytes * (passes - 1) / bandwidth  # kernels of their own, before and after the products
        return (
            passes * self._floor + moving + max(work.flops / self._matrix_rate(dtype), work.bytes / bandwidth),
            NOTHING,
            "FLOPs and passes over its tensors",
        )

    def _matrix_rate(self, dtype: str) -> float:
        """FLOP/s that products sustain: measured, else half the peak."""
        peak = self.peaks.get(dtype) or self.peaks.get("bf16") or DEFAULT_PEAK
        return self.ceilings.get(f"matrix_sustained/{dtype}") or peak * DEFAULT_EFFICIENCY

    @property
    def _floor(self) -> float:
        return self.ceilings.get("kernel_floor", DEFAULT_FLOOR)

    def _nothing(self, wanted: SurfaceKey, work: WorkLike) -> Answer:
        floor = self._floor
        bandwidth = self.ceilings.get("hbm_copy", DEFAULT_BANDWIDTH)
        seconds = floor + work.bytes / bandwidth
        if work.flops:
            peak = self.peaks.get(wanted.variant.dtypes) or self.peaks.get("bf16") or DEFAULT_PEAK
            seconds = max(seconds, floor + work.flops / (peak * DEFAULT_EFFICIENCY))
        return seconds, NOTHING, "bytes and FLOPs alone"


def _likeness(wanted: SurfaceKey, name: SurfaceKey) -> tuple[bool, bool, int, bool]:
    """Greater is more alike: dtypes first, then backend, shared tokens of the variant, cache."""
    # a sum over dimensions between others strides as one over the first does: no row of its own for each result
    own, its = ({token.replace("mix", "col") for token in n.variant.tokens} for n in (wanted, name))
    shared = len(own & its)
    return (
        name.variant.dtypes == wanted.variant.dtypes,
        name.backend == wanted.backend,
        shared,
        name.cache == wanted.cache,
    )


def _operation(key: SurfaceKey) -> str:
    """The operation of a call that only moves bytes; "" of any other."""
    return key.variant.operation if isinstance(key.variant, CallVariant) else ""


def _fits(surface: Surface, works: Sequence[WorkLike]) -> bool:
    return len(surface.features[0]) == len(works[0].features)


def _columns(works: Sequence[WorkLike]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([work.features for work in works], float),
        np.array([work.bytes for work in works], float),
        np.array([work.flops for work in works], float),
    )
