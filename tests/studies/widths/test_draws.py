"""The products of steps with an unaligned width: drawn alike everywhere, of all kinds, none near what judges them."""

from __future__ import annotations

import random
from collections import Counter

from flopcast.roofline.widths.penalties import power_of_two
from studies.suites.gemms import LAYOUTS, MAX_BYTES
from studies.widths.draws import MAX_MACS, NEAR, POWERS, losses, products
from studies.widths.products import kind_of
from studies.widths.sets import SETS, drawn

BELOW = (960, 1280, 2048, 3072, 4032, 8128, 4864, 50_240, 128_256, 151_872, 151_936)


def test_the_first_so_many_are_those_of_fewer_draws_and_hold_every_kind() -> None:
    few, many = products(150), products(300)
    assert many[: len(few)] == few
    kinds = Counter((kind_of(one.shape), one.shape.layout) for one in few)
    unaligned = [kind for kind in kinds if kind[0][0] != "none"]
    assert len(unaligned) == 12
    assert min(kinds.values()) >= 10
    assert {one.shape.layout for one in few} == {*LAYOUTS}
    assert max(one.shape.m * one.shape.n * one.shape.k for one in many) <= MAX_MACS
    assert max(one.shape.bytes for one in many) <= MAX_BYTES


def test_no_size_that_is_off_lies_near_one_of_the_blind_set() -> None:
    blind = [value for place in SETS[3].neighbourhoods for value in place.unaligned]
    off = {
        side
        for one in products()
        for side in (one.shape.m, one.shape.n, one.shape.k)
        if power_of_two(side) <= max(POWERS)
    }
    assert len(off) > 500
    assert min(abs(size - value) for size in off for value in blind) > NEAR


def test_what_is_held_out_is_not_fitted() -> None:
    roles = Counter(one.role for one in products())
    shapes = [one.shape for one in products()]
    assert len(set(shapes)) == len(shapes)
    assert 0.05 < roles["holdout"] / roles["fit"] < 0.15


def test_the_third_sets_sizes_are_those_its_rule_draws() -> None:
    rng = random.Random(3)
    shown = {value for n in (1, 2) for place in SETS[n].neighbourhoods for value in place.unaligned}
    by_rule = [value for below in BELOW for value in drawn(rng, below, shown)]
    assert sorted(by_rule) == sorted(value for place in SETS[3].neighbourhoods for value in place.unaligned)


def test_losses_are_forward_and_backward_of_sizes_off_the_blind_ones() -> None:
    calls = losses()
    vocabularies = {call.outputs[0].shape[1] for call in calls}
    assert len({call.key for call in calls}) == len(calls)
    assert Counter(call.op for call in calls) == {
        "aten._log_softmax.default": len(calls) // 2,
        "aten._log_softmax_backward_data.default": len(calls) // 2,
    }
    blind = [value for place in SETS[3].neighbourhoods for value in place.unaligned]
    assert min(abs(size - value) for size in vocabularies for value in blind) > NEAR
    assert {power_of_two(size) for size in vocabularies} >= {1, 2, 4, 8, 16, 32}
