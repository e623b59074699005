"""The two timelines of a step: what the device has to do, and what it costs the host to hand it over.

`device_work` turns an op stream into timed kernels; `simulation` lets a host enqueue and a device drain them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.step.memory import rounded
from flopcast.roofline.step.simulation import Item
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.lower import launches, lower
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_micro_batches import times_run

# Share of L2 that still holds what was touched before: lines go before the cache is full.
L2_SHARE = 0.8

# Of what a kernel gains in isolation when its operands lie in L2, the part that it gains in a step. Five recorded
# steps on an H200: element-wise kernels all of it; products 0.4 and reductions 0.6, which rather wait
# than stream (with all of it reductions of 4 to 16 MB came out 21% too fast, products 4%).
HOT_GAIN = {"gemm": 0.4, "reduction": 0.6}


@dataclass(frozen=True)
class Backends:
    """Which backend runs a class of operations; "sdpa" is the one torch picks on the device."""

    matmul: str = "torch"
    attention: str = "sdpa"

    def of(self, work: Work, profile: Profile) -> str:
        if work.op_class == "gemm":
            return self.matmul if self.matmul == "torch" or _is_for_triton(work) else "torch"
        if work.op_class == "attention":
            return profile.default_attention if self.attention == "sdpa" else self.attention
        return work.backend if work.op_class == "fused" else "torch"


def _is_for_triton(work: Work) -> bool:
    """Whether `microbench.patches` would give it to the Triton kernel: products of two matrices of 16 bits."""
    shape = work.shape
    return isinstance(shape, Gemm) and shape.batch == 1 and shape.dtype in ("bf16", "fp16")


@dataclass(frozen=True)
class _Timed:
    """What all calls of one work have in common. `gain`: seconds less with all operands in L2, as a step has it."""

    cold: Estimate
    hot: Estimate
    gain: float
    launches: int


def device_work(stream: Stream, profile: Profile, host: HostCosts, backends: Backends) -> list[Item]:
    """Every op of `stream` with its device and host seconds, in order.

    An op that reads what was touched less than `L2_SHARE` of the L2 ago runs at the hot curve, else at the cold
    one; in between by bytes.
    """
    works = describe_ops(stream)
    hot_shares = l2_shares(stream, [work is not None for work in works], L2_SHARE * profile.l2_bytes)
    timed = _times({id(work): work for work in works if work is not None}, profile, backends)
    items = []
    phase = ""
    known: dict[tuple[Any, ...], Item] = {}  # a layer's ops again and again, but for the module
    for i, (op, work) in enumerate(zip(stream.ops, works, strict=True)):
        n_tensors = len(op.inputs) if '"ts"' in op.args else 0
        key = (op.phase, op.kind, id(work), n_tensors, hot_shares[i])
        if op.phase == phase and key in known:
            items.append(_elsewhere(known[key], op.module))
            continue
        found = timed[id(work)] if work is not None else None
        count = found.launches if found is not None else 0
        # forward and backward costs are per call, the optimizer's per kernel (`calibration.count_ops`)
        n_launches = count if op.phase == "optimizer" else 1
        host_seconds = host.seconds(op.phase, op.kind, launches=n_launches, tensors=n_tensors)
        if work is not None and host.triton:
            host_seconds += host.triton.get(triton_operator(work, backends.of(work, profile)), 0.0)
        is_first = op.phase != phase
        if is_first:  # what a phase costs once, where it begins
            phase = op.phase
            host_seconds += getattr(host, phase).get("fixed", 0.0) + (host.step_fixed if i == 0 else 0.0)
        if work is None or found is None:
            item = Item(op.phase, op.kind, op.module, host_seconds)
        else:
            share = hot_shares[i] * HOT_GAIN.get(work.op_class, 1.0)
            is_faster = found.hot.seconds <= found.cold.seconds
            item = Item(
                phase=phase, kind=op.kind, module=op.module, host_seconds=host_seconds, work=work,
                seconds=found.cold.seconds - share * found.gain, sigma=found.cold.sigma, launches=count,
                basis=found.cold.basis, hot_seconds=share * found.hot.seconds if is_faster else 0.0,
                hot_basis=found.hot.basis if is_faster else "",
            )  # fmt: skip
        items.append(item)
        if not is_first:
            known[key] = item
    return [item if times == 1 else _several(item, times) for item, times in zip(items, times_run(stream), strict=True)]


def _several(item: Item, times: int) -> Item:
    return replace(
        item, count=times, host_seconds=item.host_seconds * times, seconds=item.seconds * times,
        hot_seconds=item.hot_seconds * times, launches=item.launches * times,
    )  # fmt: skip


def _elsewhere(item: Item, module: str) -> Item:
    """The same in another module. Spelt out: a third of the constructor's time."""
    if item.module == module:
        return item
    moved: Item = object.__new__(Item)
    fields = moved.__dict__
    fields.update(item.__dict__)
    fields["module"] = module
    return moved


