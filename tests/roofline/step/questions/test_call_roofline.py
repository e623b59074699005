"""The roofline of prefills and decodes: what lies where, worked out by hand, and drawn."""

from __future__ import annotations

from typing import Any

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.call_roofline import CallRoofline, call_roofline
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.views.figures.anatomy import calls_figure

TINY = make_config(width=128, depth=2, vocab=512)


def found(context: int, **run: Any) -> CallRoofline:
    def stream_of(run: Run) -> Stream:
        return get_stream(TINY, run.traced_on("cuda"), vary="batch")

    asked = Run(**{"batch": 4, "context": context, "precision": "bf16", "phase": "decode", **run})
    step = PricedStep(stream_of(asked), asked, find_profile("nvidia-h200"))
    result = call_roofline(step, stream_of)
    assert result is not None
    return result


@pytest.fixture(scope="module")
def short() -> CallRoofline:
    return found(1)


def test_calls_lie_below_the_roofs(short: CallRoofline) -> None:
    assert {(call.phase, call.batch) for call in short.calls if call.is_asked} == {("decode", 4)}
    assert {call.batch for call in short.calls if call.phase == "decode"} == {1, 4, 16, 64, 256, 1024}
    weights = 2 * (2 * (4 * 128 * 128 + 3 * 128 * 384) + 512 * 128)  # of products; the logits' are the embeddings'
    for call in short.calls:
        tokens, kept = (1, 2) if call.phase == "decode" else (1, 1)
        cache = 2 * 2 * call.batch * kept * 128 * 2
        assert weights + cache <= call.bytes <= weights + cache + 4 * 512
        assert call.roof_seconds <= call.device_seconds
        assert call.flops >= call.batch * tokens * weights


def test_decodes_turn_where_their_roof_does(short: CallRoofline) -> None:
    turning = short.turning_batch
    assert turning is not None
    assert 64 < turning < 256
    assert {call.batch: call.bound for call in short.calls if call.phase == "decode"} == {
        1: "memory", 4: "memory", 16: "memory", 64: "memory", 256: "matrix", 1024: "matrix"
    }  # fmt: skip
    assert f"from a batch of {turning:,.0f} on" in short.turns
    far = found(512)
    assert far.turning_batch is None
    assert {call.bound for call in far.calls if call.phase == "decode"} == {"memory"}


def test_it_is_drawn_with_its_batches_and_its_turn(short: CallRoofline) -> None:
    figure = calls_figure(short)
    assert figure is not None
    assert "prefill of 16" in figure.svg
    assert "matrix-bound from a batch" in figure.alt


def test_training_has_none() -> None:
    run = Run(batch=2, seq=16)
    step = PricedStep(get_stream(TINY, run.traced_on("cuda")), run, find_profile("nvidia-h200"))
    assert call_roofline(step, lambda run: None) is None
