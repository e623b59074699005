import csv

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.catalogue import power
from flopcast.roofline.gpu.catalogue.datasheets import SPECS_FILE, find_spec, load_specs, spec_of_device
from flopcast.roofline.gpu.projection import rates

NAMES = {
    "nvidia-h200",
    "nvidia-h100-sxm",
    "nvidia-h100-pcie",
    "nvidia-a100-80gb-sxm",
    "nvidia-a100-80gb-pcie",
    "nvidia-a100-40gb-sxm",
    "nvidia-l4",
    "nvidia-l40s",
    "nvidia-a10g",
    "nvidia-rtx-a6000",
    "nvidia-rtx-4090",
    "nvidia-rtx-3090",
    "nvidia-b200",
}
# dense bf16 FLOP per clock and SM, fp32 accumulation; GeForce (and the A10G) run at half of their chip's rate
FLOPS_PER_CLOCK = {(8, 0): (2048,), (8, 6): (512, 1024), (8, 9): (512, 1024), (9, 0): (4096,), (10, 0): (8192,)}


def test_every_named_gpu_ships_once() -> None:
    with SPECS_FILE.open(encoding="utf-8", newline="") as file:
        rows = [row["gpu"] for row in csv.DictReader(file)]
    assert sorted(rows) == sorted(NAMES)
    assert set(load_specs()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_spec_is_consistent_with_itself(name: str) -> None:
    spec = find_spec(name)
    per_clock = spec.bf16_flops_per_second / (spec.sm_count * spec.boost_mhz * 1e6)
    assert any(per_clock == pytest.approx(known, rel=0.02) for known in FLOPS_PER_CLOCK[spec.capability])
    assert spec.fp16_flops_per_second == spec.bf16_flops_per_second  # both with fp32 accumulation
    assert spec.tf32_flops_per_second == pytest.approx(spec.bf16_flops_per_second / 2, rel=0.02)
    assert spec.peaks["bf16"] == spec.bf16_flops_per_second
    assert ("fp8" in spec.peaks) == (spec.capability >= (8, 9))
    assert 20e9 < spec.memory_bytes < 200e9
    assert 200e9 < spec.bandwidth_bytes_per_second < 10e12
    assert 70 <= spec.tdp_w <= 1000
    # what is looked up by the architecture
    for known in (power.REACHED, power.ENERGY, power.FP32_FRACTION, rates.L2_BYTES_PER_CLOCK):
        assert spec.arch in known
    assert spec.source


def test_an_unknown_gpu_is_refused_with_the_known_ones_and_how_to_measure_one() -> None:
    with pytest.raises(UsageError, match=r"Did you mean nvidia-l40s.*Known: .*nvidia-l4.*flopcast bench"):
        find_spec("nvidia-l40x")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("H200", "nvidia-h200"), ("NVIDIA_H200", "nvidia-h200"), ("l4", "nvidia-l4"), ("L40S", "nvidia-l40s"),
     ("rtx4090", "nvidia-rtx-4090"), ("GeForce RTX 4090", "nvidia-rtx-4090"), ("4090", "nvidia-rtx-4090"),
     ("a100-40gb", "nvidia-a100-40gb-sxm"), ("H100 SXM", "nvidia-h100-sxm"), ("A6000", "nvidia-rtx-a6000"),
     ("NVIDIA H100 80GB HBM3", "nvidia-h100-sxm")],
)  # fmt: skip
def test_a_gpu_is_known_by_what_tells_it_from_the_others(spelling: str, name: str) -> None:
    assert find_spec(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "said"),
    [("H100", r"ambiguous: nvidia-h100-pcie or nvidia-h100-sxm\?"),
     ("a100 80gb", r"ambiguous: nvidia-a100-80gb-pcie or nvidia-a100-80gb-sxm\?"),
     ("rtx", r"ambiguous: .* name the board"), ("L40", "unknown GPU 'L40'"), ("A10", "unknown GPU 'A10'"),
     ("nvidia", "unknown GPU"), ("", "unknown GPU")],
)  # fmt: skip
def test_a_spelling_that_means_several_or_another_gpu_is_refused(spelling: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_spec(spelling)


def test_a_device_is_known_by_its_whole_name_only() -> None:
    names = {
        "NVIDIA L4": "nvidia-l4",
        "NVIDIA L40S": "nvidia-l40s",
        "nvidia h200": "nvidia-h200",
        "NVIDIA H100 80GB HBM3": "nvidia-h100-sxm",
        "A100-SXM4-40GB": "nvidia-a100-40gb-sxm",
    }
    for device, name in names.items():
        found = spec_of_device(device)
        assert found is not None
        assert found.name == name
    assert spec_of_device("NVIDIA L40") is None
    assert spec_of_device("NVIDIA H100 NVL") is None
