"""What the host spends on the graphs of a compiled step: entering each, and on its launches or its replay."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from flopcast.microbench.recipe.layout import Layout
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.host_graphs import (
    ENTERING_INFERENCE,
    GIVEN,
    GIVEN_KINDS,
    GRADIENT,
    HEAVIER_CALLS,
    OF_INFERENCE,
    is_dense_nchw,
)
from flopcast.roofline.stream.ops.op_stream import Stream, once_per_stream, packet

# The host's time for entering a graph that torch cut out of one at the buckets of DistributedDataParallel, over that of
# a whole model's: guards are asked once. `python -m studies.parallel.host`, of three compiled steps of Qwen3-0.6B.
PIECE_SHARE = 0.76

# The host's time for entering a further graph of a phase, forward and backward, over that of its first: a break in a
# layer costs the frame that goes on and its guards, while the first of a phase finds the caches cold and autograd's
# engine asleep. `python -m studies.calls.breaks`, of stacks whose layers break into two and four, in processes of four
# H200s: 0.15 to 0.31 and 0.11 to 0.18; with CUDA graphs 0.30 and 0.31, 0.16 and 0.19.
FURTHER_GRAPH = {"compile": (0.23, 0.15), "compile-graphs": (0.30, 0.18)}


class GraphLaunch(NamedTuple):
    """Of an operation in a graph: the host's seconds for it, and which replay of a captured graph it is part of,
    counted from 1; 0 where it is launched by itself."""

    host_seconds: float
    replay: int = 0


def graph_launches(stream: Stream, host: HostCosts) -> dict[int, GraphLaunch]:
    """Returns, by the number of each operation that a graph launches, what its launch costs the host: of the first one
    entering the graph too. `Stream.meta["graphs"]` has of each call of a graph its label, first and last operation."""
    mode = stream.meta["mode"]
    costs, is_captured = host.graph_costs(mode), mode == "compile-graphs"
    worth = [1.0] * len(stream.ops) if is_captured else launches_worth(stream)
    of_step = ENTERING_INFERENCE if _is_inference(stream) and not is_captured else 1.0
    found: dict[int, GraphLaunch] = {}
    for number, ((_, first, last), share) in enumerate(zip(stream.meta["graphs"], shares(stream), strict=True), 1):
        for i in range(first, last + 1):
            entering = of_step * share * costs.entry(stream.ops[first].phase) if i == first else 0.0
            found[i] = GraphLaunch(costs.launch * worth[i] + entering, number if is_captured else 0)
    return found


@once_per_stream
def launches_worth(stream: Stream) -> list[float]:
    """Returns for each operation in a compiled graph the launches that it costs the host, with the tensors that its
    graph is given, where a forward reads them first, and the gradients, where a backward writes them first."""
    if _is_inference(stream):
        return [OF_INFERENCE] * len(stream.ops)
    found = [1.0] * len(stream.ops)
    for _, first, last in stream.meta["graphs"]:
        seen: set[int] = set()
        for i in range(first, last + 1):
            op = stream.ops[i]
            if heavier := HEAVIER_CALLS.get(packet(op.name)):
                first_two = (stream.tensors[tensor].operand for tensor in op.inputs[:2])
                found[i] += heavier[0 if is_dense_nchw(*first_two) else 1]
            is_forward = op.phase == "forward"
            touched = op.inputs if is_forward else (*op.outputs, *(op.inputs[place] for place in op.written))
            new = {stream.tensors[tensor].storage for tensor in touched} - seen
            seen |= new
            kinds = [stream.storages[storage].kind for storage in new]
            found[i] += (
                GIVEN * sum(kind in GIVEN_KINDS for kind in kinds) if is_forward else GRADIENT * kinds.count("gradient")
            )
    return found


def _is_inference(stream: Stream) -> bool:
    return not any(op.phase == "backward" for op in stream.ops)


def shares(stream: Stream) -> Iterator[float]:
    """Yields, by call of a graph, the share of the cost of entering a whole model's that entering it costs: the least
    for those that follow in a phase in which graphs recur, as those of layers that break do. On several GPUs, where
    hooks enter dynamo around each, what is left is counted in calls (`step.communication`)."""
    calls = stream.meta["graphs"]
    for phase, entered in groupby(calls, lambda call: stream.ops[call[1]].phase):
        labels = [label for label, _, _ in entered]
        further = 1.0
        if stream.meta.get("parallel") is None and len(set(labels)) < len(labels):
            further = FURTHER_GRAPH[stream.meta["mode"]][phase == "backward"]
        of_all = PIECE_SHARE if _is_cut(stream) else 1.0
        yield from (of_all, *[of_all * further] * (len(labels) - 1))


def _is_cut(stream: Stream) -> bool:
    """Whether torch cut the step's graph at the buckets of DistributedDataParallel."""
    told = stream.meta.get("parallel")
    return told is not None and not Layout.parse(told["layout"]).is_fully_sharded
