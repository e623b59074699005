"""How many bytes lie between a buffer's touch and its reading."""

from __future__ import annotations

from flopcast.roofline.stream.compiled.launches import Kind, Launch, Touch
from flopcast.roofline.stream.compiled.reuse import with_ages


def launch(*touches: Touch) -> Launch:
    return Launch(
        Kind.POINTWISE, "triton_x", sum(t.read for t in touches), sum(t.written for t in touches), touches=touches
    )


def test_what_was_just_written_has_no_age_and_grows_old_by_what_others_move() -> None:
    made = launch(Touch("a", 0, 100))
    other = launch(Touch("b", 30, 40))
    reader = launch(Touch("a", 100, 0), Touch("c", 5, 0))
    assert with_ages([made, reader])[1].ages == ((100, 0),)
    assert with_ages([made, other, reader])[2].ages == ((100, 70),)
    assert with_ages([reader])[0].ages == ()


def test_what_is_only_written_has_none() -> None:
    made = launch(Touch("a", 0, 100))
    assert with_ages([made, made])[1].ages == ()
