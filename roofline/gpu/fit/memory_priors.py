"""Priors of the surfaces of kernels that only move bytes, from other surfaces of their class. Used at fit time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flopcast.kernels.shapes import DTYPE_BYTES, Call
from flopcast.roofline.gpu.fit.cases import Group, Limits
from flopcast.roofline.gpu.fit.priors import Belief, Prior, memory_prior, typical
from flopcast.roofline.gpu.fit.surface import fit_law
from flopcast.roofline.gpu.laws import reduction
from flopcast.roofline.gpu.laws.laws import LAWS
from flopcast.roofline.gpu.profile.unmeasured import OTHER_CACHE
from flopcast.roofline.stream.lowering.describe import Work
from flopcast.roofline.stream.lowering.variants import CallVariant, SurfaceKey

# Seconds per unit of a third size: up to 1 ns for a reduction on an H200, 20 to 50 ns for an embedding's gradient.
EACH = {"reduction": Belief(1e-10, 1.5), "embedding": Belief(2e-8, 1.0)}
# Latencies of a reduction (`laws/reduction.py`): a load takes 0.5 us cold and 0.2 hot, a partial sum 0.25 us. The same
# kernel over other strides has the same latencies.
LATENCIES = {"load": Belief(4e-7, 1.0), "merge": Belief(2.5e-7, 1.0), "split": Belief(1e-6, 1.0)}
LATENCY_SD = 0.2
# Seconds per load where all measured calls do equally many and the fit cannot separate it from the floor: values of
# sums down columns on an H200, cold and hot. With the sum's own (1.1 to 1.7 us) forecasts of sums over groups of 7 were
# 20 to 44% too slow.
LOADS = {False: 5e-7, True: 2e-7}
# Seconds per result where all are sums of equally many elements across rows: next to nothing, as down columns.
ACROSS = Belief(2e-12, 0.5)
# Seconds per element summed across rows that are not contiguous, which are not read with vector loads.
ELEMENT = Belief(3e-12, 0.7)
TURN = {False: Belief(9e-7, 0.5), True: Belief(4e-7, 0.5)}  # per iteration of the loss's only block, cold, hot
STEP = Belief(1e-9, 1.5)  # on a processor: seconds per element summed
# Kernels that widen what they read (bf16 to fp32) load one element at a time and wait for it: an SM holds 2,048 threads
# of 4 elements each, and each such round takes 1 to 2 us on an H200, cold (10 MiB 5.8 us, 12.5 MiB 8.2).
WAVE, ROUND_ELEMENTS = Belief(5e-7, 1.5), 8192.0
# Batch norms over planes: the seconds to start and end a round of the summing blocks, per load of theirs, and per round
# of the blocks that write the result: 2.5, 0.4 and 2.4 us on an H200.
PLANES = {"plane": Belief(2.5e-6, 0.5), "plane_load": Belief(4e-7, 0.5), "spread": Belief(2.4e-6, 0.5)}
# Standard deviations of log bandwidth beyond the L2, given a kernel's bandwidth with cold operands, or only a copy's.
BEYOND_SD, SPILL_SD = 0.1, 0.4
# Seconds per tensor of a list, since a launch holds a limited number of them; and per large tensor, since its last
# blocks run alone.
TENSOR, LARGE_TENSOR = Belief(2e-8, 1.0), Belief(7e-8, 1.0)
# Log-softmax reads long rows faster where they start at multiples of 128 bytes and not just of 32: fp32 near 151,936
# items, forward 2.03 (32) and 2.10 (128) TB/s, backward 2.8 and 3.0. log2 of that number of items.
ROW_ALIGNMENTS = 5.0
# Standard deviation of log seconds of rows that a kernel holds in two tiles, about what whole ones tell of them: other
# code for the same work, as in another state of the cache (`profile/unmeasured.py`). The rows that were fitted are all
# of one tile.
PARTED = OTHER_CACHE
# The loss's forward is a single block, which reads thousands of rows: 40 GB/s of the sectors it needs.
ONE_BLOCK = Belief(4e10, 0.5)


def memory_priors(groups: Mapping[SurfaceKey, Group], gpu: Limits) -> dict[SurfaceKey, Prior]:
    """The prior of each surface, from the points of all.

    Each law is first fitted with a prior from the ceilings; the median and spread of the fitted parameters of a class
    are then the prior of each of its surfaces, so that a variant of one point is taken for a typical one."""
    first: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    alike: dict[tuple[str, str], list[tuple[SurfaceKey, dict[str, float]]]] = defaultdict(list)
    bandwidths: dict[SurfaceKey, float] = {}
    for key, group in groups.items():
        believed = Belief(gpu.floor, 0.5), Belief(gpu.bandwidth(key.cache), 0.7)
        prior = _memory_prior(group, *believed, _spill(key, gpu, Belief(gpu.bandwidth("cold"), SPILL_SD)), gpu)
        params = fit_law("memory", key.variant, group.points, prior)
        first[_class(group.work), key.cache].append(params)
        alike[_operation(group.work), key.cache].append((key, params))
        round_seconds = params["wave"] / params["wave_bytes"] if "wave" in params else 0.0
        bandwidths[key] = 1.0 / (1.0 / params["bandwidth"] + round_seconds)
    priors = {}
    for key, group in groups.items():
        kin = first[_class(group.work), key.cache]
        cold = bandwidths.get(key.with_cache("cold"))  # what does not fit into L2 is read at the kernel's cold rate
        spill = _spill(key, gpu, Belief(gpu.bandwidth("cold"), SPILL_SD) if cold is None else Belief(cold, BEYOND_SD))
        prior = _memory_prior(group, typical(kin, "floor", 0.3), typical(kin, "bandwidth", 0.3), spill, gpu)
        same = alike[_operation(group.work), key.cache]
        others = [params for other, params in same if other != key and "load" in params]
        if others:
            known = {term: typical(others, term, LATENCY_SD) for term in LATENCIES if term in prior.law}
            if prior.law.get("load", STEP).sd == LATENCY_SD:  # known already
                del known["load"]
            prior = replace(prior, law={**prior.law, **known})
        priors[key] = prior
    return priors


def _spill(key: SurfaceKey, gpu: Limits, bandwidth: Belief) -> tuple[Belief, float] | None:
    """Prior of the bandwidth beyond the L2, and the L2's bytes; None where operands are cold or the L2 is unknown."""
    return (bandwidth, gpu.l2_bytes) if key.cache == "hot" and gpu.l2_bytes else None


