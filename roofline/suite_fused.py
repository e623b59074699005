"""Which calls of the fused memory-bound kernels a suite measures: those of patched steps (`predict --fused triton`).

A suite of its own, `bench --suite fused`, since it is short, and its kernels change more often than torch's: rows of
another card or day join the others' folder as one more card. Made, as the others are, from traces:

    python -m flopcast.roofline.suite fused
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flopcast.roofline.lower import Work
from flopcast.roofline.suite_calls import CallPlan, call_cases
from flopcast.roofline.suite_case import SuiteCase

# (width, batch, seq) of the patched Qwen3 steps, from 1,024 to 16,384 tokens; (precision)
FIT = (
    *((width, 4, 256, "autocast-bf16") for width in (256, 512, 1024, 2048, 4096)),
    *((width, 8, 1024, "autocast-bf16") for width in (512, 1024, 2048)),
    (256, 2, 4096, "autocast-bf16"), (640, 2, 1024, "autocast-bf16"), (1792, 4, 512, "autocast-bf16"),
    (2560, 4, 1024, "autocast-bf16"), (4096, 2, 2048, "autocast-bf16"), (1024, 4, 4096, "autocast-bf16"),
    (512, 4, 256, "bf16"), (1024, 16, 256, "bf16"), (2048, 8, 1024, "bf16"),
)  # fmt: skip
HOLDOUT = (
    (896, 4, 256, "autocast-bf16"), (1280, 4, 512, "autocast-bf16"), (2304, 4, 768, "autocast-bf16"),
)  # fmt: skip

# The loss of 8,192 tokens moves 5 GB, and its reference takes eight times the memory.
MOST = {"fit": CallPlan(others=12, largest=6 * 10**9), "holdout": CallPlan(others=3, largest=6 * 10**9)}


def fused_cases(fit: Iterable[Work], holdout: Iterable[Work]) -> list[SuiteCase]:
    """Cold, and hot where an L2 holds them; what is fitted is not held out."""
    fitted = [work for work in fit if work.op_class == "fused"]
    shapes = {work.shape for work in fitted}
    held = [work for work in holdout if work.op_class == "fused" and work.shape not in shapes]
    return [
        replace(case, backend="triton")
        for role, works in (("fit", fitted), ("holdout", held))
        for case in call_cases(works, MOST[role], role)
    ]
