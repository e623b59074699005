"""Reads the datasheets of GPUs from `data/gpus.csv`: one row per GPU, with its source.

Peaks are dense (no sparsity), bf16 and fp16 with fp32 accumulation, at the clock of the datasheet; cards may
boost above it, so a measured rate above 100% is a warning and not an error. `memory_bytes` is what a program
sees, not the nominal capacity: reserved and ECC memory are subtracted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.base.shipped import DATA, parsed_rows

SPECS_FILE = DATA / "gpus.csv"
INLINE_ECC_SHARE = 15 / 16
PEAK_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")
HOW_TO_MEASURE = (
    "to measure the GPU of a machine, run there: flopcast bench --out DIR, then flopcast fit DIR --out "
    "PROFILE.json, and give --gpu PROFILE.json"
)


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One GPU's datasheet. Rates are per second, sizes in bytes, clocks in MHz as drivers report them, power in watts.

    `name_match`: the names that torch and NVML report for this GPU, which price catalogues without names of their own
    (`price_catalogues.py`) use too. `arch`: the chip's architecture, by which `power.py` and `projection/rates.py` look
    up what its chips have in common. `boost_mhz`: the clock of the peaks; `max_clock_mhz`: the clock at which cards run
    while power allows, equal to `boost_mhz` where nothing else is known. Peaks are dense; one that the GPU lacks is
    None. `inline_ecc`: whether check bits are kept in the memory itself, which reduces the memory that programs see (an
    L4 shows 22.0 of 24 GiB, an RTX 4090 all but what the driver takes).
    """

    name: str
    name_match: tuple[str, ...]
    arch: str
    capability: tuple[int, int]
    sm_count: int
    boost_mhz: float
    max_clock_mhz: float
    bf16_flops_per_second: float
    fp16_flops_per_second: float
    tf32_flops_per_second: float
    fp32_flops_per_second: float
    fp8_flops_per_second: float | None
    memory_bytes: int
    bandwidth_bytes_per_second: float
    l2_bytes: int
    tdp_w: float
    inline_ecc: bool
    source: str
    notes: str

    @property
    def usable_bytes_per_second(self) -> float:
        """Bandwidth left for data: with inline ECC 15/16 of the board's, as of its memory, else all of it."""
        return self.bandwidth_bytes_per_second * (INLINE_ECC_SHARE if self.inline_ecc else 1.0)

    @property
    def peaks(self) -> dict[str, float]:
        """Dense peak FLOP/s by dtype, of the dtypes that the GPU supports."""
        peaks = {dtype: getattr(self, f"{dtype}_flops_per_second") for dtype in PEAK_DTYPES}
        return {dtype: peak for dtype, peak in peaks.items() if peak is not None}


@cache
def _shipped() -> MappingProxyType[str, GpuSpec]:
    return MappingProxyType({spec.name: spec for spec in parsed_rows(SPECS_FILE, _parse)})


def _parse(row: dict[str, str]) -> GpuSpec:
    major, minor = row["capability"].split(".")
    parsed: dict[str, Any] = {
        "name": row["gpu"],
        "name_match": tuple(row["name_match"].split("|")),
        "capability": (int(major), int(minor)),
        "inline_ecc": {"true": True, "false": False}[row["inline_ecc"]],
        "fp8_flops_per_second": float(row["fp8_flops_per_second"]) if row["fp8_flops_per_second"] else None,
    }
    numbers = {"int": int, "float": float, "str": str}  # annotations are text here
    others = {f.name: numbers[str(f.type)](row[f.name]) for f in fields(GpuSpec) if f.name not in parsed}
    return GpuSpec(**parsed, **others)


def load_specs() -> dict[str, GpuSpec]:
    """All shipped GPUs by name, in the file's order."""
    return dict(_shipped())


def find_spec(name: str) -> GpuSpec:
    """The spec of a GPU by its flopcast name, or another spelling of it (`gpu_meant`). Raises UsageError, naming the
    known ones, for any other."""
    specs = _shipped()
    return specs[gpu_meant(name, specs)]


def gpu_meant(name: str, known: Iterable[str]) -> str:
    """The one of `known` that a name means: itself, the name that the driver reports ("NVIDIA H100 80GB HBM3"), or a
    spelling in which only case, separators, the maker or the board are missing ("H200", "rtx4090", "A100 40GB").

    Raises UsageError for a name that means none of them, and for one that means several boards, which it names.
    """
    names = list(known)
    if name in names:
        return name
    spec = spec_of_device(name)
    if spec is not None and spec.name in names:
        return spec.name
    words = _words(name)
    found = [one for one in names if words and "".join(_words(one)) == "".join(words)]
    found = found or [one for one in names if words and set(words) <= set(_words(one))]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"GPU {name!r} is ambiguous: {' or '.join(sorted(found))}? Their speeds and prices differ; name the board"
        )
    raise UsageError(unknown_gpu_message(name, names))


def _words(name: str) -> list[str]:
    """The words of a GPU's name that tell it from others: "NVIDIA-A100_80GB" -> ["a100", "80gb"]."""
    return [word for word in re.split(r"[\W_]+", name.casefold()) if word not in ("", "nvidia", "geforce")]


def spec_of_device(device_name: str) -> GpuSpec | None:
    """The spec of a device by the name that torch or NVML reports; None for one that is not known.

    The whole name must match: "NVIDIA L4" must not find the L40S, nor "NVIDIA H100 NVL" the H100 SXM.
    """
    wanted = device_name.strip().casefold()
    for spec in _shipped().values():
        if any(wanted == match.casefold() for match in spec.name_match):
            return spec
    return None


def unknown_gpu_message(name: str, known: Iterable[str]) -> str:
    """The message for a GPU name that is not among `known`: similar names, all names, how to measure a GPU."""
    names = sorted(known)
    bare = name.strip().casefold().replace("_", "-").replace(" ", "-")
    near = [n for n in names if bare and bare in n] or difflib.get_close_matches(bare, names, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"unknown GPU {name!r}.{hint} Known: {', '.join(names)}; {HOW_TO_MEASURE}"
