"""Machine identity and telemetry, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from flopcast.errors import UsageError
from flopcast.microbench.records.machine import machine_id
from flopcast.microbench.timing import device

CPU = torch.device("cpu")


def test_the_processor_is_described() -> None:
    machine = device.describe(CPU)
    assert json.loads(json.dumps(machine)) == machine
    assert {"schema", "machine", "device", "host", "stack"} == set(machine)
    assert {
        "type", "name", "uuid", "sm_count", "clock_mhz", "memory_clock_mhz", "memory_bytes", "l2_bytes",
        "capability", "power_limit_w", "driver",
    } <= set(machine["device"])  # fmt: skip
    assert machine["device"]["type"] == "cpu"
    assert machine["device"]["name"]
    assert machine["device"]["memory_bytes"] > 1 << 28
    assert machine["stack"]["torch"] == torch.__version__
    assert device.describe(CPU)["machine"] == machine["machine"]


def test_the_machine_id_follows_what_changes_a_measurement() -> None:
    part = {"uuid": "GPU-1", "power_limit_w": 700.0, "driver": "580"}
    stack = {"flopcast": "1", "python": "3.12.1", "torch": "2.13", "cuda": "13.0"}
    base = machine_id(part, stack)
    assert machine_id(part, {**stack, "flopcast": "2", "python": "3.12.9"}) == base
    others = [
        machine_id({**part, "uuid": "GPU-2"}, stack),
        machine_id({**part, "power_limit_w": 500.0}, stack),
        machine_id({**part, "driver": "590"}, stack),
        machine_id(part, {**stack, "torch": "2.14"}),
        machine_id(part, {**stack, "python": "3.13.1"}),
        machine_id(part, stack, method=99),
    ]
    assert len({base, *others}) == len(others) + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_no_cuda_says_so_and_offers_the_processor() -> None:
    for name in ("cuda", "cuda:0"):
        with pytest.raises(UsageError, match="--device cpu"):
            device.pick_device(name)
    assert device.pick_device(None) == CPU


def test_cpu_may_be_asked_for() -> None:
    assert device.pick_device("cpu") == CPU


@pytest.mark.parametrize("name", ["gpu", "", "cpu:1", "cuda:x", "mps"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="valid are cuda"):
        device.pick_device(name)
