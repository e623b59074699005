"""How many blocks the plain Triton attention visits, of windows and packed documents too. No torch.

A query sees a range of keys, and a key is seen by a range of queries; both ends move forward only. Of a tile's rows the
first range begins and the last one ends what the kernel walks over (`triton_attention._passes`), in whole blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from flopcast.kernels.attention_config import AttentionConfig, Tile
from flopcast.kernels.shapes import Attention
from flopcast.kernels.sizes import cdiv

PRODUCTS = {"forward": 2, "dkdv": 4, "dq": 3}  # of a tile with a block, by kernel


class Band(NamedTuple):
    """Which keys a query sees: those up to its own (causal), the last `window` of these (0: all), and of its document.

    `documents`: the lengths of a row's documents, one after the other; what lies behind the last is one more.
    """

    seq: int
    causal: bool
    window: int = 0
    documents: tuple[int, ...] = ()

    def span(self, token: int) -> tuple[int, int]:
        """The first token of a token's document, and the one past the last."""
        ends = _ends(self.documents)
        at = bisect_right(ends, token)
        return (ends[at - 1] if at else 0), (min(ends[at], self.seq) if at < len(ends) else self.seq)

    def keys_of(self, query: int) -> tuple[int, int]:
        """The first key that a query sees, and the one past the last."""
        low, high = self.span(query)
        if self.window:
            low = max(low, query - (self.window - 1))
        return low, query + 1 if self.causal else high

    def queries_of(self, key: int) -> tuple[int, int]:
        """The first query that sees a key, and the one past the last. Behind the sequence's end there is none, but the
        kernel looks no further than whole blocks, as here."""
        low, high = self.span(key)
        if self.causal:
            low = key
        if self.window:
            high = min(high, key + self.window)
        return low, high


@lru_cache(maxsize=256)
def _ends(documents: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(documents))


def band_of(shape: Attention) -> Band:
    lengths = shape.document_lengths if shape.documents else ()
    return Band(shape.seq, shape.causal, shape.window if shape.window < shape.seq else 0, lengths)


def is_banded(shape: Attention) -> bool:
    """Whether the plain kernels run it, on Hopper too."""
    return shape.window > 0 or shape.documents > 0


class Visits(NamedTuple):
    """Blocks that a tile visits, and how many of them it masks."""

    blocks: int
    masked: int


@lru_cache(maxsize=4096)
def visits(kernel: str, band: Band, tile: Tile) -> tuple[Visits, ...]:
    """Of each tile of a head, from the first tile to the last: blocks of keys of the tiles of queries, for dK and dV
    ("dkdv") blocks of queries of the tiles of keys, of one query head."""
    ranges: Callable[[int], tuple[int, int]]
    if kernel == "dkdv":
        rows, step, ranges = tile.block_n, tile.block_m, band.queries_of
    else:
        rows, step, ranges = tile.block_m, tile.block_n, band.keys_of
    found = []
    for start in range(0, band.seq, rows):
        (begin, first_high), (last_low, end) = ranges(start), ranges(min(start + rows, band.seq) - 1)
        past_end = cdiv(end, step)
        inside = min(cdiv(last_low, step), past_end)
        unmasked = max(first_high // step, inside) - inside  # blocks that all rows see whole
        count = past_end - begin // step
        found.append(Visits(count, count - unmasked))
    return tuple(found)


def flops_visited(shape: Attention, config: AttentionConfig) -> int:
    """FLOPs that the kernels of a call make, 2 per multiply-add: of all pairs of the blocks that they visit. What they
    recompute counts (the backward makes seven products of the five of `Attention.flops`)."""
    band = band_of(shape)
    names = ("forward",) if shape.direction == "fwd" else ("dkdv", "dq")
    pairs = 0
    for name in names:
        tile: Tile = getattr(config, name)
        pairs += PRODUCTS[name] * tile.block_m * tile.block_n * sum(one.blocks for one in visits(name, band, tile))
    return 2 * shape.head_dim * shape.batch * shape.heads * pairs
