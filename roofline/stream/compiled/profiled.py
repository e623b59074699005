"""Joins the launches of a step's graphs to the kernels that a profiler saw, in order.

A generated kernel has the same name in both. A call of a library launches kernels of names of its own, with fills
before them and sums of parts after them: all that stand between two generated kernels belong to the calls between them.
What a step launches outside its graphs (the loss's first gradient, the optimizer) belongs to none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flopcast.errors import DataError
from flopcast.roofline.stream.compiled.launches import Graph, Kind, Launch

_FILL = re.compile(r"^Mem(set|cpy)\b")
_PRODUCT = re.compile(r"nvjet|gemm|gemv|cutlass|cublas|splitK|xmma|\bdot_kernel|reduce_1Block")
_ATTENTION = re.compile(r"cudnn|flash|fmha|sdpa|attention", re.IGNORECASE)
_OPTIMIZER = re.compile(r"multi_tensor_apply_kernel|FusedOptimizer|foreach", re.IGNORECASE)


@dataclass(frozen=True)
class TimedLaunch:
    """A launch and the kernels that it ran as, (name, seconds) each."""

    launch: Launch
    kernels: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.kernels)


@dataclass(frozen=True)
class Joined:
    """A step's launches with their times, and the kernels of no launch: the optimizer's and others."""

    launches: tuple[TimedLaunch, ...]
    optimizer: tuple[tuple[str, float], ...]
    outside: tuple[tuple[str, float], ...]


def join(graphs: Sequence[Graph], kernels: Sequence[tuple[str, float]]) -> Joined:
    """The kernels of each launch. `graphs` in the order in which a step runs them, forward before backward.

    Raises DataError at the first generated kernel that the profile does not have in its place.
    """
    launches: list[TimedLaunch] = []
    outside: list[tuple[str, float]] = []
    place = 0
    for graph in graphs:
        pending: list[Launch] = []
        for launch in graph.launches:
            if not launch.is_generated:
                pending.append(launch)
                continue
            end = next((p for p in range(place, len(kernels)) if _is_generated(kernels[p][0])), len(kernels))
            if end == len(kernels) or kernels[end][0] != launch.name:
                found = kernels[end][0] if end < len(kernels) else "the end"
                raise DataError(
                    f"graph {graph.label}: after {len(launches)} launches the text launches {launch.name}, the profile "
                    f"has {found[:100]!r}: they are not of the same step"
                )
            timed, others = _shared(pending, kernels[place:end])
            launches += timed
            outside += others
            launches.append(TimedLaunch(launch, (kernels[end],)))
            place, pending = end + 1, []
        if pending:
            end = next((p for p in range(place, len(kernels)) if _ends_calls(kernels[p][0])), len(kernels))
            timed, others = _shared(pending, kernels[place:end])
            launches += timed
            outside += others
            place = end
    outside += kernels[place:]
    optimizer = tuple(kernel for kernel in outside if _OPTIMIZER.search(kernel[0]))
    return Joined(tuple(launches), optimizer, tuple(kernel for kernel in outside if kernel not in optimizer))


def run_order(graphs: Sequence[Graph]) -> tuple[Graph, ...]:
    """Graphs as a step runs them, which is as they were compiled, but for backward ones that wait for the loss: forward
    graphs in the order of their labels, then backward ones in the opposite order."""
    forward = [graph for graph in graphs if not graph.is_backward]
    return (*forward, *(graph for graph in graphs if graph.is_backward))


def _is_generated(name: str) -> bool:
    return name.startswith("triton_")


def _ends_calls(name: str) -> bool:
    return _is_generated(name) or _OPTIMIZER.search(name) is not None


def _shared(
    calls: Sequence[Launch], kernels: Sequence[tuple[str, float]]
) -> tuple[list[TimedLaunch], list[tuple[str, float]]]:
    """Kernels between two generated ones, shared out among the calls between them in order; what is left over stands
    before the first or after the last."""
    if not calls:
        return [], list(kernels)
    shares: list[list[tuple[str, float]]] = [[] for _ in calls]
    place = -1  # the call that the last kernel belonged to
    waiting: list[tuple[str, float]] = []  # fills, which belong to the next call's kernel
    outside: list[tuple[str, float]] = []
    for kernel in kernels:
        if _FILL.match(kernel[0]):
            waiting.append(kernel)
            continue
        following = place + 1
        begins = following < len(calls) and _begins(calls[following], kernel[0], place >= 0 and calls[place])
        if begins:
            place = following
        if place < 0:
            outside += [*waiting, kernel]
        else:
            shares[place] += [*waiting, kernel]
        waiting = []
    (shares[place] if place >= 0 else outside).extend(waiting)
    return [TimedLaunch(call, tuple(share)) for call, share in zip(calls, shares, strict=True)], outside


def _begins(call: Launch, kernel: str, before: Launch | bool) -> bool:
    """Whether a kernel is the first of `call`, or still belongs to the call before it."""
    if call.kind is Kind.PRODUCT:
        return _PRODUCT.search(kernel) is not None and "splitK" not in kernel
    if call.kind in (Kind.ATTENTION, Kind.ATTENTION_BACKWARD):
        return _ATTENTION.search(kernel) is not None
    return _PRODUCT.search(kernel) is None and _ATTENTION.search(kernel) is None
