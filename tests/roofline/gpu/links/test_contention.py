"""What kernels and collectives lose to each other: the shipped link's parameters against rows that they were not fitted
to, and how the law behaves beyond them."""

from __future__ import annotations

from statistics import median

import pytest

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.links.contention import Beside, wave_factor
from flopcast.roofline.gpu.links.contention_fit import fit_contention, foretold
from flopcast.roofline.gpu.links.library import SHIPPED, find_interconnect
from flopcast.roofline.gpu.links.profile import LinkProfile
from flopcast.roofline.stream.lowering.describe import describe

MIB = 1024 * 1024
H200 = find_interconnect("nvidia-h200")


def test_a_kind_of_collective_that_was_not_fitted_is_foretold() -> None:
    """Each by the parameters of the other two; worst are additions, of which a copy's or theirs is the median."""
    rows = LinkProfile.load(SHIPPED / "nvidia-h200.json").beside
    kernels, collectives = [], []
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        known = fit_contention([row for row in rows if row.collective != kind], 132)
        assert known is not None
        for row in rows:
            if row.collective == kind:
                kernel, collective = foretold(known, row)
                kernels.append(abs(kernel / row.beside_seconds - 1))
                collectives.append(abs(collective / row.collective_beside_seconds - 1))
    assert median(kernels) < 0.03
    assert max(kernels) < 0.13
    assert median(collectives) < 0.08
    assert max(collectives) < 0.35


def test_less_held_is_less_lost() -> None:
    large = H200.contended("memory", "all_reduce", 256 * MIB, 2, kernel_seconds=1e-4)
    small = H200.contended("memory", "all_reduce", 16 * 1024, 2, kernel_seconds=1e-4)
    assert 1.0 < small.kernel < large.kernel < 1.3
    assert (small.held, large.held) == (2, 24)  # as NCCL logged them
    assert 0 < large.delay < 1e-4
    attention = H200.contended("attention", "all_reduce", 256 * MIB, 2)
    assert 1.0 < attention.kernel < 1.3
    assert large.collective > attention.collective > 1.0


def test_what_leaves_half_of_the_memorys_rate_slows_collectives_no_more_than_products_do() -> None:
    """Beside the memory-bound kernels of FSDP's steps, at 0.6 to 0.7 of the rate, all-gathers lost 13 to 18% of their
    time and reduce-scatters 31 to 36%; beside a copy of 256 MiB, half."""
    seconds, rate = 1e-4, 4e12
    calm, usual, full = (
        H200.contended("memory", "all_gather", 64 * MIB, 2, kernel_seconds=seconds, kernel_bytes=share * rate * seconds,
                       bandwidth=rate).collective
        for share in (0.5, 0.75, 1.0)
    )  # fmt: skip
    assert calm == H200.contended("matrix", "all_gather", 64 * MIB, 2).collective
    assert calm < usual < full
    assert full == H200.contended("memory", "all_gather", 64 * MIB, 2, kernel_seconds=seconds).collective
    nothing = H200.contended("memory", "all_gather", 64 * MIB, 2, kernel_seconds=seconds, kernel_bytes=0.0)
    assert nothing.collective == calm


@pytest.mark.parametrize(
    ("m", "n", "k", "microseconds", "times"),
    [(4096, 1024, 1024, 14.3, 1.78), (4096, 2048, 1024, 26.0, 1.82), (2048, 6144, 2048, 68.0, 1.59),
     (8192, 2048, 2048, 85.5, 1.49), (2560, 9728, 2048, 135.9, 1.35), (8192, 6144, 2048, 255.7, 1.21)],
)  # fmt: skip
def test_products_of_real_steps_take_as_much_longer(m: int, n: int, k: int, microseconds: float, times: float) -> None:
    """As profiled in steps on two H200s, by themselves and beside a collective that lasted longer: one wave to twelve.
    Nothing was fitted to them."""
    work = describe(Gemm(m=m, n=n, k=k, layout="tn"))
    blocks = find_profile("nvidia-h200").blocks(work)
    found = H200.contended("matrix", "all_gather", 64 * MIB, 2, kernel_seconds=microseconds * 1e-6,
                           kernel_blocks=blocks)  # fmt: skip
    assert found.kernel == pytest.approx(times, rel=0.17)


def test_waves_over_what_is_left() -> None:
    assert wave_factor(0.9, 100, 132, 108) == 1.0  # all fit beside it
    assert wave_factor(0.9, 132, 132, 108) == 2.0
    assert wave_factor(0.9, 132_000, 132, 108) == pytest.approx(132 / 108, rel=1e-3)
    assert H200.contended("matrix", "all_reduce", 256 * MIB, 2).kernel == 2.0  # blocks that are not known: one wave


def test_blocks_are_those_of_products() -> None:
    profile = find_profile("nvidia-h200")
    assert profile.blocks(describe(Gemm(m=4096, n=2048, k=1024, layout="tn"))) == 256
    assert profile.blocks(describe(Gemm(m=4096, n=2048, k=1024, layout="tn")), "triton") == 0


def test_a_link_without_rows_has_those_of_the_link_that_ships() -> None:
    other = find_interconnect("nvlink3")
    found = other.contended("memory", "all_reduce", 256 * MIB, 8, multiprocessors=108)
    assert found.kernel > 1.0
    assert found.held == other.time("all_reduce", 256 * MIB, 8).blocks


def test_without_rows_of_each_bound_there_is_none() -> None:
    row = Beside("copy-256MiB", "all_reduce", 2, 24, 1e-4, 1.2e-4, 1e-3, 2e-3)
    assert fit_contention([row, row], 132) is None
