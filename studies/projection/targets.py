"""What projections are judged against: the targets, and which published tables had been looked at."""

from __future__ import annotations

OTHER = "nvidia-h100-sxm"  # of the measured GPUs that projections could be made from
FROM_OTHER = f"zero-shot, from {OTHER}"
SOURCE = "ai-dynamo/aiconfigurator (Apache-2.0), sglang 0.5.10 and vllm 0.14.0"
# Mean |error| to reach, by GPU, class and stage.
TARGETS = {
    ("nvidia-a100-80gb-sxm", "matmul", "zero-shot"): 0.15,
    ("nvidia-a100-80gb-sxm", "matmul", "refined"): 0.07,
    ("nvidia-l40s", "matmul", "zero-shot"): 0.22,
    ("nvidia-l40s", "matmul", "refined"): 0.15,
    ("nvidia-a100-80gb-sxm", "attention forward", "zero-shot"): 0.20,
    ("nvidia-a100-80gb-sxm", "attention forward", "refined"): 0.10,
    ("nvidia-l4", "memory-bound", "zero-shot"): 0.15,
}
LOOKED_AT = (
    "the power limit acts through the busy share of the matrix units",
    "latencies and floors are counted in clock cycles",
    "results that fit in L2 are waited for by half (the belief that fits start from, not the H200's own value)",
    "a server's attention packs query heads and stores keys and values (from the kernels' sources), and its tensors "
    "stay in L2 where they fit: one set of them is replayed",
    "attention is scaled by rates at full clock, its bytes as those of memory-bound kernels",
    "boards with inline ECC have 15/16 of their bandwidth (from the memory that they show)",
)
