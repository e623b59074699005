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
_PRODUCT = re.compile(r"nvjet|gemm|gemv|cutlass|cublas|xmma|\bdot_kernel|reduce_1Block")
_PARTS = re.compile(r"splitKreduce")  # sums what several programs multiplied
_ATTENTION = re.compile(r"cudnn|flash|fmha|sdpa|attention", re.IGNORECASE)
_FUSED_ATTENTION = re.compile(r"sdpa|flash|fmha|attention|cudnn::fusion", re.IGNORECASE)
_TRITON_ATTENTION = re.compile(r"^(forward|prepare|delta|dkdv|dq|onepass|dq_scale)_kernel$")
_RELAYOUT = re.compile(r"nchwToNhwc|AddPadding")  # before a convolution
_CONVOLUTION = re.compile(r"xmma|cutlass|nvjet|wgrad|dgrad|fprop|convolve|conv2d")
_OPTIMIZER = re.compile(
    r"multi_tensor_apply_kernel|FusedOptimizer|foreach|adamw_kernel|squares_kernel|root_of_sum_kernel", re.IGNORECASE
)


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
    """The kernels of each launch, in the order in which the step ran its graphs (`run_order`).

    Raises DataError for a profile of another step.
    """
    launches: list[TimedLaunch] = []
    outside: list[tuple[str, float]] = []
    place = 0
    for graph in run_order(graphs, kernels):
        pending: list[Launch] = []
        for launch in graph.launches:
            if not launch.is_generated:
                pending.append(launch)
                continue
            end = next(p for p in range(place, len(kernels)) if _is_generated(kernels[p][0]))
            timed, others = _shared(pending, kernels[place:end])
            launches += [*timed, TimedLaunch(launch, (kernels[end],))]
            outside += others
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


def class_of_kernel(name: str) -> str:
    """The operation class of a kernel by its name alone, where nothing says which call launched it."""
    if _is_generated(name):
        return "generated"
    if _OPTIMIZER.search(name):
        return "optimizer"
    if _FUSED_ATTENTION.search(name) or _TRITON_ATTENTION.match(name):
        return "attention"
    if _RELAYOUT.search(name):
        return "conv"
    if _PRODUCT.search(name):
        return "gemm"
    return "reduction" if "reduce_kernel" in name else "fill" if _FILL.match(name) else "pointwise"


def run_order(graphs: Sequence[Graph], kernels: Sequence[tuple[str, float]]) -> tuple[Graph, ...]:
    """The graphs as the step ran them, one graph perhaps several times: layers behind a graph break share theirs. Each
    is told by the names of its generated kernels in a row; of several that fit, the longest.

    Raises DataError at a generated kernel where none of the graphs goes on.
    """
    names = [name for name, _ in kernels if _is_generated(name)]
    generated = [(graph, [launch.name for launch in graph.launches if launch.is_generated]) for graph in graphs]
    generated.sort(key=lambda pair: len(pair[1]), reverse=True)
    order: list[Graph] = []
    place = 0
    while place < len(names):
        fitting = next((pair for pair in generated if pair[1] and names[place : place + len(pair[1])] == pair[1]), None)
        if fitting is None:
            raise DataError(
                f"kernel {names[place]}, number {place + 1} of {len(names)} that are generated, begins no graph of the "
                "text: profile and text are not of the same step"
            )
        order.append(fitting[0])
        place += len(fitting[1])
    return tuple(order)


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
    waiting: list[tuple[str, float]] = []  # fills, which belong to the next kernel's call
    outside: list[tuple[str, float]] = []
    for kernel in kernels:
        if _FILL.match(kernel[0]):
            waiting.append(kernel)
            continue
        following = place + 1
        is_free = place < 0 or _is_whole(calls[place], shares[place])
        if is_free and following < len(calls) and _begins(calls[following], kernel[0]):
            place = following
        if place < 0:
            outside += [*waiting, kernel]
        else:
            shares[place] += [*waiting, kernel]
        waiting = []
    (shares[place] if place >= 0 else outside).extend(waiting)
    return [TimedLaunch(call, tuple(share)) for call, share in zip(calls, shares, strict=True)], outside


def _begins(call: Launch, kernel: str) -> bool:
    """Whether a kernel can be the first of `call`."""
    if call.kind is Kind.PRODUCT:
        return _PRODUCT.search(kernel) is not None and not _PARTS.search(kernel)
    if call.kind is Kind.CONVOLUTION:
        return any(pattern.search(kernel) for pattern in (_CONVOLUTION, _RELAYOUT))
    if call.kind in (Kind.ATTENTION, Kind.ATTENTION_BACKWARD):
        return _ATTENTION.search(kernel) is not None
    return not any(pattern.search(kernel) for pattern in (_PRODUCT, _ATTENTION))


def _is_whole(call: Launch, kernels: Sequence[tuple[str, float]]) -> bool:
    """Whether a call has run what it has to: a convolution's backward pass has a kernel for each gradient."""
    if call.kind is not Kind.CONVOLUTION:
        return True
    done = sum(_CONVOLUTION.search(name) is not None for name, _ in kernels)
    return done >= (len(call.results) if "backward" in call.name else 1)
