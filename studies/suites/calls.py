"""Which memory-bound calls a suite measures: those of op streams, and the same calls at sizes between them.

A stream has a call at few sizes, and between them lie the steps that matter: a round of thread blocks, the end of the
L2, a reduction's rows. So a recorded call is made longer or shorter along its leading dimension (`scaled`), which keeps
strides and broadcasts, and with them the kernel; and an optimizer's call is given the tensors of more layers
(`deepened`), because streams are traced three layers deep: of real steps on an H200, optimizers of 28 layers and more
were forecast 4 to 5% high, of four to seven by -1 to 4%.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import dist
from typing import Any

from flopcast.kernels.shapes import Call, Operand
from flopcast.roofline.gpu.suites import HOT_BYTES, SuiteCase
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import KernelKind

# Of the leading dimension, in eighths. The holdout's are none of the fit's, so that between is where it judges.
EIGHTHS = {"fit": (1, 2, 4, 6, 12, 16, 24, 32), "holdout": (3, 5, 7, 10, 14, 20)}
TIMES = {"fit": (3, 8), "holdout": (5,)}  # the layers of a traced optimizer's call (three), so many times
SCALABLE = ("pointwise", "copy", "reduction", "embedding", "cat", "softmax", "loss")


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """How many calls of a kind of kernel: by class where it is named, else `others`. `largest`: bytes of a call."""

    pointwise: int | None = None
    copy: int | None = None
    reduction: int | None = None
    embedding: int | None = None
    optimizer: int | None = None
    conv: int | None = None
    others: int = 10
    largest: int = 16 * 10**9

    def most(self, op_class: str) -> int:
        """How many calls of each variant of the class."""
        count: int | None = getattr(self, op_class, None)
        return self.others if count is None else count


# By what bounds the forecast on an H200 with ten calls a variant, errors of points left out: reductions 5 and 13%
# (two sizes each, rows and columns), embeddings' gradients 9%, casts 10% at the 90th percentile.
PLANS = {
    ("quick", "fit"): CallPlan(reduction=5, others=4, largest=6 * 10**9),
    ("quick", "holdout"): CallPlan(others=0),
    ("standard", "fit"): CallPlan(pointwise=16, copy=20, reduction=36, embedding=20, optimizer=14, conv=40, others=10),
    ("standard", "holdout"): CallPlan(pointwise=4, copy=5, reduction=8, embedding=5, optimizer=4, conv=12, others=3),
    ("full", "fit"): CallPlan(pointwise=24, copy=28, reduction=50, embedding=30, optimizer=20, conv=64, others=16),
    ("full", "holdout"): CallPlan(pointwise=6, copy=8, reduction=12, embedding=8, optimizer=6, conv=20, others=5),
    ("cpu-quick", "fit"): CallPlan(others=3),
    ("cpu-quick", "holdout"): CallPlan(others=1),
}


def call_cases(
    works: Sequence[Work],
    plan: CallPlan,
    role: str,
    caches: Sequence[str] = ("cold", "hot"),
    without: Collection[Call] = (),
) -> list[SuiteCase]:
    """Of each variant among `works` (those of one role's op streams) the smallest call, the largest and some between,
    as far from one another as they come; recorded ones and made ones alike, none that is among `without`."""
    variants: dict[KernelKind, dict[Call, Work]] = defaultdict(dict)
    for work in works:
        if isinstance(work.shape, Call) and work.bytes <= plan.largest:
            for call in (work.shape, *made_from(work, role)):
                found = work if call is work.shape else describe(call)
                if call not in without and found.variant == work.variant and found.bytes <= plan.largest:
                    variants[KernelKind(work.op_class, work.variant)].setdefault(call, found)
    cases = []
    for kind, group in variants.items():
        members = sorted(group.values(), key=lambda work: (work.features, work.shape.key))
        for i in spread([work.features for work in members], plan.most(kind.op_class)):
            hot = members[i].bytes <= HOT_BYTES
            cases += [SuiteCase(members[i].shape, "torch", cache, role) for cache in caches if hot or cache == "cold"]
    return cases


def spread(points: Sequence[tuple[float, ...]], most: int) -> list[int]:
    """Indices of at most `most` of the sorted `points`, as far from one another as they come, both ends among them."""
    if len(points) <= most:
        return list(range(len(points)))
    if most <= 1:
        return [len(points) // 2] * most
    chosen = [0, len(points) - 1]
    nearest = [min(dist(point, points[i]) for i in chosen) for point in points]
    while len(chosen) < most:
        far = max(range(len(points)), key=lambda i: nearest[i])
        chosen.append(far)
        nearest = [min(d, dist(point, points[far])) for d, point in zip(nearest, points, strict=True)]
    return sorted(chosen)


def made_from(work: Work, role: str) -> Iterator[Call]:
    """The calls that a role measures beside a recorded one."""
    call = work.shape
    if not isinstance(call, Call):
        return
    if work.op_class == "optimizer":
        yield from (deeper for times in TIMES[role] if (deeper := deepened(call, times)) is not None)
    elif work.op_class in SCALABLE:
        yield from (longer for n in EIGHTHS[role] if (longer := scaled(call, n, 8)) is not None)


def scaled(call: Call, numerator: int, denominator: int) -> Call | None:
    """The call with its leading dimension times numerator / denominator; None where that is no whole number of at least
    2, or where an operand does not say whether it follows (a leading 1, a size that an argument names)."""
    rank = max((len(o.shape) for o in (*call.inputs, *call.outputs)), default=0)
    first = next((o for o in (*call.inputs, *call.outputs) if len(o.shape) == rank), None)
    if first is None or rank < 2:
        return None
    lead = max(o.shape[0] for o in (*call.inputs, *call.outputs) if len(o.shape) == rank)
    is_lookup = call.op.startswith("aten.embedding")
    if is_lookup:  # the table stays; the indices have one dimension less than what is looked up or comes back
        lead = next(o.shape[0] for o in call.inputs if o.dtype.startswith("int"))
    size, rest = divmod(lead * numerator, denominator)
    if rest or size < 2 or lead < 2 or _names_sizes(call, lead):
        return None

    is_loss = call.op.startswith("aten.nll_loss")  # of rows of logits, and a target for each

    def follow(operand: Operand) -> Operand:
        follows = (
            len(operand.shape) == rank
            or (is_lookup and operand.dtype.startswith("int"))
            or (is_loss and len(operand.shape) == 1)
        )
        if not follows or operand.shape[0] != lead:
            return operand
        if operand.stride[0] != 0 and operand.stride[0] != max(operand.stride):
            raise _NotLeading
        return replace(operand, shape=(size, *operand.shape[1:]))

    if not (is_lookup or is_loss) and any(
        len(o.shape) not in (0, rank) and lead in o.shape for o in (*call.inputs, *call.outputs)
    ):
        return None
    try:
        return replace(call, inputs=tuple(map(follow, call.inputs)), outputs=tuple(map(follow, call.outputs)))
    except _NotLeading:
        return None


class _NotLeading(Exception):
    """An operand's leading dimension is not its slowest: longer, its rows would overlap."""


def _names_sizes(call: Call, lead: int) -> bool:
    """Whether an argument may be a size: a list of numbers among which is the leading one. Dimensions are below 8."""
    return any(
        isinstance(value, list) and lead in value and any(isinstance(v, int) and v >= 8 for v in value)
        for value in json.loads(call.args)
    )


def deepened(call: Call, times: int) -> Call | None:
    """An optimizer's call for a model of `times` as many layers: of each list all tensors but the first (the embedding)
    and the last (the final norm) are there so many times. None where a list has fewer than three."""
    arguments, options = json.loads(call.args), json.loads(call.kwargs)
    lists = [v["ts"] for v in (*arguments, *options.values()) if isinstance(v, dict) and "ts" in v]
    if not lists or len({count for _, count in lists}) != 1 or lists[0][1] < 3:
        return None
    count = lists[0][1]
    order = [0, *list(range(1, count - 1)) * times, count - 1]
    inputs: list[Operand] = []
    places: dict[int, list[int]] = {}  # of an input, where it stands now
    starts = {first: None for first, _ in lists}
    index = 0
    while index < len(call.inputs):
        chosen = [index + i for i in order] if index in starts else [index]
        for old in chosen:
            places.setdefault(old, []).append(len(inputs))
            inputs.append(call.inputs[old])
        index += count if index in starts else 1

    def renamed(value: Any) -> Any:
        match value:
            case {"ts": [first, _]}:
                return {"ts": [places[first][0], len(order)]}
            case {"t": position}:
                return {"t": places[position][0]}
            case {"rs": [number, repeats]} if repeats == count:
                return {"rs": [number, len(order)]}
        return value

    outputs = tuple(call.outputs[i] for i in order) if len(call.outputs) == count else call.outputs
    return replace(
        call,
        inputs=tuple(inputs),
        outputs=outputs,
        args=json.dumps([renamed(value) for value in arguments], separators=(",", ":")),
        kwargs=json.dumps({k: renamed(v) for k, v in options.items()}, separators=(",", ":")),
        written=tuple(sorted(place for old in call.written for place in places[old])),
    )


# The loss of 8,192 tokens moves 5 GB, and its reference takes eight times the memory.
FUSED_PLANS = {"fit": CallPlan(others=12, largest=6 * 10**9), "holdout": CallPlan(others=3, largest=6 * 10**9)}


def fused_cases(fit: Iterable[Work], holdout: Iterable[Work]) -> list[SuiteCase]:
    """The fused kernels' calls of both roles, cold, and hot where an L2 holds them; what is fitted is not held out."""
    fitted = [work for work in fit if work.op_class == "fused"]
    shapes = {work.shape for work in fitted}
    held = [work for work in holdout if work.op_class == "fused" and work.shape not in shapes]
    return [
        replace(case, backend="triton")
        for role, works in (("fit", fitted), ("holdout", held))
        for case in call_cases(works, FUSED_PLANS[role], role)
    ]


# Bytes that a call of flopcast's AdamW moves at most: operands and a step of them in fp64 take 48 bytes a parameter.
LARGEST_STEP = 50 * 10**9


def optimizer_cases(fit: Iterable[Work], holdout: Iterable[Work]) -> list[SuiteCase]:
    """All calls of flopcast's optimizer in both roles, cold: what a step updates is not in L2 when it is updated."""
    found: dict[Call, SuiteCase] = {}
    for role, works in (("fit", fit), ("holdout", holdout)):
        for work in works:
            is_ours = (work.op_class, work.backend) == ("optimizer", "triton") and work.bytes <= LARGEST_STEP
            if isinstance(work.shape, Call) and is_ours:
                found.setdefault(work.shape, SuiteCase(work.shape, "triton", "cold", role))
    return list(found.values())
