"""What dropout adds to attention, by the tiles of scores that a call visits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.laws.attention_dropout import drawn, dropout_seconds
from flopcast.roofline.gpu.library.attention_dropout import fitted
from flopcast.roofline.gpu.library.generated import rates_of
from flopcast.roofline.stream.lowering.attention_calls import TILE

LAW, RATES = fitted().law, rates_of(find_spec("nvidia-h200"))


@st.composite
def shapes(draw: st.DrawFn) -> Attention:
    heads = draw(st.integers(1, 64))
    return Attention(
        batch=draw(st.integers(1, 64)), heads=heads, kv_heads=heads, seq=draw(st.integers(1, 1 << 15)),
        head_dim=draw(st.sampled_from([64, 128])), causal=False, direction=draw(st.sampled_from(["fwd", "bwd"])),
    )  # fmt: skip


@given(shapes())
def test_no_pair_goes_without_a_number_and_a_causal_call_draws_fewer(shape: Attention) -> None:
    causal = replace(shape, causal=True)
    assert drawn(shape) >= shape.seq**2
    assert drawn(causal) >= shape.seq * (shape.seq + 1) // 2
    assert drawn(causal) <= drawn(shape) < 2 * drawn(causal)


@given(shapes(), st.integers(1, 4096))
def test_longer_calls_and_more_heads_take_longer(shape: Attention, more: int) -> None:
    taken = dropout_seconds(shape, RATES, LAW)
    assert 0 < taken <= dropout_seconds(replace(shape, seq=shape.seq + more), RATES, LAW)
    assert dropout_seconds(replace(shape, batch=2 * shape.batch), RATES, LAW) == pytest.approx(2 * taken)


def test_a_short_causal_call_draws_for_whole_tiles() -> None:
    assert drawn(Attention(batch=1, heads=1, kv_heads=1, seq=192, head_dim=64)) == 3 * TILE * TILE
