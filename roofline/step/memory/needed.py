"""Says what a GPU must have for a step to run, beyond what torch's allocator counts."""

from __future__ import annotations

from flopcast.microbench.recipe.layout import Layout
from flopcast.roofline.step.memory.allocator import rounded
from flopcast.roofline.step.memory.peak import UNKNOWN, Target, least_reserved_bytes, reserved_bytes
from flopcast.roofline.stream.ops.op_stream import Stream

# The CUDA context and kernels' code, which torch's allocator does not count but a GPU must hold: about 0.6 GB.
CONTEXT_BYTES = 600 * 1024**2

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


def needed_bytes(stream: Stream, layout: Layout, target: Target = UNKNOWN) -> int:
    """Returns the memory, in bytes, that a GPU must have for the step to run: what torch's allocator takes at least,
    blocks that lie between others and hold nothing included, the context, and what communication takes outside. Of many
    GPUs it is what the allocator takes where there is plenty: with less they would wait for one another's driver."""
    taken = (least_reserved_bytes if layout.world == 1 else reserved_bytes)(stream, target)
    return taken + CONTEXT_BYTES + nccl_bytes(layout)


def nccl_bytes(layout: Layout) -> int:
    """Returns the bytes that communication takes on a rank outside of torch's allocator."""
    if layout.world == 1:
        return 0
    return NCCL_BYTES + (NCCL_SENDING_BYTES if layout.tp > 1 else 0)


def holds_first_buckets(step_seconds: float) -> bool:
    """Whether steps of DistributedDataParallel are so quick that its first buckets are held beside the later ones."""
    return STEPS_BETWEEN * step_seconds < WATCHDOG_SECONDS


def first_bucket_bytes(stream: Stream) -> int:
    """Returns the bytes of DistributedDataParallel's buckets of the first step, which the second lays out anew: they
    are held until the watchdog of collectives has seen the first ones done."""
    return sum(rounded(s.bytes) for s in stream.storages if s.kind == "bucket")
