"""What the study of tiles tries, without a GPU."""

from __future__ import annotations

from flopcast.kernels.matmul_configs import shared_memory_limit
from flopcast.microbench.tuning.shapes import LEAST, MOST, drawn, grid, of_models
from studies.kernels.tiles import shapes, tried


def test_what_is_tried_fits_and_differs() -> None:
    for shape in shapes(2, 1, split=False):
        found = tried(shape, 132, 28)
        assert len({config.key for config in found}) == len(found)
        assert all(config.shared_bytes(2) <= shared_memory_limit((9, 0)) for config in found)
        assert 8 <= len(found) <= 29


def test_draws_differ_by_seed_alone() -> None:
    one = drawn(8, 60, 1)
    assert one == drawn(8, 60, 1)
    assert len(set(one)) == 60
    assert not set(one) & set(drawn(8, 60, 2))
    assert all(size % 8 == 0 and LEAST <= size <= MOST for x in one for size in (x.m, x.n, x.k))
    assert not set(of_models()) & set(grid())
