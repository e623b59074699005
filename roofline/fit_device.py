"""What a measured device is called, its peaks, and which attention torch picks on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flopcast.roofline.gpus import spec_of_device
from flopcast.roofline.profile import Number

# FLOP per clock and SM on the matrix units, dense, bf16 with fp32 accumulation, by compute capability.
_MATRIX_RATE = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192}
_HALVED = ("geforce", "a10g")  # parts whose fp32 accumulation runs at half rate


def gpu_name(device: Mapping[str, Any]) -> str:
    """flopcast's name of a device: "cpu", a known GPU's, else a slug of what the driver calls it."""
    if device.get("type") == "cpu":
        return "cpu"
    name = str(device.get("name") or "gpu")
    spec = spec_of_device(name)
    if spec is not None:
        return spec.name
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def device_peaks(device: Mapping[str, Any], ceilings: Mapping[str, Number]) -> dict[str, Number]:
    """Dense peak FLOP/s by dtype: as published where the GPU is known, else SMs x clock x FLOP/clock/SM of
    the live device ("datasheet"); of a processor, or an architecture unknown here, the rate measured in a
    burst."""
    spec = spec_of_device(str(device.get("name"))) if device.get("type") != "cpu" else None
    if spec is not None:
        return {
            dtype: Number(peak, peak, peak, "published", spec.source) for dtype, peak in spec.peaks.items()
        }
    capability = tuple(device.get("capability") or ())
    rate = _MATRIX_RATE.get(capability[:2])
    clock, sm_count = device.get("clock_mhz"), device.get("sm_count")
    if rate and clock and sm_count:
        if any(part in str(device.get("name")).lower() for part in _HALVED):
            rate //= 2
        cores = 64 if capability == (8, 0) else 128
        rates = {"bf16": rate, "fp16": rate, "tf32": rate / 2, "fp32": 2 * cores}
        if capability >= (8, 9):
            rates["fp8"] = 2 * rate
        source = f"{sm_count} SMs x {clock:g} MHz x FLOP per clock and SM"
        values = {dtype: sm_count * clock * 1e6 * per_clock for dtype, per_clock in rates.items()}
        return {dtype: Number(value, value, value, "datasheet", source) for dtype, value in values.items()}
    prefix = "matrix_burst/"
    return {name.removeprefix(prefix): n for name, n in ceilings.items() if name.startswith(prefix)}


def attention_alias(
    device: Mapping[str, Any], stack: Mapping[str, Any], backends: set[str]
) -> dict[str, str]:
    """What torch's SDPA picks by itself, if it was measured. cuDNN first on Hopper and Blackwell of the
    data centre from torch 2.10 with cuDNN above 9.15 (`check_prefer_cudnn_attention` in torch's
    sdp_utils.cpp), else flash."""
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
