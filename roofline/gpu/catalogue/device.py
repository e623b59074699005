"""Derives a measured device's flopcast name, its peak rates, and the attention kernel that torch picks on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flopcast.microbench.records.machine import Device
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.catalogue.datasheets import spec_of_device

# Dense FLOP per clock and SM, 2 per multiply-add, by compute capability: fp16 and bf16 with fp32 accumulation, tf32 and
# fp8 and int8 on the matrix units, fp32 on the CUDA cores, fp64 on whichever is faster. From NVIDIA's white papers of
# V100, TU102, GA100, GA102, AD102 and GH100, the HGX B200 datasheet and the RTX Blackwell white paper; fp32 and fp64
# also from the CUDA C++ Programming Guide's table of arithmetic throughput. Each gives its datasheet's rate within 1%:
# 80 SMs x 1.53 GHz x 1024 = 125 TFLOP/s of a V100, T4 65, A100 312, A10 125, L40S 366, H100 SXM 989 at 1.83 GHz.
# Architectures without sure values (8.7, 10.3, 11.0, 12.1) are left out: for them the measured burst is the reference.
_RATES: dict[tuple[int, int], dict[str, int]] = {
    (7, 0): {"fp16": 1024, "fp32": 128, "fp64": 64},  # no bf16, no tf32
    (7, 5): {"fp16": 1024, "fp32": 128, "fp64": 4, "int8": 2048},
    (8, 0): {"bf16": 2048, "fp16": 2048, "tf32": 1024, "fp32": 128, "fp64": 128, "int8": 4096},
    (8, 6): {"bf16": 1024, "fp16": 1024, "tf32": 512, "fp32": 256, "fp64": 4, "int8": 2048},
    (8, 9): {"bf16": 1024, "fp16": 1024, "tf32": 512, "fp32": 256, "fp64": 4, "fp8": 2048, "int8": 2048},
    (9, 0): {"bf16": 4096, "fp16": 4096, "tf32": 2048, "fp32": 256, "fp64": 256, "fp8": 8192, "int8": 8192},
    (10, 0): {"bf16": 8192, "fp16": 8192, "tf32": 4096, "fp32": 256, "fp64": 128, "fp8": 16384, "int8": 16384},
    (12, 0): {"bf16": 1024, "fp16": 1024, "tf32": 512, "fp32": 256, "fp64": 4, "fp8": 2048, "int8": 2048},
}
_HALVED = ("geforce", "a10g")  # parts whose matrix units accumulate in fp32 at half rate (Turing on)
_HALVED_DTYPES = ("bf16", "fp16", "tf32", "fp8")


def gpu_name(device: Device) -> str:
    """flopcast's name of a device: "cpu", the name of a known GPU, else a slug of the driver's name."""
    if device.get("type") == "cpu":
        return "cpu"
    name = str(device.get("name") or "gpu")
    spec = spec_of_device(name)
    if spec is not None:
        return spec.name
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def device_peaks(device: Device, ceilings: Mapping[str, Number]) -> dict[str, Number]:
    """Reference dense peak FLOP/s by dtype.

    As published where the GPU is known; otherwise, and for dtypes that its datasheet lacks, SMs x clock x FLOP per
    clock and SM of the live device (basis "datasheet"). For a processor or an unknown architecture, the rate measured
    in a burst."""
    if device.get("type") != "cpu":
        spec = spec_of_device(str(device.get("name")))
        published = (
            {}
            if spec is None
            else {d: Number(peak, peak, peak, "published", spec.source) for d, peak in spec.peaks.items()}
        )
        peaks = {**live_peaks(device), **published}
        if peaks:
            return peaks
    prefix = "matrix_burst/"
    return {name.removeprefix(prefix): n for name, n in ceilings.items() if name.startswith(prefix)}


def live_peaks(device: Device) -> dict[str, Number]:
    """Dense peaks by dtype from the highest SM clock, SM count and compute capability that the driver reports; empty
    where one of them or the architecture is unknown."""
    capability = device.get("capability")
    rates = _RATES.get((capability[0], capability[1])) if capability else None
    clock, sm_count = device.get("clock_mhz"), device.get("sm_count")
    if not (capability and rates and clock and sm_count):
        return {}
    name = str(device.get("name")).lower()
    is_halved = any(part in name for part in _HALVED) and tuple(capability) >= (7, 5)
    peaks = {}
    for dtype, full in rates.items():
        rate = full // 2 if is_halved and dtype in _HALVED_DTYPES else full
        source = f"{sm_count} SMs x {clock:g} MHz x {rate} FLOP per clock and SM"
        value = sm_count * clock * 1e6 * rate
        peaks[dtype] = Number(value, value, value, "datasheet", source)
    return peaks


def attention_alias(device: Device, stack: Mapping[str, Any], backends: set[str]) -> dict[str, str]:
    """Maps "sdpa" to the backend that torch's SDPA picks by default, if that backend was measured.

    cuDNN comes first on data-centre Hopper and Blackwell, from torch 2.10 with cuDNN above 9.15
    (`check_prefer_cudnn_attention` in torch's sdp_utils.cpp), else flash."""
    if device.get("type") == "cpu":
        order = ["sdpa-cpu", "sdpa-math"]
    else:
        order = ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"]
        new_torch = _version(stack.get("torch")) >= (2, 10)
        if (
            list(device.get("capability") or []) in ([9, 0], [10, 0])
            and new_torch
            and int(stack.get("cudnn") or 0) > 91500
        ):
            order.insert(0, "sdpa-cudnn")
    chosen = stack.get("sdpa") or next((name for name in order if name in backends), None)
    return {"sdpa": chosen} if chosen and "sdpa" not in backends else {}


def _version(text: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(text or "0").split("+")[0].split(".")[:2] if part.isdigit())
