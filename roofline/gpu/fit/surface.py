"""Fits one surface: the law's parameters robustly, then the residual's hyper-parameters by their posterior. scipy.

Every parameter has a prior, so one point is as valid an input as a thousand: with few points the prior (from other
surfaces of the class and the ceilings) dominates, with many the data do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.fit.priors import Prior
from flopcast.roofline.gpu.laws import gemm
from flopcast.roofline.gpu.laws.laws import LAWS
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.profile.gaussian_process import (
    Coordinates,
    Residual,
    lower_inverse,
    matern,
    same_inputs,
    squared_distances,
)
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.variants import Variant

FOLDS = 4
POOLED_POINTS = 20  # surfaces of fewer points take their error bars from all of their class
SCALE_BOUNDS = 0.8, 3.0
DOUBT_FACTOR = 3.0
LEARNT_CONVOLUTIONS = 60  # points from which on a surface of convolutions has hyper-parameters of its own
CHOSEN_POINTS = 12  # convolutions from which on one that cuDNN runs on another kernel stands out
# Standard deviations from which on the error of a product, or a convolution, is attributed to it alone.
OFF = {"gemm": 2.0, "conv": 3.0}
HYPER_POINTS = 500  # most points that hyper-parameters are fitted to: each step costs points^3
# Bounded parameters and their greatest value. GPUs boost above their datasheet's clock by a few percent.
_BOUNDED = {"quantised": 1.0, "absorbed": 1.0} | dict.fromkeys(
    ("efficiency", "dq_efficiency", "onepass_efficiency", *gemm.TILE_NAMES), 1.15
)
_LINEAR = frozenset(["misaligned_result", "uneven", "partial"])
# Residuals beyond this many log seconds, by kind of law, count linearly instead of by their square.
_ROBUST = {"memory": 0.05, "gemm": 0.08, "tuned": 0.08, "attention": 0.08, "conv": 0.15}


@dataclass(frozen=True)
class Points:
    """Measured points of one surface: features[points, sizes]; the other arrays have one value per point."""

    features: Array
    bytes: Array
    flops: Array
    seconds: Array
    noise: Array

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, which: NDArray[np.bool_]) -> Points:
        columns = (self.features, self.bytes, self.flops, self.seconds, self.noise)
        return Points(*(column[which] for column in columns))


def fit_surface(kind: str, variant: Variant, points: Points, prior: Prior, base: Surface | None = None) -> Surface:
    """Fits a surface to `points`; `base`: that of the same kernel with cold operands, whose residual it shares.

    Raises ValueError without points or with times that are not positive."""
    if not len(points) or not np.all(points.seconds > 0) or not np.all(np.isfinite(points.seconds)):
        raise ValueError("a surface needs at least one point, and positive finite times")
    apart = _less_base(points, base)
    params = fit_law(kind, variant, apart, prior)
    residual = _fit_residual(kind, variant, params, apart, prior)
    surface = _surface(kind, variant, params, points, residual, base)
    surface = replace(surface, own=_own(surface))
    return replace(surface, residual=replace(residual, sigma_scale=_sigma_scale(surface, points, prior)))


def fit_doubtful(kind: str, variant: Variant, points: Points, prior: Prior) -> tuple[Surface, int]:
    """Fits a surface to times that may be wrong by large factors; returns it and the number of doubtful points.

    On a busy machine a wall clock reads 8 ms for 20 us where a thread waits to be scheduled, in every sample of a run.
    A point that is off by DOUBT_FACTOR from the prediction of the others, and by more than three of its standard
    deviations, is kept with its error as its noise, so that it hardly influences the fit."""
    surface = fit_surface(kind, variant, points, prior)
    error, sigma = surface.leave_one_out
    off = np.abs(error)
    doubtful = (off > np.log(DOUBT_FACTOR)) & (off > 3.0 * sigma)
    if not doubtful.any():
        return surface, 0
    points = replace(points, noise=np.where(doubtful, np.maximum(off, points.noise), points.noise))
    return fit_surface(kind, variant, points, prior), int(doubtful.sum())


def _less_base(points: Points, base: Surface | None) -> Points:
    """The points with their times divided by the residual that they share with the base."""
    if base is None:
        return points
    lent = base.residual_at(points.features, points.bytes)[0]
    return replace(points, seconds=points.seconds * np.exp(-lent))


def _surface(
    kind: str,
    variant: Variant,
    params: dict[str, float],
    points: Points,
    residual: Residual,
    base: Surface | None = None,
) -> Surface:
    return Surface(
        kind=kind,
        variant=variant,
        params=params,
        features=tuple(tuple(row) for row in points.features.tolist()),
        bytes=tuple(points.bytes.tolist()),
        flops=tuple(points.flops.tolist()),
        seconds=_rounded(points.seconds),
        noise=_rounded(points.noise),
        residual=residual,
        has_base=base is not None,
        base=base,
    )


def _rounded(values: Array) -> tuple[float, ...]:
    """Rounds to five significant digits, the accuracy of the values, which keeps profiles small."""
    return tuple(float(f"{value:.5g}") for value in values)


def _sigma_scale(surface: Surface, points: Points, prior: Prior) -> float:
    """The factor of sigma that puts 90% of the errors of left-out points within the 90% interval.

    Of few points it is the scale of the surface that the prior was learnt from, else 1.

    Laws of many parameters overfit their points, and leaving a point out of the residual alone underestimates their
    error (L40S products: 17% at the 90th percentile, against 21% on new shapes). So the laws are fitted again without
    each quarter of the points."""
    count = len(points)
    if count < POOLED_POINTS:
        return prior.hyper.sigma_scale
    return scale_of(left_out_ratios(surface, points, prior, FOLDS))


def left_out_ratios(surface: Surface, points: Points, prior: Prior, folds: int) -> Array:
    """|error| / sigma of each point, with law, hyper-parameters and base fitted without its fold.

    Products have thousands of points, so their hyper-parameters are not fitted again."""
    count = len(points)
    ratio = np.empty(count)
    fold = np.random.default_rng(0).permutation(count) % folds
    bare = replace(surface.residual, sigma_scale=1.0)
    for i in range(folds):
        others, left = points.take(fold != i), points.take(fold == i)
        base = None if surface.base is None else surface.base.without(left.features)
        told = _less_base(others, base)
        params = fit_law(surface.kind, surface.variant, told, prior, start=surface.params)
        if surface.kind != "gemm":
            bare = _fit_residual(surface.kind, surface.variant, params, told, prior)
        apart = _surface(surface.kind, surface.variant, params, others, bare, base)
        found = replace(apart, own=_own(apart)).predict(left.features, left.bytes, left.flops)
        ratio[fold == i] = np.abs(np.log(found.seconds / left.seconds) / found.sigma)
    return ratio


def _own(surface: Surface) -> tuple[float, ...]:
    """Own noise per product or convolution: its error, where the others' prediction is more than OFF deviations off.

    A product with a tile that a library rarely picks, or a grid that just misses a wave, takes up to twice the time of
    its neighbours, and says nothing about them. Cross-validated errors of tn on an H200: 3.0% at the median and 14% at
    the 90th percentile without this noise, 2.4% and 12% with it.

    A convolution for which cuDNN takes a kernel of another kind takes up to ten times as long: 124 held out on an H200
    24% at the 90th percentile without this noise, 19% with it."""
    least = {"gemm": POOLED_POINTS, "conv": CHOSEN_POINTS}.get(surface.kind)
    if least is None or len(surface.seconds) < least:
        return ()
    error, sigma = surface.leave_one_out
    off = np.abs(error) > OFF[surface.kind] * sigma / surface.residual.sigma_scale
    return _rounded(np.where(off, np.abs(error), 0.0)) if off.any() else ()


def scale_of(ratios: Array) -> float:
    """The factor of sigma that puts 90% of the errors within the 90% interval, within SCALE_BOUNDS."""
    return float(np.clip(np.quantile(ratios, 0.9) / Z_90, *SCALE_BOUNDS))


# --- the law ------------------------------------------------------------------------------------------------


def _encode(name: str, value: float) -> float:
    if name in _LINEAR:
        return value
    if name in _BOUNDED:
        share = min(max(value / _BOUNDED[name], 1e-6), 1 - 1e-6)
        return float(np.log(share / (1.0 - share)))
    return float(np.log(value))


def _decode(name: str, value: float) -> float:
    if name in _LINEAR:
        return float(value)
    return float(_BOUNDED[name] / (1.0 + np.exp(-value)) if name in _BOUNDED else np.exp(value))


def fit_law(
    kind: str, variant: Variant, points: Points, prior: Prior, start: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Fits the law's parameters by least squares of log errors, large ones damped, with the prior as further residuals.

    `start`: parameters near the solution, from which few steps are enough."""
    from scipy.optimize import least_squares

    names = list(prior.law)
    center = np.array([_encode(name, prior.law[name].value) for name in names])
    width = np.array([prior.law[name].sd for name in names])
    measured = np.log(points.seconds)
    scale = np.hypot(_ROBUST[kind], points.noise)

    def params(theta: Array) -> dict[str, float]:
        return {**prior.fixed, **{name: _decode(name, t) for name, t in zip(names, theta.tolist(), strict=True)}}

    def misfit(theta: Array) -> Array:
        law = LAWS[kind].log_seconds(variant, params(theta), points.features, points.bytes, points.flops)
        return np.concatenate([(law - measured) / scale, (theta - center) / width])

    # 8 prior deviations either way are as good as no bound, and keep exp() finite
    low, high = center - 8 * width, center + 8 * width
    if start is None:
        firsts, steps = [center], 50
        if "tile_odd" in names:  # a library without the odd tiles is a local minimum of its own
            firsts.append(np.where([name == "tile_odd" for name in names], center - 1.5 * width, center))
    else:
        firsts, steps = [np.clip([_encode(name, start[name]) for name in names], low, high)], 10
    found = min(
        (least_squares(misfit, first, loss="soft_l1", max_nfev=steps, bounds=(low, high)) for first in firsts),
        key=lambda result: float(result.cost),
    )
    return params(found.x)