def _call(work: Work) -> CallVariant:
    assert isinstance(work.variant, CallVariant), work
    return work.variant


def _class(work: Work) -> str:
    """The class whose kernels share priors of floor and bandwidth; the single-block loss is a class of its own."""
    return "one block" if _call(work).operation == "nll_loss_forward" else work.op_class


def _operation(work: Work) -> str:
    """A name of a reduction's kernel that is the same whatever its operand's strides."""
    call = _call(work)
    return f"{work.op_class}/{call.operation}/{(call.pattern or call.dtypes).rstrip('~')}"


def _memory_prior(
    group: Group, floor: Belief, bandwidth: Belief, spill: tuple[Belief, float] | None, gpu: Limits
) -> Prior:
    work, features = group.work, group.points.features
    prior = memory_prior(floor, bandwidth, LAWS["memory"].inputs(work.variant, {}, features).shape[1])
    law, fixed = dict(prior.law), dict(prior.fixed)
    variant = _call(work)
    if work.op_class == "fused" and "rms_norm" in variant.operation:
        fixed["parted_rows"] = 1.0
        prior = replace(prior, hyper=replace(prior.hyper, levels=(*prior.hyper.levels, PARTED)))
    if variant.operation.startswith("_log_softmax"):
        fixed["row_alignments"] = ROW_ALIGNMENTS
    if spill is not None:
        law["beyond"], fixed["l2_bytes"] = spill
    if spill is None and (element := widened_bytes(work)) and gpu.sm_count:
        law["wave"], fixed["wave_bytes"] = WAVE, element * ROUND_ELEMENTS * gpu.sm_count
    if work.op_class == "optimizer":
        law |= {"tensor": TENSOR, "large_tensor": LARGE_TENSOR}
    if _class(work) == "one block":
        law["bandwidth"] = ONE_BLOCK
        if isinstance(work.shape, Call):
            rows = work.shape.inputs[0].numel // max(work.shape.inputs[0].shape[-1], 1)
            law["turn"], fixed["row_bytes"] = TURN[spill is not None], work.bytes / max(rows, 1)
    if features.shape[1] > 2 and work.op_class in EACH:
        law["each"] = EACH[work.op_class]
        if features.shape[1] > 3 and gpu.sm_count:
            del law["each"]
            law |= {
                name: belief
                for name, belief in PLANES.items()
                if name != "spread" or "backward" not in variant.operation
            }
            fixed["sm_count"] = gpu.sm_count
        elif work.op_class == "reduction" and gpu.sm_count:
            law |= LATENCIES
            fixed["sm_count"] = gpu.sm_count
            counts, results = (np.exp2(features[:, i]).round() for i in (1, 2))
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
    """Bytes per element of an element-wise call that reads a narrower dtype than it writes; 0 for any other."""
    call = _call(work)
    if work.op_class not in ("pointwise", "copy") or ">" not in call.dtypes or ">" not in call.pattern:
        return 0.0
    (sources, results), (read, written) = call.dtypes.split(">"), call.pattern.split(">")
    sizes = [DTYPE_BYTES.get(name, 0) for name in results.split("+")]
    narrow = any(0 < DTYPE_BYTES.get(name, 0) < min(sizes) for name in sources.split("+"))
    if not narrow or not sources.replace("+", "").isalnum() or "int" in sources or "bool" in sources:
        return 0.0
    whole = set(written.rstrip("~"))  # broadcast operands of fewer dimensions cost almost nothing
    full = zip(sources.split("+"), read.split(","), strict=False)
    return float(sum(sizes) + sum(DTYPE_BYTES[name] for name, dims in full if set(dims.rstrip("~")) == whole))
