"""Describes this machine's processor as Linux reports it; None, or a documented default, where Linux does not."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def processor_name() -> str:
    """The model name; with family and model number where a hypervisor gives a bare one ("AMD EPYC")."""
    cpuinfo = _read("/proc/cpuinfo")

    def field(name: str) -> str:
        found = re.search(rf"^{name}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
        return found.group(1).strip() if found else ""

    name = field("model name") or platform.processor() or platform.machine()
    family, model = field("cpu family"), field("model")
    if family and not re.search(r"\d", name):
        name += f" (family {family} model {model})"
    return name


def max_mhz() -> float | None:
    khz = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    return float(khz) / 1e3 if khz.isdigit() else current_mhz()


def current_mhz() -> float | None:
    mhz = [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", _read("/proc/cpuinfo"), re.MULTILINE)]
    return round(max(mhz), 1) if mhz else None


def last_level_cache_bytes() -> int:
    """Size of cpu0's largest cache; 32 MiB where the kernel does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG]?)", _read(str(path)).strip())
        if found:
            sizes.append(int(found.group(1)) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[found.group(2)])
    return max(sizes, default=32 << 20)
