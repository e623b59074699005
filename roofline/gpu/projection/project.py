"""Projects a measured profile onto a GPU that was not measured, scaled by the ratios of their datasheets.

What is scaled, and by what (everything else is kept as measured on the source):

cuBLAS's products            on a GPU before Hopper: the tile law (`laws/gemm_before_hopper.py`), from the datasheet
                             (`gemm_before_hopper.py`); else SM count as the target's (waves computed again), peak by
                             the rates that power lets a GPU sustain
attention                    the same with the rates at full clock: its products keep matrix units less busy, so power
                             binds less; its bytes as memory-bound kernels'; flash's schedule by architecture
memory-bound kernels         bandwidth, with the SMs' share in what limits a kernel (`rates.memory_rate`)
the same out of L2 ("hot")   SMs x clock x bytes per clock and SM (`rates.L2_BYTES_PER_CLOCK`)
latencies                    constant in clock cycles, the launch floor too
host costs                   kept: the target's host is not known

Every time is labelled "extrapolated" and its deviation widened by `sigmas`; that error is common to all shapes of
a surface, so that it does not average out in a sum over kernels. Where published tables of the GPU's own times exist,
its parameters are refined by them (`published_fit.py`). The errors of both are in reports/projection.
"""

from __future__ import annotations

from dataclasses import replace
from math import hypot, log

import numpy as np

from flopcast.errors import UsageError
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec, find_spec, load_specs, spec_of_device
from flopcast.roofline.gpu.catalogue.power import burst_rate, sustained_fraction
from flopcast.roofline.gpu.laws import attention_triton, gemm_triton
from flopcast.roofline.gpu.laws.laws import kind_of
from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.gpu.projection import gemm_before_hopper
from flopcast.roofline.gpu.projection.ceilings import project_ceiling
from flopcast.roofline.gpu.projection.rates import (
    SIGMA,
    cycles,
    l2_rate,
    matrix_ratio,
    memory_rate,
    sigmas,
    sustained_rate,
)
from flopcast.roofline.stream.lowering.variants import AttentionVariant, SurfaceKey, Variant

# Attention kernels written for Ampere (torch's flash and its memory-efficient one) issue mma.sync, which on Hopper
# reaches 0.63 of the peak that wgmma reaches (Luo et al. 2024, "Benchmarking and Dissecting the Nvidia Hopper GPU
# Architecture", arXiv 2402.13499), elsewhere all of it.
MMA_SYNC_FRACTION = 0.63
MMA_SYNC_BACKENDS = ("sdpa-flash", "sdpa-efficient")

# Parameters of laws that are constant in clock cycles.
LATENCIES = (
    "prologue", "epilogue", "split", "floor", "follow_floor", "merge", "merge_row", "wave", "load", "step", "each",
    "element", "turn", "plane", "plane_load", "spread", "tensor", "large_tensor", "dq_prologue",
    "onepass_prologue", "conversion_floor",
)  # fmt: skip

# Kernels that read each byte once: if they stay below the roof, the SMs limit them. In others a low rate may also mean
# traffic that is not counted (rows read twice), which scales with bandwidth.
SINGLE_PASS = ("pointwise", "copy", "cat", "fill", "embedding", "optimizer")


# --- surfaces -----------------------------------------------------------------------------------------------


def project_surface(key: SurfaceKey, surface: Surface, source: GpuSpec, target: GpuSpec) -> Surface | None:
    """Projects a surface of `source` onto `target`.

    The law's parameters are scaled; each point keeps its distance from the law, as an observation that is as
    uncertain as the projection. None when the target lacks the dtype."""
    doubt = sigmas(source, target)
    if gemm_before_hopper.applies(key, surface, source, target):
        sigma = max(doubt["gemm"], doubt["hot"] if key.cache == "hot" else 0.0)
        return gemm_before_hopper.tile_surface(surface, _dtype(surface.variant), source, target, sigma)
    if surface.kind == "memory":
        params, sigma = _memory_params(key, surface, source, target)
    else:
        scaled = _matrix_params(key, surface, source, target)
        if scaled is None:
            return None
        params, sigma = scaled, doubt["gemm" if surface.kind == gemm_triton.KIND else surface.kind]
    if key.cache == "hot":
        sigma = max(sigma, doubt["hot"])
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


def _matrix_params(key: SurfaceKey, surface: Surface, source: GpuSpec, target: GpuSpec) -> dict[str, float] | None:
    rate = burst_rate if surface.kind == "attention" else sustained_rate
    compute = matrix_ratio(rate, _dtype(surface.variant), source, target)
    if compute is None:
        return None
    if key.backend in MMA_SYNC_BACKENDS:
        compute *= _mma_sync(target) / _mma_sync(source)
    memory = target.usable_bytes_per_second / source.usable_bytes_per_second
    if surface.kind == "attention" and key.cache == "hot":
        memory = l2_rate(target) / l2_rate(source)
    elif surface.kind == "attention":
        memory = memory_rate(surface.params["bandwidth"], source, target) / surface.params["bandwidth"]
    slower = cycles(source, target)
    cores = target.sm_count / source.sm_count / slower
    factors = {
        "peak": compute,
        "rate": compute,
        "scale": 1.0 / compute,
        "bandwidth": memory,
        "split_bandwidth": memory,
        "follow_bandwidth": memory,
        "sum_bandwidth": memory,
        **dict.fromkeys(
            ("conversion_bandwidth", "padding_bandwidth", "weight_bandwidth", "bias_bandwidth", "partial_bandwidth"),
            memory,
        ),
        **dict.fromkeys(("tap_rate", "result_rate", "input_tap_rate", "input_rate"), cores),
        "l2_bandwidth": compute,  # tiles are chosen so that loads keep up
        **dict.fromkeys(LATENCIES, slower),
    }
    # exact, not by a factor: 108 blocks are one wave on 108 SMs
    given = {"sm_count": float(target.sm_count), "l2_bytes": float(target.l2_bytes)}
    if isinstance(surface.variant, AttentionVariant):
        given |= flash_schedule(key.backend, surface.variant, target)
        given |= attention_triton.one_pass_elsewhere(surface.params, target.capability)
    return {key: given[key] if key in given else value * factors.get(key, 1.0) for key, value in surface.params.items()}


