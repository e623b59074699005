"""What the shipped law of matmul tiles picks among what was timed, and the fit that made it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flopcast.kernels import matmul_trees
from flopcast.kernels.matmul_law import fitted, tile_key
from studies.kernels import tile_law
from studies.kernels.tile_law import Timed, multiple_of, picks, read

TREES = matmul_trees.fitted().grown
NONE = matmul_trees.Grown(TREES.inputs[:1], TREES.limits[:1], 0.0 * TREES.leaves[:1])  # which leave the law as it is
FIFTH = Path(__file__).resolve().parents[3] / "reports/nvidia-h200/matmul-kernels/fifth_tuning.jsonl.gz"


@pytest.fixture(scope="module")
def timed() -> list[Timed]:
    return read([FIFTH])


# Reached: 0.999 and 0.891 of cuBLAS's speed, 1.021 and 1.044 of the fastest configuration's time.
@pytest.mark.parametrize(
    ("multiple", "count", "of_library", "of_fastest"), [("64", 605, 0.995, 1.03), ("8", 298, 0.885, 1.05)]
)
def test_what_it_picks_is_nearly_the_fastest(
    timed: list[Timed], multiple: str, count: int, of_library: float, of_fastest: float
) -> None:
    found = [pick for pick in picks(timed, fitted(), TREES) if multiple_of(pick.place) == multiple]
    assert len(found) == count
    assert np.exp(np.mean([np.log(pick.library / pick.seconds) for pick in found if pick.library])) > of_library
    assert np.exp(np.mean([np.log(pick.seconds / pick.fastest) for pick in found])) < of_fastest


def test_a_fit_finds_the_rates_again(timed: list[Timed]) -> None:
    """To times that the law itself gives, of nine shapes, one tile made a tenth faster."""
    law = fitted()
    tile = "tma/128x256x64/w8s4/c2p1"
    faster = dict(law.rates) | {tile: 1.1 * law.rates[tile]}
    some = [
        Timed(one.place, one.configs, np.array([pick.estimate for pick in _each(one, faster)]), None)
        for one in timed[:90:10]
    ]
    found = tile_law.fit(some, law, 4).rates
    others = [found[key] / law.rates[key] for key in found if key != tile]
    assert found[tile] / law.rates[tile] / np.median(others) == pytest.approx(1.1, abs=0.05)


def _each(one: Timed, rates: dict[str, float]) -> list[tile_law.Pick]:
    """Each configuration of a shape as if it alone had been timed."""
    from dataclasses import replace

    law = replace(fitted(), rates=rates)
    alone = [Timed(one.place, (config,), one.seconds[:1], None) for config in one.configs]
    assert all(tile_key(config) in rates for config in one.configs)
    return list(picks(alone, law, NONE))
