"""Configurations of the cross-entropy kernels: a rule for the defaults, and those worth timing on a new part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VocabConfig:
    """Launch options of a cross-entropy kernel.

    block: logits per step of a program. num_warps: warps per program. num_stages: steps whose loads are in flight at
    once (1: the present step alone). programs_per_sm: in direction "both" the programs, and so the rows, that a
    multiprocessor has at a time. split: a row is shared by as many programs as it has blocks, and read once;
    max_registers: the limit per thread, which then lets more programs onto a multiprocessor.
    """

    block: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 1
    split: bool = False
    max_registers: int | None = None


# For rows that programs cannot share: one row per multiprocessor, by 32 warps with 64 KB of loads in flight. The
# second read should find the row in the L2: on an H200 some 40% of 132 x 304 KB were still there, and it took 1.3 times
# a copy.
WHOLE_ROWS = VocabConfig(32768, 32)


def config_for(direction: str = "both") -> VocabConfig:
    """The default configuration of a direction.

    "both": 19 programs share a row of 151,936 logits, at 64 registers per thread, half of which hold logits (on an H200
    1.1 times the time of a copy). "fwd" reads the logits once, four rows per multiprocessor. "bwd" is element-wise.
    """
    return {
        "both": VocabConfig(8192, 4, split=True, max_registers=64),
        "fwd": VocabConfig(8192, 16, num_stages=3),
        "bwd": VocabConfig(4096, 8),
    }[direction]


def candidates(direction: str) -> list[VocabConfig]:
    """The configurations worth timing on a new part."""
    if direction == "bwd":
        return [
            VocabConfig(block, warps)
            for block in (1024, 2048, 4096, 8192)
            for warps in (4, 8, 16)
            if block >= 256 * warps
        ]
    # 64 registers per thread, of which a quarter to a half hold logits: 64 or 128 KB of rows per multiprocessor (on an
    # H200 0.75 and 0.91 of a copy's bandwidth).
    split = [
        VocabConfig(block, warps, split=True, max_registers=registers)
        for block, warps, registers in (
            (8192, 4, 64), (8192, 4, 72), (16384, 8, 64), (32768, 16, 64), (4096, 4, 64), (8192, 8, 64),
        )
    ]  # fmt: skip
    tiles = ((8192, 32), (16384, 32), (32768, 32), (8192, 16), (16384, 16), (4096, 8))
    both = direction == "both"
    whole = [VocabConfig(block, warps, stages) for block, warps in tiles for stages in ((1,) if both else (1, 3))]
    return [*split, *whole] if both else whole
