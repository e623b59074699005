"""The repeated read in Triton's interpreter, on the CPU; run by test_read.py in a process of its own."""

from __future__ import annotations

import pytest
import torch

from flopcast.kernels.read import BLOCK, prepare


@pytest.mark.parametrize(("blocks", "programs", "rounds"), [(1, 1, 1), (4, 3, 4), (3, 8, 3), (8, 2, 9)])
def test_every_block_is_read_in_turns(blocks: int, programs: int, rounds: int) -> None:
    """Program p reads blocks p, p + programs, ... modulo `blocks`; small integers add up exactly."""
    generator = torch.Generator().manual_seed(blocks)
    x = torch.randint(-3, 4, (blocks * BLOCK,), generator=generator).float()
    call, moved = prepare(x, least_bytes=4 * BLOCK * programs * rounds, programs=programs)
    sums = x.view(blocks, BLOCK).sum(1)
    expected = [sum(sums[(p + i * programs) % blocks] for i in range(rounds)) for p in range(programs)]
    assert moved == 4 * BLOCK * programs * rounds
    assert torch.equal(call(), torch.tensor(expected))


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        prepare(torch.zeros(100), least_bytes=1, programs=1)
