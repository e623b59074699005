"""All surfaces of a folder of measurements, each with a prior from its kin and the ceilings. scipy, at fit
time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flopcast.kernels.shapes import DTYPE_BYTES, Call
from flopcast.microbench.records.machine import Device
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.fit import priors as fit_priors
from flopcast.roofline.gpu.fit import surface as fit_surface
from flopcast.roofline.gpu.fit.convolution import conv_priors
from flopcast.roofline.gpu.fit.kernel_choice import learn_tiles
from flopcast.roofline.gpu.fit.priors import Belief, Prior
from flopcast.roofline.gpu.fit.surface import Points
from flopcast.roofline.gpu.laws import attention, gemm, gemm_triton, reduction
from flopcast.roofline.gpu.laws.laws import LAWS, kind_of
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.describe import Work
from flopcast.roofline.stream.lowering.variants import (
    AttentionVariant,
    CallVariant,
    ConvVariant,
    GemmVariant,
    SurfaceKey,
    Variant,
)

# What is believed of residuals timed by the wall clock, on a processor: threads, caches and neighbours
# make them several times those of a GPU (there 0.05 and 0.015 for kernels that move bytes).
WALL_AMPLITUDE, WALL_WHITE = 0.15, 0.08
# What a product of unaligned rows has of its own: cuBLAS picks among few kernels there, and not the best (log seconds).
UNALIGNED_WHITE = 0.08
# What a third size takes each: of a reduction up to 1 ns on an H200, of an embedding's gradient 20 to 50 ns.
EACH = {"reduction": Belief(1e-10, 1.5), "embedding": Belief(2e-8, 1.0)}
# What a reduction waits for (`reduce_plan.py`): a load 0.5 us cold and 0.2 hot, a partial sum 0.25 us. The same kernel
# over other strides waits as long.
LATENCIES = {"load": Belief(4e-7, 1.0), "merge": Belief(2.5e-7, 1.0), "split": Belief(1e-6, 1.0)}
LATENCY_SD = 0.2
# A load where the calls measured all do as many, which a floor cannot be told from: as sums down columns have it on an
# H200, cold and hot. With the sum's own (1.1 to 1.7 us) sums over groups of 7 were 20 to 44% too slow.
LOADS = {False: 5e-7, True: 2e-7}
# What a result takes where all are sums of as many elements, across rows: next to nothing, as down columns.
ACROSS = Belief(2e-12, 0.5)
# An element of those added up across rows that do not lie one after the other, which are not read by vectors.
ELEMENT = Belief(3e-12, 0.7)
TURN = {False: Belief(9e-7, 0.5), True: Belief(4e-7, 0.5)}  # a turn of the loss's one block, cold and hot
STEP = Belief(1e-9, 1.5)  # on a processor: an element of those that are added up
# Kernels that widen what they read (bf16 to fp32) load one element at a time and wait for it: an SM holds 2,048 threads
# of 4 elements, and each such round takes 1 to 2 us on an H200, cold (10 MiB 5.8 us, 12.5 MiB 8.2).
WAVE, ROUND_ELEMENTS = Belief(5e-7, 1.5), 8192.0
# Batch norms over planes: what a round of blocks that add up takes to begin and end, each of their loads, and a round
# of the blocks that lay the result out: 2.5, 0.4 and 2.4 us on an H200.
PLANES = {"plane": Belief(2.5e-6, 0.5), "plane_load": Belief(4e-7, 0.5), "spread": Belief(2.4e-6, 0.5)}
# How well a kernel's bandwidth beyond the L2 is told by its bandwidth with cold operands (log).
BEYOND_SD = 0.1
# What a tensor of a list takes, as launches hold so many of them, and where it is large as its last blocks run alone.
TENSOR, LARGE_TENSOR = Belief(2e-8, 1.0), Belief(7e-8, 1.0)
# Log-softmax reads long rows, faster where they start at multiples of 128 bytes and not just of 32: fp32 near 151,936,
# forward 2.03 and 2.10 TB/s, backward 2.8 and 3.0. log2 of so many items.
ROW_ALIGNMENTS = 5.0
# The loss's forward is one block, which reads rows by the thousand: 40 GB/s of the sectors it needs.
ONE_BLOCK = Belief(4e10, 0.5)


@dataclass(frozen=True)
class Case:
    """A measured row as the fit sees it."""

    row: dict[str, Any]
    work: Work
    backend: str
    cache: str
    seconds: float
    noise: float

    @property
    def surface(self) -> SurfaceKey:
        return SurfaceKey(self.backend, self.work.op_class, self.work.variant, self.cache)


def fit_surfaces(
    cases: Sequence[Case], device: Device, peaks: Mapping[str, Number], ceilings: Mapping[str, Number]
) -> tuple[dict[SurfaceKey, Surface], int]:
    """(surface by its key, number of rows that were given no weight)."""
    groups: dict[SurfaceKey, list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.surface].append(case)
    kinds = {name: _kind(group[0], device) for name, group in groups.items()}
    fitted: dict[SurfaceKey, Surface] = {}
    doubtful = 0
    small = {name: group for name, group in groups.items() if kinds[name] == "memory"}
    priors = _memory_priors(small, device, ceilings)
    priors |= conv_priors(
        {key: _points(group) for key, group in groups.items() if kinds[key] == "conv"},
        _floor(ceilings),
        _bandwidth(ceilings, "cold"),
        {dtype: number.value for dtype, number in peaks.items()},
        float(device.get("sm_count") or 1),
    )
    tiles = learn_tiles(
        ((case.work.shape, case.row.get("kernels") or ()) for case in cases if case.backend == "torch"),
        float(device.get("sm_count") or 1),
        {dtype: number.value for dtype, number in peaks.items()},
    )
    fitted_from: dict[SurfaceKey, tuple[Points, Prior]] = {}
    donors: dict[tuple[str, str, bool], Surface] = {}
    # the surface with most points first: what it learns of tiles and floors is what the others start from; cold before
    # hot, which share the residuals of products
    for name, group in sorted(groups.items(), key=lambda item: (item[0].cache != "cold", -len(item[1]), str(item[0]))):
        work, points = group[0].work, _points(group)
        if kinds[name] == gemm_triton.KIND and isinstance(work.variant, GemmVariant):
            own = gemm_triton.PARTIAL_NOISE * gemm_triton.partial(work.variant, points.features)
            points = replace(points, noise=np.hypot(points.noise, own))
        kin = (group[0].backend, work.op_class, _is_backward_or_unaligned(work.variant))
        prior = priors.get(name) or _dense_prior(
            group[0].backend, work, points, device, peaks, ceilings, tiles if group[0].backend == "torch" else {}
        )
        base = _base(name, kinds[name], fitted)
        if base is not None and kinds[name] == "gemm":  # its own dtype's, not that of most points
            prior = prior.learnt_from(base, 0.7)
        elif kin in donors and kinds[name] != "conv":
            prior = prior.learnt_from(donors[kin], 0.7)
        if any(case.row.get("timer") == "wall" for case in group):
            prior = replace(prior, hyper=replace(prior.hyper, amplitude=WALL_AMPLITUDE, white=WALL_WHITE))
            fitted[name], count = fit_surface.fit_doubtful(kinds[name], work.variant, points, prior)
            doubtful += count
        else:
            fitted[name] = fit_surface.fit_surface(kinds[name], work.variant, points, prior, base)
        fitted_from[name] = points, prior
        if kinds[name] != "memory":
            donors.setdefault(kin, fitted[name])
    for name, scale in _pooled_scales(fitted, fitted_from, groups).items():
        fitted[name] = replace(fitted[name], residual=replace(fitted[name].residual, sigma_scale=scale))
    return {key: fitted[key] for key in sorted(fitted, key=str)}, doubtful


def _is_backward_or_unaligned(variant: Variant) -> bool:
    """Whether the kernels are others than those of the forward, of aligned rows."""
    if isinstance(variant, GemmVariant):
        return not variant.is_aligned
    return isinstance(variant, AttentionVariant | ConvVariant) and variant.direction == "bwd"


def _kind(case: Case, device: Device) -> str:
    work = case.work
    if gemm_triton.is_for(case.backend, work.variant) and gemm_triton.table_of(device) is not None:
        return gemm_triton.KIND
    return kind_of(work.op_class)


def _base(key: SurfaceKey, kind: str, fitted: Mapping[SurfaceKey, Surface]) -> Surface | None:
    """Of a kernel with hot operands the surface with cold ones. Cross-validated on an H200's 623 hot products, theirs
    and their cold twins left out, the 90th percentile of the error: random ones 17.3% without, 14.4% with; unaligned
    ones 23.4 and 16.5%, those like streams 10.6 and 9.2%."""
    shares = kind in ("gemm", "conv", "attention") and key.cache != "cold"
    return fitted.get(key.with_cache("cold")) if shares else None


def _pooled_scales(
    fitted: Mapping[SurfaceKey, Surface],
    fitted_from: Mapping[SurfaceKey, tuple[Points, Prior]],
    groups: Mapping[SurfaceKey, list[Case]],
) -> dict[SurfaceKey, float]:
    """sigma_scale of the small surfaces of all but products: from the points of a backend, class and cache state, each
    told by the others of its surface. With 8 points a surface's own would be a guess; untouched, 47% of an H200's
    held-out reductions and, cross-validated, 68% of torch's flash attention with hot operands lay in their 90%
    interval."""
    pools: dict[tuple[str, str, str], dict[SurfaceKey, list[float]]] = defaultdict(dict)
    for name, surface in fitted.items():
        points, prior = fitted_from[name]
        case = groups[name][0]
        if surface.kind != "gemm" and len(points) < fit_surface.POOLED_POINTS and case.row.get("timer") != "wall":
            pool = pools[case.backend, case.work.op_class, case.cache]
            pool[name] = []
            if len(points) > 3:
                pool[name] = fit_surface.left_out_ratios(surface, points, prior, len(points)).tolist()
    scales: dict[SurfaceKey, float] = {}
    for pool in pools.values():
        ratios = np.array([ratio for members in pool.values() for ratio in members])
        if len(ratios) >= fit_surface.POOLED_POINTS:
            scales.update(dict.fromkeys(pool, fit_surface.scale_of(ratios)))
    return scales


def _points(group: Sequence[Case]) -> Points:
    return Points(
        np.array([case.work.features for case in group], float),
        np.array([case.work.bytes for case in group], float),
        np.array([case.work.flops for case in group], float),
        np.array([case.seconds for case in group], float),
        np.array([case.noise for case in group], float),
    )


def _floor(ceilings: Mapping[str, Number]) -> float:
    for name in ("kernel_floor_cupti", "kernel_floor"):
        if name in ceilings:
            return ceilings[name].value
    return 2e-6


def _bandwidth(ceilings: Mapping[str, Number], cache: str) -> float:
    names = ("l2_copy", "hbm_copy") if cache == "hot" else ("hbm_copy", "l2_copy")
    return next((ceilings[name].value for name in names if name in ceilings), 1e12)


def _spill(cache: str, device: Device, ceilings: Mapping[str, Number]) -> tuple[Belief, float] | None:
    l2_bytes = float(device.get("l2_bytes") or 0.0)
    if cache != "hot" or not l2_bytes:
        return None
    return Belief(_bandwidth(ceilings, "cold"), 0.4), l2_bytes


def _memory_priors(
    groups: Mapping[SurfaceKey, list[Case]], device: Device, ceilings: Mapping[str, Number]
) -> dict[SurfaceKey, Prior]:
    """Each law is fitted once from the ceilings; what the laws of a class came out as is then what is
    believed of each, so that a variant of one point is taken for a typical one of its class."""
    first: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    alike: dict[tuple[str, str], list[tuple[SurfaceKey, dict[str, float]]]] = defaultdict(list)
    bandwidths: dict[SurfaceKey, float] = {}
    for name, group in groups.items():
        work, cache, points = group[0].work, group[0].cache, _points(group)
        floor, bandwidth = Belief(_floor(ceilings), 0.5), Belief(_bandwidth(ceilings, cache), 0.7)
        prior = _memory_prior(work, points, floor, bandwidth, _spill(cache, device, ceilings), device)
        params = fit_surface.fit_law("memory", work.variant, points, prior)
        first[_class(work), cache].append(params)
        alike[_operation(work), cache].append((name, params))
        round_seconds = params["wave"] / params["wave_bytes"] if "wave" in params else 0.0
        bandwidths[name] = 1.0 / (1.0 / params["bandwidth"] + round_seconds)
    priors = {}
    for name, group in groups.items():
        work, cache = group[0].work, group[0].cache
        kin = first[_class(work), cache]
        floor, bandwidth = _typical(kin, "floor", 0.3), _typical(kin, "bandwidth", 0.3)
        spill = _spill(cache, device, ceilings)
        cold = bandwidths.get(name.with_cache("cold"))
        if spill is not None and cold is not None:  # what does not fit is fetched as the same kernel does cold
            spill = Belief(cold, BEYOND_SD), spill[1]
        prior = _memory_prior(work, _points(group), floor, bandwidth, spill, device)
        others = [params for other, params in alike[_operation(work), cache] if other != name and "load" in params]
        if others:
            told = {term: _typical(others, term, LATENCY_SD) for term in LATENCIES if term in prior.law}
            if prior.law.get("load", STEP).sd == LATENCY_SD:  # told already
                del told["load"]
            prior = replace(prior, law={**prior.law, **told})
        priors[name] = prior
    return priors


def _call(work: Work) -> CallVariant:
    assert isinstance(work.variant, CallVariant), work
    return work.variant


def _class(work: Work) -> str:
    """Kernels of one are alike in floor and bandwidth: a single block's are its own."""
    return "one block" if _call(work).operation == "nll_loss_forward" else work.op_class


