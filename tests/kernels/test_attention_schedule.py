"""Tiles of attention's backward in one pass, deal_tiles to programs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flopcast.kernels.attention_schedule import FIXED_WORK, deal_tiles, even_section

counts = st.integers(1, 70)


@given(counts, counts, st.booleans(), counts, st.integers(1, 132))
def test_every_tile_is_taken_once_and_no_program_has_more_than_a_tile_more(
    pairs: int, blocks: int, causal: bool, section: int, programs: int
) -> None:
    taken = deal_tiles(pairs, blocks, causal, section, programs)
    assert len(taken) == programs
    assert sorted(tile for own in taken for tile in own) == list(range(pairs * blocks))
    work = [sum(FIXED_WORK + (blocks - tile % blocks if causal else blocks) for tile in own) for own in taken]
    assert max(work) - min(work) <= FIXED_WORK + blocks
    for own in taken:  # section by section
        assert [tile // blocks // section for tile in own] == sorted(tile // blocks // section for tile in own)


@given(st.integers(1, 300), st.integers(1, 40_000), st.sampled_from([64, 128]), st.integers(0, 64))
def test_sections_are_even_and_fit(pairs: int, seq: int, head_dim: int, mib: int) -> None:
    section = even_section(pairs, seq, head_dim, mib << 20)
    assert 1 <= section <= pairs
    if not mib:
        assert section == pairs
        return
    row = 8 * seq * head_dim
    assert section == 1 or section * row <= mib << 20
    sections = -(-pairs // section)
    least = -(-pairs // max(1, (mib << 20) // row))
    assert sections == least  # as few as fit
    assert pairs - (sections - 1) * section > 0
    assert sections == 1 or section - 1 < pairs / sections <= section  # no evener ones of whole pairs
