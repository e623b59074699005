"""Catalogues that others publish: what is taken, and what is refused with its line."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest

from flopcast.errors import DataError, UsageError
from flopcast.roofline.gpu.catalogue.price_catalogues import (
    GPUHUNT_PROVIDERS,
    Offer,
    collect,
    gpu_of,
    gpuhunt_offers,
    load_any,
    read_skypilot,
    refresh_gpuhunt,
)
from flopcast.roofline.gpu.catalogue.prices import load_prices, write_prices

TODAY, DAY = date(2026, 11, 21), date(2025, 6, 15)
HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Region,SpotPrice,Price\n"


def catalogue(tmp_path: Path, *rows: str, provider: str = "runpod") -> Path:
    path = tmp_path / provider / "vms.csv"
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEADER + "".join(f"{row}\n" for row in rows))
    return path


GOOD = "1x_L4_SECURE,L4,1.0,8,50,L4,CA,0.22,0.39"

REFUSED = {
    "1x_L40S_SECURE,L40S,2.0,8,80,L40S,CA,1.72,0.86": "SpotPrice 1.72 of L40S is above its Price 0.86: swapped",
    "1x_H200_SECURE,H200,1.0,8,80,H200,CA,,0": "Price of H200 is 0; it must be above zero",
    "1x_H200_SECURE,H200,1.0,8,80,H200,CA,,-3.5": "Price of H200 is -3.5",
    "1x_H200_SECURE,H200,1.0,8,80,H200,CA,,much": "Price is 'much', not a number",
    "1x_H200_SECURE,H200,1.0,8,80,H200,CA,,": "H200 without a price",
    "1x_H200_SECURE,H200,0,8,80,H200,CA,,3": "AcceleratorCount of H200 is 0",
    "1x_H100_SECURE,H100,1.0,8,80,H100,CA,,2.39": "H100 is ambiguous",
    "1x_A100-80GB_SECURE,A100-80GB,1.0,8,80,A100-80GB,CA,,1.64": "A100-80GB is ambiguous",
    ",L4,1.0,,,L4,us-central1,,0.3": "L4 without a machine",
}


@pytest.mark.parametrize("row", REFUSED)
def test_a_bad_row_is_left_out_and_named_with_its_line(tmp_path: Path, row: str) -> None:
    found = read_skypilot(catalogue(tmp_path, GOOD, row), day=DAY, today=TODAY)
    assert [(p.gpu, p.kind, p.usd_per_hour) for p in found.prices] == [
        ("nvidia-l4", "on-demand", 0.39),
        ("nvidia-l4", "spot", 0.22),
    ]
    (text,) = found.refused
    assert text.startswith(f"line 3: {REFUSED[row]}")
    with pytest.raises(DataError, match=r"no usable price: line 2: "):
        read_skypilot(catalogue(tmp_path, row), day=DAY, today=TODAY)


def test_a_spot_column_that_repeats_the_other_is_no_spot_price(tmp_path: Path) -> None:
    found = read_skypilot(catalogue(tmp_path, "1x_L4_SECURE,L4,1.0,8,50,L4,CA,0.49,0.49"), day=DAY, today=TODAY)
    assert [(p.kind, p.usd_per_hour) for p in found.prices] == [("on-demand", 0.49)]
    assert found.refused[0].startswith("line 2: SpotPrice of L4 equals Price")


def test_prices_are_per_gpu_and_by_region_where_regions_differ(tmp_path: Path) -> None:
    path = catalogue(
        tmp_path,
        "8x_H100-SXM_SECURE,H100-SXM,8.0,8,80,x,CA,,24",
        "1x_H100-SXM_SECURE,H100-SXM,1.0,8,80,x,CA,,2.99",
        "1x_H100-SXM_SECURE,H100-SXM,1.0,8,80,x,US,,2.99",
        "1x_H100-SXM_COMMUNITY,H100-SXM,1.0,8,80,x,US,,2.5",
        "p5.48xlarge,H100,8.0,8,80,x,us-east-1,,55.04",
        "p5.48xlarge,H100,8.0,8,80,x,eu-north-1,,60",
        "cpu_4x,,,4,16,,CA,,0.2",
        "1x_RTX4000-Ada_SECURE,RTX4000-Ada,1.0,8,80,x,CA,,0.32",
        "1x_H100-NVL_SECURE,H100-NVL,1.0,8,80,x,CA,,3.19",
    )
    found = read_skypilot(path, day=DAY, today=TODAY)
    assert {(p.gpu, p.provider, p.usd_per_hour) for p in found.prices} == {
        ("nvidia-h100-sxm", "RunPod Secure Cloud", 2.99),
        ("nvidia-h100-sxm", "RunPod Community Cloud", 2.5),
        ("nvidia-h100-sxm", "RunPod us-east-1", 6.88),
        ("nvidia-h100-sxm", "RunPod eu-north-1", 7.5),
    }
    assert (found.others, found.refused) == (3, ())
    assert {p.source.rpartition("; ")[2] for p in found.prices if "us-east" in p.provider} == {"per GPU of 8"}
    out = tmp_path / "out.csv"
    write_prices(found.prices, out)
    assert load_prices(out, today=TODAY) == list(found.prices)


def test_a_file_without_a_day_has_its_own_said_to_be_inferred(tmp_path: Path) -> None:
    path = catalogue(tmp_path, GOOD)
    price = load_any(path).prices[0]
    assert (price.date, price.date_inferred) == (date.fromtimestamp(path.stat().st_mtime), True)
    with pytest.raises(DataError, match="2027-01-01 lies in the future"):
        read_skypilot(path, day=date(2027, 1, 1), today=TODAY)


def test_what_is_no_catalogue_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no catalogue of SkyPilot"):
        read_skypilot(path)
    with pytest.raises(UsageError, match="does not exist"):
        read_skypilot(tmp_path / "none.csv")
    path.write_text(HEADER + "1x_T4,T4,1.0,8,50,T4,CA,0.22,0.39\n")
    with pytest.raises(DataError, match="1 rows of GPUs that flopcast does not know"):
        read_skypilot(path, day=TODAY, today=TODAY)


@pytest.mark.parametrize(
    ("name", "instance", "memory", "gpu"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", 80, "nvidia-h100-sxm"),
        ("A100", "NVIDIA A100 80GB PCIe", 80, "nvidia-a100-80gb-pcie"),
        ("A100", "NVIDIA A100-SXM4-80GB", 80, "nvidia-a100-80gb-sxm"),
        ("H100", "gpu_1x_h100_pcie", 80, "nvidia-h100-pcie"),
        ("A100", "gpu_1x_a100_sxm4", 40, "nvidia-a100-40gb-sxm"),
        ("A100", "gpu_1x_a100_pcie", 40, None),  # a board that is not known here
        ("A100", "Standard_NC24ads_A100_v4", 80, "nvidia-a100-80gb-pcie"),
        ("H100NVL", "NVIDIA H100 NVL", 94, None),
        ("L40S", "NVIDIA L40S", 48, "nvidia-l40s"),
        ("L40", "NVIDIA L40", 48, None),
        ("RTX4090", "x", 24, "nvidia-rtx-4090"),
    ],
)
def test_boards_are_told_apart(name: str, instance: str, memory: float, gpu: str | None) -> None:
    offer = Offer(where="", name=name, count=1, usd_per_hour=1, spot_usd_per_hour=None, provider="P",
                  instance=instance, memory_gb=memory)  # fmt: skip
    assert gpu_of(offer, {}) == gpu
    assert gpu_of(offer, {name: "nvidia-b200"}) == "nvidia-b200"


# --- gpuhunt


@dataclass
class Item:
    """The fields of gpuhunt's CatalogItem that are read (gpuhunt 0.1.34)."""

    provider: str
    instance_name: str
    location: str
    price: float
    gpu_count: int
    gpu_name: str | None
    gpu_memory: float | None
    spot: bool = False
    flags: list[str] = field(default_factory=list)


