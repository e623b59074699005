"""What the ranks of a step on several GPUs send each other: how long it takes on their link, on which CUDA stream it
runs, what waits for it, and what it and the kernels beside it lose to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp
from operator import attrgetter
from statistics import NormalDist
from typing import Any, cast

from flopcast.microbench.recipe.layout import Layout
from flopcast.roofline.gpu.links.choice import Kind
from flopcast.roofline.gpu.links.contention import Bound, Contended
from flopcast.roofline.gpu.links.fitted import CollectiveTime
from flopcast.roofline.gpu.links.library import Interconnect
from flopcast.roofline.gpu.profile.host import PROCESS_SPREAD, HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.simulation import Span
from flopcast.roofline.stream.ops.collectives import Collective, collectives
from flopcast.roofline.stream.ops.op_stream import Stream, once_per_stream

# What Python does around a call, as so many calls of the same host in a forward: FSDP's hooks, views and bookkeeping
# around each of its all-gathers and reduce-scatters, by phase; ring attention's around each of its own; DTensor's
# dispatch of each call of a module that tensor parallel divides, and of each tensor in an optimizer's lists. `python -m
# studies.parallel.host` has them, the mean of three hosts.
SHARDED_CALLS = {
    ("all_gather", "forward"): 71.0, ("all_gather", "backward"): 20.0, ("reduce_scatter", "backward"): 59.0,
}  # fmt: skip
RING_CALLS = 24.0
DIVIDED_CALLS = {"forward": 3.7, "backward": 2.9}
SHARDED_TENSOR_CALLS, DIVIDED_TENSOR_CALLS = 0.19, 0.59
# The same around compiled layers, whose hooks enter dynamo and leave it: `python -m studies.parallel.host`, of three
# compiled steps of Qwen3-0.6B and the shipped host.
COMPILED_SHARDED_CALLS = 68.0
# How far the three hosts lie apart: standard deviation of the log of FSDP's. Three others, which judge, lie 0.36 above
# and 0.34 and 0.04 below their mean.
CALLS_SIGMA = 0.40
_SHARDED = ("all_gather", "reduce_scatter")
_FUNCTIONAL = "_c10d_functional."  # collectives of DTensor and ring attention; FSDP calls c10d's own
_COPIES = "fsdp."  # what `fully_shard` copies before and after it gathers
_DIVIDED = ("_proj", "_norm")  # how these modules are called in a stream that does not say it: recorded, or older

# Of its time a kernel loses at most so much to collectives, however many run beside it.
MOST_LOST = 0.75


def slowest_host_factor(ranks: int) -> float:
    """The host seconds of the slowest of so many processes over those of one, both at the median.

    Ranks meet in each collective, so that a step goes at the pace of the slowest host. Processes of one machine differ
    by `PROCESS_SPREAD`, and do not slow each other down: four at once took 0.99 and 1.02 times as long for a forward
    and a backward as each alone, the slowest 1.12 and 1.09 times the mean (`studies.parallel.beside`). Steps of two
    and four GPUs that the host bounds take 4 to 17% longer than their ranks take on average to enqueue one for idle
    GPUs, in twelve of thirteen sessions (there too; in one, of ring attention and experts, 2% less); the law has 9 and
    17%. More than four ranks were not measured."""
    return exp(PROCESS_SPREAD * NormalDist().inv_cdf(0.5 ** (1 / ranks))) if ranks > 1 else 1.0


def _kind(sent: Collective) -> Kind:
    return cast(Kind, sent.kind)


@dataclass(frozen=True)
class Fabric:
    """What joins a step's ranks: the link, and how many of them a host holds."""

    link: Interconnect
    per_host: int

    def hosts(self, sent: Collective) -> int:
        """The hosts over which the ranks of a collective lie."""
        return min(ceil(((sent.ranks - 1) * sent.stride + 1) / self.per_host), sent.ranks)

    def time(self, sent: Collective) -> CollectiveTime:
        if sent.ranks == 1:  # as the shards of hsdp=8x1: nothing is sent
            return CollectiveTime(0.0, 0.0, "measured", None, 0, self.link.name)
        return self.link.time(_kind(sent), sent.bytes, sent.ranks, self.hosts(sent), sent.dtype)

    def beside(self, op: TimedOp, sent: Collective, profile: Profile) -> Contended:
        """What a kernel and a collective lose to each other."""
        if sent.ranks == 1:
            return Contended(1.0, 1.0, 0.0, 0)
        work, launches = op.work, max(op.launches, 1)
        bound: Bound = "memory"
        if work is not None and work.op_class in ("gemm", "attention"):
            bound = "matrix" if work.op_class == "gemm" else "attention"
        return self.link.contended(
            bound, _kind(sent), sent.bytes, sent.ranks, self.hosts(sent), sent.dtype,
            kernel_seconds=op.seconds / launches, multiprocessors=profile.device.get("sm_count"),
            kernel_blocks=profile.blocks(work) if work is not None and bound == "matrix" else 0,
            kernel_bytes=op.bytes / launches * (1 - op.hot_seconds / op.seconds) if op.seconds else None,
            bandwidth=profile.ceiling("hbm_copy", 0.0) or None,
        )  # fmt: skip


