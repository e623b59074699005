"""What masks and dropout add to attention: bounds that no call leaves."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.laws.attention_mask import seconds
from flopcast.roofline.gpu.library.attention_mask import fitted
from flopcast.roofline.gpu.library.generated import rates_of

LAW, RATES = fitted().law, rates_of(find_spec("nvidia-h200"))
SECONDS = st.floats(1e-6, 1.0)


@st.composite
def shapes(draw: st.DrawFn) -> Attention:
    heads = draw(st.integers(1, 64))
    return Attention(
        batch=draw(st.integers(1, 64)), heads=heads, kv_heads=heads, seq=draw(st.integers(1, 1 << 15)),
        head_dim=draw(st.sampled_from([64, 128])), causal=False, direction=draw(st.sampled_from(["fwd", "bwd"])),
    )  # fmt: skip


@given(shapes(), SECONDS)
def test_a_mask_takes_longer_by_at_most_its_factor(shape: Attention, plain: float) -> None:
    of = LAW.fwd if shape.direction == "fwd" else LAW.bwd
    found = seconds(replace(shape, mask=True), plain, RATES, LAW)
    assert plain <= found <= plain * (1 + of.slower)
    assert seconds(shape, plain, RATES, LAW) == plain


@given(shapes(), SECONDS, st.floats(1.0, 10.0))
def test_longer_calls_never_take_less_with_a_mask(shape: Attention, plain: float, factor: float) -> None:
    shape = replace(shape, mask=True, dropout=True)
    assert seconds(shape, plain * factor, RATES, LAW) >= seconds(shape, plain, RATES, LAW)


@given(shapes(), SECONDS)
def test_dropout_costs_by_the_pairs_of_which_a_causal_call_has_half(shape: Attention, plain: float) -> None:
    added = [
        seconds(one, plain, RATES, LAW) - plain
        for one in (
            replace(shape, dropout=True),
            replace(shape, dropout=True, causal=True),
            replace(shape, dropout=True, batch=2 * shape.batch),
        )
    ]
    assert added[0] > 0
    assert abs(added[1] / added[0] - 0.5) < 1e-3 + 1e-12 / added[0]
    assert abs(added[2] / added[0] - 2.0) < 1e-3 + 1e-12 / added[0]