def _operation(work: Work) -> str:
    """The kernel of a reduction, whatever its operand's strides."""
    call = _call(work)
    return f"{work.op_class}/{call.operation}/{(call.pattern or call.dtypes).rstrip('~')}"


def _typical(laws_: Sequence[Mapping[str, float]], name: str, least: float) -> Belief:
    values = np.log([params[name] for params in laws_])
    return Belief(float(np.exp(np.median(values))), float(np.clip(values.std(), least, 0.7)))


def _memory_prior(
    work: Work, points: Points, floor: Belief, bandwidth: Belief, spill: tuple[Belief, float] | None, device: Device
) -> Prior:
    """`spill`: what is believed of the memory behind the L2, and the L2's bytes."""
    inputs = LAWS["memory"].inputs(work.variant, {}, points.features).shape[1]
    prior = fit_priors.memory_prior(floor, bandwidth, inputs)
    law, fixed = dict(prior.law), dict(prior.fixed)
    variant = _call(work)
    if variant.operation.startswith("_log_softmax"):
        fixed["row_alignments"] = ROW_ALIGNMENTS
    if spill is not None:
        law["beyond"], fixed["l2_bytes"] = spill
    if spill is None and (element := widened_bytes(work)) and device.get("sm_count"):
        law["wave"], fixed["wave_bytes"] = WAVE, element * ROUND_ELEMENTS * float(device["sm_count"])
    if work.op_class == "optimizer":
        law |= {"tensor": TENSOR, "large_tensor": LARGE_TENSOR}
    if _class(work) == "one block":
        law["bandwidth"] = ONE_BLOCK
        if isinstance(work.shape, Call):
            rows = work.shape.inputs[0].numel // max(work.shape.inputs[0].shape[-1], 1)
            law["turn"], fixed["row_bytes"] = TURN[spill is not None], work.bytes / max(rows, 1)
    if points.features.shape[1] > 2 and work.op_class in EACH:
        law["each"] = EACH[work.op_class]
        if points.features.shape[1] > 3 and device.get("sm_count"):
            del law["each"]
            law |= {
                name: belief
                for name, belief in PLANES.items()
                if name != "spread" or "backward" not in variant.operation
            }
            fixed["sm_count"] = float(device["sm_count"])
        elif work.op_class == "reduction" and device.get("sm_count"):
            law |= LATENCIES
            fixed["sm_count"] = float(device["sm_count"])
            counts, results = (np.exp2(points.features[:, i]).round() for i in (1, 2))
            plan = reduction.plan(variant, results, counts, fixed["sm_count"])
            if np.ptp(plan.loads) == 0.0:
                law["load"] = Belief(LOADS[spill is not None], LATENCY_SD)
            if np.ptp(counts) == 0.0 and variant.pattern.startswith(("mix", "col")):
                law["each"] = ACROSS
            if variant.operation == "sum" and variant.pattern in ("mix~", "col~"):
                law["element"] = ELEMENT
        elif work.op_class == "reduction":
            law["step"] = STEP
    return replace(prior, law=law, fixed=fixed)