@once_per_stream
def calls_around(stream: Stream) -> dict[int, float]:
    """Returns what Python does around operations of a rank, in calls of the host's, by the operation's number."""
    told = stream.meta["parallel"]
    layout = Layout.parse(told["layout"])
    divides = layout.tp > 1 or (layout.is_own and bool(told["divided"]))
    is_sharded = layout.is_fully_sharded or (layout.is_own and any(op.name.startswith(_COPIES) for op in stream.ops))
    is_compiled = stream.meta.get("mode", "eager") != "eager"
    found: dict[int, float] = {}
    for sent in collectives(stream):
        op = stream.ops[sent.op]
        if layout.cp > 1 and op.name.startswith(_FUNCTIONAL) and op.phase != "optimizer":  # where clipping sums norms
            found[sent.op] = RING_CALLS
        elif is_sharded and sent.kind in _SHARDED and not op.name.startswith(_FUNCTIONAL):
            calls = SHARDED_CALLS.get((sent.kind, op.phase), 0.0)
            found[sent.op] = COMPILED_SHARDED_CALLS if is_compiled else calls
    names = tuple(f".{name}" for name in told.get("divided", ())) or _DIVIDED
    of_tensor = DIVIDED_TENSOR_CALLS if divides else SHARDED_TENSOR_CALLS * is_sharded
    for number, op in enumerate(stream.ops):
        if op.phase == "optimizer":
            if of_tensor and '"ts"' in op.args:
                found[number] = of_tensor * len(op.inputs)
        elif divides and op.module.endswith(names):
            found[number] = DIVIDED_CALLS[op.phase]
    return found


def on_lanes(stream: Stream, timed: Sequence[TimedOp], fabric: Fabric, host: HostCosts) -> list[TimedOp]:
    """Returns the operations of a rank on the CUDA streams that they run on, each with the launches that it waits for,
    and those that send with their time on the link and what asking for them costs the host."""
    found = list(timed)
    around = calls_around(stream)
    call = host.seconds("forward", "launch")
    sent = {one.op: one for one in collectives(stream)}
    times: dict[Collective, CollectiveTime] = {}
    latest: dict[int, int] = {}  # by lane: its last launch
    behind: dict[int, int] = {}  # by an op that launches nothing: the last launch of its lane before it
    owed: dict[int, set[int]] = {}  # by lane: what its next launch waits for
    known: dict[tuple[int, float], TimedOp] = {}  # by operation and calls around it; operations live as long as `timed`
    for number, (op, one) in enumerate(zip(stream.ops, timed, strict=True)):
        changed: dict[str, Any] = {}  # at once: to replace a field takes 3 us
        if number in sent:
            what = sent[number]._replace(op=0, lane=0)
            time = times.get(what) or times.setdefault(what, fabric.time(what))
            asked = fabric.link.host_cost(_kind(what), max(what.ranks, 2)).python_seconds if call else 0.0
            changed = {
                "work": None, "seconds": time.seconds, "sigma": time.sigma, "launches": 1, "basis": time.basis,
                "hot_seconds": 0.0, "hot_basis": "", "host_seconds": asked, "collective": what,
            }  # fmt: skip
        if number in around:
            changed["host_seconds"] = changed.get("host_seconds", one.host_seconds) + around[number] * call
        for other in op.waits:
            launch = behind.get(other, other)
            if launch >= 0:
                owed.setdefault(op.lane, set()).add(launch)
        if changed.get("launches", one.launches):
            latest[op.lane] = number
            waits = tuple(sorted(owed.pop(op.lane))) if op.lane in owed else ()
            if op.lane or waits:
                changed |= {"lane": op.lane, "waits": waits}
        else:
            behind[number] = latest.get(op.lane, -1)
        if number in around and len(changed) == 1:  # alike in all layers
            alike = id(one), around[number]
            found[number] = known.get(alike) or known.setdefault(alike, replace(one, **changed))
        elif changed:
            found[number] = replace(one, **changed)
    return found


Beside = Callable[[TimedOp, Collective], Contended]


def slowed(ops: Sequence[TimedOp], spans: Sequence[Span], of_link: Beside) -> list[float]:
    """Returns the seconds that the operations take beside each other, if they ran when `spans` say. `ops` are
    as if each ran by itself; `of_link` tells what a kernel and a collective lose to each other.

    Of the time that both run, one whose factor is f loses the share 1 - 1 / f: a kernel and a collective by the law of
    the link, two kernels half of it each, since either alone fills the GPU."""
    lost: dict[int, float] = {}  # seconds in which nothing is done, by op
    late: dict[int, float] = {}
    running: list[Span] = []
    latest = 0.0  # when the last of them ends
    begun = [span.begun if span.waited else span for span in spans]
    begun.sort(key=attrgetter("start"))
    for span in begun:
        number, start, end, _ = span
        if latest <= start:
            running, latest = [span], end
            continue
        one = ops[number]
        running = [other for other in running if other.end > start]
        for other in running:
            both = min(end, other.end) - start
            beside = ops[other.op]
            own, its = 2.0, 2.0
            kernel, sent = (one, beside) if one.collective is None else (beside, one)
            if kernel.collective is not None:
                own, its = 1.0, 1.0
            elif sent.collective is not None:
                found = of_link(kernel, sent.collective)
                own, its = (found.kernel, found.collective) if kernel is one else (found.collective, found.kernel)
                if sent is one and other.start < start:  # its blocks find no room until the kernel's have begun
                    late[number] = late.get(number, 0.0) + found.delay
            lost[number] = lost.get(number, 0.0) + both * (1 - 1 / own)
            lost[other.op] = lost.get(other.op, 0.0) + both * (1 - 1 / its)
        running.append(span)
        latest = max(latest, end)
    took = dict.fromkeys(lost, 0.0)
    for number, start, end, _ in begun:
        if number in took:
            took[number] += end - start
    changed = [op.seconds for op in ops]
    for number, seconds in lost.items():
        share = min(seconds / took[number], MOST_LOST)
        changed[number] = changed[number] / (1 - share) + late.get(number, 0.0)
    return changed
