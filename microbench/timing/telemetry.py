"""Reads the device's state during measurements: clocks, power, temperature, reasons for throttling. Read only.

NVML (nvidia-ml-py) is optional; without it, or where the driver denies a query, the field is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flopcast.microbench.records.rows import Fields
from flopcast.microbench.timing.contention import OthersShare
from flopcast.microbench.timing.processor import current_mhz

# nvml.h, nvmlClocksEventReasons. The first group slows the device below the requested clocks.
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
    """Whether any reason means clocks below those requested (a power cap, heat); idle clocks and user settings do
    not."""
    return not set(reasons).isdisjoint(THROTTLE_BITS.values())


@dataclass(frozen=True)
class Reading:
    """The device's state at one moment; None where unknown."""

    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    others_share: float | None = None  # of the machine's cores, that other processes kept busy

    @property
    def throttled(self) -> bool:
        return is_throttled(self.throttle_reasons)

    def as_row(self) -> Fields:
        """The fields of a measurement row."""
        return {**asdict(self), "throttle_reasons": list(self.throttle_reasons), "throttled": self.throttled}


def typical_reading(readings: Sequence[Reading]) -> Reading:
    """Combines several readings of one case: medians, and every throttle reason that was seen.

    The first reading is left out where there are others: it may still show the clocks of the preceding work.
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
        others_share=middle("others_share"),
        throttle_reasons=tuple(dict.fromkeys(name for reading in later for name in reading.throttle_reasons)),
    )


class Nvml:
    """One device's NVML handle. Every query returns None when NVML, the device or the query is not available."""

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
        return Nvml(device).reading
    return beside_others(lambda: Reading(clock_mhz=current_mhz()))


def beside_others(read: Callable[[], Reading]) -> Callable[[], Reading]:
    """The same readings, each with the share of the cores that other processes kept busy since the one before."""
    others = OthersShare()
    return lambda: replace(read(), others_share=others())
