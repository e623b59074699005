"""The two timelines of a step: what the device has to do, and how the host hands it over.

`device_work` turns an op stream into timed kernels; `simulate` lets a host enqueue and a device drain them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flopcast.roofline.lower import Work, describe, launches, lower
from flopcast.roofline.memory import rounded
from flopcast.roofline.profile import HostCosts, Profile
from flopcast.roofline.stream import Stream

# Share of L2 that still holds what was touched before: lines go before the cache is full.
L2_SHARE = 0.8

# Of what a kernel gains in isolation when its operands lie in L2, the part that it gains in a step. Five recorded
# steps on an H200: element-wise kernels all of it; products 0.4 and reductions 0.6, which rather wait
# than stream (with all of it reductions of 4 to 16 MB came out 21% too fast, products 4%).
HOT_GAIN = {"gemm": 0.4, "reduction": 0.6}

# From the host's launch call to the kernel's start on an idle device; a step of a thousand launches shows it
# only where the host waits (a synchronisation).
LAUNCH_LATENCY_SECONDS = 4e-6


@dataclass(frozen=True)
class Item:
    """One op of the step: what the host spends on it, and what it puts on the device (None: nothing)."""

    phase: str
    kind: str
    module: str
    host_seconds: float
    work: Work | None = None
    seconds: float = 0.0
    sigma: float = 0.0
    launches: int = 0
    basis: str = ""
    hot_seconds: float = 0.0  # the part of `seconds` that the hot curve gave, and how that came about
    hot_basis: str = ""


@dataclass(frozen=True)
class Backends:
    """Which backend runs a class of operations; "sdpa" is the one torch picks on the device."""

    matmul: str = "torch"
    attention: str = "sdpa"

    def of(self, work: Work, profile: Profile) -> str:
        if work.op_class == "gemm":
            return self.matmul
        if work.op_class == "attention":
            return profile.default_attention if self.attention == "sdpa" else self.attention
        return "torch"


def device_work(stream: Stream, profile: Profile, host: HostCosts, backends: Backends) -> list[Item]:
    """Every op of `stream` with its device and host seconds, in order.

    An op that reads what was touched less than `L2_SHARE` of the L2 ago runs at the hot curve, else at the cold
    one; in between by bytes.
    """
    works: list[Work | None] = []
    for op in stream.ops:
        lowered = lower(stream, op)
        works.append(None if lowered is None else describe(*lowered))
    hot_shares = l2_shares(stream, [work is not None for work in works], L2_SHARE * profile.l2_bytes)
    present = [(i, work) for i, work in enumerate(works) if work is not None]
    requests = [(work, backends.of(work, profile), cache) for _, work in present for cache in ("cold", "hot")]
    estimates = profile.estimate(requests)
    timed: dict[int, tuple[float, float, str, int]] = {}
    hot_parts: dict[int, tuple[float, str]] = {}
    for n, (i, work) in enumerate(present):
        cold, hot_one = estimates[2 * n], estimates[2 * n + 1]
        share = hot_shares[i] * HOT_GAIN.get(work.op_class, 1.0)
        seconds = (1 - share) * cold.seconds + share * min(hot_one.seconds, cold.seconds)
        if hot_one.seconds <= cold.seconds:
            hot_parts[i] = share * hot_one.seconds, hot_one.basis
        # An optimizer's call launches what its lists need, which torch's rules count exactly; the profile's mean over
        # the lists measured said 996 kernels for 864 at width 256.
        rules = launches(work.shape)
        count = rules if work.op_class == "optimizer" else profile.launches(work, default=rules)
        timed[i] = (seconds, cold.sigma, cold.basis, count)
    items = []
    phase = ""
    for i, op in enumerate(stream.ops):
        seconds, sigma, basis, count = timed.get(i, (0.0, 0.0, "", 0))
        hot_seconds, hot_basis = hot_parts.get(i, (0.0, ""))
        n_tensors = len(op.inputs) if '"ts"' in op.args else 0
        # forward and backward costs are per call, the optimizer's per kernel (`calibration.count_ops`)
        n_launches = count if op.phase == "optimizer" else 1
        host_seconds = host.seconds(op.phase, op.kind, launches=n_launches, tensors=n_tensors)
        if op.phase != phase:  # what a phase costs once, where it begins
            phase = op.phase
            host_seconds += getattr(host, phase).get("fixed", 0.0) + (host.step_fixed if i == 0 else 0.0)
        items.append(
            Item(
                phase=op.phase, kind=op.kind, module=op.module, host_seconds=host_seconds,
                work=works[i], seconds=seconds, sigma=sigma, launches=count, basis=basis,
                hot_seconds=hot_seconds, hot_basis=hot_basis,
            )
        )  # fmt: skip
    return items


def l2_shares(stream: Stream, runs: Sequence[bool], capacity: float) -> list[float]:
    """For each op the share of its bytes that lies in L2, in a steady step.

    One rule: what was touched less than `capacity` bytes ago is there. Addresses matter, not tensors: the
    caching allocator gives a new tensor the block that was freed last, so that outputs too land on lines in
    L2. The first of two passes only sets the scene.
    """
    touched_at: dict[int, float] = {}
    address: dict[int, int] = {}
    pool: dict[int, list[int]] = defaultdict(list)
    clock = 0.0
    n_addresses = 0
    shares: list[float] = []
    for _ in range(2):
        shares = []
        for op, is_running in zip(stream.ops, runs, strict=True):
            for storage in op.freed:
                if storage in address:
                    pool[rounded(stream.storages[storage].bytes)].append(address.pop(storage))
            hot = total = 0
            touched: dict[int, int] = {}
            for index in (*op.inputs, *op.outputs):
                ref = stream.tensors[index]
                at = address.get(ref.storage)
                if at is None:
                    blocks = pool[rounded(stream.storages[ref.storage].bytes)]
                    if blocks:
                        at = blocks.pop()
                    else:
                        at = n_addresses
                        n_addresses += 1
                    address[ref.storage] = at
                touched[at] = max(touched.get(at, 0), ref.operand.bytes)
            if is_running:
                for at, size in touched.items():
                    total += size
                    last = touched_at.get(at)
                    if last is not None and clock - last + size <= capacity:
                        hot += size
                for at, size in touched.items():
                    clock += size
                    touched_at[at] = clock
            shares.append(hot / total if total else 0.0)
    return shares


def simulate(
    items: Sequence[Item],
    *,
    host_factor: float = 1.0,
    device_factor: float = 1.0,
    gap_seconds: float,
    queue_depth: int,
    sync_seconds: float,
    is_synchronous: bool,
    steps: int = 3,
) -> float:
    """Seconds of one steady step when steps follow each other without waiting.

    The host enqueues op by op; the device runs in order, `gap_seconds` between kernels; at most `queue_depth`
    launches are outstanding; a sync stops the host until the device has drained. `is_synchronous` (the CPU as
    a device): every op is done when its call returns.
    """
    if is_synchronous:
        return sum(item.host_seconds * host_factor + item.seconds * device_factor for item in items)
    if steps < 2:
        raise ValueError("a steady step is the difference of two: steps must be at least 2")
    host = device = 0.0
    outstanding: list[float] = []  # finish times of launches, in order: a queue read from `head`
    head = 0
    ends = []
    for _ in range(steps):
        for item in items:
            host += item.host_seconds * host_factor
            if item.launches:
                start = max(host + LAUNCH_LATENCY_SECONDS, device + gap_seconds)
                device = start + item.seconds * device_factor + gap_seconds * (item.launches - 1)
                outstanding.extend([device] * item.launches)
                if len(outstanding) - head > queue_depth:
                    excess = len(outstanding) - head - queue_depth
                    host = max(host, outstanding[head + excess - 1])
                    head += excess
            if item.kind == "sync":
                host = max(host, device) + sync_seconds
                outstanding.clear()
                head = 0
        ends.append(max(host, device))
    return ends[-1] - ends[-2]
