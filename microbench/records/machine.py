"""Defines the fields of machine.json: the device that was measured, its host and its software. Pure Python."""

from __future__ import annotations

import hashlib
import json
from typing import TypedDict

from flopcast.microbench.records.rows import METHOD


class Device(TypedDict, total=False):
    """A GPU, or a processor described by the same fields. None where the driver does not report a value."""

    type: str  # "cuda" or "cpu"
    name: str
    uuid: str  # for a processor a hash of what decides its speed: model, cores, threads used, cache
    sm_count: int  # multiprocessors; for a processor the cores that may be used
    threads: int  # threads that torch uses; for processors only
    clock_mhz: float | None  # the highest
    memory_clock_mhz: float | None
    memory_bytes: int
    l2_bytes: int  # the last-level cache
    capability: list[int] | None  # compute capability: major, minor
    isa: str  # vector instructions that torch uses ("AVX512"); for processors only
    power_limit_w: float | None  # as enforced
    driver: str | None


class Host(TypedDict, total=False):
    """The host that launches the device's kernels."""

    cpu: str
    cores: int  # cores that this process may use


class Stack(TypedDict, total=False):
    """Versions of the software that runs the kernels; None for what is not installed or cannot be determined."""

    flopcast: str
    python: str
    torch: str
    triton: str | None
    transformers: str | None
    cuda: str | None
    cublas: str | None
    cudnn: int | None


class Machine(TypedDict, total=False):
    """The content of machine.json; `read_machine` ensures that the first two fields are present."""

    schema: int
    machine: str  # `machine_id`, which every row repeats
    device: Device
    host: Host
    stack: Stack


def machine_id(device: Device, stack: Stack, method: int = METHOD) -> str:
    """12 hex digits of a hash over what may change a measurement: device uuid, power limit, driver, stack and method.

    flopcast's own version is left out (it changes with every release; `method` changes when timing does),
    and so is the interpreter's patch release.
    """
    python = ".".join(stack["python"].split(".")[:2])
    versions = {**{name: version for name, version in stack.items() if name != "flopcast"}, "python": python}
    identity = [device.get("uuid"), device.get("power_limit_w"), device.get("driver"), versions, method]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
