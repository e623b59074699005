"""A surface predicts what it was given, rises with the work, and falls back on its law where nothing was
measured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopcast.decode import decode
from flopcast.errors import DataError
from flopcast.roofline.gpu.fit.priors import Belief, attention_prior, gemm_prior, memory_prior
from flopcast.roofline.gpu.fit.surface import Points, fit_surface
from flopcast.roofline.gpu.laws.laws import LAWS
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.profile import surface
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.variants import SurfaceKey, parse_variant

FLOOR, BANDWIDTH, PEAK, SM_COUNT = 2e-6, 2e12, 300e12, 108.0


def gemm_columns(sizes: Array) -> tuple[Array, Array, Array]:
    """(features, bytes, flops) of bf16 products; sizes[rows, (m, n, k)]."""
    m, n, k = sizes.T
    return np.log2(sizes), 2 * (m * k + k * n + m * n), 2 * m * n * k


def gemm_law(sizes: Array) -> Array:
    """The best of a few tiles and of k cut in up to four, blocks in whole waves."""
    m, n, k = sizes.T
    busy = []
    for rows, columns in ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)):
        rate = PEAK / SM_COUNT * (0.75 - 0.15 * (rows * columns < 16384))
        for split in (1, 2, 4):
            waves = np.ceil(split * np.ceil(m / rows) * np.ceil(n / columns) / SM_COUNT)
            added = 3e-6 + 8 * split * m * n / 4e12 if split > 1 else 0.0
            busy.append(added + waves * (1e-6 + 2 * rows * columns * np.ceil(k / split / 64) * 64 / rate))
    return np.asarray(FLOOR + np.maximum(np.min(busy, axis=0), 2 * (m * k + k * n + m * n) / BANDWIDTH))


def memory_surface(seed: int, noise: float = 0.02, count: int = 24) -> Surface:
    """Bytes over a wide range, a few row lengths; 30% slower where rows are short, which the law does not
    know."""
    rng = np.random.default_rng(seed)
    bytes_ = np.round(2.0 ** rng.uniform(10, 30, count))
    inner = rng.choice([16.0, 128.0, 1024.0], count)
    seconds = (FLOOR + bytes_ * np.where(inner < 64, 1.3, 1.0) / BANDWIDTH) * np.exp(rng.normal(0, noise, count))
    features = np.column_stack([np.log2(bytes_), np.log2(inner)])
    points = Points(features, bytes_, np.zeros(count), seconds, np.full(count, 0.005))
    prior = memory_prior(Belief(3e-6, 0.5), Belief(1.5e12, 0.5), 3)
    return fit_surface("memory", parse_variant("mul|fp32>fp32|a>a"), points, prior)


def gemm_surface(count: int = 120, noise: float = 0.02) -> Surface:
    rng = np.random.default_rng(1)
    sizes = np.round(2.0 ** rng.uniform(0, 7, (count, 3))) * 64
    seconds = gemm_law(sizes) * np.exp(rng.normal(0, noise, count))
    points = Points(*gemm_columns(sizes), seconds, np.full(count, 0.005))
    return fit_surface("gemm", parse_variant("nt/bf16"), points, gemm_prior(PEAK, SM_COUNT, 2.5e-6, 1.6e12, 40e6, 11))


def attention_surface() -> Surface:
    rng = np.random.default_rng(2)
    grid = np.array([(h, s) for h in range(2, 8) for s in range(7, 14)], float)
    heads, seq = 2.0 ** rng.permutation(grid)[:40].T
    flops, bytes_ = 256 * heads * seq**2, 4 * 2 * heads * seq * 128
    seconds = (FLOOR + flops / (0.5 * PEAK / (1 + 200 / seq))) * np.exp(rng.normal(0, 0.02, 40))
    features = np.column_stack([np.log2(heads), np.ones(40), np.log2(seq)])
    points = Points(features, bytes_, flops, seconds, np.full(40, 0.005))
    prior = attention_prior(PEAK, SM_COUNT, FLOOR, BANDWIDTH)
    return fit_surface("attention", parse_variant("fwd/causal/bf16/d128"), points, prior)


MADE = {"memory": lambda: memory_surface(0), "gemm": gemm_surface, "attention": attention_surface}


@cache
def fitted(kind: str) -> Surface:
    return MADE[kind]()


def own_points(surface: Surface) -> tuple[Array, Array, Array]:
    return np.array(surface.features), np.array(surface.bytes), np.array(surface.flops)


@pytest.mark.parametrize("kind", MADE)
def test_measured_points_come_back_within_their_noise(kind: str) -> None:
    surface = fitted(kind)
    found = surface.predict(*own_points(surface))
    error = np.log(found.seconds / np.array(surface.seconds))
    assert np.median(np.abs(error)) < 0.01
    assert np.quantile(np.abs(error), 0.95) < 0.03
    assert np.all(found.likeness == 1.0)
    assert surface.measured == set(surface.features)


@pytest.mark.parametrize("kind", MADE)
def test_json_gives_identical_predictions(kind: str) -> None:
    surface = fitted(kind)
    again = decode(Surface, json.loads(json.dumps(surface.to_json())), "a surface")
    assert again == surface
    features, bytes_, flops = own_points(surface)
    here, there = (s.predict(features + 0.37, bytes_ * 1.3, flops * 1.3) for s in (surface, again))
    assert there.seconds == pytest.approx(here.seconds, rel=3e-5)  # a file keeps seven digits of what was solved for
    assert there.sigma == pytest.approx(here.sigma, rel=1e-6)


def test_new_products_are_predicted_and_their_interval_holds() -> None:
    rng = np.random.default_rng(7)
    sizes = np.round(2.0 ** rng.uniform(0, 7, (2000, 3))) * 64
    found = fitted("gemm").predict(*gemm_columns(sizes))
    error = np.log(found.seconds / gemm_law(sizes))
    assert np.median(np.abs(error)) < 0.04
    assert 0.8 < np.mean(np.abs(error) < 1.645 * found.sigma) <= 1.0


def test_what_the_law_lacks_is_learnt() -> None:
    """The 30% that short rows cost is in no parameter of the law."""
    bytes_ = np.full(2, 2.0**26)
    features = np.column_stack([np.log2(bytes_), np.log2([16.0, 1024.0])])
    short, long = memory_surface(0, noise=0.005, count=60).predict(features, bytes_, np.zeros(2)).seconds
    assert 1.2 < short / long < 1.4


def test_far_from_every_point_the_law_answers_with_a_wider_bar() -> None:
    surface = fitted("gemm")
    sizes = np.array([[2.0**20, 2.0**20, 2.0**17], [2.0**21, 64.0, 64.0]])
    columns = gemm_columns(sizes)
    found = surface.predict(*columns)
    # the residual's level may shift the law as a whole, nothing else is left of it
    assert np.all(np.abs(np.log(found.seconds) - surface.law(*columns)) < 0.1)
    near = surface.predict(*own_points(surface))
    assert np.all(found.sigma > 2 * np.median(near.sigma))
    assert np.all(found.likeness < 0.3)


@given(
    bytes_=st.floats(1, 40), doublings=st.floats(0.01, 4), inner=st.sampled_from([1.0, 4.0, 7.0, 8.5, 10.0,
    17.0]), seed=st.sampled_from([0, 1, 2]), noise=st.sampled_from([0.02, 0.15]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_more_bytes_never_take_less(bytes_: float, doublings: float, inner: float, seed: int, noise: float) -> None:
    surface = _noisy(seed, noise)
    log_bytes = np.array([bytes_, bytes_ + doublings])
    features = np.column_stack([log_bytes, [inner, inner]])
    less, more = surface.predict(features, np.exp2(log_bytes), np.zeros(2)).seconds
    assert 0 < less <= more * (1 + 1e-3)  # 0.1%: where the monotone grid ends and the law takes over


@cache
def _noisy(seed: int, noise: float) -> Surface:
    return memory_surface(seed, noise)


@given(
    exponents=st.tuples(*[st.integers(4, 16)] * 3), axis=st.integers(0, 2), kind=st.sampled_from(["law", "residual"])
)
@settings(max_examples=150, deadline=None)
def test_doubling_a_product_never_makes_it_much_faster(exponents: tuple[int, int, int], axis: int, kind: str) -> None:
    small = 2.0 ** np.array(exponents)
    sizes = np.array([small, small * np.where(np.arange(3) == axis, 2.0, 1.0)])
    columns = gemm_columns(sizes)
    surface = fitted("gemm")
    if kind == "law":
        less, more = np.exp(surface.law(*columns))
        assert 0 < less <= more * (1 + 1e-9)
    else:  # twice the size may run another, better kernel: the residual bends the law by what it learnt
        less, more = surface.predict(*columns).seconds
        assert 0 < less <= more * 1.15


@given(heads=st.integers(0, 12), seq=st.integers(0, 17), axis=st.integers(0, 1), group=st.sampled_from([0.0, 1.0, 3.0]))
@settings(max_examples=100, deadline=None)
def test_attention_law_rises_with_heads_and_length(heads: int, seq: int, axis: int, group: float) -> None:
    h = np.array([2.0**heads, 2.0 ** (heads + (axis == 0))])
    s = np.array([2.0**seq, 2.0 ** (seq + (axis == 1))])
    features = np.column_stack([np.log2(h), [group, group], np.log2(s)])
    columns = features, 4 * 2 * h * s * 128, 256 * h * s * s
    less, more = np.exp(fitted("attention").law(*columns))
    assert 0 < less <= more * (1 + 1e-9)
    found = fitted("attention").predict(*columns)
    assert np.all(np.isfinite(found.seconds) & (found.seconds > 0) & (found.sigma > 0))


@given(st.lists(st.floats(1e-7, 1e-1), min_size=1, max_size=6), st.floats(1, 35))
@settings(max_examples=60, deadline=None)
def test_any_positive_times_make_a_finite_surface(seconds: list[float], log_bytes: float) -> None:
    count = len(seconds)
    bytes_ = np.full(count, 2.0**log_bytes)
    points = Points(np.log2(bytes_)[:, None], bytes_, np.zeros(count), np.array(seconds), np.full(count, 0.01))
    surface = fit_surface("memory", parse_variant("x"), points, memory_prior(Belief(2e-6, 0.5), Belief(1e12, 0.5), 1))
    found = surface.predict(np.array([[log_bytes], [12.5]]), np.array([bytes_[0], 5793.0]), np.zeros(2))
    assert np.all(np.isfinite(found.seconds) & (found.seconds > 0))
    assert np.all(np.isfinite(found.sigma) & (found.sigma > 0))


def test_an_answer_does_not_depend_on_what_else_is_asked() -> None:
    surface = fitted("memory")
    log_bytes = np.linspace(12, 28, 50)
    features = np.column_stack([log_bytes, np.full(50, 7.0)])
    together = surface.predict(features, np.exp2(log_bytes), np.zeros(50)).seconds
    alone = [
        surface.predict(features[i : i + 1], np.exp2(log_bytes[i : i + 1]), np.zeros(1)).seconds[0] for i in range(50)
    ]
    assert together == pytest.approx(alone, rel=1e-12)


def test_one_row_past_a_tile_costs_a_wave() -> None:
    """108 SMs: 1,536 x 1,152 is 108 tiles of 128 x 128, one row more is 117."""
    features, bytes_, flops = gemm_columns(np.array([[1536.0, 1152.0, 4096.0], [1537.0, 1152.0, 4096.0]]))
    params = fitted("gemm").params | {"quantised": 1.0, "tile_odd": 0.05}  # a part of common tiles alone
    full, spilt = np.exp(LAWS["gemm"].log_seconds(parse_variant("nt/bf16"), params, features, bytes_, flops))
    assert spilt > 1.15 * full
    params["tile_odd"] = params["tile_common"]  # one with many more has a tile that fills the wave
    full, spilt = np.exp(LAWS["gemm"].log_seconds(parse_variant("nt/bf16"), params, features, bytes_, flops))
    assert spilt < 1.15 * full


def test_misaligned_rows_are_told_from_aligned_ones() -> None:
    sizes = np.array([[512, 512, 512], [512, 512, 513], [512, 513, 512], [513, 512, 512]], float)
    params = fitted("gemm").params
    for variant, worse in (("nt/bf16", [1]), ("nn/bf16", [1, 2]), ("tn/bf16", [2, 3])):
        operands = LAWS["gemm"].inputs(parse_variant(variant), params, np.log2(sizes))[:, -2]
        assert [i for i in range(4) if operands[i] > 0] == worse


@cache
def shared_surfaces() -> tuple[Surface, Surface, Surface, Array, Array]:
    """Cold products, and a quarter of them hot: 1.2 times as fast, off the law as the cold ones are, but where the law
    cannot tell (a ripple over the sizes). (cold, hot with it as its base, hot alone, sizes elsewhere, their seconds)"""
    rng = np.random.default_rng(5)
    sizes = np.round(2.0 ** rng.uniform(2, 7, (260, 3))) * 64
    ripple = 0.25 * np.sin(1.5 * np.log2(sizes).sum(axis=1))
    cold = gemm_law(sizes) * np.exp(ripple + rng.normal(0, 0.01, len(sizes)))
    hot = gemm_law(sizes) / 1.2 * np.exp(ripple + rng.normal(0, 0.01, len(sizes)))
    points = Points(*gemm_columns(sizes), cold, np.full(len(sizes), 0.005))
    prior = gemm_prior(PEAK, SM_COUNT, 2.5e-6, 1.6e12, 40e6, 11)
    is_fitted = np.arange(len(sizes)) < 200
    few = replace(points, seconds=hot).take(np.arange(len(sizes)) < 50)
    base = fit_surface("gemm", parse_variant("nt/bf16"), points.take(is_fitted), prior)
    return (
        base,
        fit_surface("gemm", parse_variant("nt/bf16"), few, prior, base),
        fit_surface("gemm", parse_variant("nt/bf16"), few, prior),
        sizes[~is_fitted],
        hot[~is_fitted],
    )


def test_hot_products_are_off_their_law_as_cold_ones_are() -> None:
    base, hot, alone, sizes, seconds = shared_surfaces()
    error = {}
    for name, one in (("with", hot), ("without", alone)):
        found = one.predict(*gemm_columns(sizes))
        error[name] = np.abs(np.log(found.seconds / seconds))
        assert np.mean(error[name] < 1.645 * found.sigma) > 0.7
    assert np.median(error["with"]) < 0.7 * np.median(error["without"])
    measured = [np.array(column) for column in (hot.features, hot.bytes, hot.flops, hot.seconds)]
    assert hot.predict(*measured[:3]).seconds == pytest.approx(measured[3], rel=0.03)
    # left out are both: what a shape that is new to both is told, no better
    errors, _ = hot.leave_one_out
    assert np.median(np.abs(errors)) > 0.7 * np.median(error["with"])
    twin = base.without(measured[0])
    assert len(twin.features) == len(base.features) - len(measured[0])
    assert set(twin.features).isdisjoint(hot.features)


def test_of_many_points_the_nearest_tell_how_sure_a_prediction_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never surer than all of them together, and hardly less; the prediction itself is that of all."""
    base, _, _, sizes, _ = shared_surfaces()
    everything = base.predict(*gemm_columns(sizes))
    monkeypatch.setattr(surface, "LOCAL_FROM", 100)
    nearest = base.predict(*gemm_columns(sizes))
    assert np.array_equal(nearest.seconds, everything.seconds)
    assert np.all(nearest.sigma >= everything.sigma * (1 - 1e-9))
    assert np.median(nearest.sigma / everything.sigma) < 1.1


