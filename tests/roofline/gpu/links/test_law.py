"""The law of collectives and what ships of its terms: bounds that no time leaves, monotone in bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.roofline.gpu.links.catalogue import find_link, links
from flopcast.roofline.gpu.links.choice import KINDS, Group, Kind, Regime
from flopcast.roofline.gpu.links.fitted import CLASSES, class_of, fitted, projected
from flopcast.roofline.gpu.links.law import Collective, blocks, latency, seconds

INSIDE = [link for link in links().values() if link.kind != "network"]
NETWORKS = [link for link in links().values() if link.kind == "network"]


@st.composite
def collectives(draw: st.DrawFn) -> Collective:
    nodes = draw(st.sampled_from([1, 1, 2, 4, 128]))
    gpus = nodes * draw(st.integers(1 if nodes > 1 else 2, 8))
    network = draw(st.sampled_from(NETWORKS)) if nodes > 1 else None
    group = Group(gpus, draw(st.sampled_from(INSIDE)), nodes, network, draw(st.booleans()))
    return Collective(draw(st.sampled_from(KINDS)), draw(st.integers(1, 2**36)), group)


@given(collectives())
def test_a_time_is_above_its_latency_and_the_wire(asked: Collective) -> None:
    found = projected(asked)
    assert found.basis == "projected"
    assert found.regime is not None
    terms = fitted().terms_of(asked, found.regime)
    assert found.seconds >= latency(asked, found.regime, terms) > 0
    assert 0 < found.low < found.seconds < found.high
    assert class_of(asked) in CLASSES
    assert found.low >= found.least or found.seconds <= found.least
    if asked.regime.algorithm == "ring":  # no ring is faster than its line
        assert found.seconds >= found.least > 0


@given(collectives(), st.integers(1, 2**34))
def test_more_bytes_take_longer_in_a_regime(asked: Collective, more: int) -> None:
    regime = asked.regime
    terms = fitted().terms_of(asked, regime)
    assert seconds(replace(asked, bytes=asked.bytes + more), regime, terms) > seconds(asked, regime, terms)


@given(collectives())
def test_blocks_are_a_few_of_the_multiprocessors(asked: Collective) -> None:
    assert 1 <= blocks(asked) <= 32


@pytest.mark.parametrize(("kind", "held"), [("all_gather", 24), ("all_reduce", 24)])
def test_a_large_ring_on_hopper_holds_24_blocks(kind: Kind, held: int) -> None:
    large = Collective(kind, 2**28, Group(4, find_link("nvlink4")))
    assert blocks(large) == held
    assert blocks(replace(large, bytes=1024)) == 1


def test_eight_h200s_reduce_faster_with_nvls() -> None:
    """480 against 367 GB/s at 16 GiB, where they were measured: the first is fitted, the ring was never seen."""
    for nvls, rate in ((True, 480e9), (False, 367e9)):
        asked = Collective("all_reduce", 2**34, Group(8, find_link("nvlink4"), nvls=nvls))
        assert 1.75 * asked.bytes / projected(asked).seconds == pytest.approx(rate, rel=0.1)


def test_terms_of_a_regime_that_no_table_had_are_those_of_a_ring() -> None:
    asked = Collective("all_reduce", 2**20, Group(16, find_link("nvlink4"), 2, find_link("ib-400", network=True)))
    known = fitted()
    assert known.terms_of(asked, Regime("tree", "LL")) == known.terms["nvlink ring/LL"]
    assert known.terms_of(asked, Regime("ring", "Simple")) == known.terms["nvlink ring/Simple"]
