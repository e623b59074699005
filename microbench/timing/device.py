"""Who measures: the device, its host and its software as dictionaries, the machine id, and live telemetry.

Read only: nothing here sets a clock, a power limit or a mode. NVML (nvidia-ml-py) is optional; without it,
or where the driver denies a query, the field is None and measuring goes on.
"""

from __future__ import annotations

import ctypes.util
import hashlib
import json
import os
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flopcast import __version__
from flopcast.errors import UsageError
from flopcast.microbench.records.machine import Device, Host, Machine, Stack, machine_id
from flopcast.microbench.records.rows import SCHEMA

# nvml.h, nvmlClocksEventReasons. The first group slows the device below what it was asked to run at.
THROTTLE_BITS = {
    0x0004: "sw_power_cap",
    0x0008: "hw_slowdown",
    0x0020: "sw_thermal_slowdown",
    0x0040: "hw_thermal_slowdown",
    0x0080: "hw_power_brake",
}
BENIGN_BITS = {
    0x0001: "gpu_idle",
    0x0002: "applications_clocks_setting",
    0x0010: "sync_boost",
    0x0100: "display_clock_setting",
}


def throttle_names(mask: int) -> tuple[str, ...]:
    """Names of the set bits of NVML's clock event reasons; bits unknown here as "bit_0x..."."""
    known = THROTTLE_BITS | BENIGN_BITS
    names = [name for bit, name in sorted(known.items()) if mask & bit]
    rest = mask & ~sum(known)
    names += [f"bit_{1 << i:#x}" for i in range(rest.bit_length()) if rest >> i & 1]
    return tuple(names)


def is_throttled(reasons: tuple[str, ...]) -> bool:
    """Whether a reason means slower than asked (a power cap, heat); idle clocks and user settings do not."""
    return not set(reasons).isdisjoint(THROTTLE_BITS.values())


def all_gpus() -> list[str]:
    """The names of all visible CUDA devices, as `pick_device` takes them. Raises UsageError where there are none.

    Makes no context: a process that only starts others holds no memory on any of them.
    """
    if not torch.cuda.is_available():
        pick_device("cuda")
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def pick_device(name: str | None = None) -> torch.device:
    """The device asked for; without a name CUDA where there is one, else the processor.

    "cuda" is the current CUDA device, "cuda:1" a certain one. Raises UsageError when it is not there.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "cpu") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise UsageError(f"unknown device {name!r}: valid are cuda, cuda:N, cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        raise UsageError(f"--device {name}: {build}; `--device cpu` measures this machine's processor instead")
    number = int(index) if index else torch.cuda.current_device()
    if number >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return torch.device("cuda", number)


# --- identity


def describe(device: torch.device) -> Machine:
    """This process's machine, with `device` as what is measured."""
    described = _describe_cuda(device) if device.type == "cuda" else _describe_cpu()
    stack = describe_stack()
    return {
        "schema": SCHEMA,
        "machine": machine_id(described, stack),
        "device": described,
        "host": describe_host(),
        "stack": stack,
    }


def _describe_cuda(device: torch.device) -> Device:
    facts = torch.cuda.get_device_properties(device)
    nvml = _Nvml(device)
    clock_khz = getattr(facts, "clock_rate", None)
    memory_khz = getattr(facts, "memory_clock_rate", None)
    uuid = str(getattr(facts, "uuid", "") or "")
    described: Device = {
        "type": "cuda",
        "name": facts.name,
        "uuid": uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}",
        "sm_count": facts.multi_processor_count,
        "clock_mhz": nvml.query("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM") or (clock_khz and clock_khz / 1e3),
        "memory_clock_mhz": nvml.query("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM")
        or (memory_khz and memory_khz / 1e3),
        "memory_bytes": facts.total_memory,
        "l2_bytes": facts.L2_cache_size,
        "capability": [facts.major, facts.minor],
        "power_limit_w": nvml.scaled("nvmlDeviceGetEnforcedPowerLimit", 1e-3),
        "driver": nvml.driver(),
    }
    nvml.close()
    return described