def test_what_is_made_from_a_surface_is_solved_anew() -> None:
    read = decode(Surface, json.loads(json.dumps(fitted("gemm").to_json())), "a surface")
    twice = replace(read, seconds=tuple(2 * t for t in read.seconds))
    assert read.weights
    assert not twice.weights
    columns = own_points(read)
    assert twice.predict(*columns).seconds == pytest.approx(2 * read.predict(*columns).seconds, rel=0.1)


def test_a_file_keeps_what_hot_products_share_with_cold_ones() -> None:
    base, hot, _, sizes, _ = shared_surfaces()
    key = SurfaceKey.parse("torch/gemm/nt/bf16/hot")
    profile = Profile("g", "measured", {"type": "cuda"}, {}, {}, {key: hot, key.with_cache("cold"): base})
    kept = Profile.from_json(json.loads(json.dumps(profile.to_json()))).surfaces[key]
    for a, b in zip(kept.predict(*gemm_columns(sizes)), hot.predict(*gemm_columns(sizes)), strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    lost = profile.to_json()
    del lost["surfaces"]["torch/gemm/nt/bf16/cold"]
    with pytest.raises(DataError, match="without the cold one"):
        Profile.from_json(lost)


def test_sizes_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match="3 sizes"):
        fitted("gemm").predict(np.zeros((2, 4)), np.ones(2), np.ones(2))


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"kind": "magic"}, "kind is 'magic': valid is one of memory, gemm"),
        ({"seconds": []}, "as many bytes, flops, seconds and noise as features"),
        ({"seconds": [1e-6, -1.0] * 12}, r"seconds\[1\] is -1.0: valid is a number above 0"),
        ({"features": []}, "as many"),
        ({"residual": {}}, "residual.lengths is missing"),
        ({"variant": "a/b/c/d/e"}, "is no variant of a kernel"),
        ({"variant": 3}, "variant is 3: valid is a text"),
        ({"params": {}}, "lacks bandwidth"),
    ],
)
def test_a_malformed_record_is_refused(broken: dict[str, object], told: str) -> None:
    record = {**fitted("memory").to_json(), **broken}
    with pytest.raises(DataError, match=told):
        decode(Surface, record, "a surface")
