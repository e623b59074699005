"""What dropout adds to an attention call: a random number per pair of query and key, and again in the backward.

The kernel draws them (Philox) by the SMs' integer units, for every tile that it visits, whatever a causal mask hides of
it: at 192 tokens a causal call draws 2.7 times as many as it has pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flopcast.bounds import Positive
from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.laws.generated import Rates
from flopcast.roofline.stream.lowering.attention_calls import TILE


@dataclass(frozen=True, kw_only=True)
class DropoutLaw:
    """Clocks of an SM that one random number takes, of the forward and of the backward."""

    fwd: Positive
    bwd: Positive


def dropout_seconds(shape: Attention, rates: Rates, law: DropoutLaw) -> float:
    """Seconds that the random numbers of a call add."""
    clocks = law.fwd if shape.direction == "fwd" else law.bwd
    return clocks * shape.batch * shape.heads * drawn(shape) / (rates.sm_count * rates.clock)


def drawn(shape: Attention) -> int:
    """Random numbers of a head: one per place of each tile that is visited."""
    tiles = ceil(shape.seq / TILE)
    visited = tiles * (tiles + 1) // 2 if shape.causal else tiles * tiles
    return visited * TILE * TILE