def _describe_cpu() -> Device:
    """The processor under the same names. `sm_count` counts cores, `l2_bytes` is the last-level cache; the
    "uuid" hashes what decides speed (model, cores, threads used, cache), not the individual machine."""
    cores = len(_affinity())
    described: Device = {
        "type": "cpu",
        "name": _cpu_name(),
        "uuid": "",
        "sm_count": cores,
        "threads": torch.get_num_threads(),
        "clock_mhz": _cpu_max_mhz(),
        "memory_clock_mhz": None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "l2_bytes": last_level_cache_bytes(),
        "capability": None,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "power_limit_w": None,
        "driver": None,
    }
    parts = [described["name"], described["sm_count"], described["threads"], described["l2_bytes"], described["isa"]]
    described["uuid"] = "CPU-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return described


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def describe_host() -> Host:
    return {"cpu": _cpu_name(), "cores": len(_affinity())}


def describe_stack() -> Stack:
    cudnn_version: Any = torch.backends.cudnn.version
    return {
        "flopcast": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "transformers": _installed("transformers"),
        "cuda": torch.version.cuda,
        "cublas": _cublas_version(),
        "cudnn": cudnn_version() if torch.version.cuda else None,
    }


def _installed(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cublas_version() -> str | None:
    """Of the wheel that torch uses, else of the system's library (a container's CUDA)."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    wheel = _installed(f"nvidia-cublas-cu{major}", "nvidia-cublas")
    if wheel is not None:
        return wheel
    name = ctypes.util.find_library("cublas")
    for folder in ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu"):
        for path in sorted(Path(folder).glob(f"libcublas.so.{major}*"), reverse=True):
            version = path.resolve().name.removeprefix("libcublas.so.")
            if "." in version:
                return version
    return name and name.removeprefix("libcublas.so.")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _cpu_name() -> str:
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


def _cpu_max_mhz() -> float | None:
    khz = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    return float(khz) / 1e3 if khz.isdigit() else _cpu_current_mhz()


def _cpu_current_mhz() -> float | None:
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


# --- telemetry


@dataclass(frozen=True)
class Reading:
    """The device's state at one moment; None where unknown."""

    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()

    @property
    def throttled(self) -> bool:
        return is_throttled(self.throttle_reasons)

    def as_row(self) -> dict[str, Any]:
        """The fields of a measurement row."""
        return {**asdict(self), "throttle_reasons": list(self.throttle_reasons), "throttled": self.throttled}


def typical_reading(readings: Sequence[Reading]) -> Reading:
    """One reading for several of the same case: medians, and every throttle reason that was seen.

    The first is left out where there are others: it may still show the clocks of what came before.
    """
    later = readings[1:] or readings
    if not later:
        return Reading()

    def middle(name: str) -> float | None:
        known = [value for reading in later if (value := getattr(reading, name)) is not None]
        return statistics.median_low(known) if known else None

    return Reading(
        clock_mhz=middle("clock_mhz"),
        memory_clock_mhz=middle("memory_clock_mhz"),
        power_w=middle("power_w"),
        temperature_c=middle("temperature_c"),
        throttle_reasons=tuple(dict.fromkeys(name for reading in later for name in reading.throttle_reasons)),
    )


class _Nvml:
    """One device's NVML handle. Every query answers None when NVML, the device or the query is not there."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "") or "")
            if uuid:  # by uuid: CUDA's numbers are not NVML's under CUDA_VISIBLE_DEVICES
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            else:
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        except Exception:  # ImportError, NVMLError of any kind, an OSError from a stub library: work without
            self._handle = None

    def query(self, function: str, *constants: str) -> Any:
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *(getattr(self._nvml, name) for name in constants))
        except Exception:  # not supported on this part, no permission, renamed in another release
            return None

    def scaled(self, function: str, factor: float) -> float | None:
        value = self.query(function)
        return None if value is None else round(value * factor, 1)

    def driver(self) -> str | None:
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except Exception:
            return None
        return version.decode() if isinstance(version, bytes) else str(version)

    def reading(self) -> Reading:
        mask = self.query("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:  # drivers before 535 know it by the old name
            mask = self.query("nvmlDeviceGetCurrentClocksThrottleReasons")
        return Reading(
            clock_mhz=self.query("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            memory_clock_mhz=self.query("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
            power_w=self.scaled("nvmlDeviceGetPowerUsage", 1e-3),
            temperature_c=self.query("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
            throttle_reasons=throttle_names(mask or 0),
        )

    def close(self) -> None:
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except Exception:
                return


def telemetry(device: torch.device) -> Callable[[], Reading]:
    """A function that reads the device's state now (a few 100 us on CUDA). Call it while the device is busy:
    an idle one shows idle clocks. The handle lives as long as the process."""
    if device.type == "cuda":
        return _Nvml(device).reading
    return lambda: Reading(clock_mhz=_cpu_current_mhz())
