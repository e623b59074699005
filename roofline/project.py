"""A profile for a GPU that was not measured: another's measured profile, scaled by what the datasheets say.

What is scaled, and by what (everything else is kept as measured on the source):

matrix products, attention   SM count as the target's (waves anew); peak by the ratio of dense peaks times the
                             ratio of what power lets a GPU sustain (`sustained_fraction`); latencies by clock
memory-bound kernels         bandwidth, with the SMs' share in what limits a kernel (`memory_rate`)
the same out of L2 ("hot")   SMs x clock x bytes per clock and SM (`L2_BYTES_PER_CLOCK`)
launch floor, host costs     kept: the floor is a property of the driver, the host another machine's anyway

Every time is labelled "extrapolated" and its deviation widened by `SIGMA`, which is common to all shapes of a
surface: in a sum over kernels it does not average out. The widths are judgements from how far the model is
from the published rates named below (all of them, the ones that its constants come from included): they hold
until projections are compared with measurements of the GPUs themselves.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, log

import numpy as np

from flopcast.errors import UsageError
from flopcast.roofline.gpus import GpuSpec, find_spec, load_specs, spec_of_device
from flopcast.roofline.laws import kind_of
from flopcast.roofline.profile import HostCosts, Number, Profile
from flopcast.roofline.surface import Surface

# Standard deviations of log seconds, added to what the source's surfaces say of themselves.
# gemm: sustained rates of L4, L40S, A100 and H100 lie within 20% of `sustained_fraction`, and cuBLAS chooses
#   other tiles there; two stacks' timings of the same products on an L40S alone differ by 16%.
# attention: other kernels than on the source: cuDNN's run at 0.8 to 2.3 times torch's flash by architecture.
# memory: published copy kernels reach 84 to 98% of the datasheet's bandwidth.
# hot: nothing to check it with, and what fits into one L2 does not fit into another.
# host: single runs differ by 10 to 40%, and hosts differ besides.
SIGMA = {"gemm": 0.25, "attention": 0.30, "memory": 0.15, "hot": 0.30, "host": 0.25}
Z90 = 1.645  # half-width of a 90% interval in standard deviations

# --- matrix rate under the power limit
#
# Dynamic power goes with f V^2 and V with f, so the rate that P watts sustain grows as P to a power between
# 1/3 and 1: sustained / peak = constant x (W per peak TFLOP/s)^0.45, up to what the best shapes reach with
# power to spare. H100 PCIe (350 W, 0.62) to SXM (700 W, 0.73) has exponent 0.36, A100 PCIe (250 W, 0.69) to
# SXM (400 W, 0.85) 0.44, L4 (72 W, 0.47 to 0.59) to L40S (350 W, 0.74) 0.5 to 0.9. The constants go through
# the published bf16 rates of an architecture: torch.mm of 8192 to 10240 squared, randn, back to back
# (torch-performance-test-data), and MAMF (ml-engineering).
POWER_EXPONENT = 0.45
POWER_CONSTANT = {
    "Hopper": 0.85,  # H100 SXM 720 of 989 TFLOP/s at 10240, H100 PCIe 472 of 756
    "Ampere GA100": 0.76,  # A100 SXM 264 to 271 of 312, PCIe 40 GB 212
    "Ampere GA102": 0.60,  # RTX A6000 123 of 155, A40 122 of 150
    "Ada": 0.68,  # between L4 (57 to 71 of 121) and L40S (269 of 362)
    "Blackwell": 1.04,  # B200 1696 to 1745 of 2250 in bursts, 15% less when throttled
}
BEST_FRACTION = 0.87  # MAMF on an A100 SXM; GH200 reaches 0.84
# Chips whose fp32-accumulating rate is halved (GeForce, A10G) saturate it, and boost above the datasheet's
# clock: RTX 4090 173 of 165, RTX 3090 77 of 71.
BEST_FRACTION_HALVED = 1.0
HALVED_FLOPS_PER_CLOCK = 600  # an SM of 512 bf16 FLOP per clock is halved, one of 1024 or more is not
SUSTAINED_RANGE = 1.2  # low = value / 1.2, high = value x 1.2

# fp32 on the CUDA cores, torch.mm with TF32 off, of the datasheet's peak: dual issue is seldom full (same
# source: H200 0.77, A100 0.98, RTX A6000 0.62, RTX 3090 0.70, L4 and L40S 0.51, RTX 4090 0.68, B200 0.83).
FP32_FRACTION = {"Hopper": 0.77, "Ampere GA100": 0.98, "Ampere GA102": 0.64, "Ada": 0.55, "Blackwell": 0.83}

# Attention kernels written for Ampere (torch's flash) issue mma.sync, which on Hopper reaches 0.63 of the
# peak that wgmma reaches (Luo et al. 2024, "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture",
# arXiv 2402.13499), elsewhere all of it.
MMA_SYNC_FRACTION = 0.63
MMA_SYNC_BACKENDS = ("sdpa-flash",)

# --- memory

ROOF = 0.92  # of the datasheet's bandwidth, what streaming kernels reach at best: 84 to 98% published
SHARPNESS = 4.0  # exponent of the smooth minimum of memory's roof and the SMs' limit
# Kernels that read each byte once: if they stay under the roof, the SMs hold them back. In the others a low
# rate may as well be traffic that is not counted (rows read twice), which goes with bandwidth.
SINGLE_PASS = ("pointwise", "copy", "cat", "fill", "embedding", "optimizer")

# L2 read bandwidth per clock and SM at the datasheet's clock (gpu-benches): H200 9775 GB/s, H100 PCIe 7040,
# A100 5437, L40 5262. GA102 and Blackwell are guesses by kinship.
L2_BYTES_PER_CLOCK = {
    "Hopper": 40.0,
    "Ampere GA100": 35.7,
    "Ada": 14.9,
    "Ampere GA102": 15.0,
    "Blackwell": 40.0,
}


def sustained_fraction(spec: GpuSpec) -> Number:
    """The share of the dense bf16 peak that large products sustain under the power limit, with its range."""
    per_clock = spec.bf16_flops_per_second / (spec.sm_count * spec.boost_mhz * 1e6)
    best = BEST_FRACTION_HALVED if per_clock < HALVED_FLOPS_PER_CLOCK else BEST_FRACTION
    watts = spec.tdp_w / (spec.bf16_flops_per_second / 1e12)
    value = min(best, POWER_CONSTANT[spec.arch] * watts**POWER_EXPONENT)
    source = f"power model: {spec.tdp_w:g} W, {watts:.3g} W per peak TFLOP/s, {spec.arch}"
    return Number(value, value / SUSTAINED_RANGE, value * SUSTAINED_RANGE, "extrapolated", source)


def matrix_rate(dtype: str, spec: GpuSpec) -> float | None:
    """FLOP/s of large products that the model expects; None for a dtype that the GPU lacks."""
    peak = spec.peaks.get(dtype)
    if peak is None:
        return None
    return peak * (FP32_FRACTION[spec.arch] if dtype == "fp32" else sustained_fraction(spec).value)


def memory_rate(rate: float, source: GpuSpec, target: GpuSpec) -> float:
    """bytes/s on `target` of a kernel that moves `rate` on `source`.

    rate = smooth minimum of memory's roof and of what the SMs can issue. Solved for the latter on the source,
    which is then scaled by SMs and clock. A kernel at the roof tells nothing of its SM limit: it is put at
    twice the roof, so such a kernel goes nearly with bandwidth.
    """
    roof = ROOF * source.bandwidth_bytes_per_second
    left = rate**-SHARPNESS - roof**-SHARPNESS
    issue = max(left, (2.0 * roof) ** -SHARPNESS) ** (-1.0 / SHARPNESS)
    there = issue * _sm_clocks(target) / _sm_clocks(source)
    target_roof = ROOF * target.bandwidth_bytes_per_second
    return rate * _smooth_min(there, target_roof) / _smooth_min(issue, roof)


def _smooth_min(a: float, b: float) -> float:
    return float((a**-SHARPNESS + b**-SHARPNESS) ** (-1.0 / SHARPNESS))


def _sm_clocks(spec: GpuSpec) -> float:
    return spec.sm_count * spec.boost_mhz * 1e6


def _l2_rate(spec: GpuSpec) -> float:
    return _sm_clocks(spec) * L2_BYTES_PER_CLOCK[spec.arch]


# --- surfaces -----------------------------------------------------------------------------------------------


def project_surface(name: str, surface: Surface, source: GpuSpec, target: GpuSpec) -> Surface | None:
    """A surface of `source` (`name`: backend/class/variant/cache) as it should be on `target`.

    The law's parameters are scaled; each point keeps its distance from the law, as an observation that is as
    uncertain as the projection. None when the target lacks the dtype."""
    if surface.kind == "memory":
        params, sigma = _memory_params(name, surface, source, target)
    else:
        scaled = _matrix_params(name, surface, source, target)
        if scaled is None:
            return None
        params, sigma = scaled, SIGMA[surface.kind]
    if name.endswith("/hot"):
        sigma = max(sigma, SIGMA["hot"])
    features = np.array(surface.features, float)
    sizes = np.array(surface.bytes, float), np.array(surface.flops, float)
    moved = replace(surface, params=params)
    change = np.exp(moved.law(features, *sizes) - surface.law(features, *sizes))
    return replace(
        moved,
        seconds=tuple((np.array(surface.seconds) * change).tolist()),
        noise=tuple(hypot(noise, sigma) for noise in surface.noise),
        residual=replace(surface.residual, sigma_scale=max(1.0, surface.residual.sigma_scale)),
    )


def _matrix_params(name: str, surface: Surface, source: GpuSpec, target: GpuSpec) -> dict[str, float] | None:
    backend = name.split("/", 1)[0]
    rates = [matrix_rate(_dtype(surface.variant), spec) for spec in (source, target)]
    if rates[0] is None or rates[1] is None:
        return None
    compute = rates[1] / rates[0]
    if backend in MMA_SYNC_BACKENDS:
        compute *= _mma_sync(target) / _mma_sync(source)
    memory = target.bandwidth_bytes_per_second / source.bandwidth_bytes_per_second
    cycles = source.boost_mhz / target.boost_mhz
    factors = {
        "peak": compute,
        "bandwidth": memory,
        "split_bandwidth": memory,
        "follow_bandwidth": memory,
        "sum_bandwidth": memory,
        "l2_bandwidth": compute,  # tiles are chosen so that loads keep up
        "prologue": cycles,
        "epilogue": cycles,
        "split": cycles,
    }
    # exact, not by a factor: 108 blocks are one wave on 108 SMs
    given = {"sm_count": float(target.sm_count), "l2_bytes": float(target.l2_bytes)}
    return {
        key: given[key] if key in given else value * factors.get(key, 1.0)
        for key, value in surface.params.items()
    }


def _memory_params(
    name: str, surface: Surface, source: GpuSpec, target: GpuSpec
) -> tuple[dict[str, float], float]:
    """(parameters, standard deviation); of a kernel that may read twice, halfway between the two cases."""
    rate = surface.params["bandwidth"]
    if name.endswith("/hot"):
        there, doubt = rate * _l2_rate(target) / _l2_rate(source), 0.0
    else:
        there, doubt = memory_rate(rate, source, target), 0.0
        if name.split("/")[1] not in SINGLE_PASS:
            plain = rate * target.bandwidth_bytes_per_second / source.bandwidth_bytes_per_second
            there, doubt = (there * plain) ** 0.5, abs(log(there / plain)) / 2.0
    params = {**surface.params, "bandwidth": there}
    if "wave_bytes" in params:
        params["wave_bytes"] *= target.sm_count / source.sm_count
    if "sm_count" in params:  # among which a reduction is divided
        params["sm_count"] = float(target.sm_count)
    if "beyond" in params:  # where the target's L2 ends, its memory begins
        params["beyond"] = memory_rate(params["beyond"], source, target)
        params["l2_bytes"] = float(target.l2_bytes)
    return params, hypot(SIGMA["memory"], doubt)


def _dtype(variant: str) -> str:
    """The dtype in a variant of gemm or attention ("nt/bf16", "fwd/causal/bf16/d128")."""
    known = ("bf16", "fp16", "tf32", "fp32", "fp8")
    return next((part for part in variant.split("/") if part in known), "bf16")


def _mma_sync(spec: GpuSpec) -> float:
    return MMA_SYNC_FRACTION if spec.capability >= (9, 0) else 1.0


def common_sigma(profile: Profile, op_class: str) -> float:
    """The part of the deviation of log seconds that all kernels of a class share because the profile is
    projected, 0 for a measured one. It does not average out over the kernels of a step."""
    if profile.basis != "projected":
        return 0.0
    sigma: dict[str, float] = profile.provenance.get("sigma", SIGMA)
    return sigma[kind_of(op_class)]


# --- the profile --------------------------------------------------------------------------------------------


def project(source: Profile, spec: GpuSpec) -> Profile:
    """A profile for the GPU of `spec` from a measured one.

    Raises UsageError when the source was not measured, or when its own datasheet is not known."""
    if source.basis != "measured":
        raise UsageError(f"cannot project from {source.gpu}: its profile is {source.basis}, not measured")
    own = _spec_of(source)
    note = f"projected from {source.gpu}"
    surfaces = {name: project_surface(name, surface, own, spec) for name, surface in source.surfaces.items()}
    ceilings = {name: _ceiling(name, number, own, spec, note) for name, number in source.ceilings.items()}
    compute = sustained_fraction(spec)
    return replace(
        source,
        gpu=spec.name,
        basis="projected",
        device={
            "type": "cuda",
            "name": spec.name_match[0],
            "sm_count": spec.sm_count,
            "clock_mhz": spec.boost_mhz,
            "memory_bytes": spec.memory_bytes,
            "l2_bytes": spec.l2_bytes,
            "capability": list(spec.capability),
            "power_limit_w": spec.tdp_w,
        },
        peaks={
            dtype: Number(peak, peak, peak, "datasheet", spec.source) for dtype, peak in spec.peaks.items()
        },
        ceilings={name: number for name, number in ceilings.items() if number is not None},
        surfaces={name: surface for name, surface in surfaces.items() if surface is not None},
        host=None if source.host is None else _host(source.host),
        provenance={
            "projected_from": source.gpu,
            "source": dict(source.provenance),
            "specs": {"source": own.source, "target": spec.source, "notes": spec.notes},
            "sustained_fraction": [compute.value, compute.low, compute.high],
            "sigma": dict(SIGMA),
            "host": "as measured on the source's host",
        },
        aliases=_aliases(source, spec),
    )


def _spec_of(profile: Profile) -> GpuSpec:
    found = spec_of_device(str(profile.device.get("name", "")))
    if found is not None:
        return found
    if profile.gpu in load_specs():
        return find_spec(profile.gpu)
    known = ", ".join(sorted(load_specs()))
    raise UsageError(f"cannot project from {profile.gpu}: its datasheet is not known; known are {known}")


def _ceiling(name: str, number: Number, source: GpuSpec, target: GpuSpec, note: str) -> Number | None:
    """A ceiling on the target; None when it lacks the dtype. Latencies stay, with the interval of a guess."""
    source_note = f"{note} ({number.source})"
    if number.value <= 0:  # a gap too small to be measured
        return replace(number, basis="extrapolated", source=source_note)
    factor, sigma = 1.0, SIGMA["memory"]
    if name.startswith("matrix_"):
        dtype = name.rsplit("/", 1)[-1]
        rates = [matrix_rate(dtype, spec) for spec in (source, target)]
        if rates[0] is None or rates[1] is None:
            return None
        factor, sigma = rates[1] / rates[0], SIGMA["gemm"]
    elif name.startswith("hbm_"):
        factor = memory_rate(number.value, source, target) / number.value
    elif name.startswith("l2_"):
        factor, sigma = _l2_rate(target) / _l2_rate(source), SIGMA["hot"]
    value = number.value * factor
    down = hypot(log(number.value / number.low), Z90 * sigma) if number.low > 0 else Z90 * sigma
    up = hypot(log(number.high / number.value), Z90 * sigma)
    return Number(value, value * exp(-down), value * exp(up), "extrapolated", source_note)


def _host(host: HostCosts) -> HostCosts:
    """The source's host, which is not the one that the target GPU will stand in."""
    return replace(host, sigma=hypot(host.sigma, SIGMA["host"]), basis="extrapolated")


def _aliases(source: Profile, spec: GpuSpec) -> dict[str, str]:
    """cuDNN's attention is what torch may prefer from Hopper on; before, "sdpa" is flash."""
    aliases = dict(source.aliases)
    flash = any(name.startswith("sdpa-flash/") for name in source.surfaces)
    if spec.capability < (9, 0) and flash:
        aliases = {key: "sdpa-flash" if to == "sdpa-cudnn" else to for key, to in aliases.items()}
    return aliases
