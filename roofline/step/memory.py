"""Computes the peak memory of a step by following the lifetimes of the stream's storages in order.

The peak is what `torch.cuda.max_memory_allocated` would report: parameters, optimizer state, gradients, saved
activations and autocast's cast weights (all of them storages of the stream), rounded as the allocator rounds, plus the
workspaces of the libraries, which no ATen call shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import accumulate, groupby, islice
from typing import NamedTuple

from flopcast.kernels.shapes import Attention
from flopcast.microbench.recipe.layout import Layout
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.ops.op_stream import Op, Storage, Stream, once_per_stream, packet
from flopcast.roofline.stream.ops.to_micro_batches import layers_run

ALLOCATION_BYTES = 512  # the CUDA caching allocator rounds every block up to this (c10/cuda/CUDACachingAllocator.cpp)

# The CUDA context, kernels' code and the allocator's unused parts, which `max_memory_allocated` does not count but a
# GPU must hold: about 0.6 GB of context plus a reserve of 4% for fragmentation.
CONTEXT_BYTES = 600 * 1024**2
FRAGMENTATION = 0.04

# cuBLAS keeps one workspace per handle: the forward's thread has one and autograd's another
# (aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and later, else 8 MiB and 128 KiB).
_HOPPER_WORKSPACE, _WORKSPACE, _HANDLES = 32 * 1024**2, 8320 * 1024, 2
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.addmm_", "aten.bmm", "aten.baddbmm")  # that cuBLAS computes

# What a rank of several GPUs holds outside of torch's allocator beyond CONTEXT_BYTES, most of it NCCL's: two H200s held
# 1,613 MiB in all from the first collective on, and 124 to 386 MiB more where tensor parallel had divided parameters,
# which the first rank sends to the others (NCCL 2.28.9, NVLS off; `python -m studies.parallel.memory`). Groups of more
# ranks were not measured.
NCCL_BYTES = 1013 * 1024**2
NCCL_SENDING_BYTES = 386 * 1024**2

# torch's watchdog of collectives looks so often which are done, and until then holds what they reduced
# (ProcessGroupNCCL.cpp, kWatchdogThreadSleepMillis). DistributedDataParallel lays out its buckets anew when the second
# step begins: the first ones are in memory beside them until the third step's backward, a step and a half after they
# were reduced, unless it has looked. Of two ranks one held them in five steps of 27 to 59 ms, none in one of 89.
WATCHDOG_SECONDS = 0.1
STEPS_BETWEEN = 1.5

_EXISTING = ("parameter", "state", "buffer", "bucket", "input", "cache")
PARTS = ("weights", "gradients", "optimizer", "activations", "communication", "libraries")
_PART_OF = {
    "parameter": "weights", "gradient": "gradients", "bucket": "gradients", "state": "optimizer", "cache": "cache",
    "new cache": "cache",
}  # fmt: skip
_SENDING = ("c10d.", "fsdp.")  # operators that send, or copy what is sent


def holds_first_buckets(step_seconds: float) -> bool:
    """Whether steps of DistributedDataParallel are so quick that its first buckets are held beside the later ones."""
    return STEPS_BETWEEN * step_seconds < WATCHDOG_SECONDS


def rounded(size: int) -> int:
    return -(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES


def peak_bytes(stream: Stream, workspace: int = 0, *, is_captured: bool = False) -> int:
    """Returns the largest sum of live storages over a steady step, plus `workspace` bytes of libraries.

    Storages on the host do not count. Gradients live from the backward to the next step's zero_grad. Of captured graphs
    each takes the workspace anew at its first product and gives it back at its end.
    """
    return _peak_of(stream, workspace, is_captured).total


def peak_parts(stream: Stream, workspace: int = 0, *, is_captured: bool = False) -> dict[str, int]:
    """Returns what `peak_bytes` is made of where it is reached, in bytes by PARTS.

    Activations are all that is no other part: what the forward leaves for the backward, temporaries, inputs, cast
    weights. Communication: what ranks gathered, and what waits to be sent, but for the buckets of
    DistributedDataParallel, which are its gradients. Libraries: `workspace`."""
    peak = _peak_of(stream, workspace, is_captured)
    at_peak = next(islice(_live_bytes(stream), peak.place, None))
    sent = {
        stream.tensors[i].storage
        for op in stream.ops
        if op.name.startswith(_SENDING)
        for i in (*op.inputs, *op.outputs)
    }
    found = dict.fromkeys(PARTS, 0)
    for i in at_peak.storages - at_peak.others:
        storage = stream.storages[i]
        rest = "communication" if i in sent else "activations"
        part = "weights" if is_scale(storage) else _PART_OF.get(storage.kind, rest)
        found[part] = found.get(part, 0) + rounded(storage.bytes)
    found["libraries"] = peak.workspace
    found["gradients"] += at_peak.gradients_of_others
    found["activations"] += peak.total - sum(found.values())  # scratch of kernels, layers that are repeated
    return found


def is_scale(storage: Storage) -> bool:
    """Whether a storage holds scales of packed weights: the buffers of layers do."""
    return storage.kind == "buffer" and storage.layer is not None


def first_bucket_bytes(stream: Stream) -> int:
    """Returns the bytes of DistributedDataParallel's buckets of the first step, which the second lays out anew: they
    are held until the watchdog of collectives has seen the first ones done."""
    return sum(rounded(s.bytes) for s in stream.storages if s.kind == "bucket")


class _Peak(NamedTuple):
    """Where the most is live: bytes in all, of them the libraries' workspace, and the place among `_live_bytes`."""

    total: int
    workspace: int
    place: int


