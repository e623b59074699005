"""Fits all surfaces of a folder of measurements, with priors from related surfaces and ceilings. scipy, at fit time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from statistics import median

import numpy as np

from flopcast.roofline.gpu.fit.cases import Case, Group, Limits, points_of
from flopcast.roofline.gpu.fit.convolution import conv_prior, with_products
from flopcast.roofline.gpu.fit.kernel_choice import learn_tiles
from flopcast.roofline.gpu.fit.memory_priors import memory_priors
from flopcast.roofline.gpu.fit.priors import Prior, attention_prior, gemm_prior, tuned_prior
from flopcast.roofline.gpu.fit.surface import POOLED_POINTS, fit_doubtful, fit_surface, left_out_ratios, scale_of
from flopcast.roofline.gpu.laws import attention, gemm, gemm_triton
from flopcast.roofline.gpu.laws.laws import LAWS, kind_of
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.gpu.suites import HOT_BYTES
from flopcast.roofline.stream.lowering.conv_1x1 import is_1x1
from flopcast.roofline.stream.lowering.variants import AttentionVariant, ConvVariant, GemmVariant, SurfaceKey, Variant

# Prior of the residuals of times by the wall clock, on a processor: threads, caches and other processes make them
# several times those of a GPU (there 0.05 and 0.015 for kernels that move bytes).
WALL_AMPLITUDE, WALL_WHITE = 0.15, 0.08
# Deviation (log seconds) between a convolution with hot operands and with cold ones: of 118 that an H200 ran both ways
# the hot ones took 2.6% less at the median, 10% at the 90th percentile.
HOT_DOUBT = 0.05
PAIRS = 5  # sizes measured in both states, from which on those of one state alone are taken by their median ratio
# White noise (log seconds) of products of unaligned rows: cuBLAS picks among few kernels there, and not the best.
UNALIGNED_WHITE = 0.08


def fit_surfaces(
    cases: Sequence[Case], gpu: Limits, known: Mapping[SurfaceKey, Surface] | None = None
) -> tuple[dict[SurfaceKey, Surface], int]:
    """Fits all surfaces; returns them by key, and the number of rows that were given no weight. Those `known` of others
    are priors of their relatives, as those fitted here are. 1x1 convolutions come last, since their products
    are told by those of matrices."""
    conv_1x1 = [case for case in cases if is_1x1(case.work.variant)]
    others = [case for case in cases if not is_1x1(case.work.variant)]
    fitted, doubtful = _fit_surfaces(others, gpu, known or {})
    if not conv_1x1:
        return fitted, doubtful
    every = {**(known or {}), **fitted}
    more, more_doubtful = _fit_surfaces(with_products(conv_1x1, every), gpu, every)
    both = {**fitted, **more}
    return {key: both[key] for key in sorted(both, key=str)}, doubtful + more_doubtful


def _fit_surfaces(
    cases: Sequence[Case], gpu: Limits, known: Mapping[SurfaceKey, Surface]
) -> tuple[dict[SurfaceKey, Surface], int]:
    by_surface: dict[SurfaceKey, list[Case]] = defaultdict(list)
    for case in cases:
        by_surface[case.surface].append(case)
    by_surface |= {key: _of_either_state(key, members, by_surface) for key, members in by_surface.items()}
    groups = {key: _group(key, members, gpu) for key, members in by_surface.items()}
    priors = memory_priors({key: group for key, group in groups.items() if group.kind == "memory"}, gpu)
    sm_count = gpu.sm_count or 1.0
    named = ((case.work.shape, case.kernels) for case in cases if case.backend == "torch")
    tiles = learn_tiles(named, sm_count, gpu.peaks)
    fitted: dict[SurfaceKey, Surface] = {}
    doubtful = 0
    donors = _donors(known)
    # the surface with most points first, because its parameters are the others' prior; cold before hot, because hot
    # products share the residuals of cold ones
    order = sorted(groups, key=lambda key: (key.cache != "cold", -len(groups[key].points), str(key)))
    for key in order:
        group = groups[key]
        kind, points = group.kind, group.points
        kin = _kin(key, kind)
        prior = priors.get(key) or _dense_prior(key, group, gpu, tiles if key.backend == "torch" else {})
        base = _base(key, kind, fitted)
        if base is not None and kind == "gemm":  # the surface of the same dtype, not the one of most points
            prior = prior.learnt_from(base, 0.7)
        elif kin in donors and kind != "conv":
            prior = prior.learnt_from(donors[kin], 0.7)
        if group.is_wall:
            prior = replace(prior, hyper=replace(prior.hyper, amplitude=WALL_AMPLITUDE, white=WALL_WHITE))
            fitted[key], count = fit_doubtful(kind, key.variant, points, prior)
            doubtful += count
        else:
            fitted[key] = fit_surface(kind, key.variant, points, prior, base)
        priors[key] = prior
        if kind != "memory":
            donors.setdefault(kin, fitted[key])
    for key, scale in _pooled_scales(fitted, groups, priors).items():
        fitted[key] = replace(fitted[key], residual=replace(fitted[key].residual, sigma_scale=scale))
    return {key: fitted[key] for key in sorted(fitted, key=str)}, doubtful


Kin = tuple[str, str, str, bool]


def _kin(key: SurfaceKey, kind: str) -> Kin:
    """What surfaces share that learn from each other: backend, operation, law, and the direction or alignment."""
    return key.backend, key.op_class, kind, _is_backward_or_unaligned(key.variant)


def _donors(known: Mapping[SurfaceKey, Surface]) -> dict[Kin, Surface]:
    """Of the surfaces of products and attention, cold ones, that with most points of each kin."""
    found: dict[Kin, Surface] = {}
    for key in sorted(known, key=lambda key: (-len(known[key].bytes), str(key))):
        if key.cache == "cold" and known[key].kind != "memory":
            found.setdefault(_kin(key, known[key].kind), known[key])
    return found


def _of_either_state(key: SurfaceKey, members: Sequence[Case], every: Mapping[SurfaceKey, list[Case]]) -> list[Case]:
    """The cases of a surface; of convolutions with those of sizes that were measured in the other cache state alone, as
    far as an L2 can hold them.

    Left out by size, 427 rows of an H200 were 5.1% off at the median with these, without them 6.3%."""
    if not isinstance(key.variant, ConvVariant):
        return list(members)
    known = {case.work.features: case.seconds for case in members}
    other = every.get(key.with_cache("hot" if key.cache == "cold" else "cold"), ())
    shared = [
        log(known[case.work.features] / case.seconds)
        for case in other
        if case.work.features in known and case.work.bytes <= HOT_BYTES
    ]
    times = exp(median(shared)) if len(shared) >= PAIRS else 1.0
    others = [
        case
        for case in other
        if case.work.features not in known and (key.cache == "cold" or case.work.bytes <= HOT_BYTES)
    ]
    return [*members, *(_of_other_state(case, times if case.work.bytes <= HOT_BYTES else 1.0) for case in others)]


def _of_other_state(case: Case, times: float) -> Case:
    return replace(case, seconds=case.seconds * times, noise=float(np.hypot(case.noise, HOT_DOUBT)))


def _group(key: SurfaceKey, members: Sequence[Case], gpu: Limits) -> Group:
    kind, points = kind_of(key.op_class, key.variant), points_of(members)
    if gemm_triton.is_for(key.backend, key.variant) and gemm_triton.table_of(gpu.device) is not None:
        kind = gemm_triton.KIND
        if isinstance(key.variant, GemmVariant):
            own = gemm_triton.PARTIAL_NOISE * gemm_triton.partial(key.variant, points.features)
            points = replace(points, noise=np.hypot(points.noise, own))
    return Group(kind, members[0].work, points, any(case.timer == "wall" for case in members))


def _is_backward_or_unaligned(variant: Variant) -> bool:
    """Whether the kernels differ from those of the forward, or, for products, from those of aligned rows."""
    if isinstance(variant, GemmVariant):
        return not variant.is_aligned
    return isinstance(variant, AttentionVariant | ConvVariant) and variant.direction == "bwd"


def _base(key: SurfaceKey, kind: str, fitted: Mapping[SurfaceKey, Surface]) -> Surface | None:
    """The cold surface whose residual a hot surface shares; None for others.

    90th percentile of the error on an H200's 623 hot products, cross-validated with each product and its cold
    counterpart left out: random ones 17.3% without a base, 14.4% with; unaligned ones 23.4 and 16.5%, those like
    streams 10.6 and 9.2%."""
    shares = kind in ("gemm", "attention") and key.cache != "cold"
    return fitted.get(key.with_cache("cold")) if shares else None


def _pooled_scales(
    fitted: Mapping[SurfaceKey, Surface], groups: Mapping[SurfaceKey, Group], priors: Mapping[SurfaceKey, Prior]
) -> dict[SurfaceKey, float]:
    """sigma_scale of small surfaces, pooled by backend, class and cache state; by backend and class alone where these
    are too few.

    Each point is predicted from the others of its surface. With 8 points a surface's own scale would be a guess, and
    left-out points of a regular grid are the easy ones: no scale is below 1, nor below that of the surface which the
    prior was learnt from;
    without any scale, 47% of an H200's held-out reductions and, cross-validated, 68% of torch's flash attention with
    hot operands lay in their 90% interval."""
    found: dict[SurfaceKey, list[float]] = {}
    for key, surface in fitted.items():
        points = groups[key].points
        if len(points) < POOLED_POINTS and not groups[key].is_wall:
            is_enough = len(points) > 3
            found[key] = left_out_ratios(surface, points, priors[key], len(points)).tolist() if is_enough else []
    by_class = _pooled(found, lambda key: (key.backend, key.op_class))
    pooled = {**by_class, **_pooled(found, lambda key: (key.backend, key.op_class, key.cache))}
    return {key: max(priors[key].hyper.sigma_scale, scale) for key, scale in pooled.items()}


def _pooled(
    found: Mapping[SurfaceKey, Sequence[float]], pool_of: Callable[[SurfaceKey], tuple[str, ...]]
) -> dict[SurfaceKey, float]:
    """The scale of each surface that has POOLED_POINTS ratios at least in its pool."""
    pools: dict[tuple[str, ...], list[SurfaceKey]] = defaultdict(list)
    for key in found:
        pools[pool_of(key)].append(key)
    scales: dict[SurfaceKey, float] = {}
    for members in pools.values():
        ratios = np.array([ratio for key in members for ratio in found[key]])
        if len(ratios) >= POOLED_POINTS:
            scales |= dict.fromkeys(members, scale_of(ratios))
    return scales


def _dense_prior(
    key: SurfaceKey, group: Group, gpu: Limits, tiles: Mapping[tuple[int, str], Mapping[str, float]]
) -> Prior:
    """The prior of a surface of matrix products, convolutions or attention. `tiles`: from `learn_tiles`."""
    variant, features = key.variant, group.points.features
    peak = gpu.peaks.get(variant.dtypes)
    if peak is None:  # fp64, or a processor where only fp32 was measured: the lowest known peak
        peak = min(gpu.peaks.values(), default=1e12)
    sm_count = gpu.sm_count or 1.0
    if group.kind == gemm_triton.KIND and (table := gemm_triton.table_of(gpu.device)) is not None:
        return tuned_prior(peak, sm_count, table)
    floor, bandwidth = gpu.floor, gpu.bandwidth("cold")
    if isinstance(variant, ConvVariant):
        return conv_prior(variant, floor, bandwidth, gpu.peaks, gpu.sm_count or 0.0)
    if isinstance(variant, GemmVariant):
        learnt = gemm.learnt_for(variant, tiles)
        inputs = LAWS[key.op_class].inputs(variant, {"sm_count": sm_count, **learnt}, features).shape[1]
        prior = gemm_prior(peak, sm_count, floor, bandwidth, gpu.l2_bytes, inputs, features.shape[1])
        hyper = prior.hyper if variant.is_aligned else replace(prior.hyper, white=UNALIGNED_WHITE)
        return replace(prior, fixed={**prior.fixed, **learnt}, hyper=hyper)
    assert isinstance(variant, AttentionVariant), variant
    schedule = attention.schedule_of(
        group.work.backend, variant.direction, variant.head_dim, variant.is_causal, gpu.device
    )
    return attention_prior(peak, sm_count, floor, bandwidth, schedule)
