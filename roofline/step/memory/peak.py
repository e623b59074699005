"""Computes the peak memory of a step.

It is what `torch.cuda.max_memory_allocated` would report: parameters, optimizer state, gradients, saved activations and
autocast's cast weights (all of them storages of the stream) in the blocks that torch's allocator hands out for them,
what kernels take while they run, and the workspaces of the libraries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flopcast.roofline.step.memory.allocator import LEAST_KNOWN_TO, least_capacity, rounded
from flopcast.roofline.step.memory.lifetimes import Followed, Most, follow
from flopcast.roofline.stream.ops.op_stream import Storage, Stream, once_per_stream
from flopcast.roofline.stream.ops.to_micro_batches import layers_run

# cuBLAS keeps one workspace per handle: the forward's thread has one and autograd's another
# (aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and later, else 8 MiB and 128 KiB).
_HOPPER_WORKSPACE, _WORKSPACE, _HANDLES = 32 * 1024**2, 8320 * 1024, 2

PARTS = ("weights", "gradients", "optimizer", "activations", "communication", "libraries")
_PART_OF = {
    "parameter": "weights", "gradient": "gradients", "bucket": "gradients", "state": "optimizer", "cache": "cache",
    "new cache": "cache",
}  # fmt: skip
_SENDING = ("c10d.", "fsdp.")  # operators that send, or copy what is sent


@dataclass(frozen=True)
class Target:
    """What the memory of a step depends on besides its operations: the GPU's compute capability and the number of its
    multiprocessors (None: of the CPU, or not known), and whether all products run in captured CUDA graphs."""

    capability: tuple[int, int] | None = None
    sm_count: int | None = None
    is_captured: bool = False

    @property
    def workspace_bytes(self) -> int:
        """The bytes of cuBLAS's workspaces; 0 on the CPU.

        While a graph is captured its thread's handle has a workspace in the graph's own memory, which torch takes back
        before and after it (torch/_inductor/cudagraph_trees.py, clear_cublas_manager): one at a time."""
        if self.capability is None:
            return 0
        each = _HOPPER_WORKSPACE if self.capability >= (9, 0) else _WORKSPACE
        return (1 if self.is_captured else _HANDLES) * each


UNKNOWN = Target()


def peak_bytes(stream: Stream, target: Target = UNKNOWN) -> int:
    """Returns the most bytes that are allocated during a step, with the workspaces of libraries.

    Storages on the host do not count. Gradients live from the backward to the next step's zero_grad. Of captured graphs
    each takes the workspace anew at its first product and gives it back at its end.
    """
    return _peak_of(stream, target).total


def peak_parts(stream: Stream, target: Target = UNKNOWN) -> dict[str, int]:
    """Returns what `peak_bytes` is made of where it is reached, in bytes by PARTS.

    Activations are all that is no other part: what the forward leaves for the backward, temporaries, inputs, cast
    weights. Communication: what ranks gathered, and what waits to be sent, but for the buckets of
    DistributedDataParallel, which are its gradients. Libraries: their workspaces."""
    peak = _peak_of(stream, target)
    held = _followed(stream, target.sm_count).held_at(peak.most)
    sending = {name for name in {op.name for op in stream.ops} if name.startswith(_SENDING)}
    sent = {stream.tensors[i].storage for op in stream.ops if op.name in sending for i in (*op.inputs, *op.outputs)}
    found = dict.fromkeys(PARTS, 0)
    for i, size in held.items():
        storage = stream.storages[i]
        rest = "communication" if i in sent else "activations"
        part = "weights" if is_scale(storage) else _PART_OF.get(storage.kind, rest)
        found[part] = found.get(part, 0) + size
    found["libraries"] = peak.workspace
    found["gradients"] += peak.most.gradients_of_others
    found["activations"] += peak.total - sum(found.values())  # scratch of kernels, layers that are repeated
    return found


def reserved_bytes(stream: Stream, target: Target = UNKNOWN) -> int:
    """Returns the most bytes that torch's allocator takes of a device which has enough, as
    `torch.cuda.max_memory_reserved` reports them."""
    return _followed(stream, target.sm_count).reserved + target.workspace_bytes


def least_reserved_bytes(stream: Stream, target: Target = UNKNOWN) -> int:
    """Returns the bytes of the device with which torch's allocator manages, to a hundredth: where these are fewer than
    it takes of a larger one, each step gives back and takes segments, which makes it slow."""
    return _least(stream, target.sm_count) + target.workspace_bytes


def is_scale(storage: Storage) -> bool:
    """Whether a storage holds scales of packed weights: the buffers of layers do."""
    return storage.kind == "buffer" and storage.layer is not None


def cache_bytes(stream: Stream) -> int:
    """Returns the bytes of the keys and values that a call of inference leaves; 0 for other steps."""
    freed = {storage for op in stream.ops for storage in op.freed}
    kinds = ("cache", "new cache")
    return sum(rounded(s.bytes) for i, s in enumerate(stream.storages) if s.kind in kinds and i not in freed)


class _Peak(NamedTuple):
    """Where the most is live: bytes in all, of them the libraries' workspace, and the place in what was followed."""

    total: int
    workspace: int
    most: Most


def _peak_of(stream: Stream, target: Target) -> _Peak:
    found, workspace = _followed(stream, target.sm_count), target.workspace_bytes
    if not target.is_captured:
        return _Peak(found.anywhere.bytes + workspace, workspace, found.anywhere)
    return max(
        _Peak(found.anywhere.bytes, 0, found.anywhere),
        _Peak(found.beside_products.bytes + workspace, workspace, found.beside_products),
    )


@once_per_stream
def _followed(stream: Stream, sm_count: int | None) -> Followed:
    return follow(stream, sm_count)


@once_per_stream
def _least(stream: Stream, sm_count: int | None) -> int:
    """Of layers that stand for others, whose blocks are not followed, what is taken where there is plenty."""
    found = _followed(stream, sm_count)
    if max(layers_run(stream), default=1) > 1:
        return found.reserved
    if found.reserved - found.anywhere.bytes < LEAST_KNOWN_TO * found.anywhere.bytes:
        return found.reserved
    return least_capacity(found.requests, found.anywhere.bytes, found.reserved)
