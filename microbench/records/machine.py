"""Defines the fields of machine.json: the device that was measured, its host and its software. Pure Python."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, Required, TypedDict

from flopcast.bounds import Count, Positive, Size, Valid
from flopcast.microbench.records.rows import METHOD

DeviceType = Annotated[str, Literal["cuda", "cpu"]]
Capability = Annotated[list[Count], Valid(lambda found: len(found) == 2, "a major and a minor number")]


class Device(TypedDict, total=False):
    """A GPU, or a processor described by the same fields. None where the driver does not report a value."""

    type: Required[DeviceType]
    name: str
    uuid: str | None  # for a processor a hash of what decides its speed: model, cores, threads used, cache
    sm_count: Size  # multiprocessors; for a processor the cores that may be used
    threads: Size  # threads that torch uses; for processors only
    clock_mhz: Positive | None  # the highest
    memory_clock_mhz: Positive | None
    memory_bytes: Size
    l2_bytes: Count  # the last-level cache
    capability: Capability | None
    isa: str  # vector instructions that torch uses ("AVX512"); for processors only
    power_limit_w: Positive | None  # as enforced
    driver: str | None


class Host(TypedDict, total=False):
    """The host that launches the device's kernels."""

    cpu: str
    cores: Size  # cores that this process may use


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
    """The content of machine.json."""

    schema: Required[int]
    machine: Required[str]  # `machine_id`, which every row repeats
    device: Required[Device]
    host: Host
    stack: Required[Stack]


def machine_id(device: Device, stack: Stack, method: int = METHOD) -> str:
    """12 hex digits of a hash over what may change a measurement: device uuid, power limit, driver, stack and method.

    flopcast's own version is left out (it changes with every release; `method` changes when timing does),
    and so is the interpreter's patch release.
    """
    python = ".".join(stack["python"].split(".")[:2])
    versions = {**{name: version for name, version in stack.items() if name != "flopcast"}, "python": python}
    identity = [device.get("uuid"), device.get("power_limit_w"), device.get("driver"), versions, method]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