def widened_bytes(work: Work) -> float:
    """Bytes an element of an element-wise call that reads a narrower dtype than it writes; 0 for any other."""
    call = _call(work)
    if work.op_class not in ("pointwise", "copy") or ">" not in call.dtypes or ">" not in call.pattern:
        return 0.0
    (sources, results), (read, written) = call.dtypes.split(">"), call.pattern.split(">")
    sizes = [DTYPE_BYTES.get(name, 0) for name in results.split("+")]
    narrow = any(0 < DTYPE_BYTES.get(name, 0) < min(sizes) for name in sources.split("+"))
    if not narrow or not sources.replace("+", "").isalnum() or "int" in sources or "bool" in sources:
        return 0.0
    whole = set(written.rstrip("~"))  # operands of fewer dimensions are broadcast: next to nothing an element
    full = zip(sources.split("+"), read.split(","), strict=False)
    return float(sum(sizes) + sum(DTYPE_BYTES[name] for name, dims in full if set(dims.rstrip("~")) == whole))


def _dense_prior(
    backend: str,
    work: Work,
    points: Points,
    device: Device,
    peaks: Mapping[str, Number],
    ceilings: Mapping[str, Number],
    tiles: Mapping[tuple[int, str], Mapping[str, float]],
) -> Prior:
    variant = work.variant
    known_peak = peaks.get(variant.dtypes)
    # of fp64, or on a processor where only fp32 was tried, the least that is known
    peak = min((n.value for n in peaks.values()), default=1e12) if known_peak is None else known_peak.value
    sm_count = float(device.get("sm_count") or 1)
    floor, bandwidth = _floor(ceilings), _bandwidth(ceilings, "cold")
    if gemm_triton.is_for(backend, work.variant):
        table = gemm_triton.table_of(device)
        if table is not None:
            return fit_priors.tuned_prior(peak, sm_count, table)
    if isinstance(variant, GemmVariant):
        learnt = gemm.learnt_for(variant, tiles)
        known = {"sm_count": sm_count, **learnt}
        inputs = LAWS[work.op_class].inputs(variant, known, points.features).shape[1]
        l2_bytes = float(device.get("l2_bytes") or 0.0)
        sizes = points.features.shape[1]
        prior = fit_priors.gemm_prior(peak, sm_count, floor, bandwidth, l2_bytes, inputs, sizes)
        prior = replace(prior, fixed={**prior.fixed, **learnt})
        if not variant.is_aligned:
            prior = replace(prior, hyper=replace(prior.hyper, white=UNALIGNED_WHITE))
        return prior
    assert isinstance(variant, AttentionVariant), variant
    schedule = attention.schedule_of(work.backend, variant.direction, variant.head_dim, variant.is_causal, device)
    return fit_priors.attention_prior(peak, sm_count, floor, bandwidth, schedule)
