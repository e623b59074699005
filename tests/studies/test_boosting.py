"""Boosted trees: what they say, by hand; what they learn; and those that ship."""

from __future__ import annotations

import numpy as np
import pytest

from flopcast.kernels import matmul_law, matmul_trees
from flopcast.kernels.matmul_trees import Grown
from studies.boosting import boosted


def test_trees_say_the_sum_of_their_leaves() -> None:
    """Two trees of depth 2: up to a limit to the left, above it to the right."""
    trees = Grown(
        np.array([[0, 1, 1], [1, 0, 0]]),
        np.array([[0.5, 2.0, 3.0], [1.0, 9.0, 9.0]]),
        np.array([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]),
    )
    rows = np.array([[0.5, 2.0], [0.5, 2.5], [0.6, 3.0], [0.6, 3.5], [10.0, 0.0]])
    assert trees(rows).tolist() == [1 + 30, 2 + 30, 3 + 30, 4 + 30, 3 + 20]


def test_what_depends_on_two_inputs_together_is_learnt_and_noise_is_not() -> None:
    generator = np.random.default_rng(1)
    rows = generator.uniform(size=(4000, 6))
    truth = np.where((rows[:, 0] > 0.5) & (rows[:, 3] > 0.3), 0.2, -0.1)
    target = truth + generator.normal(0, 0.1, len(rows))
    seen, unseen = slice(0, 3000), slice(3000, None)
    grown = boosted(rows[seen], target[seen], np.ones(3000), trees=60)
    assert np.std(grown(rows[unseen]) - truth[unseen]) < 0.35 * np.std(truth[unseen])
    again = boosted(rows[seen], target[seen], np.ones(3000), trees=60)
    assert np.array_equal(again(rows), grown(rows)), "the same in every run"
    assert boosted(rows[:40], np.full(40, 0.3), np.ones(40), trees=80)(rows[:3]) == pytest.approx(0.3, abs=1e-3)


def test_a_row_of_weight_zero_is_not_heard() -> None:
    rows = np.linspace(0, 1, 400)[:, None]
    target, weights = np.where(rows[:, 0] > 0.5, 1.0, 0.0), np.ones(400)
    target[::2], weights[::2] = 5.0, 0.0
    found = boosted(rows, target, weights, trees=80)(np.array([[0.1], [0.9]]))
    assert found == pytest.approx([0.0, 1.0], abs=0.02)


def test_those_that_ship_ask_what_the_law_answers() -> None:
    grown = matmul_trees.fitted().grown
    tile = matmul_law.fitted().tiles[0]
    asked = matmul_law.inputs(matmul_law.columns([tile], [1.0]), matmul_law.sizes_of("nt", 512, 512, 512), 132)
    assert grown.inputs.max() < asked.shape[-1]
    assert grown.leaves.shape[1] == grown.limits.shape[1] + 1 == grown.inputs.shape[1] + 1
    assert np.abs(grown(np.tile(asked, (3, 1)))).max() < 0.7  # a factor of two at most
