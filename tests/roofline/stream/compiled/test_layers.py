"""Layers found in, and unfolded from, the lists of shallow models."""

from __future__ import annotations

import gzip
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flopcast.errors import DataError
from flopcast.roofline.stream.compiled.launches import Graph, Kind, Launch
from flopcast.roofline.stream.compiled.layers import alike, fold
from flopcast.roofline.stream.compiled.output_code import read_output_code

FOLDER = Path(__file__).parents[4] / "reports" / "nvidia-h200" / "compiled-steps"


@cache
def graphs_of(case: str) -> tuple[Graph, ...]:
    return read_output_code(gzip.decompress((FOLDER / f"{case}.code.gz").read_bytes()).decode())


def counts(launches: tuple[Launch, ...]) -> Counter[Launch]:
    return Counter(alike(launch) for launch in launches)


def test_28_layers_launch_what_2_do_and_26_times_a_layer() -> None:
    """The premise: the difference of the two real lists is a multiple of 26, whatever the launch."""
    for shallow, deep in zip(graphs_of("qwen3-0.6b-l2"), graphs_of("qwen3-0.6b-8x1024"), strict=True):
        few, many = counts(shallow.launches), counts(deep.launches)
        assert not few - many
        assert {number % 26 for number in (many - few).values()} == {0}
        assert (many - few).total() == 26 * {"0_forward": 22, "0_backward": 36}[deep.label]


def test_2_and_3_layers_unfold_to_the_real_list_of_28() -> None:
    """All three recorded on a GPU: the same launches in the same order."""
    real = graphs_of("qwen3-0.6b-8x1024")
    layered = fold(graphs_of("qwen3-0.6b-l2"), graphs_of("qwen3-0.6b-l3"), 2)
    for found, graph in zip(layered, real, strict=True):
        assert [alike(launch) for launch in found.launches(28)] == [alike(launch) for launch in graph.launches]
        assert len(found.layer) == 1


def launch(name: str) -> Launch:
    return Launch(Kind.POINTWISE, f"triton_poi_fused_{name}_0", 1, 1)


def graph(names: str) -> Graph:
    return Graph("0_forward", (), tuple(launch(name) for name in names), (), ())


def test_numbers_of_kernels_do_not_count() -> None:
    deep = graph("eabcabcabcz")
    deep = replace(
        deep, launches=tuple(replace(one, name=one.name[:-1] + str(i)) for i, one in enumerate(deep.launches))
    )
    (layered,) = fold([graph("eabcabcz")], [deep], 2)
    assert "".join(one.name[17] for one in layered.launches(4)) == "eabcabcabcabcz"


def test_a_graph_without_layers_stays_as_it_is() -> None:
    (layered,) = fold([graph("xyz")], [graph("xyz")], 2)
    assert layered.launches(28) == graph("xyz").launches


def test_layers_that_are_not_alike_are_told() -> None:
    with pytest.raises(DataError, match="2 layers launch triton_poi_fused_q 1 times, 3 layers 0 times"):
        fold([graph("aqa")], [graph("aaaa")], 2)
    with pytest.raises(DataError, match="as 1 graphs, 3 as 2"):
        fold([graph("ab")], [graph("ab"), graph("c")], 2)


def test_a_layer_more_draws_more_seeds() -> None:
    """Of GPT-2's dropout: inductor draws those of all layers at once."""
    seeds = [Launch(Kind.FALLBACK, "aten.randint", 0, 8 * count, args=f"[{count}]") for count in (5, 7)]
    pairs = zip(("eabcabcz", "eabcabcabcz"), seeds, strict=True)
    few, many = (replace(graph(names), launches=(one, *graph(names).launches)) for names, one in pairs)
    (layered,) = fold([few], [many], 2)
    assert len(layered.launches(12)) == 1 + 2 + 12 * 3


def test_layers_that_overlap_repeat_where_they_stand() -> None:
    """Inductor may move the gradients of weights (w, v) of all layers behind those of activations."""
    (layered,) = fold([graph("eabcabcwvwvz")], [graph("eabcabcabcwvwvwvz")], 2)
    found = "".join(one.name[17] for one in layered.launches(5))
    assert Counter(found) == Counter("e" + 5 * "abcwv" + "z")
    assert sum(stop - start for start, stop in layered.layer) == 5
    assert {found[0], found[-1]} == {"e", "z"}