def triton_operator(work: Work, backend: str) -> str:
    """The operator that runs the work, as `HostCosts.triton` names it; "" where it is none of Triton's."""
    shape = work.shape
    if backend != "triton":
        return ""
    if isinstance(shape, Gemm):
        return "mm"
    if isinstance(shape, Attention):
        return "attention" if shape.direction == "fwd" else "attention_backward"
    return shape.op.split(".")[1] if work.op_class == "fused" else ""


def describe_ops(stream: Stream) -> list[Work | None]:
    """The work of each op, None where nothing runs. Equal calls, as in the layers of a deep model, are the same object
    and described once."""
    known: dict[Any, Work | None] = {}
    operands = [id(ref.operand) for ref in stream.tensors]
    works: list[Work | None] = []
    first: dict[int, Work | None] = {}  # what the op of the folded stream was found to be
    for op, repeated in zip(stream.ops, stream.repeats or [-1] * len(stream.ops), strict=True):
        if repeated in first:
            works.append(first[repeated])
            continue
        key = (
            op.name, op.kind, op.args, op.kwargs, op.written,
            *(operands[i] for i in op.inputs), "", *(operands[i] for i in op.outputs),
        )  # fmt: skip
        if key not in known:
            lowered = lower(stream, op)
            known[key] = None if lowered is None else describe(*lowered)
        works.append(known[key])
        if repeated >= 0:
            first[repeated] = known[key]
    return works


# What was estimated before: models of a sweep have most of their works in common. By profile, then by work and backend;
# both are kept with it, so that no other object can get their ids.
_Known = dict[tuple[int, str], tuple[Work, _Timed]]
_known: list[tuple[Profile, _Known]] = []
_MOST_PROFILES, _MOST_WORKS = 8, 50_000


def _known_of(profile: Profile) -> _Known:
    found = next((known for one, known in _known if one is profile), None)
    if found is None:
        found = {}
        _known.append((profile, found))
        del _known[:-_MOST_PROFILES]
    if len(found) > _MOST_WORKS:
        found.clear()
    return found


def _times(works: Mapping[int, Work], profile: Profile, backends: Backends) -> dict[int, _Timed]:
    """Estimates of distinct works, by the keys given."""
    known = _known_of(profile)
    names = {key: (id(work), backends.of(work, profile)) for key, work in works.items()}
    lacking = [(names[key], work) for key, work in works.items() if names[key] not in known]
    estimates = profile.estimate(
        [(work, backend, cache) for (_, backend), work in lacking for cache in ("cold", "hot")]
    )
    for n, (name, work) in enumerate(lacking):
        cold, hot = estimates[2 * n], estimates[2 * n + 1]
        # An optimizer's call launches what its lists need, which torch's rules count exactly; the profile's mean over
        # the lists measured said 996 kernels for 864 at width 256.
        rules = launches(work.shape)
        count = rules if work.op_class == "optimizer" else profile.launches(work, default=rules)
        known[name] = work, _Timed(cold, hot, max(cold.seconds - hot.seconds, 0.0), count)
    return {key: known[name][1] for key, name in names.items()}


def l2_shares(stream: Stream, runs: Sequence[bool], capacity: float) -> list[float]:
    """For each op the share of its bytes that lies in L2, in a steady step.

    One rule: what was touched less than `capacity` bytes ago is there. Addresses matter, not tensors: the
    caching allocator gives a new tensor the block that was freed last, so that outputs too land on lines in
    L2. The first of two passes only sets the scene.
    """
    sizes = [rounded(storage.bytes) for storage in stream.storages]
    operands = [(ref.storage, ref.operand.bytes) for ref in stream.tensors]
    steps: list[tuple[tuple[int, ...], dict[int, int], bool]] = []
    for op, is_running in zip(stream.ops, runs, strict=True):
        touched: dict[int, int] = {}  # storage -> the most of it that one operand covers
        for index in op.inputs + op.outputs:
            storage, size = operands[index]
            if size > touched.get(storage, -1):
                touched[storage] = size
        steps.append((op.freed, touched, is_running))
    address: dict[int, int] = {}
    pool: dict[int, list[int]] = defaultdict(list)
    touched_at: list[float | None] = []  # by address
    clock = 0.0
    shares: list[float] = []
    for _ in range(2):
        shares = []
        for freed, touched, is_running in steps:
            for storage in freed:
                if storage in address:
                    pool[sizes[storage]].append(address.pop(storage))
            hot = total = 0
            for storage, size in touched.items():
                at = address.get(storage)
                if at is None:
                    blocks = pool[sizes[storage]]
                    if blocks:
                        at = blocks.pop()
                    else:
                        at = len(touched_at)
                        touched_at.append(None)
                    address[storage] = at
                if is_running:
                    total += size
                    last = touched_at[at]
                    if last is not None and clock - last + size <= capacity:
                        hot += size
            if is_running:
                for storage, size in touched.items():
                    clock += size
                    touched_at[address[storage]] = clock
            shares.append(hot / total if total else 0.0)
    return shares
