"""Products of unaligned rows: names of their kernels, a library that is known here learnt from times and names, and
what the law says of grids, rows and sizes that were never measured."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import log2

import numpy as np
import pytest
from scipy.optimize import check_grad

from flopcast.decode import decode
from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.fit import gemm_unaligned as fit_gemm_unaligned
from flopcast.roofline.gpu.fit.gemm_unaligned import Ran, ran
from flopcast.roofline.gpu.fit.kernel_choice import learn_tiles
from flopcast.roofline.gpu.fit.priors import gemm_prior
from flopcast.roofline.gpu.fit.surface import Points, fit_surface
from flopcast.roofline.gpu.laws import gemm, gemm_unaligned
from flopcast.roofline.gpu.laws.gemm_unaligned import (
    MODES,
    SHARE,
    SLOPES,
    Kernels,
    row_kind,
    row_shift,
    sizes_of,
    waves,
)
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.variants import GemmVariant

SM_COUNT, PEAK, LAUNCH = 132.0, 989e12, 2e-6
PACES = {(128, 256, 32): 1.1, (128, 128, 32): 1.0, (64, 64, 32): 0.7}  # of what "align1" is told by
VARIANT = GemmVariant("nn", "bf16", is_aligned=False)


def library(shape: Gemm) -> tuple[tuple[int, int, int], int, float]:
    """(tile, mode, seconds) of a library that takes what is fastest, whole or with k divided in turn. Rows of B that
    start at multiples of 16 bytes make a step a tenth longer."""
    found = []
    for (rows, columns, depth), pace in PACES.items():
        blocks = np.ceil(shape.m / rows) * np.ceil(shape.n / columns)
        step = 2 * rows * columns * SM_COUNT / (PEAK * SHARE["align1"] * pace)
        step *= 1.1 if shape.n % 8 == 0 else 1.0
        each = -(-shape.k // depth) * depth * step + 1e-6 * rows / 64
        evenly = blocks / SM_COUNT * shape.k * step * 1.08 + 6e-6 * np.ceil(blocks / SM_COUNT)
        for mode, seconds in enumerate((np.ceil(blocks / SM_COUNT) * each, evenly)):
            found.append((float(LAUNCH + seconds), (rows, columns, depth), mode))
    seconds, tile, mode = min(found)
    return tile, mode, seconds


def kernels(shape: Gemm) -> list[tuple[str, float]]:
    """As the profiler has them: the transpose is computed."""
    (rows, columns, _), mode, seconds = library(shape)
    name = f"void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_{columns}x{rows}_nn_align1>(Params)"
    return [("Memset (Device)", 1e-6)] * mode + [(name, seconds - mode * 1e-6)]


def shapes(seed: int, count: int) -> list[Gemm]:
    rng = np.random.default_rng(seed)
    found = []
    for m, n, k in np.round(2 ** rng.uniform(8, 12.5, (count, 3))).astype(int).tolist():
        n = n // 8 * 8 if rng.random() < 0.5 else n
        found.append(Gemm(m=m, n=n, k=k | 1, layout="nn"))
    return found


def columns(of: list[Gemm]) -> tuple[Array, Array, Array]:
    return (
        np.array([[log2(s.m), log2(s.n), log2(s.k)] for s in of]),
        np.array([s.bytes for s in of], float),
        np.array([s.flops for s in of], float),
    )


FITTED = shapes(0, 240)


@cache
def learnt_tiles() -> dict[str, float]:
    return learn_tiles([(s, kernels(s)) for s in FITTED], SM_COUNT, {"bf16": PEAK})[2, "nn"]


def surface(learnt: dict[str, float]) -> Surface:
    features, bytes_, flops = columns(FITTED[:120])
    seconds = np.array([library(shape)[2] for shape in FITTED[:120]])
    count = gemm.inputs(VARIANT, {"sm_count": SM_COUNT, "peak": PEAK, **learnt}, features).shape[1]
    prior = gemm_prior(PEAK, SM_COUNT, LAUNCH, 4e12, 5e7, count)
    points = Points(features, bytes_, flops, seconds, np.full(120, 0.004))
    return fit_surface("gemm", VARIANT, points, replace(prior, fixed={**prior.fixed, **learnt}))


@cache
def known() -> Surface:
    return surface(learnt_tiles())


AMPERE = "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2"


@pytest.mark.parametrize(("names", "tile", "mode", "family"), [
    (["cutlass_75_tensorop_bf16_s1688gemm_bf16_128x256_nt_align1"], (256, 128, 32), 0, "align1"),
    (["Memset (Device)", AMPERE], (128, 256, 64), 1, "align2"),
    ([AMPERE, "cublasLt::splitKreduce_kernel<32, 16>"], (128, 256, 64), 2, "align2"),
    (["cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_nn_align2"], (32, 32, 128), 0, "align2"),
])  # fmt: skip
def test_names_of_kernels(names: list[str], tile: tuple[int, int, int], mode: int, family: str) -> None:
    shape = FITTED[0]
    found = ran(shape, [[name, 1e-5] for name in names])
    assert found == Ran(shape, tile, mode, family, pytest.approx(1e-5 * len(names)))


def test_other_names_are_of_no_such_kernel() -> None:
    for name in ("nvjet_sm90_tst_128x160_64x5_1x2_h_bz_NTT", "cutlass_80_simt_sgemm_128x64_8x5_nn_align1x"):
        assert ran(FITTED[0], [[name, 1e-5]]) is None


def test_new_products_are_forecast_from_what_was_learnt() -> None:
    new = shapes(1, 200)
    seconds = np.array([library(shape)[2] for shape in new])
    off, plain = (np.abs(np.log(made.predict(*columns(new)).seconds / seconds)) for made in (known(), surface({})))
    assert np.median(off) < 0.025
    assert np.quantile(off, 0.9) < 0.08
    assert np.quantile(off, 0.9) < 0.7 * np.quantile(plain, 0.9)


def test_what_was_learnt_is_kept_for_unaligned_products_alone() -> None:
    every = {(2, "nn"): {**learnt_tiles(), "tile/aligned/sharpness": 20.0}}
    assert gemm.learnt_for(VARIANT, every) == learnt_tiles()
    assert gemm.learnt_for(GemmVariant("nn", "bf16"), every) == {"tile/aligned/sharpness": 20.0}
    assert gemm.learnt_for(GemmVariant("tn", "bf16"), every) == {}


def test_few_names_teach_nothing() -> None:
    few = [(shape, kernels(shape)) for shape in FITTED[: fit_gemm_unaligned.LEAST_NAMES - 1]]
    assert learn_tiles(few, SM_COUNT, {"bf16": PEAK}) == {}


def test_a_mode_never_seen_is_never_expected() -> None:
    """None of the library's products adds up its parts by a kernel of its own."""
    learnt = [learnt_tiles()[f"unaligned/align1/{r}x{c}x{d}/reduced"] for r, c, d in PACES]
    assert learnt == [-fit_gemm_unaligned.NEVER] * 3


