"""Picks the device to measure and describes the machine for machine.json. Nothing here sets a clock or a mode."""

from __future__ import annotations

import ctypes.util
import hashlib
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flopcast import __version__
from flopcast.errors import UsageError
from flopcast.microbench.records.machine import Device, Host, Machine, Stack, machine_id
from flopcast.microbench.records.rows import SCHEMA
from flopcast.microbench.timing.processor import last_level_cache_bytes, max_mhz, processor_name, usable_cores
from flopcast.microbench.timing.telemetry import Nvml


def all_gpus() -> list[str]:
    """The names of all visible CUDA devices, as `pick_device` takes them. Raises UsageError where there are none.

    Creates no CUDA context: a process that only starts others holds no memory on any of them.
    """
    if not torch.cuda.is_available():
        pick_device("cuda")
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def pick_device(name: str | None = None) -> torch.device:
    """The device of that name; without a name CUDA where there is a CUDA device, else the processor.

    "cuda" is the current CUDA device, "cuda:1" the one of that number. Raises UsageError when it does not exist.
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
    """Describes this process's machine, with `device` as the device measured."""
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
    nvml = Nvml(device)
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
    """Describes the processor by the same fields. `sm_count` counts cores, `l2_bytes` is the last-level cache; the
    "uuid" hashes what decides speed (model, cores, threads used, cache), not the individual machine."""
    described: Device = {
        "type": "cpu",
        "name": processor_name(),
        "uuid": "",
        "sm_count": usable_cores(),
        "threads": torch.get_num_threads(),
        "clock_mhz": max_mhz(),
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


def describe_host() -> Host:
    return {"cpu": processor_name(), "cores": usable_cores()}


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
    """The cuBLAS version of the wheel that torch uses, else of the system's library (a container's CUDA)."""
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
