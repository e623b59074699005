"""The norm of all gradients of a model, in one pass over them: what clipping asks for.

    norm = gradient_norm(gradients)                   # fp32 [1], on the device: the host does not wait for it

torch's `clip_grad_norm_` makes a norm per tensor, one of these norms, and then scales every gradient: it reads them
twice and writes them once, 12 bytes per element. With the scale applied inside AdamW (`adamw.AdamW(max_norm=...)`) it
is one read, 4 bytes, and the gradients stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from operator import or_
from typing import TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flopcast.kernels.launching import Replayed
from flopcast.kernels.operators import operator, unobserved
from flopcast.kernels.rowwise import load_triton

CHUNK, BLOCK = 32768, 2048  # elements per program, and at a time: 0.6 B parameters are 18,000 sums for the last program


@dataclass(frozen=True)
class Table:
    """What the kernel reads to find its work. It does not keep the tensors alive.

    pointers: int64 [tensors, 2], addresses and numbers of elements. chunk_tensor, chunk_index: as `adamw.Table`'s.
    aligned: whether all addresses are multiples of 16 bytes.
    """

    pointers: Tensor
    chunk_tensor: Tensor
    chunk_index: Tensor
    aligned: bool
    chunk: int = CHUNK
    block: int = BLOCK


_TABLES: dict[tuple[int, ...], Table] = {}  # the tables made last, by address, as `adamw` keeps its own
KEPT = 8

Key = TypeVar("Key")
Value = TypeVar("Value")


@lru_cache(maxsize=64)
def chunks_of(numels: tuple[int, ...], chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(tensor, chunk within it) of every program, each int32 [programs]."""
    counts = torch.tensor([-(-numel // chunk) for numel in numels], dtype=torch.int64)
    tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)
    index = torch.arange(tensor.numel()) - (counts.cumsum(0) - counts)[tensor]
    return tensor.int().to(device), index.int().to(device)


def require_whole(tensors: Sequence[Tensor], device: torch.device, use: str) -> None:
    """Raises ValueError unless all are fp32, contiguous and on the device; `use`: what takes others."""
    if (
        all(map(Tensor.is_contiguous, tensors))
        and {x.dtype for x in tensors} == {torch.float32}
        and {x.device for x in tensors} == {device}
    ):
        return
    for x in tensors:
        if x.dtype is not torch.float32 or x.device != device or not x.is_contiguous():
            raise ValueError(
                f"these kernels take contiguous fp32 tensors of one device, {device}, got {x.dtype}{tuple(x.shape)} "
                f"with strides {x.stride()} on {x.device}: use {use} for others"
            )


def are_aligned(addresses: Iterable[int]) -> bool:
    """Whether all are multiples of 16 bytes, as accesses of four elements at once need."""
    return reduce(or_, addresses, 0) % 16 == 0


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """A table of the host's on the device, which the host does not wait for."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def make_table(gradients: Sequence[Tensor]) -> Table:
    """Raises ValueError unless all are fp32, contiguous and on one device."""
    device = gradients[0].device
    require_whole(gradients, device, "torch.nn.utils.clip_grad_norm_")
    addresses, numels = [x.data_ptr() for x in gradients], tuple(x.numel() for x in gradients)
    table = torch.tensor((addresses, numels), dtype=torch.int64).T.contiguous()
    return Table(to_device(table, device), *chunks_of(numels, CHUNK, device), are_aligned(addresses))


def made_once(known: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """The value of a key, made where there is none; of the values made last KEPT are known."""
    value = known.get(key)
    if value is None:
        value = make()
        while len(known) >= KEPT:
            del known[next(iter(known))]
        known[key] = value
    return value


def _table(gradients: Sequence[Tensor]) -> Table:
    key = (*map(Tensor.data_ptr, gradients), *map(Tensor.numel, gradients))
    return made_once(_TABLES, key, partial(make_table, gradients))


def _launch_by(pointers: Tensor, chunk_tensor: Tensor, chunk_index: Tensor, aligned: bool) -> Tensor:
    norm = torch.empty(1, dtype=torch.float32, device=pointers.device)
    load_triton("gradient_norm").launch(Table(pointers, chunk_tensor, chunk_index, aligned), norm)
    return norm


_launch = Replayed(_launch_by)


def _norm_by(table: Table, kept: Sequence[Tensor] = ()) -> Tensor:
    """The norm of a table's gradients; `kept`: these, where nobody else holds them."""
    if not table.chunk_tensor.numel():  # no elements
        return torch.zeros(1, dtype=torch.float32, device=table.pointers.device)
    norm: Tensor = _launch(table.pointers, table.chunk_tensor, table.chunk_index, table.aligned)
    return norm


@operator("flopcast::gradient_norm")
def gradient_norm_op(gradients: list[Tensor]) -> Tensor:
    load_triton("gradient_norm", gradients[0])
    return _norm_by(_table(gradients))


@gradient_norm_op.register_fake
def _(gradients: list[Tensor]) -> Tensor:
    return gradients[0].new_empty(1)


def call_of(gradients: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A call that makes the norm again and again by a table of its own, as `adamw.call_of` makes a step."""
    load_triton("gradient_norm", gradients[0])
    return partial(_norm_by, make_table(gradients), tuple(gradients))


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, fp32 [1]. Raises ValueError for none, and as `make_table` does."""
    if not gradients:
        raise ValueError("gradient_norm takes at least one gradient")
    with torch.no_grad():
        if unobserved() and not is_dynamo_compiling():
            load_triton("gradient_norm", gradients[0])
            return _norm_by(_table(gradients))
        norm: Tensor = gradient_norm_op(list(gradients))
    return norm
