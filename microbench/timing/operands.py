"""Makes operand sets to rotate over, so that a call finds none of its operands in the last-level cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flopcast.microbench.timing.policy import TimingPolicy

Operands = Sequence[Tensor]
Call = Callable[[], Any]
Prepare = Callable[[Operands], Call]  # binds operands to a call without arguments


def storage_bytes(values: Any) -> int:
    """Bytes of the distinct storages behind the tensors of a nested list, tuple or dictionary."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(values)}.values())


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def clone_operands(operands: Operands) -> tuple[Tensor, ...]:
    """Copies with the memory layout of the originals: sizes, strides (including 0), offsets, shared storages."""
    storages: dict[int, Any] = {}
    clones = []
    for tensor in operands:
        storage: Any = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()
        clone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        clone.set_(storages[storage.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride())
        clones.append(clone.requires_grad_(tensor.requires_grad))
    return tuple(clones)


def rotation_sets(footprint_bytes: int, cache_bytes: int, free_bytes: int, policy: TimingPolicy) -> int:
    """How many operand sets to rotate over: together `rotation_factor` times the cache, at least 2, within
    the memory allowed (1 when not even two fit)."""
    footprint = max(1, footprint_bytes)
    wanted = max(2, math.ceil(policy.rotation_factor * cache_bytes / footprint))
    allowed = min(policy.max_rotation_bytes, free_bytes // 2) // footprint
    return max(1, min(wanted, policy.max_sets, allowed))


def rotate(
    prepare: Prepare, operands: Operands, footprint: int, cache_bytes: int, device: torch.device, policy: TimingPolicy
) -> list[Call] | None:
    """Calls on copies of the operands, one less than `rotation_sets`, each run once (a first call may compile or
    allocate). `footprint`: bytes of one set, its results included.

    None when that takes over `rotation_seconds` (a traced backward: 0.1 s each) or too much memory.
    """
    sets = rotation_sets(footprint, cache_bytes, free_bytes(device), policy)
    calls: list[Call] = []
    start = time.perf_counter()
    for _ in range(sets - 1):
        try:
            calls.append(prepare(clone_operands(operands)))
            calls[-1]()
        except torch.OutOfMemoryError:
            return None
        if time.perf_counter() - start > policy.rotation_seconds and len(calls) < sets - 1:
            return None
    return calls


def cold_warnings(cache: str, sets: int, footprint: int, cache_bytes: int) -> tuple[str, ...]:
    """A warning where the rotated operand sets do not exceed the cache (many tiny sets): the row is then partly
    warm."""
    if cache == "cold" and sets * footprint < cache_bytes:
        return (f"partly warm: {sets} operand sets of {footprint} bytes stay within the {cache_bytes}-byte cache",)
    return ()


def free_bytes(device: torch.device) -> int:
    """Memory that torch could still take on the device, its own cached blocks included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2 << 30
