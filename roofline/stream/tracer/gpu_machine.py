"""A machine with one GPU: what `torch.cuda` and `torch.accelerator` answer while a factory and its step are traced.

A step may ask for the GPU's name, count devices, time itself with events, reset the memory statistics or wait for the
device. Waiting is recorded, as reading a value back is; the rest costs a step nothing worth counting, and numbers that
only a run could give (bytes allocated, milliseconds between events) are 0 and 1.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.unmodelled import NotModelled, Topic
from flopcast.roofline.stream.tracer.user_code import users_line


@dataclass(frozen=True)
class Gpu:
    """What Python code sees of a GPU; by default an H200, on which the streams of the tests were recorded."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 150_109_880_320
    sm_count: int = 132
    l2_bytes: int = 62_914_560

    @classmethod
    def of(cls, device: Mapping[str, Any]) -> Gpu:
        """Takes what a profile says of its device; fields that it lacks are the default's."""
        major, minor = device.get("capability") or cls.capability
        return cls(
            name=device.get("name") or cls.name,
            capability=(int(major), int(minor)),
            memory_bytes=int(device.get("memory_bytes") or cls.memory_bytes),
            sm_count=int(device.get("sm_count") or cls.sm_count),
            l2_bytes=int(device.get("l2_bytes") or cls.l2_bytes),
        )


@torch.library.custom_op("flopcast::synchronize", mutates_args=())
def _synchronize() -> None:
    """The host waits for the device; recorded like any other call."""


@_synchronize.register_fake
def _() -> None: ...


def cuda_device(value: Any) -> torch.device | None:
    """Returns the CUDA device that a string or device names, None where it names another.

    Raises NotModelled for any but the first.
    """
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        value = torch.device(value)
    if not isinstance(value, torch.device) or value.type != "cuda":
        return None
    check_index(value.index)
    return value


def check_index(index: int | None) -> None:
    if index:
        raise NotModelled(Topic.SEVERAL_GPUS, f"cuda:{index}")


class _Event:
    """A CUDA event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: _Event) -> float:
        return 1.0

    def synchronize(self) -> None:
        _synchronize()


class _Stream(_Event):
    """A CUDA stream. All work is taken to be on one."""

    cuda_stream = 0
    stream_id = 0
    device = torch.device("cuda", 0)
    device_index = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    wait_stream = wait_event = _Event.wait

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _GeneratorType(type(torch._C.Generator)):  # type: ignore[misc]
    """The class of `torch.Generator` itself still counts as one of its own."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_GeneratorType):
    """A generator of random numbers that says it is on the device it was asked for."""

    where: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        made: Any = torch._C.Generator.__new__(cls, "cpu")  # type: ignore[call-arg]
        made.where = torch.device("cuda", 0) if cuda_device(device) else torch.device("cpu")
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where


# Calls that change nothing that a forecast knows, and calls that only a run could answer.
_NOTHING = (
    "_lazy_init", "init", "empty_cache", "empty_host_cache", "ipc_collect", "manual_seed", "manual_seed_all", "seed",
    "seed_all", "set_rng_state", "set_rng_state_all", "set_sync_debug_mode", "set_per_process_memory_fraction",
    "set_stream", "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_accumulated_memory_stats", "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats",
)  # fmt: skip
_ZERO = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "memory_usage", "utilization", "temperature", "power_draw", "clock_rate",
    "device_memory_used", "initial_seed", "current_device", "current_device_index", "current_device_idx",
    "get_sync_debug_mode",
)  # fmt: skip
_RAW_STREAM = "_cuda_getCurrentRawStream"


@contextlib.contextmanager
def machine_with(
    asked: Gpu | None, note: Callable[[str], None], on_host: Callable[[torch.Tensor], Any]
) -> Iterator[None]:
    """Makes torch answer within the context as on a machine with this GPU, or with the default one where the step is
    for several. `note` takes what a forecast takes for granted, `on_host` a tensor that lies in host memory."""
    gpu = asked or Gpu()

    def tells(value: Any) -> Callable[..., Any]:
        """Makes a function that returns what distinguishes this GPU from others."""

        def tell(*_: Any, **__: Any) -> Any:
            if asked is None and (line := users_line(sys._getframe(1))):
                note(f"asked which GPU this is, the step was told {gpu.name}: {line}")
            return value

        return tell

    def select(device: Any = None, *_: Any) -> contextlib.AbstractContextManager[None]:
        if isinstance(device, int):
            check_index(device)
        elif device is not None and not isinstance(device, torch.Tensor):
            cuda_device(device)
        return contextlib.nullcontext()

    def side_stream(stream: Any = None) -> Any:
        if stream is not None and stream is not main:
            note("work on a second CUDA stream is forecast as if it ran in turn with the rest")
        return contextlib.nullcontext()

    def rng_state(*_: Any) -> torch.Tensor:
        with _disable_current_modes():  # no work of the step
            state = torch.zeros(16, dtype=torch.uint8)
        on_host(state)
        return state

    main = _Stream()
    properties = SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.sm_count, L2_cache_size=gpu.l2_bytes, warp_size=32, is_integrated=0,
        is_multi_gpu_board=0, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    )  # fmt: skip
    answers: dict[str, Any] = {
        **dict.fromkeys(_NOTHING, lambda *_, **__: None),
        **dict.fromkeys(_ZERO, lambda *_, **__: 0),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "get_device_name": tells(gpu.name),
        "get_device_capability": tells(gpu.capability),
        "get_device_properties": tells(properties),
        "get_arch_list": lambda: ["sm_{}{}".format(*gpu.capability)],
        "is_bf16_supported": tells(gpu.capability[0] >= 8),
        "is_tf32_supported": lambda: gpu.capability[0] >= 8,
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda *_: False,
        "mem_get_info": tells((gpu.memory_bytes, gpu.memory_bytes)),
        "get_memory_info": tells((gpu.memory_bytes, gpu.memory_bytes)),
        "memory_stats": lambda *_: defaultdict(int),
        "memory_snapshot": lambda *_: [],
        "memory_summary": lambda *_, **__: "",
        "get_rng_state": rng_state,
        "get_rng_state_all": lambda: [rng_state()],
        "synchronize": lambda *_: _synchronize(),
        "set_device": select, "set_device_index": select, "device": select, "device_of": select, "device_index": select,
        "Event": _Event, "Stream": _Stream, "stream": side_stream,
        "current_stream": lambda *_: main, "default_stream": lambda *_: main,
    }  # fmt: skip
    markers = SimpleNamespace(
        **dict.fromkeys(("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA"), lambda *_: 0)
    )
    with contextlib.ExitStack() as stack:
        for owner in (torch.cuda, torch.accelerator):
            for name, answer in answers.items():
                if hasattr(owner, name):
                    stack.enter_context(replaced(owner, name, answer))
        for owner, name, value in ((torch.cuda.nvtx, "_nvtx", markers), (torch, "Generator", _Generator)):
            stack.enter_context(replaced(owner, name, value))
        # torch's own takes streams of its own class only, which need the device
        torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
        stack.callback(delattr, torch.Tensor, "record_stream")
        if not hasattr(torch._C, _RAW_STREAM):  # a build for CPUs; libraries with kernels take it when imported
            setattr(torch._C, _RAW_STREAM, lambda *_: 0)
            stack.callback(delattr, torch._C, _RAW_STREAM)
        yield