# --- the residual -------------------------------------------------------------------------------------------

_LENGTH_SD, _AMPLITUDE_SD, _WHITE_SD = 0.8, 0.7, 0.7
# Octaves: a longer length scale would carry one corner's error across the plane.
_LENGTH_BOUNDS, _AMPLITUDE_BOUNDS, _WHITE_BOUNDS = (0.3, 12.0), (0.005, 0.6), (0.002, 0.3)
_GEMM_LENGTH = 1.5  # least, of inputs that jump between shapes: shorter ones would learn single shapes
_MEMORY_LENGTH = 4.0  # so that a memory surface's residual has faded at the end of its monotone grid


def _fit_residual(kind: str, variant: Variant, params: dict[str, float], points: Points, prior: Prior) -> Residual:
    """Finds the hyper-parameters of greatest posterior (marginal likelihood times log-normal priors) by an analytic
    gradient.

    Few points on round sizes say how a law of up to 16 parameters fits these, not how far a library jumps between
    sizes: fewer than POOLED_POINTS do not narrow what a surface of more points of their class has shown. Those of fewer
    than LEARNT_CONVOLUTIONS convolutions stay as they were believed: of 6 to 60 points left out were off by 18.9% at
    the 90th percentile with learnt ones (depthwise 20.8%), with these by 17.5% (17.9%); beside surfaces of 60 to 250
    points 866 that were held out by 17.6%, by 19.1% with believed ones."""
    if kind == "conv" and len(points) < LEARNT_CONVOLUTIONS:
        return prior.hyper
    from scipy.optimize import minimize

    belief = prior.hyper
    law = LAWS[kind].log_seconds(variant, params, points.features, points.bytes, points.flops)
    at = Coordinates(
        LAWS[kind].inputs(variant, params, points.features),
        LAWS[kind].sensitivities(params, points.features, points.bytes),
    )
    residual = np.log(points.seconds) - law
    noise = points.noise
    if len(points) > HYPER_POINTS:
        some = np.random.default_rng(0).permutation(len(points))[:HYPER_POINTS]
        at = Coordinates(at.inputs[some], at.terms[some])
        residual, noise = residual[some], noise[some]
    longest = _MEMORY_LENGTH if kind == "memory" else _LENGTH_BOUNDS[1]
    shortest = _GEMM_LENGTH if kind == "gemm" else _LENGTH_BOUNDS[0]
    count = len(belief.lengths)
    bounds = np.log([(shortest, longest)] * count + [_AMPLITUDE_BOUNDS, _WHITE_BOUNDS])
    center = np.log([*belief.lengths, belief.amplitude, belief.white]).clip(bounds[:, 0], bounds[:, 1])
    if prior.is_learnt and len(points) < POOLED_POINTS:
        bounds[count:, 0] = center[count:]
    width = np.array([_LENGTH_SD] * count + [_AMPLITUDE_SD, _WHITE_SD])
    # outliers of the residual would raise the white noise of all points: damp them at 4 deviations
    spread = max(1.4826 * float(np.median(np.abs(residual - np.median(residual)))), 0.01)
    damped = np.clip(residual, np.median(residual) - 4 * spread, np.median(residual) + 4 * spread)
    if len(points) < 3:
        best = center
    else:
        found: Any = minimize(  # type: ignore[call-overload]
            _negative_log_posterior, center, args=(at, damped, noise, belief.levels, center, width),
            jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40},
        )  # fmt: skip
        best = found.x
    *lengths, amplitude, white = (float(value) for value in np.exp(best))
    return Residual(tuple(lengths), amplitude, white, belief.levels)


