"""The collectives as torch runs them, on buffers of a known pattern, and the check of what they leave.

Element i of the member numbered r is (i + r) % 4 before: sums of 64 members are exact in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flopcast.microbench.collectives.cases import Case

PERIOD = 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MOST_CHECKED = 1 << 20  # elements of a result that are compared, spread over the whole
TOLERANCE = 0.01
# as torch 2.13 calls what were all_gather_into_tensor and reduce_scatter_tensor
_ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Group:
    """A process group, the same on the processors (gloo), the ranks of its members, and this process's number among
    them."""

    handle: Any
    control: Any
    ranks: list[int]
    number: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_of(self, value: float) -> list[float]:
        """Every member's number."""
        found = torch.zeros(self.size, dtype=torch.float64)
        found[self.number] = value
        dist.all_reduce(found, group=self.control)
        return [float(one) for one in found]

    def longest(self, value: float) -> float:
        """The largest of the members' numbers, in all."""
        return max(self.all_of(value))


@dataclass(frozen=True)
class Operation:
    """A collective that is ready to be called. `source`: what the call reads; it is `result` where the call works in
    place."""

    call: Callable[[], Any]
    source: Tensor
    result: Tensor


def operation(case: Case, group: Group, first: Tensor, second: Tensor) -> Operation:
    """The call of a case on two buffers of bytes, each as long as the largest case."""
    dtype = DTYPES[case.dtype]
    whole, other = (buffer[: case.bytes].view(dtype) for buffer in (first, second))
    part = case.items // group.size
    handle = group.handle
    if case.kind == "all_reduce":
        return Operation(lambda: dist.all_reduce(whole, group=handle), whole, whole)
    if case.kind == "all_gather":
        own = other[:part]
        return Operation(lambda: _ALL_GATHER(whole, own, group=handle), own, whole)
    if case.kind == "reduce_scatter":
        own = other[:part]
        return Operation(lambda: _REDUCE_SCATTER(own, whole, group=handle), whole, own)
    if case.kind == "all_to_all":
        return Operation(lambda: dist.all_to_all_single(other, whole, group=handle), whole, other)
    if case.kind == "broadcast":
        return Operation(lambda: dist.broadcast(whole, src=group.ranks[0], group=handle), whole, whole)
    return Operation(_send_or_receive(whole, group), whole, whole)


def _send_or_receive(buffer: Tensor, group: Group) -> Callable[[], None]:
    """Every even member sends to the next."""
    is_sender = group.number % 2 == 0
    peer = group.ranks[group.number + (1 if is_sender else -1)]
    operations = [dist.P2POp(dist.isend if is_sender else dist.irecv, buffer, peer, group.handle)]

    def run() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run


def fill(tensor: Tensor, number: int) -> None:
    """Writes the pattern of a member."""
    pattern = ((torch.arange(PERIOD) + number) % PERIOD).to(tensor)
    whole = tensor.numel() // PERIOD * PERIOD
    tensor[:whole].view(-1, PERIOD).copy_(pattern)
    tensor[whole:] = pattern[: tensor.numel() - whole]


def relative_error(case: Case, group: Group, done: Operation) -> float:
    """The largest difference of the result from what it must be, over the largest value that it may have; after one
    call on filled buffers."""
    count = done.result.numel()
    places = torch.arange(0, count, max(1, count // MOST_CHECKED), device=done.result.device)
    expected = _expected(case, group, places)
    found = done.result[places].to(torch.float64)
    sums = group.size if case.kind in ("all_reduce", "reduce_scatter") else 1
    return float((found - expected).abs().max()) / ((PERIOD - 1) * sums)


def _expected(case: Case, group: Group, places: Tensor) -> Tensor:
    part = case.items // group.size
    members = range(group.size)
    if case.kind == "all_reduce":
        return _sum_of(members, places)
    if case.kind == "reduce_scatter":
        return _sum_of(members, places + group.number * part)
    if case.kind == "all_gather":
        return _value(places // part, places % part)
    if case.kind == "all_to_all":
        return _value(places // part, places % part + group.number * part)
    sender = 0 if case.kind == "broadcast" else group.number // 2 * 2
    return _value(torch.full_like(places, sender), places)


def _value(member: Tensor, place: Tensor) -> Tensor:
    return ((place + member) % PERIOD).to(torch.float64)


def _sum_of(members: range, places: Tensor) -> Tensor:
    sums = [float(sum((first + member) % PERIOD for member in members)) for first in range(PERIOD)]
    return torch.tensor(sums, dtype=torch.float64, device=places.device)[places % PERIOD]