def _peak_of(stream: Stream, workspace: int, is_captured: bool) -> _Peak:
    (anywhere, place), (beside_products, place_there) = _peaks_of_storages(stream)
    if not is_captured:
        return _Peak(anywhere + workspace, workspace, place)
    return max(_Peak(anywhere, 0, place), _Peak(beside_products + workspace, workspace, place_there))


@once_per_stream
def _peaks_of_storages(stream: Stream) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the largest total of `_live_bytes` and its place, of all and of those after a graph's first product."""
    peak = beside = (0, 0)
    for place, live in enumerate(_live_bytes(stream)):
        if live.total > peak[0]:
            peak = live.total, place
        if live.is_after_product and live.total > beside[0]:
            beside = live.total, place
    return peak, beside


class _Live(NamedTuple):
    """What is live: bytes in all, with scratch; storages; of them the gradients of layers that another layer's
    operations stand for, and the bytes in which these have been counted so far; whether a compiled graph runs that has
    multiplied."""

    total: int
    storages: Set[int]
    others: Set[int] = frozenset()
    gradients_of_others: int = 0
    is_after_product: bool = False


def _live_bytes(stream: Stream) -> Iterator[_Live]:
    """Yields what is live before the step, while each op runs, and between layers that are repeated."""
    sizes = [rounded(s.bytes) for s in stream.storages]
    live = {i for i, s in enumerate(stream.storages) if s.kind in _EXISTING}
    on_host = {i for i, s in enumerate(stream.storages) if s.kind == "host"}
    storages = [ref.storage for ref in stream.tensors]
    total = sum(sizes[i] for i in live)
    yield _Live(total, live)
    counts = layers_run(stream)  # a micro-batch that stands for several leaves nothing behind
    stretches = _Stretches(stream, counts)
    others = stretches.gradients_of_others
    live |= others
    multiplied = _after_products(stream)
    following_ops = (*stream.ops[1:], None)
    for number, (op, following) in enumerate(zip(stream.ops, following_ops, strict=True)):
        is_sum = op.phase == "backward" and op.name == "aten.add.Tensor"
        reused = _summed_in_place(stream, op, following) if is_sum else ()
        for storage in op.freed + reused if reused else op.freed:
            if storage in live:
                live.remove(storage)
                total -= sizes[storage]
        if number in stretches.bounds:
            total += stretches.pass_bound(number, total)
            yield _Live(total, live, others, stretches.more_gradients, number in multiplied)
        for index in op.inputs + op.outputs:
            storage = storages[index]
            if storage not in live and storage not in reused and storage not in on_host:
                live.add(storage)
                total += sizes[storage]
        scratch = _scratch_bytes(stream, op) if "attention" in op.name else 0
        if counts[number]:
            fields = total + scratch, live, others, stretches.more_gradients, number in multiplied
            yield tuple.__new__(_Live, fields)  # as _Live(*fields), which calls a function first


def _after_products(stream: Stream) -> frozenset[int]:
    """Returns the ops of compiled graphs from each graph's first product on."""
    found: set[int] = set()
    for _, first, last in stream.meta.get("graphs", ()):
        ops = range(first, last + 1)
        start = next((number for number in ops if packet(stream.ops[number].name) in _PRODUCTS), last + 1)
        found.update(range(start, last + 1))
    return frozenset(found)


