"""What torch.cuda, Triton and inductor are told of a GPU that is not there.

For a process of its own, before it imports dynamo and inductor: they take functions of torch.cuda by name. Nothing is
undone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils_internal

from flopcast.roofline.stream.tracer.gpu_machine import Gpu

# By compute capability: threads per SM, and shared memory per SM and the most that one block can have, in KiB (CUDA
# C++ Programming Guide, "Technical Specifications per Compute Capability").
_SM = {
    (7, 0): (2048, 96, 96), (7, 5): (1024, 64, 64), (8, 0): (2048, 164, 163), (8, 6): (1536, 100, 99),
    (8, 9): (1536, 100, 99), (9, 0): (2048, 228, 227), (10, 0): (2048, 228, 227), (10, 3): (2048, 228, 227),
    (12, 0): (1536, 100, 99),
}  # fmt: skip
_BUS_BITS = 1024  # any: Triton multiplies it by the memory's clock, which is chosen for the product to be right
_H200_FLOPS_PER_SECOND, _H200_BYTES_PER_SECOND, _H200_MHZ = 9.894e14, 4.8e12, 1980.0  # bf16, dense


@dataclass(frozen=True)
class Card:
    """A GPU, with what only compilers ask."""

    gpu: Gpu
    flops_per_second: float  # in bf16, dense
    bytes_per_second: float
    clock_mhz: float  # the highest, as nvidia-smi tells it

    @classmethod
    def of(cls, device: Mapping[str, Any]) -> Card:
        """Takes what a datasheet or a profile says of its device; fields that it lacks are an H200's."""
        return cls(
            gpu=Gpu.of(device),
            flops_per_second=float(device.get("bf16_flops_per_second") or _H200_FLOPS_PER_SECOND),
            bytes_per_second=float(device.get("bandwidth_bytes_per_second") or _H200_BYTES_PER_SECOND),
            clock_mhz=float(device.get("max_clock_mhz") or _H200_MHZ),
        )

    @property
    def properties(self) -> SimpleNamespace:
        """What `torch.cuda.get_device_properties` returns."""
        gpu = self.gpu
        threads, per_sm, per_block = _SM.get(gpu.capability, _SM[9, 0])
        return SimpleNamespace(
            name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], total_memory=gpu.memory_bytes,
            multi_processor_count=gpu.sm_count, L2_cache_size=gpu.l2_bytes, warp_size=32, gcnArchName="",
            regs_per_multiprocessor=65536, max_threads_per_multi_processor=threads, max_threads_per_block=1024,
            shared_memory_per_multiprocessor=per_sm * 1024, shared_memory_per_block=48 * 1024,
            shared_memory_per_block_optin=per_block * 1024, is_integrated=0, is_multi_gpu_board=0,
        )  # fmt: skip


def tell_of(card: Card) -> None:
    """Makes this process's torch.cuda and Triton answer as on a machine with this GPU alone."""
    gpu, properties = card.gpu, card.properties
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: gpu.capability,
        "get_device_name": lambda *_: gpu.name,
        "is_bf16_supported": lambda *_, **__: gpu.capability[0] >= 8,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),  # dynamo keeps and restores it
        "set_rng_state": lambda *_, **__: None,
        "device": _NoDevice,
    }
    # inductor asks a class that took torch.cuda's functions when it was imported, which may have been before
    interface = getattr(sys.modules.get("torch._dynamo.device_interface"), "CudaInterface", None)
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if name in vars(interface or object):
            setattr(interface, name, answer if isinstance(answer, type) else staticmethod(answer))
    torch.cuda.default_generators = (_Generator(),)
    torch._C._cuda_cudaCachingAllocator_is_enabled = lambda: True  # else no graph is captured; absent without CUDA
    torch._utils_internal.max_clock_rate = lambda: card.clock_mhz  # type: ignore[assignment]
    _set_triton_driver(card)


class _Generator(torch.Generator):
    """The GPU's generator of random numbers, whose state compiled graphs keep for operations that they repeat."""

    device = torch.device("cuda", 0)

    def clone_state(self) -> torch.Generator:
        return _Generator()

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, _state: torch.Generator) -> torch.Generator:
        return self


class _NoDevice(contextlib.nullcontext[None]):
    """Stands for the context `torch.cuda.device(...)`."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


def _set_triton_driver(card: Card) -> None:
    """Gives Triton a driver for this GPU, which inductor asks for its target."""
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = card.gpu.capability
    properties = card.properties
    told = {
        "max_shared_mem": properties.shared_memory_per_block_optin, "max_num_regs": 65536, "warpSize": 32,
        "multiprocessor_count": card.gpu.sm_count, "sm_clock_rate": card.clock_mhz * 1e3, "mem_bus_width": _BUS_BITS,
        "mem_clock_rate": card.bytes_per_second * 8 / _BUS_BITS / 2 / 1e3,
    }  # fmt: skip

    class Driver:
        utils = SimpleNamespace(get_device_properties=lambda *_: told)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * major + minor, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

        def is_active(self) -> bool:
            return True

    triton.runtime.driver.set_active(Driver())
