"""What kernels and collectives lose to each other: the shipped link's parameters against the rows that they came from,
and how the law behaves beyond them."""

from __future__ import annotations

import pytest

from flopcast.roofline.gpu.links.contention import Beside, bound_of
from flopcast.roofline.gpu.links.contention_fit import fit_contention
from flopcast.roofline.gpu.links.library import SHIPPED, find_interconnect
from flopcast.roofline.gpu.links.profile import LinkProfile

MIB = 1024 * 1024
H200 = find_interconnect("nvidia-h200")


@pytest.fixture(scope="module")
def profile() -> LinkProfile:
    return LinkProfile.load(SHIPPED / "nvidia-h200.json")


def test_a_kind_of_kernel_that_was_not_fitted_is_foretold(profile: LinkProfile) -> None:
    """Each kind of collective by the parameters of the other two: what each loses within 8% at the median."""
    errors = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        known = fit_contention([row for row in profile.beside if row.collective != kind], 132)
        assert known is not None
        for row in profile.beside:
            if row.collective == kind:
                share = known.of(bound_of(row.work))
                took = row.collective_alone_seconds * (1 + share.slowed) + known.waited * row.alone_seconds
                kernel = row.alone_seconds * (1 + share.lost * row.channels / (132 - row.channels))
                errors += [abs(took / row.collective_beside_seconds - 1), abs(kernel / row.beside_seconds - 1)]
    errors.sort()
    assert errors[len(errors) // 2] < 0.08
    assert errors[-1] < 0.35  # a product of one wave, and an addition


def test_less_held_is_less_lost() -> None:
    large = H200.contended("matrix", "all_reduce", 256 * MIB, 2, kernel_seconds=1e-4)
    small = H200.contended("matrix", "all_reduce", 16 * 1024, 2, kernel_seconds=1e-4)
    assert 1.0 < small.kernel < large.kernel
    assert (small.blocks, large.blocks) == (2, 24)  # as NCCL logged them
    assert 0 < large.delay < 1e-4
    memory = H200.contended("memory", "all_reduce", 256 * MIB, 2)
    assert memory.kernel < large.kernel
    assert memory.collective > large.collective > 1.0


def test_a_product_of_one_wave_takes_two() -> None:
    beside = [
        H200.contended("matrix", "all_reduce", 256 * MIB, 2, kernel_blocks=blocks).kernel for blocks in (100, 132, 1320)
    ]
    assert beside == pytest.approx([1.0, 2.0, 1.3])


def test_a_link_without_rows_has_those_of_the_link_that_ships() -> None:
    other = find_interconnect("nvlink3")
    found = other.contended("matrix", "all_reduce", 256 * MIB, 8, multiprocessors=108)
    assert found.kernel > 1.0
    assert found.blocks == other.time("all_reduce", 256 * MIB, 8).blocks


def test_without_rows_of_both_classes_there_is_none() -> None:
    row = Beside("copy-256MiB", "all_reduce", 2, 24, 1e-4, 1.2e-4, 1e-3, 2e-3)
    assert fit_contention([row, row], 132) is None
