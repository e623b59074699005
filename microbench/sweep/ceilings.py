"""Measures the ceilings: matrix rates, burst and sustained, and bandwidths of memory and last-level cache.

Each function measures one number on the timer's device; scalars.py makes rows of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from flopcast.kernels import read
from flopcast.kernels.references import BackendUnavailable, matmul_precision
from flopcast.microbench.timing.cuda_timer import event, seconds_between
from flopcast.microbench.timing.operands import free_bytes
from flopcast.microbench.timing.telemetry import Reading
from flopcast.microbench.timing.timer import Timer, synchronise

MATRIX_SIDE = 8192
BANDWIDTH_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # per array
MATRIX_DTYPES = {"cuda": ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "int8"), "cpu": ("fp32", "bf16")}
READ_BYTES = 1 << 29  # per launch of `cache_read`: 0.1 ms at 5 TB/s
# FLOPs per product on the processor: about 20 ms at 1e11 FLOP/s
CPU_MATRIX_FLOPS = 2e9


@dataclass(frozen=True)
class Scalar:
    """One measured number; `fields` go into its row as they are."""

    value: float
    unit: str
    samples: tuple[float, ...] = ()
    reading: Reading = field(default_factory=Reading)
    fields: Mapping[str, Any] = field(default_factory=dict)


# --- matrix units


def _matrix_call(device: torch.device, dtype: str) -> tuple[Callable[[], Any], int]:
    """A square matrix product of random normal operands, and its FLOPs. Raises BackendUnavailable where the device
    lacks the dtype."""
    side = MATRIX_SIDE if device.type == "cuda" else round((CPU_MATRIX_FLOPS / 2) ** (1 / 3) / 64) * 64
    if dtype in ("fp8", "int8"):
        return (_fp8_call if dtype == "fp8" else _int8_call)(device, side), 2 * side**3
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(dtype, torch.float32)
    a = torch.randn(side, side, device=device, dtype=torch_dtype)
    b = torch.randn(side, side, device=device, dtype=torch_dtype)
    out = torch.empty(side, side, device=device, dtype=torch_dtype)
    if torch_dtype is not torch.float32:
        return lambda: torch.mm(a, b.T, out=out), 2 * side**3

    def product() -> None:
        with matmul_precision(tf32=dtype == "tf32"):
            torch.mm(a, b.T, out=out)

    return product, 2 * side**3


def _fp8_call(device: torch.device, side: int) -> Callable[[], Any]:
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise BackendUnavailable("fp8 products need compute capability 8.9 or later")
    a = torch.randn(side, side, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(side, side, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _int8_call(device: torch.device, side: int) -> Callable[[], Any]:
    if torch.cuda.get_device_capability(device) < (7, 5):
        raise BackendUnavailable("int8 products need compute capability 7.5 or later")
    a, b = (torch.randint(-128, 128, (side, side), device=device, dtype=torch.int8) for _ in range(2))
    return lambda: torch._int_mm(a, b.T)  # into int32


def matrix_burst(timer: Timer, dtype: str) -> Scalar:
    """The best rate of ten single products after half a second of idle time."""
    call, flops = _matrix_call(timer.device, dtype)
    call()
    synchronise(timer.device)
    time.sleep(0.5 if timer.device.type == "cuda" else 0.0)
    samples, reading = _stretches(timer, call, stretches=10, per_stretch=1, limit_seconds=0.5)
    return Scalar(flops / min(samples), "flops_per_second", samples, reading)


def matrix_sustained(timer: Timer, dtype: str) -> Scalar:
    """The rate of products without a pause for `sustained_seconds` (a quarter of that for all dtypes but bf16 and, on
    the CPU, fp32): the mean over the last half, when clock and power have settled."""
    call, flops = _matrix_call(timer.device, dtype)
    call()
    synchronise(timer.device)
    main = dtype == ("bf16" if timer.device.type == "cuda" else "fp32")
    limit = timer.policy.sustained_seconds * (1.0 if main else 0.25)
    start = time.perf_counter()
    call()
    synchronise(timer.device)
    once = time.perf_counter() - start  # fp64 on a consumer GPU takes a second: then one per stretch
    per_stretch = max(1, min(5, round(limit / 50 / once)))
    samples, reading = _stretches(timer, call, stretches=10_000, per_stretch=per_stretch, limit_seconds=limit)
    tail = samples[len(samples) // 2 :]
    return Scalar(flops / statistics.fmean(tail), "flops_per_second", tail, reading)


def _stretches(
    timer: Timer, call: Callable[[], Any], *, stretches: int, per_stretch: int, limit_seconds: float
) -> tuple[tuple[float, ...], Reading]:
    """Seconds per call of consecutive stretches until the time limit, at least two, and the last telemetry reading
    under load.

    On CUDA two stretches are always queued, so that the device never waits for the host.
    """
    if timer.device.type == "cpu":
        return _cpu_stretches(timer, call, stretches, limit_seconds)
    marks = [event()]
    marks[0].record()
    reading = Reading()
    start = time.perf_counter()
    while len(marks) <= stretches and (len(marks) <= 2 or time.perf_counter() - start < limit_seconds):
        for _ in range(per_stretch):
            call()
        marks.append(event())
        marks[-1].record()
        if len(marks) > 2:
            marks[-3].synchronize()
            reading = timer.read()
    torch.cuda.synchronize(timer.device)
    return tuple(seconds_between(pair) / per_stretch for pair in pairwise(marks)), reading


def _cpu_stretches(
    timer: Timer, call: Callable[[], Any], stretches: int, limit_seconds: float
) -> tuple[tuple[float, ...], Reading]:
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < stretches and (len(samples) < 2 or time.perf_counter() - begin < limit_seconds):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return tuple(samples), timer.read()


# --- memory


def _array(timer: Timer, size: int) -> torch.Tensor:
    return torch.randn(max(1, size // 4), device=timer.device)


def _bandwidth(timer: Timer, call: Callable[[], Any], moved: int) -> Scalar:
    timing = timer.time(lambda _: call, (), "hot")
    return Scalar(
        moved / timing.seconds, "bytes_per_second", tuple(moved / s for s in timing.samples), timing.reading,
        {"timer": timing.timer, "bytes": moved},
    )  # fmt: skip


def _large(timer: Timer) -> int:
    """Bytes per array for memory bandwidth: 1 GiB (CPU: 256 MiB), less where memory is short."""
    return min(BANDWIDTH_BYTES[timer.device.type], free_bytes(timer.device) // 8)


def copy_bandwidth(timer: Timer, size: int) -> Scalar:
    """Bandwidth of a copy between two arrays of `size` bytes, counting bytes read and bytes written."""
    source, target = _array(timer, size), _array(timer, size)
    return _bandwidth(timer, lambda: target.copy_(source), 2 * 4 * source.numel())


def hbm_copy(timer: Timer) -> Scalar:
    return copy_bandwidth(timer, _large(timer))


def hbm_read(timer: Timer) -> Scalar:
    """Read bandwidth, of a sum, whose writes are negligible."""
    source = _array(timer, _large(timer))
    return _bandwidth(timer, lambda: torch.sum(source), 4 * source.numel())


def hbm_write(timer: Timer) -> Scalar:
    target = _array(timer, _large(timer))
    return _bandwidth(timer, lambda: target.fill_(1.0), 4 * target.numel())


def l2_copy(timer: Timer) -> Scalar:
    """Bandwidth of a copy whose two arrays together fill a quarter of the last-level cache."""
    return copy_bandwidth(timer, timer.cache_bytes // 8)


def cache_read(timer: Timer, working_set: int) -> Scalar:
    """Bytes/s of reading `working_set` bytes repeatedly within one kernel: hundreds of MB per launch, so that neither
    the launch nor the kernel's ramp-up counts. Raises BackendUnavailable without triton or on a processor."""
    source = _array(timer, working_set)
    sm_count = torch.cuda.get_device_properties(timer.device).multi_processor_count if source.is_cuda else 1
    programs = 4 * sm_count  # of 8 warps: half of what an SM holds
    call, moved = read.prepare(source, least_bytes=max(READ_BYTES, working_set), programs=programs)
    return _bandwidth(timer, call, moved)