def flash_schedule(backend: str, variant: AttentionVariant, target: GpuSpec) -> dict[str, float]:
    """Parameters of torch's flash that differ on GA102 and Ada, which have less shared memory: forward of head_dim 128
    runs blocks of 64 rows by 64 keys under a causal mask, of 128 by 32 without (2.7, run_mha_fwd_hdim128)."""
    is_small = target.capability in ((8, 6), (8, 9))
    if not (is_small and backend == "sdpa-flash" and (variant.direction, variant.head_dim) == ("fwd", 128)):
        return {}
    return {"block": 64.0, "advance": 64.0} if variant.is_causal else {"block": 128.0, "advance": 32.0}


def _memory_params(
    key: SurfaceKey, surface: Surface, source: GpuSpec, target: GpuSpec
) -> tuple[dict[str, float], float]:
    """The (parameters, standard deviation) of a memory-bound surface on the target.

    The bandwidth of a kernel that may read twice is the geometric mean of the two cases."""
    rate = surface.params["bandwidth"]
    if key.cache == "hot":
        there, doubt = rate * l2_rate(target) / l2_rate(source), 0.0
    else:
        there, doubt = memory_rate(rate, source, target), 0.0
        if key.op_class not in SINGLE_PASS:
            plain = rate * target.usable_bytes_per_second / source.usable_bytes_per_second
            there, doubt = (there * plain) ** 0.5, abs(log(there / plain)) / 2.0
    slower = cycles(source, target)
    params = {key: value * (slower if key in LATENCIES else 1.0) for key, value in surface.params.items()}
    params["bandwidth"] = there
    if "wave_bytes" in params:
        params["wave_bytes"] *= target.sm_count / source.sm_count
    if "sm_count" in params:  # among which a reduction is divided
        params["sm_count"] = float(target.sm_count)
    if "beyond" in params:  # where the target's L2 ends, its memory begins
        params["beyond"] = memory_rate(params["beyond"], source, target)
        params["l2_bytes"] = float(target.l2_bytes)
    return params, hypot(sigmas(source, target)["memory"], doubt)


def _dtype(variant: Variant) -> str:
    """The dtype whose matrix rate limits a variant of products or attention. In fp32 attention multiplies three times
    in tf32 (CUTLASS's OpMultiplyAddFastF32): on an H200 43 TFLOP/s, of 494 in tf32."""
    if isinstance(variant, AttentionVariant) and variant.dtype == "fp32":
        return "tf32"
    return variant.dtypes if variant.dtypes in ("bf16", "fp16", "tf32", "fp32", "fp8") else "bf16"


def _mma_sync(spec: GpuSpec) -> float:
    return MMA_SYNC_FRACTION if spec.capability >= (9, 0) else 1.0


def common_sigma(profile: Profile, op_class: str) -> float:
    """The part of the deviation of log seconds that all kernels of a class share because the profile is
    projected (or published times refine it), 0 for a measured one. It does not average out over the kernels of a
    step."""
    if profile.basis == "measured":
        return 0.0
    sigma: dict[str, float] = profile.provenance.get("sigma", SIGMA)
    return sigma[kind_of(op_class)]


# --- the profile --------------------------------------------------------------------------------------------


def project(source: Profile, spec: GpuSpec) -> Profile:
    """Projects a measured profile onto the GPU of `spec`.

    Raises UsageError when the source was not measured, or when its own datasheet is not known."""
    if source.basis != "measured":
        raise UsageError(f"cannot project from {source.gpu}: its profile is {source.basis}, not measured")
    own = _spec_of(source)
    surfaces = {key: project_surface(key, surface, own, spec) for key, surface in source.surfaces.items()}
    ceilings = {name: project_ceiling(name, source, own, spec) for name in source.ceilings}
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
        peaks={dtype: Number(peak, peak, peak, "datasheet", spec.source) for dtype, peak in spec.peaks.items()},
        ceilings={name: number for name, number in ceilings.items() if number is not None},
        surfaces={key: surface for key, surface in surfaces.items() if surface is not None},
        host=default_host(),
        provenance={
            "projected_from": source.gpu,
            "source": dict(source.provenance),
            "specs": {"source": own.source, "target": spec.source, "notes": spec.notes},
            "sustained_fraction": [compute.value, compute.low, compute.high],
            "sigma": sigmas(own, spec),
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


def _aliases(source: Profile, spec: GpuSpec) -> dict[str, str]:
    """Aliases on the target: torch may prefer cuDNN's attention from Hopper on; before Hopper "sdpa" is flash."""
    aliases = dict(source.aliases)
    flash = any(key.backend == "sdpa-flash" for key in source.surfaces)
    if spec.capability < (9, 0) and flash:
        aliases = {key: "sdpa-flash" if to == "sdpa-cudnn" else to for key, to in aliases.items()}
    return aliases