@pytest.mark.parametrize("what", ["m", "n", "k"])
def test_more_work_takes_longer(what: str) -> None:
    """Twice a side and more, rows alike: never less by more than what a tile's change makes."""
    base = shapes(2, 300)
    more = [Gemm(**{**vars(s), what: getattr(s, what) + 128 * (getattr(s, what) // 64 + 1)}) for s in base]
    less, greater = (known().law(*columns(of)) for of in (base, more))
    assert np.min(greater - less) > np.log(0.97)


def test_beyond_what_was_learnt_the_choice_stays() -> None:
    tiny = [Gemm(m=m, n=n, k=k, layout="nn") for m, n, k in ((189, 73, 85), (65, 97, 129), (16, 16, 17))]
    seconds = np.exp(known().law(*columns(tiny)))
    assert np.all((seconds > 1e-6) & (seconds < 2e-5))
    huge = Gemm(m=262_145, n=65_537, k=16_385, layout="nn")
    reached = huge.flops / np.exp(known().law(*columns([huge])))[0]
    assert 0.05 * PEAK < reached < 0.2 * PEAK


def test_rows_by_how_they_start() -> None:
    kinds = {2: "2", 4: "4", 8: "8", 16: "16", 32: "32", 64: "64", 128: "128", 4096: "128"}
    beside = {4094: "2", 4098: "2", 4092: "4", 4100: "4", 4088: "8", 4112: "16"}
    apart = {4114: "2_apart", 4132: "4_apart", 4126: "2_apart", 4124: "4_apart", 4120: "8_apart"}
    for row_bytes, kind in {**kinds, **beside, **apart}.items():
        assert gemm_unaligned.ROWS[int(row_kind(np.array([row_bytes]))[0])] == kind, row_bytes


def test_how_far_rows_are_from_whole_lines() -> None:
    of = {4096: 0, 4098: 1, 4094: 1, 4352: 128, 4364: 122, 2: 1, 512: 0, 768: 128}
    assert row_shift(np.array(list(of))).tolist() == list(of.values())


def test_what_rows_take_besides_is_learnt_kept_and_asked_for() -> None:
    """Rows of k beside a multiple of PITCH take 20% less than others: forecasts of such new ones do, too."""
    rng = np.random.default_rng(6)
    found = []
    for _ in range(400):
        k = int(rng.choice([512, 1024, 2048, 4096]) + rng.choice([1, 3, 65, 127]))
        shape = Gemm(m=int(rng.integers(8, 64)) * 128, n=int(rng.integers(8, 64)) * 128, k=k, layout="nn")
        is_beside = (k - 1) % 256 in (0, 2)
        found.append((shape, library(shape)[2] * (0.8 if is_beside else 1.0), is_beside))
    rows = [(shape, [(name, seconds)]) for shape, seconds, _ in found for name, *_ in kernels(shape)[-1:]]
    learnt = learn_tiles(rows, SM_COUNT, {"bf16": PEAK})[2, "nn"]
    assert any("/a+2" in name for name in learnt)
    made = surface(learnt)
    off = made.law(*columns([shape for shape, *_ in found])) - np.log([seconds for _, seconds, _ in found])
    beside = np.array([is_beside for *_, is_beside in found])
    assert abs(np.median(off[beside]) - np.median(off[~beside])) < 0.03


def test_idle_blocks_of_a_grid_crowd_the_others() -> None:
    """17 x 5 blocks are launched as 17 x 8: more than there are SMs, so that some get two; 17 x 4 fit."""
    made = Kernels(*(np.array([size]) for size in (128.0, 128.0, 64.0)), {}, {})
    sides = np.array([[2133.0, 534.0, 682.0, 1.0], [2133.0, 512.0, 682.0, 1.0]])
    at = waves(made, sizes_of(sides, np.full((2, 3), 1024)), SM_COUNT)
    assert at.along_n[:, 0].tolist() == [5.0, 4.0]
    assert at.busiest[:, 0].tolist() == [2.0, 1.0]


def test_the_gradient_of_the_choice() -> None:
    rng = np.random.default_rng(0)
    count, tiles = 30, 3
    logs = np.column_stack([np.ones(count), rng.normal(0, 1, (count, len(SLOPES) - 1))])
    times = rng.normal(-9, 0.3, (count, tiles, len(MODES)))
    tile, mode = rng.integers(0, tiles, count), rng.integers(0, len(MODES), count)
    at = logs, times, tile, mode, np.full(len(SLOPES), 0.7)
    theta = np.append(rng.normal(0, 0.5, tiles * len(MODES) * len(SLOPES)), 1.0)

    def value(x: Array) -> float:
        return fit_gemm_unaligned.negative_log_posterior(x, *at)[0]

    def slope(x: Array) -> Array:
        return fit_gemm_unaligned.negative_log_posterior(x, *at)[1]

    assert check_grad(value, slope, theta, epsilon=1e-6) < 1e-3 * float(np.linalg.norm(slope(theta)))


def test_a_surface_survives_json() -> None:
    again = decode(Surface, known().to_json(), "a surface")
    asked = columns(shapes(5, 40))
    assert np.array_equal(known().predict(*asked).seconds, again.predict(*asked).seconds)