def test_gpuhunts_offers_become_prices_a_gpu() -> None:
    items = [
        Item("runpod", "NVIDIA L4", "US-TX-1", 0.49, 1, "L4", 24),
        Item("runpod", "NVIDIA L4", "US", 0.39, 1, "L4", 24),
        Item("runpod", "NVIDIA L4", "US-TX-1", 0.6, 1, "L4", 24, spot=True),
        Item("runpod", "NVIDIA B200", "US-TX-1", 40.0, 8, "B200", 180, flags=["runpod-cluster"]),
        Item("lambdalabs", "gpu_8x_h100_sxm5", "us-west-3", 31.92, 8, "H100", 80),
        Item("runpod", "cpu", "US", 0.1, 0, None, None),
    ]
    found = collect(gpuhunt_offers(items), day=TODAY, inferred=False, source="gpuhunt")
    assert {(p.gpu, p.provider, p.kind, p.usd_per_hour) for p in found.prices} == {
        ("nvidia-l4", "RunPod Secure Cloud", "on-demand", 0.49),
        ("nvidia-l4", "RunPod Community Cloud", "on-demand", 0.39),
        ("nvidia-h100-sxm", "Lambda", "on-demand", 3.99),
    }
    (text,) = found.refused
    assert "spot price 0.6 of nvidia-l4 is not below its on-demand price 0.49" in text


def test_without_gpuhunt_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(UsageError, match=r"pip install 'flopcast\[prices\]'.*--from.*--prices"):
        refresh_gpuhunt()


@pytest.mark.skipif(importlib.util.find_spec("gpuhunt") is None, reason="gpuhunt is an extra")
def test_gpuhunt_reads_a_local_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor"
    (tmp_path / "runpod.csv").write_text(f"{columns}\nNVIDIA L4,US-TX-1,0.49,8,50,1,L4,24,False,,nvidia\n")
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    (price,) = refresh_gpuhunt().prices
    assert (price.gpu, price.provider, price.usd_per_hour) == ("nvidia-l4", "RunPod Secure Cloud", 0.49)
    assert price.date_inferred
    with pytest.raises(UsageError, match="holds none of"):
        refresh_gpuhunt([name for name in GPUHUNT_PROVIDERS if name != "runpod"])