def _negative_log_posterior(
    theta: Array, at: Coordinates, residual: Array, noise: Array, levels: tuple[float, ...], center: Array, width: Array
) -> tuple[float, Array]:
    lengths, amplitude, white = np.exp(theta[:-2]), float(np.exp(theta[-2])), float(np.exp(theta[-1]))
    squared = squared_distances(at.inputs, at.inputs, lengths)
    distance = np.sqrt(squared)
    smooth = amplitude**2 * matern(distance)
    same = same_inputs(at.inputs, at.inputs)
    matrix = (at.terms * np.array(levels) ** 2) @ at.terms.T + smooth + white**2 * same + np.diag(noise**2)
    inverse_factor = lower_inverse(np.linalg.cholesky(matrix))
    inverse = inverse_factor.T @ inverse_factor
    weights = inverse @ residual
    value = 0.5 * float(residual @ weights) - float(np.log(np.diag(inverse_factor)).sum())
    # d value / d matrix, then the chain rule; d smooth / d log length_j = 3 amplitude^2 exp(-sqrt3 r)
    # squared_j
    slope = 0.5 * (inverse - np.outer(weights, weights))
    along = slope * (3.0 * amplitude**2 * np.exp(-np.sqrt(3.0) * distance))
    scaled = at.inputs / lengths
    gradient = np.empty_like(theta)
    gradient[:-2] = 2.0 * (along.sum(axis=1) @ scaled**2 - (scaled * (along @ scaled)).sum(axis=0))
    gradient[-2] = 2.0 * float((slope * smooth).sum())
    gradient[-1] = 2.0 * white**2 * float((slope * same).sum())
    off = (theta - center) / width
    return value + 0.5 * float(off @ off), gradient + off / width
