"""The choice of a tile: read from the names of kernels, learnt from a library that is known here, used by the law."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import log2

import numpy as np
import pytest
from scipy.optimize import check_grad

from flopcast.decode import decode
from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.fit import kernel_choice
from flopcast.roofline.gpu.fit.kernel_choice import Launched, launched, learn_tiles
from flopcast.roofline.gpu.fit.priors import gemm_prior
from flopcast.roofline.gpu.fit.surface import Points, fit_surface
from flopcast.roofline.gpu.laws import gemm, gemm_choice
from flopcast.roofline.gpu.laws.gemm_choice import Sizes, candidates, choose
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import GemmVariant

SM_COUNT, PEAK, FLOOR = 132.0, 900e12, 2e-6
TILES = ((256, 128), (192, 192), (128, 128), (64, 128), (128, 64))


def library(shape: Gemm) -> tuple[tuple[int, int], int, float]:
    """(tile, parts of k, seconds) of a library that takes what is fastest by a cost of its own."""
    found = []
    for tile_m, tile_n in TILES:
        blocks = np.ceil(shape.m / tile_m) * np.ceil(shape.n / tile_n)
        step = 2 * tile_m * tile_n * 64 * SM_COUNT / (PEAK * (0.85 - 0.2 * (tile_m * tile_n < 16384)))
        for parts in (1, max(1, int(SM_COUNT // blocks))):
            added = 3e-6 + 8 * shape.m * shape.n * parts / 8e12 if parts > 1 else 0.0
            seconds = np.ceil(blocks * parts / SM_COUNT) * (np.ceil(shape.k / 64 / parts) * step + 5e-7)
            found.append((seconds + added, (tile_m, tile_n), parts))
    seconds, tile, parts = min(found)
    return tile, parts, FLOOR + seconds


def name(shape: Gemm) -> list[tuple[str, float]]:
    """As the profiler has it: cuBLAS computes the transpose."""
    (tile_m, tile_n), parts, _ = library(shape)
    split = [("void cublasLt::splitKreduce_kernel<32, 16, int, float>(float)", 2e-6)] if parts > 1 else []
    return [(f"nvjet_sm90_tst_{tile_n}x{tile_m}_64x4_1x2_h_bz_TNT", 1e-5), *split]


def shapes(seed: int, count: int) -> list[Gemm]:
    sizes = 64 * np.round(2 ** np.random.default_rng(seed).uniform(2, 7, (count, 3))).astype(int)
    return [Gemm(m=m, n=n, k=k) for m, n, k in sizes.tolist()]


def columns(of: list[Gemm]) -> tuple[Array, Array, Array]:
    return (
        np.array([[log2(s.m), log2(s.n), log2(s.k)] for s in of]),
        np.array([s.bytes for s in of], float),
        np.array([s.flops for s in of], float),
    )


def learn(of: list[Gemm]) -> dict[str, float]:
    return learn_tiles([(shape, name(shape)) for shape in of], SM_COUNT, {"bf16": PEAK})[2, "nt"]


FITTED = shapes(0, 500)
SOME = FITTED[:140]


@cache
def learnt() -> dict[str, float]:
    return learn(FITTED)


def fit(tiles: dict[str, float], seconds: Array) -> Surface:
    features, bytes_, flops = columns(SOME)
    points = Points(features, bytes_, flops, seconds, np.full(len(seconds), 0.004))
    inputs = gemm.inputs(GemmVariant("nt", "bf16"), {"sm_count": SM_COUNT, **tiles}, features).shape[1]
    prior = gemm_prior(PEAK, SM_COUNT, FLOOR, 4e12, 5e7, inputs)
    return fit_surface("gemm", GemmVariant("nt", "bf16"), points, replace(prior, fixed={**prior.fixed, **tiles}))


TIMES = np.array([library(shape)[2] for shape in SOME])


@cache
def surface() -> Surface:
    return fit(learnt(), TIMES)


@pytest.mark.parametrize(("kernels", "expected"), [
    ([["nvjet_sm90_tst_128x160_64x5_1x2_h_bz_NTT", 1e-5]], Launched(160, 128, False)),
    ([["Memset (Device)", 1e-6], ["nvjet_sm90_tst_64x8_64x16_4x2_h_bz_splitK_TNN", 1e-5],
      ["void cublasLt::splitKreduce_kernel<32, 16, int, float>(float)", 1e-6]], Launched(8, 64, True)),
    ([["void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_64x3_nn_align2>(Params)", 1e-5]], None),
    ([["matmul_kernel", 1e-5]], None),
    ([], None),
])  # fmt: skip
def test_names_of_kernels(kernels: list[list[object]], expected: Launched | None) -> None:
    assert launched(kernels) == expected


def test_what_a_library_picks_is_foretold() -> None:
    """Of shapes never seen: the likeliest tile and split is the one picked in three of four, a tie aside."""
    new = shapes(1, 300)
    features, *_ = columns(new)
    tiles, choice = gemm.likeliest_tiles(GemmVariant("nt", "bf16"), learnt() | {"sm_count": SM_COUNT}, features, 0)
    likeliest = choice.share.argmax(axis=1)
    hits = 0
    for i, shape in enumerate(new):
        tile, parts, _ = library(shape)
        index = choice.tile[i, likeliest[i]]
        split = choice.parts[i, likeliest[i]] > 1
        hits += (tiles.rows[index], tiles.columns[index]) == tile and split == (parts > 1)
    assert hits / len(new) > 0.75
    assert np.allclose(choice.share.sum(axis=1), 1.0)


def test_a_learnt_choice_forecasts_better_than_any_tile() -> None:
    new = shapes(2, 300)
    seconds = np.array([library(shape)[2] for shape in new])
    surfaces = surface(), fit({}, TIMES)
    known, unknown = (np.abs(np.log(made.predict(*columns(new)).seconds / seconds)) for made in surfaces)
    assert np.quantile(known, 0.9) < 0.8 * np.quantile(unknown, 0.9)
    assert np.median(known) < 0.02


def test_few_or_unknown_names_teach_nothing() -> None:
    few = [(shape, name(shape)) for shape in shapes(3, 60)]
    assert learn_tiles(few, SM_COUNT, {"bf16": PEAK}) == {}
    nameless = [(shape, [("matmul_kernel", 1e-5)]) for shape in FITTED]
    assert learn_tiles(nameless, SM_COUNT, {"bf16": PEAK}) == {}


def test_on_another_part_the_choice_follows_its_sms() -> None:
    """A grid that fills 132 SMs leaves a part of 108 with a second wave of a few blocks: another tile is likelier."""
    features, *_ = columns([Gemm(m=2112, n=2112, k=4096)])
    best = [
        gemm.likeliest_tiles(GemmVariant("nt", "bf16"), learnt() | {"sm_count": sms}, features, 0)[1]
        for sms in (132.0, 108.0)
    ]
    likeliest = [int(choice.tile[0, choice.share[0].argmax()]) for choice in best]
    assert likeliest[0] != likeliest[1]


def test_the_gradient_of_the_fit() -> None:
    few = shapes(4, 40)
    sizes = Sizes(*(np.array([[getattr(s, d)] for s in few], float) for d in ("m", "n", "k", "batch")))
    tile_m, tile_n = np.array(TILES, float).T
    found = candidates(tile_m, tile_n, sizes, SM_COUNT, 2)
    count = len(TILES)
    label = np.arange(len(few)) % count
    label = np.where(found.parts[np.arange(len(few)), label] > 1, label + count, label)
    rng = np.random.default_rng(0)
    theta = np.concatenate([rng.normal(-14.5, 0.3, 2 * count), rng.normal(0, 1, 3 * count), [-1.0, -12.7, 29.7, 1.0]])
    at = (sizes, found, np.arange(len(few)) % 2, label, 2, np.zeros_like(theta), np.full_like(theta, 10.0))

    def value(x: Array) -> float:
        return kernel_choice._negative_log_posterior(x, *at)[0]

    def slope(x: Array) -> Array:
        return kernel_choice._negative_log_posterior(x, *at)[1]

    error = check_grad(value, slope, theta, epsilon=1e-6)
    assert error < 1e-3 * float(np.linalg.norm(slope(theta)))


def test_a_surface_of_learnt_tiles_survives_json() -> None:
    record = surface().to_json()
    assert "sizes" in record
    assert "features" not in record
    again = decode(Surface, record, "a surface")
    assert again == surface()
    asked = columns(shapes(5, 50))
    assert np.array_equal(surface().predict(*asked).seconds, again.predict(*asked).seconds)


def test_measured_products_come_back_though_they_are_odd() -> None:
    """One shape takes twice what its neighbours do: itself as measured, they as before."""
    odd = TIMES.copy()
    odd[7] *= 2.0
    made = fit(learnt(), odd)
    assert made.own[7] > 0.3
    assert made.predict(*columns(SOME)).seconds[7] == pytest.approx(odd[7], rel=0.02)
    near = Gemm(m=SOME[7].m, n=SOME[7].n, k=SOME[7].k + 8)
    assert made.predict(*columns([near])).seconds[0] < 1.4 * library(near)[2]


def test_choices_are_probabilities_however_few_the_tiles() -> None:
    tiles = gemm_choice.Tiles(
        *(np.array([value]) for value in (128.0, 128.0, -15.0, -14.0, 0.0)), -1.0, -12.7, 29.7, 20.0
    )
    sizes = Sizes(*(np.array([[value]]) for value in (512.0, 512.0, 8192.0, 1.0)))
    choice = choose(tiles, sizes, SM_COUNT, 2)
    assert choice.share.shape == (1, 2)
    assert choice.parts.max() == 8.0


def test_few_rows_by_1024_columns_wait_for_their_loads() -> None:
    """None of these was fitted: an H200 took 12.07, 13.63 and 11.27 us, and 9.0 by 960 columns at k = 2,560."""
    profile = find_profile("nvidia-h200")
    shapes = [Gemm(m=m, n=1024, k=k) for m, k in ((1, 2048), (1, 2560), (2, 2048))]
    taken = [profile.estimate([(describe(shape), "torch", "cold")])[0].seconds for shape in shapes]
    assert taken == pytest.approx([12.07e-6, 13.63e-6, 11.27e-6], rel=0.08)
    (beside,) = profile.estimate([(describe(Gemm(m=1, n=960, k=2560)), "torch", "cold")])
    assert beside.seconds < 0.75 * taken[1]
