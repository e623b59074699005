"""The blocks that the plain Triton attention visits; `interpreted_attention.py` holds them against the kernels."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flopcast.kernels.attention_blocks import Band, Visits, flops_visited, visits
from flopcast.kernels.attention_config import AttentionConfig, Tile, rule
from flopcast.kernels.shapes import Attention, shape_from_json, shape_to_json

KERNELS = ("forward", "dkdv", "dq")
tiles = st.builds(Tile, st.sampled_from([16, 32, 64, 128]), st.sampled_from([16, 32, 64, 128]), st.just(4), st.just(2))


def counts(kernel: str, band: Band, tile: Tile) -> list[int]:
    return [one.blocks for one in visits(kernel, band, tile)]


@given(st.sampled_from(KERNELS), tiles, st.integers(1, 700), st.integers(1, 700), st.integers(0, 300))
def test_windows_hide_blocks_and_never_add_any(kernel: str, tile: Tile, seq: int, window: int, more: int) -> None:
    causal = Band(seq, causal=True)
    found, wider = (counts(kernel, Band(seq, True, size), tile) for size in (window, window + more))
    assert all(a <= b <= c for a, b, c in zip(found, wider, counts(kernel, causal, tile), strict=True))
    assert min(found) >= 1  # every tile sees its own diagonal
    if window >= seq:
        assert visits(kernel, Band(seq, True, window), tile) == visits(kernel, causal, tile)


@given(st.sampled_from(KERNELS), tiles, st.lists(st.integers(1, 200), min_size=1, max_size=6), st.booleans())
def test_a_tile_visits_the_blocks_of_some_pair_and_masks_those_not_seen_whole(
    kernel: str, tile: Tile, documents: list[int], causal: bool
) -> None:
    """Of documents every block that lies between has a pair that is seen: both ends of the ranges move forward only."""
    band = Band(sum(documents), causal, 0, tuple(documents))
    number = [i for i, length in enumerate(documents) for _ in range(length)]

    def sees(query: int, key: int) -> bool:
        return number[query] == number[key] and (key <= query or not causal)

    rows, step = (tile.block_n, tile.block_m) if kernel == "dkdv" else (tile.block_m, tile.block_n)
    for start, one in zip(range(0, band.seq, rows), visits(kernel, band, tile), strict=True):
        of_tile = range(start, min(start + rows, band.seq))
        seen = {
            other // step
            for row in (of_tile[0], of_tile[-1])
            for other in range(band.seq)
            if (sees(other, row) if kernel == "dkdv" else sees(row, other))
        }
        assert one.blocks == max(seen) - min(seen) + 1
        assert 0 <= one.masked <= one.blocks


def test_by_hand() -> None:
    """Tiles of 128 queries, blocks of 64 keys, 512 tokens: a window of 65 begins 64 keys before a tile, which is one
    block more; both edges are masked."""
    tile = Tile(128, 64, 4, 2)
    assert visits("forward", Band(512, True), tile) == ((2, 2), (4, 2), (6, 2), (8, 2))
    assert visits("forward", Band(512, True, 65), tile) == (Visits(2, 2), *[Visits(3, 3)] * 3)
    assert counts("forward", Band(512, True, 66), tile) == [2, 4, 4, 4]
    assert visits("forward", Band(512, True, 192), tile) == ((2, 2), (4, 3), (5, 4), (5, 4))
    assert counts("dkdv", Band(512, True, 65), Tile(64, 128, 4, 2)) == [3, 3, 3, 2]
    assert counts("forward", Band(512, True, 0, (128, 256)), tile) == [2, 2, 4, 2]
    assert counts("forward", Band(512, False, 0, (128, 256)), tile) == [2, 4, 4, 2]


def test_flops_of_the_blocks() -> None:
    shape = Attention(batch=2, heads=4, kv_heads=2, seq=4096, head_dim=128, window=512)
    config: AttentionConfig = rule(shape, (9, 0))
    causal = replace(shape, window=0)
    for direction in ("fwd", "bwd"):
        one, whole = (replace(of, direction=direction) for of in (shape, causal))
        assert one.flops < flops_visited(one, config) < 0.4 * flops_visited(whole, config)
    # with the diagonal's blocks whole, and two products made twice in the backward
    assert 1.0 < flops_visited(causal, config) / causal.flops < 1.1
    backward = replace(causal, direction="bwd")
    assert 1.4 < flops_visited(backward, config) / backward.flops < 1.5
    packed = replace(causal, documents=64)
    assert packed.flops < flops_visited(packed, config) < 0.15 * flops_visited(causal, config)


def test_documents_of_a_shape() -> None:
    shape = Attention(batch=1, heads=1, kv_heads=1, seq=1000, head_dim=64, documents=7)
    lengths = shape.document_lengths
    assert len(lengths) == 7
    assert sum(lengths) == 1000
    assert min(lengths) >= 1
    assert lengths == replace(shape, heads=4, direction="bwd").document_lengths
    assert shape.flops == 2 * 64 * sum(length * length for length in lengths)
    assert shape_from_json(shape_to_json(shape)) == shape
    assert "documents" not in shape_to_json(replace(shape, documents=0))
    assert shape.key.startswith("attention/fwd/causal+documents7/")
