"""Peaks of parts known and unknown, held against what their makers print."""

from __future__ import annotations

from typing import Any

import pytest

from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.catalogue.device import device_peaks, live_peaks

# name, capability, SMs, boost MHz as its datasheet counts; dtype -> TFLOP/s printed there (dense, fp32 accumulation)
PRINTED: list[tuple[str, tuple[int, int], int, float, dict[str, float]]] = [
    ("Tesla V100-SXM2-16GB", (7, 0), 80, 1530, {"fp16": 125, "fp32": 15.7, "fp64": 7.8}),
    ("Tesla T4", (7, 5), 40, 1590, {"fp16": 65, "fp32": 8.1}),
    ("NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 1545, {"fp16": 53.8, "fp32": 13.4}),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1410, {"bf16": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5}),
    ("NVIDIA A40", (8, 6), 84, 1740, {"bf16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1695, {"bf16": 71, "tf32": 35.6, "fp32": 35.6}),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 2505, {"bf16": 364.2, "fp8": 728.5, "fp32": 91.1}),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2520, {"bf16": 165.2, "fp8": 330.3, "fp32": 82.6, "tf32": 82.6}),
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1830, {"bf16": 989.4, "tf32": 494.7, "fp8": 1978.9}),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2407, {"bf16": 209.5, "tf32": 104.8, "fp8": 419, "fp32": 104.8}),
]


@pytest.mark.parametrize(("name", "capability", "sms", "mhz", "printed"), PRINTED, ids=lambda v: str(v)[:24])
def test_a_peak_computed_from_the_live_device_is_the_datasheets(
    name: str, capability: tuple[int, int], sms: int, mhz: float, printed: dict[str, float]
) -> None:
    device = {"type": "cuda", "name": name, "capability": list(capability), "sm_count": sms, "clock_mhz": mhz}
    found = live_peaks(device)
    for dtype, tera in printed.items():
        assert found[dtype].value == pytest.approx(tera * 1e12, rel=0.012), dtype
        assert found[dtype].basis == "datasheet"


def test_every_shipped_gpu_agrees_with_its_architecture() -> None:
    for spec in load_specs().values():
        device = {"name": spec.name_match[0], "capability": spec.capability, "sm_count": spec.sm_count,
                  "clock_mhz": spec.boost_mhz}  # fmt: skip
        found = live_peaks(device)
        for dtype in ("bf16", "fp16", "tf32", "fp8"):
            if dtype in spec.peaks:
                assert found[dtype].value == pytest.approx(spec.peaks[dtype], rel=0.03), (spec.name, dtype)


def test_a_known_gpu_has_published_peaks_and_those_that_its_row_lacks() -> None:
    device: dict[str, Any] = {"type": "cuda", "name": "NVIDIA H200", "capability": [9, 0], "sm_count": 132,
                              "clock_mhz": 1980}  # fmt: skip
    found = device_peaks(device, {})
    assert (found["bf16"].basis, found["bf16"].value) == ("published", 9.894e14)
    assert (found["fp64"].basis, round(found["fp64"].value / 1e12)) == ("datasheet", 67)


def test_a_part_of_unknown_architecture_is_held_against_its_burst() -> None:
    burst = Number(1e14, 1e14, 1e14, "measured")
    device = {"type": "cuda", "name": "NVIDIA Next", "capability": [13, 0], "sm_count": 200, "clock_mhz": 2000}
    assert device_peaks(device, {"matrix_burst/bf16": burst}) == {"bf16": burst}
    assert device_peaks({"type": "cpu", "name": "x"}, {"matrix_burst/fp32": burst}) == {"fp32": burst}
