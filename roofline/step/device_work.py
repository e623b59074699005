"""Times each operation of an op stream on the device and on the host.

`simulation` then models the host enqueuing these operations and the device draining the queue.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from flopcast.errors import UsageError
from flopcast.kernels.attention_config import HEAD_DIMS
from flopcast.kernels.shapes import Attention, Call, Gemm
from flopcast.roofline.gpu.library.attention_band import with_band
from flopcast.roofline.gpu.library.attention_dropout import plain, with_dropout
from flopcast.roofline.gpu.library.fastest import BEST, fastest
from flopcast.roofline.gpu.library.generated import generated_seconds
from flopcast.roofline.gpu.library.imbalance import check_imbalance, with_imbalance
from flopcast.roofline.gpu.profile.host import HostCosts, listed_tensors
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.step.graph_launches import GraphLaunch, graph_launches
from flopcast.roofline.step.memory.allocator import rounded
from flopcast.roofline.stream.compiled.generated_kernel import kernel_of_call
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.grouped import ONE_CALL, even_groups, is_group_by_group, is_grouped
from flopcast.roofline.stream.lowering.lower import launches, lower, ranks_of_experts
from flopcast.roofline.stream.lowering.variants import AttentionVariant, CallVariant
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.collectives import Collective
from flopcast.roofline.stream.ops.op_stream import Op, Stream, once_per_stream, packet
from flopcast.roofline.stream.ops.to_micro_batches import times_run
from flopcast.roofline.stream.ops.touches import touches

BOUNDS = ("matrix", "memory", "launch")  # what may bound an operation

# Share of L2's capacity that still holds what was touched before: lines are evicted before the cache is full.
L2_SHARE = 0.8

# The fraction of a kernel's isolated gain from operands in L2 that it keeps within a step. From five recorded steps on
# an H200: element-wise kernels keep all of it; products keep 0.4 and reductions 0.6, as they wait rather than stream
# (with all of it, reductions of 4 to 16 MB came out 21% too fast, products 4%).
HOT_GAIN = {"gemm": 0.4, "reduction": 0.6}

# The host's time for a call of a forward that no backward follows, over that of one which autograd records: the median
# of four decodes of a Qwen3-0.6B on an H200's host (0.79 to 0.88), beside the tiny models of their run. Of thirteen
# other calls in the first run of reports/nvidia-h200/inference, which no mending has seen, the host bounded seven.
WITHOUT_GRADIENTS = 0.82

# Calls that one of transformers' operator for experts in fp32 costs the host beyond those it makes, in the forward,
# and for each of its two products in the backward: torch.library's Python around an operator that is registered there,
# and the wait for the numbers of rows. From tiny mixtures of experts of `studies.calls.breaks`, the mean of both modes,
# whose processes lie far apart: 20 to 60 calls, with CUDA graphs 14 and 21; 6 to 22, with CUDA graphs -5.
GROUP_BY_GROUP = (27.0, 4.0)

# The host's time for a call of a forward whose layers checkpoint, over that of one whose layers do not: each tensor
# that is saved for the backward passes hooks in Python, and the state of random numbers is kept. From tiny models with
# adapters (`python -m studies.calls.checkpoint`: 23.3 over 15.1 us). What the backward recomputes costs what a call of
# the forward does (0.96 of it there).
CHECKPOINTED = 1.54
# Calls of the forward that each call of a layer costs beyond that where checkpointing is selective, in the forward and
# where it is computed again, views as others: torch's two modes see it in Python. From tiny Qwen3s
# (`python -m studies.calls.selective`: 1.00 and 0.96; of another machine, held out, 1.17 and 0.93, and GPT-2s of both
# 1.56 and 0.80 at the mean).
SELECTIVE_CALLS = 1.0

# Calls of the same phase that a call of these costs the host beyond one, of images in the layout NCHW and in NHWC.
# `python -m studies.calls.convolutions`, of three processes; stacks of convolution, norm and ReLU, which were held out,
# come out within 13%.
HEAVIER = {
    "aten.convolution": (1.8, 0.6), "aten.convolution_backward": (2.9, 2.2),
    "aten.native_batch_norm": (1.3, 1.4), "aten.native_batch_norm_backward": (1.8, 1.5),
    "aten.cudnn_batch_norm": (1.3, 1.4), "aten.cudnn_batch_norm_backward": (1.8, 1.5),  # as the native ones
}  # fmt: skip


@dataclass(frozen=True)
class TimedOp:
    """One operation of the stream: the host's time for it, and its work on the device (`work` is None where it has
    none).

    Seconds and launches are totals over the `count` times that the step runs it (identical micro-batches, one after
    the other); `work` is that of one run. `sigma`: standard deviation of the log seconds. `replay`: which replay of a
    captured CUDA graph it is part of, counted from 1; 0 where it is launched by itself. `lane`: the CUDA stream that it
    runs on; `waits`: operations before it, by their number, that have to end first; `collective`: what it sends, of
    which `work` says nothing (`communication`).
    """

    phase: str
    kind: str
    host_seconds: float
    work: Work | None = None
    seconds: float = 0.0
    sigma: float = 0.0
    launches: int = 0
    basis: str = ""
    hot_seconds: float = 0.0  # the part of `seconds` taken from the hot curve; `hot_basis` is that part's basis
    hot_basis: str = ""
    looped_seconds: float = 0.0
    count: int = 1
    replay: int = 0
    lane: int = 0
    waits: tuple[int, ...] = ()
    collective: Collective | None = None

    @cached_property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """(basis, seconds) of the parts of its time: what is taken from the cold curve, and from the hot one because
        operands lie in L2."""
        parts = ((self.basis, self.seconds - self.hot_seconds), (self.hot_basis, self.hot_seconds))
        return tuple((basis, seconds) for basis, seconds in parts if basis)

    @cached_property
    def flops(self) -> int:
        return 0 if self.work is None else self.work.flops * self.count

    @cached_property
    def bytes(self) -> int:
        return 0 if self.work is None else self.work.bytes * self.count


def backend_of(work: Work, run: Run, sdpa: str) -> str:
    """Returns the backend that runs the work; `sdpa` is the attention backend that torch itself picks on the device.
    "best" is none yet: `backends_of` decides."""
    if work.op_class == "gemm":
        shape = work.shape  # `microbench.recipe.patches` gives Triton's kernel products of two matrices of 16 bits
        is_for_triton = isinstance(shape, Gemm) and shape.batch == 1 and shape.dtype in ("bf16", "fp16")
        return run.matmul if is_for_triton else "torch"
    if work.op_class == "attention" and not isinstance(work.variant, CallVariant):  # of one token torch picks
        is_masked = _is_masked(work)  # Triton's leaves these to torch
        if work.backend == "triton":
            return _checked("triton", work)
        if run.attention != "sdpa" and not (is_masked and run.attention in (BEST, "triton")):
            return _checked(run.attention, work)
        return _picked_by_torch(work, sdpa)
    return "triton" if work.backend == "triton" else "torch"


def _is_masked(work: Work) -> bool:
    return isinstance(work.variant, AttentionVariant) and work.variant.is_masked


def _picked_by_torch(work: Work, sdpa: str) -> str:
    """Returns the backend that SDPA picks where it usually picks `sdpa`: flash and cuDNN take operands of 16 bits,
    flash no mask, and values as wide as queries (torch's sdp_utils.cpp)."""
    variant, is_masked = work.variant, _is_masked(work)
    if not isinstance(variant, AttentionVariant) or sdpa not in ("sdpa-flash", "sdpa-cudnn"):
        return sdpa
    is_refused = sdpa == "sdpa-flash" and (is_masked or variant.value_dim)
    return "sdpa-efficient" if is_refused or variant.dtype not in ("bf16", "fp16") else sdpa


def _checked(attention: str, work: Work) -> str:
    """Returns the backend. Raises UsageError where it has no kernel of the work."""
    if not isinstance(work.variant, AttentionVariant):
        return attention
    head_dim, value_dim = work.variant.head_dim, work.variant.value_dim
    if attention in ("sdpa-flash", "sdpa-cudnn") and work.variant.dtype not in ("bf16", "fp16"):
        raise UsageError(
            f"attention {attention!r} in {work.variant.dtype}: its kernels take 16 bits; use --attention sdpa, or "
            "another precision"
        )
    if attention in ("triton", "sdpa-flash") and value_dim:
        raise UsageError(
            f"attention {attention!r} with queries of {head_dim} columns and values of {value_dim}: its kernels take "
            "as many of both; use --attention sdpa"
        )
    if attention == "triton" and head_dim not in HEAD_DIMS:
        raise UsageError(
            f"attention 'triton' with head_dim {head_dim}: its kernels have {', '.join(map(str, HEAD_DIMS))}; use "
            "--attention sdpa"
        )
    return attention


def backends_of(works: Mapping[int, Work], run: Run, profile: Profile) -> dict[int, str]:
    """Returns the backend of each work, by its id: that of `backend_of` and, where that is "best", the fastest."""
    named = {key: backend_of(work, run, profile.default_attention) for key, work in works.items()}
    return named | fastest({key: works[key] for key, backend in named.items() if backend == BEST}, profile)


@dataclass(frozen=True)
class DeviceTimes:
    """What the device does of a step, whatever host feeds it. By operation of the stream: its work (None where no
    kernel runs) and the share of its bytes that lies in L2. By the work's id: its backend and its kernel times."""

    works: Sequence[Work | None]
    hot_shares: Sequence[float]
    backends: Mapping[int, str]
    kernels: Mapping[int, _KernelTimes]
    copied: Mapping[int, _KernelTimes]  # by operation: the copy that comes before its kernel


def device_times(stream: Stream, run: Run, profile: Profile) -> DeviceTimes:
    """Returns the work, the hot share and the kernel times of every operation of `stream`."""
    works = describe_ops(stream)
    hot_shares = l2_shares(stream, [work is not None for work in works], L2_SHARE * profile.l2_bytes)
    distinct = {id(work): work for work in works if work is not None}
    copies = {i: copy for i, op in enumerate(stream.ops) if (copy := copied_before(stream, op)) is not None}
    distinct |= {id(copy): copy for copy in copies.values()}
    backends = backends_of(distinct, run, profile)
    kernels = _kernel_times(distinct, backends, profile)
    if run.imbalance != 1.0:
        kernels |= _with_imbalance(kernels, backends, profile, run, ranks_of_experts(stream))
    return DeviceTimes(works, hot_shares, backends, kernels, {i: kernels[id(copy)] for i, copy in copies.items()})


def copied_before(stream: Stream, op: Op) -> Work | None:
    """Returns the copy that torch makes before a product to whose result a matrix is added, as Muon adds: the matrix
    becomes the result, to which cuBLAS adds. A vector, as a linear layer adds, is added by the product's own kernel."""
    if op.name != "aten.addmm.default":
        return None
    added = stream.tensors[op.inputs[0]].operand
    if len(added.shape) != 2 or 0 in added.stride:
        return None
    return describe(Call("aten.copy_.default", (added, added), (added,), '[{"t":0},{"t":1}]', written=(0,)))


def device_work(
    stream: Stream, run: Run, profile: Profile, host: HostCosts, known_times: DeviceTimes | None = None
) -> list[TimedOp]:
    """Returns every operation of `stream`, in order, with its device and host seconds; equal ones may be one object.

    An operation whose operands lie in L2 (`l2_shares`) takes the time of the hot curve, one with none there that of the
    cold curve, and those between a mean weighted by bytes; products and reductions save only part of the difference
    (`HOT_GAIN`). `known_times`: what `device_times` returns, where it is known.
    """
    times = device_times(stream, run, profile) if known_times is None else known_times
    hot_shares = times.hot_shares
    pace = 1.0 if any(op.phase == "backward" for op in stream.ops) else WITHOUT_GRADIENTS
    checkpoints = any(op.is_recomputed for op in stream.ops)
    is_selective = stream.meta.get("checkpoint") == "selective" and stream.meta.get("mode", "eager") == "eager"
    selective_seconds = SELECTIVE_CALLS * host.seconds("forward", "launch") if is_selective else 0.0
    timed = []
    phase = ""
    waits = _waits_of_models(stream)
    fixed_first = _phases_with_fixed_cost(stream, bool(waits))
    known: dict[tuple[int, float], TimedOp] = {}  # a layer's ops recur in every layer
    kinds: dict[tuple[Any, ...], int] = {}
    # by the op of the folded stream that one repeats: its kind, tensors in lists, whether hooked, calls beyond one
    of_repeated: dict[int, tuple[int, float, bool, float]] = {}
    repeats = stream.repeats or (-1,) * len(stream.ops)
    for i, (op, work, repeated) in enumerate(zip(stream.ops, times.works, repeats, strict=True)):
        if op.name == ONE_CALL:
            timed.append(TimedOp(op.phase, op.kind, host.bare_call(*json.loads(op.args))))
            continue
        cost = of_repeated.get(repeated)
        if cost is None:
            n_tensors, beyond = listed_tensors(op), _calls_beyond(stream, op)
            is_hooked = checkpoints and op.phase == "forward" and op.layer is not None
            is_copied = i in times.copied
            kind = op.phase, op.kind, id(work), n_tensors, is_copied, is_hooked, op.is_recomputed, beyond
            cost = kinds.setdefault(kind, len(kinds)), n_tensors, is_hooked, beyond
            if repeated >= 0:
                of_repeated[repeated] = cost
        number, n_tensors, is_hooked, beyond = cost
        key = number, hot_shares[i]
        if op.phase == phase and key in known and i not in waits:
            timed.append(known[key])
            continue
        copy = times.copied.get(i)
        found = times.kernels[id(work)] if work is not None else None
        count = found.launches if found is not None else 0
        # forward and backward costs are per call, the optimizer's per kernel (`host_calibration.count_ops`)
        n_launches = count if op.phase == "optimizer" else 1
        costs_of = "forward" if op.is_recomputed else op.phase
        host_seconds = host.seconds(costs_of, op.kind, launches=n_launches, tensors=n_tensors) * pace
        host_seconds *= (CHECKPOINTED if is_hooked else 1.0) * (1 + beyond)
        if selective_seconds and (is_hooked or op.is_recomputed) and op.kind != "host":
            host_seconds += selective_seconds
        if work is not None and host.triton:
            host_seconds += host.triton.get(_triton_operator(work, times.backends[id(work)]), 0.0)
        is_first = op.phase != phase
        if is_first:
            phase = op.phase
            host_seconds += host.step_fixed if i == 0 else 0.0
        if i in waits or (is_first and phase in fixed_first):
            host_seconds += getattr(host, phase).get("fixed", 0.0) * pace
        looped = max(looped_groups(stream, work) - 1, 0) * host.bare_call()
        if work is None or found is None:
            one = TimedOp(phase, op.kind, host_seconds)
        else:
            share = hot_shares[i] * HOT_GAIN.get(work.op_class, 1.0)
            added = 0.0 if copy is None else copy.cold.seconds - hot_shares[i] * copy.gain
            is_faster = found.hot.seconds <= found.cold.seconds
            one = TimedOp(
                phase=phase, kind=op.kind, host_seconds=host_seconds + looped, looped_seconds=looped, work=work,
                seconds=found.cold.seconds - share * found.gain + added, sigma=found.cold.sigma,
                launches=count + (copy is not None),
                basis=found.cold.basis, hot_seconds=share * found.hot.seconds if is_faster else 0.0,
                hot_basis=found.hot.basis if is_faster else "",
            )  # fmt: skip
        timed.append(one)
        if not is_first and i not in waits:
            known[key] = one
    timed = _with_graphs(timed, graph_launches(stream, host)) if stream.meta.get("graphs") else timed
    counts = times_run(stream)
    return [one if count == 1 else _run_several(one, count) for one, count in zip(timed, counts, strict=True)]


def looped_groups(stream: Stream, work: Work | None) -> int:
    """Returns how many groups of a grouped product torch runs one by one, in a loop for which the host waits for their
    numbers of rows (GroupedMMUtils.h); 0 where one kernel runs all. A group's product and the three views of its
    operands, which C++ makes, are taken to cost the host what a bare call from Python does."""
    if work is None or stream.meta.get("graphs") or not is_group_by_group(work.variant):
        return 0
    return even_groups(work).groups


def _calls_beyond(stream: Stream, op: Op) -> float:
    """Calls that an operation costs the host beyond one."""
    if op.name == "aten._grouped_mm.default" and stream.meta.get("graphs"):
        return GROUP_BY_GROUP[op.phase == "backward"]
    heavier = HEAVIER.get(packet(op.name))
    if heavier is None or op.phase == "optimizer":
        return 0.0
    return heavier[0 if stream.tensors[op.inputs[0]].operand.is_contiguous else 1]


def estimate_together(streams: Iterable[Stream], run: Run, profile: Profile) -> None:
    """Estimates the kernels of all streams in one go, for `device_work` of each: twenty batches of a model take a third
    of the time."""
    works = {id(work): work for stream in streams for work in describe_ops(stream) if work is not None}
    backends = backends_of(works, run, profile)
    _kernel_times(works, backends, profile)


def _with_graphs(ops: Sequence[TimedOp], inside: Mapping[int, GraphLaunch]) -> list[TimedOp]:
    """Returns the operations, those in compiled graphs with what launching them there costs the host."""
    found = list(ops)
    known: dict[tuple[int, GraphLaunch], TimedOp] = {}  # a layer's operations recur in every layer
    for i, launch in inside.items():
        key = id(ops[i]), launch
        if key not in known:
            known[key] = replace(ops[i], host_seconds=launch.host_seconds, replay=launch.replay)
        found[i] = known[key]
    return found


def _waits_of_models(stream: Stream) -> set[int]:
    """Returns the ops before which a model's forward spends its fixed host cost: those after its first wait.

    transformers' causal models look at the positions on the device before they make their masks, and so wait for it
    once per forward, before the first layer. The Python around it (masks, positions, rotary tables) takes 1 ms and
    launches little: traces of an H200 show 1.0 ms of idle device after each wait, also in steps that the device
    bounds. Modules that never wait have no such cost, nor that of their backward: an MLP's forward and backward take
    0.1 ms each beyond their operations, a Qwen3's 1.2 and 0.6 ms.
    """
    found: set[int] = set()
    is_new = True
    for i, op in enumerate(stream.ops):
        is_new |= op.phase != "forward"
        if is_new and op.phase == "forward" and op.kind == "sync" and op.module:
            found.add(i + 1)
            is_new = False
    return found


def _phases_with_fixed_cost(stream: Stream, waits: bool) -> tuple[str, ...]:
    """Returns the phases before whose first op the fixed host cost is spent.

    A causal model of transformers on flopcast's attention makes no mask and waits for nothing; its Python around the
    layers is no shorter. Forwards of eight patched Qwen3s of few layers took 1.1 ms beyond their operations on each of
    three hosts, where this cost is 0.7 to 1.1 (reports/nvidia-h200/steps-on-kernels/whole)."""
    is_eager_training = not stream.meta.get("graphs") and any(op.phase == "backward" for op in stream.ops)
    if waits:
        return ("backward", "optimizer")
    if "config" in stream.meta and is_eager_training:
        return ("forward", "backward", "optimizer")
    return ("optimizer",)


def _run_several(one: TimedOp, count: int) -> TimedOp:
    return replace(
        one, count=count, host_seconds=one.host_seconds * count, looped_seconds=one.looped_seconds * count,
        seconds=one.seconds * count, hot_seconds=one.hot_seconds * count, launches=one.launches * count,
    )  # fmt: skip


def _triton_operator(work: Work, backend: str) -> str:
    """Returns the operator that runs the work, as `HostCosts.triton` names it; "" where it is not one of Triton's."""
    shape = work.shape
    if backend != "triton":
        return ""
    if isinstance(shape, Gemm):
        return "mm"
    if isinstance(shape, Attention):
        return "attention" if shape.direction == "fwd" else "attention_backward"
    return shape.op.split(".")[1] if work.op_class in ("fused", "optimizer") else ""


@once_per_stream
def describe_ops(stream: Stream) -> list[Work | None]:
    """Returns the work of each op, None where no kernel runs. Equal calls, as in the layers of a deep model, are
    described once and share one object."""
    known: dict[Any, Work | None] = {}
    operands = [id(ref.operand) for ref in stream.tensors]
    works: list[Work | None] = []
    first: dict[int, Work | None] = {}  # by index in the folded stream: the work of that op's first occurrence
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


@dataclass(frozen=True)
class _KernelTimes:
    """What all calls of one work have in common. `gain`: the seconds saved when all operands lie in L2."""

    work: Work
    cold: Estimate
    hot: Estimate
    launches: int

    @property
    def gain(self) -> float:
        return max(self.cold.seconds - self.hot.seconds, 0.0)


# Estimates made before, since the models of a sweep share most of their works. Keyed by profile, then by the id of the
# work and the backend; the profile and the work are kept alive here, so that no other object can get their ids.
_Known = dict[tuple[int, str], _KernelTimes]
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


def _kernel_times(works: Mapping[int, Work], backends: Mapping[int, str], profile: Profile) -> dict[int, _KernelTimes]:
    """Returns the kernel times of each work on its backend; all three mappings are keyed by the work's id."""
    known = _known_of(profile)
    lacking = [(key, work) for key, work in works.items() if (key, backends[key]) not in known]
    for key, work in lacking:
        if work.op_class == "generated" and isinstance(work.shape, Call):
            found = generated_seconds(kernel_of_call(work.shape), profile)  # as warm as it finds its operands
            known[key, backends[key]] = _KernelTimes(work, found, found, 1)
    lacking = [(key, work) for key, work in lacking if (key, backends[key]) not in known]
    estimates = iter(
        profile.estimate([(plain(work), backends[key], cache) for key, work in lacking for cache in ("cold", "hot")])
    )
    for key, work in lacking:
        # An optimizer's call launches as many kernels as its tensor lists need, which torch's rules count exactly; the
        # lists that were measured are others.
        both = next(estimates), next(estimates)
        count = 0 if work.op_class == "optimizer" else both[0].launches
        cold, hot = (with_band(work, with_dropout(work, one, profile), profile) for one in both)
        known[key, backends[key]] = _KernelTimes(work, cold, hot, count or launches(work.shape))
    return {key: known[key, backend] for key, backend in backends.items()}


def _with_imbalance(
    kernels: Mapping[int, _KernelTimes], backends: Mapping[int, str], profile: Profile, run: Run, ranks: int
) -> dict[int, _KernelTimes]:
    """Returns the kernel times of the grouped products, of groups as uneven as the run says."""
    grouped = {key: found for key, found in kernels.items() if is_grouped(found.work.variant)}
    check_imbalance([found.work for found in grouped.values()], run, ranks)
    made = {}
    for key, found in grouped.items():
        cold, hot = (
            with_imbalance(found.work, backends[key], cache, one, profile, imbalance=run.imbalance, ranks=ranks)
            for cache, one in (("cold", found.cold), ("hot", found.hot))
        )
        made[key] = replace(found, cold=cold, hot=hot)
    return made


def l2_shares(stream: Stream, runs: Sequence[bool], capacity: float) -> list[float]:
    """Returns for each op the share of its bytes that lies in L2, in a steady step.

    One rule: an operand lies in L2 if it and all that was touched since its last use fit into `capacity` bytes.
    Addresses matter, not tensors: the caching allocator gives a new tensor the block that was freed last, so that
    outputs too land on lines in L2. The first of the two passes only establishes the cache's and the allocator's state.
    """
    sizes, steps = [rounded(storage.bytes) for storage in stream.storages], touches(stream)
    address: dict[int, int] = {}
    pool: dict[int, list[int]] = defaultdict(list)
    touched_at: list[float] = []  # by address; -inf: never
    clock = 0.0

    def move(freed: Iterable[int], first: Iterable[int]) -> None:
        """Takes the addresses of what is freed and gives some to what has none."""
        for storage in freed:
            if storage in address:
                pool[sizes[storage]].append(address.pop(storage))
        for storage in first:
            if storage not in address:  # in the second pass some are there from the first
                blocks = pool[sizes[storage]]
                if not blocks:
                    blocks.append(len(touched_at))
                    touched_at.append(-inf)
                address[storage] = blocks.pop()

    for (freed, first, touched), is_running in zip(steps, runs, strict=True):
        if freed or first:
            move(freed, first)
        if is_running:
            for storage, size in touched.items():
                clock += size
                touched_at[address[storage]] = clock
    shares: list[float] = []
    for (freed, first, touched), is_running in zip(steps, runs, strict=True):
        if freed or first:
            move(freed, first)
        if not is_running:
            shares.append(0.0)
            continue
        hot = total = 0
        now = clock
        for storage, size in touched.items():
            total += size
            if now - touched_at[address[storage]] + size <= capacity:
                hot += size
        for storage, size in touched.items():
            clock += size
            touched_at[address[storage]] = clock
        shares.append(hot / total if total else 0.0)
    return shares


# --- what bounds an operation


def matrix_rate(profile: Profile, dtype: str) -> float | None:
    """Returns the sustained FLOP/s of a dtype's products, or else the burst rate, or else the datasheet's peak; None
    where the profile has none of them."""
    for name in (f"matrix_sustained/{dtype}", f"matrix_burst/{dtype}"):
        if name in profile.ceilings:
            return profile.ceilings[name].value
    return profile.peaks[dtype].value if dtype in profile.peaks else None


def matrix_seconds(op: TimedOp, profile: Profile) -> float:
    """Returns the seconds that the FLOPs of a product, a convolution or attention take at the sustained rate; 0 for
    all other operations."""
    dtype = None if op.work is None else op.work.matrix_dtype
    rate = None if dtype is None else matrix_rate(profile, dtype)
    return op.flops / rate if rate else 0.0


def bound_seconds(ops: Iterable[TimedOp], profile: Profile) -> dict[str, float]:
    """Returns device seconds by what bounds each operation: the longest of the times of its FLOPs, of its bytes and of
    its launches at the shortest kernel's time."""
    copy, floor = profile.ceiling("hbm_copy", 0.0), profile.ceiling("kernel_floor", 0.0)
    seconds = dict.fromkeys(BOUNDS, 0.0)
    for op in ops:
        limits = (matrix_seconds(op, profile), op.bytes / copy if copy else 0.0, floor * op.launches)
        seconds[BOUNDS[limits.index(max(limits))]] += op.seconds
    return seconds