class _Stretches:
    """What stretches of ops that stand for several layers (`layers_run`) add to what they leave behind themselves.

    Each run leaves a layer's gradients, and in the forward what the backward is to read. What all stretches of a
    micro-batch leave of activations is nothing: the last one's share follows from the others', since which of the
    three compiled layers frees a buffer that is reused from layer to layer is not what a layer in the middle does.
    """

    def __init__(self, stream: Stream, counts: Sequence[int]) -> None:
        self.counts = (1, *counts)
        self.bounds = {number for number in range(len(counts)) if counts[number] != self.counts[number]}
        self._made = [0]  # bytes of gradients that are done before each op
        self.gradients_of_others: set[int] = set()  # which only the optimizer touches: they count with the stretches'
        self._last: set[int] = set()  # bounds behind the last stretch of a micro-batch
        self._left = self._left_gradients = self._kept = 0
        self.more_gradients = 0
        if not self.bounds:
            return
        gradients = {i for i, s in enumerate(stream.storages) if s.kind == "gradient"}
        done = _done(stream, gradients)
        self.gradients_of_others = gradients - done.keys()
        made = [0] * len(counts)
        for storage, number in done.items():
            made[number] += rounded(stream.storages[storage].bytes)
        self._made = list(accumulate(made, initial=0))
        is_last = True
        for number in range(len(counts) - 1, -1, -1):
            is_last |= stream.ops[number].phase != "backward"
            if is_last and stream.ops[number].phase == "backward" and counts[number] > 1:
                self._last.add(number + 1)
                is_last = False

    def pass_bound(self, number: int, total: int) -> int:
        """Returns the bytes that the stretch before op `number`, if any, leaves behind beyond those of its first run.
        `total`: what is live there."""
        times, gradients = self.counts[number], self._made[number]
        more = 0
        if times > 1:
            made = gradients - self._left_gradients
            kept = -self._kept if number in self._last else total - self._left - made
            self._kept += kept
            more = (times - 1) * (kept + made)
            self.more_gradients += (times - 1) * made
        self._left, self._left_gradients = total + more, gradients
        return more


def _done(stream: Stream, gradients: Set[int]) -> dict[int, int]:
    """Returns the op that is the last to write each gradient in the micro-batch that makes it. Before that one its
    memory may hold something else: the code that inductor generates reuses buffers, that of one layer's activation for
    another one's gradient."""
    done: dict[int, int] = {}
    made_in: dict[int, int] = {}
    for run, (phase, ops) in enumerate(groupby(enumerate(stream.ops), key=lambda each: each[1].phase)):
        if phase == "optimizer":
            continue
        for number, op in ops:
            for i in (*op.inputs, *op.outputs):
                storage = stream.tensors[i].storage
                if storage in gradients and made_in.setdefault(storage, run) == run:
                    done[storage] = number
    return done


def cache_bytes(stream: Stream) -> int:
    """Returns the bytes of the keys and values that a call of inference leaves; 0 for other steps."""
    freed = {storage for op in stream.ops for storage in op.freed}
    kinds = ("cache", "new cache")
    return sum(rounded(s.bytes) for i, s in enumerate(stream.storages) if s.kind in kinds and i not in freed)


def _summed_in_place(stream: Stream, op: Op, following: Op | None) -> tuple[int, ...]:
    """Returns the storage that receives the sum of two gradients of one tensor (an `add` in the backward) in place; ()
    where the sum gets a storage of its own.

    Autograd adds to the first gradient where nothing else holds a reference to it
    (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). A recorder of calls holds one, and so sees an
    `add` with a result of its own, after which the first operand is released. For tied embeddings of 151,936 x 2560 in
    fp32 that is 1.6 GB at the peak.
    """
    if following is None or len(op.inputs) != 2:
        return ()
    first, second, out = (stream.tensors[i] for i in (*op.inputs, *op.outputs))
    is_sum = first.operand == out.operand and second.operand.shape == out.operand.shape
    return (first.storage,) if is_sum and first.storage in following.freed else ()


def _scratch_bytes(stream: Stream, op: Op) -> int:
    """Returns the scratch memory, in bytes, that an attention kernel allocates while it runs."""
    work = lower(stream, op)
    if work is not None and isinstance(work[0], Attention) and work[0].direction == "bwd":
        shape = work[0]
        # cuDNN accumulates dQ in fp32, and per-query-head dK and dV before they are summed over the group
        own, values = shape.columns
        rows = shape.batch * shape.heads * shape.seq
        return rows * (4 * own + 2 * (own + values))
    return 0


def workspace_bytes(capability: tuple[int, int] | None, *, is_captured: bool = False) -> int:
    """Returns the bytes of cuBLAS's workspaces on a GPU of this compute capability; 0 for None (the CPU).

    `is_captured`: whether all products run in captured CUDA graphs. While one is captured its thread's handle has a
    workspace in the graph's own memory, which torch takes back before and after it (torch/_inductor/cudagraph_trees.py,
    clear_cublas_manager): one at a time."""
    if capability is None:
        return 0
    return (1 if is_captured else _HANDLES) * (_HOPPER_WORKSPACE if capability >= (9, 0) else _WORKSPACE)


def nccl_bytes(layout: Layout) -> int:
    """Returns the bytes that communication takes on a rank outside of torch's allocator."""
    if layout.world == 1:
        return 0
    return NCCL_BYTES + (NCCL_SENDING_BYTES if layout.tp > 1 else 0)


def needed_bytes(peak: int, layout: Layout) -> int:
    """Returns the memory, in bytes, that a GPU must have for the step to run: the peak, the context, what communication
    takes outside of it, and a reserve for fragmentation."""
    return round(peak * (1 + FRAGMENTATION)) + CONTEXT_BYTES + nccl_bytes(layout)
