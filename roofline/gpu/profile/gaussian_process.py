"""A Gaussian process over the residuals of a law: covariance, inverses, nearest neighbours. numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopcast.bounds import Deviation, Positive
from flopcast.roofline.gpu.laws.smooth import Array

Numbers = dict[bytes, int]  # rows of inputs, as bytes, by number
LOCAL_CHUNK = 1024
NEAREST = 32  # points that the variance of a prediction is computed from, where there are many
MANY = 256  # rows from which to number them all costs less than to compare them input by input


@dataclass(frozen=True)
class Residual:
    """Hyper-parameters of the Gaussian process, standard deviations in log seconds. `lengths`: length scales, one per
    input of the law; `levels`: one per sensitivity of the law (`laws.law.Law`).

    `sigma_scale` widens or narrows the predictive deviation so that the leave-one-out errors fall into it as often as
    they should.
    """

    lengths: tuple[Positive, ...]
    amplitude: Deviation
    white: Deviation
    levels: tuple[Deviation, ...]
    sigma_scale: Positive = 1.0


class Coordinates(NamedTuple):
    """Where points lie: inputs[points, inputs] of the smooth part, terms[points, levels] of the law's
    uncertainty."""

    inputs: Array
    terms: Array


def covariance(
    a: Coordinates, b: Coordinates, residual: Residual, same: NDArray[np.bool_] | None = None
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """(covariance of the residuals at a (rows) and b (columns), measurement noise not included;
    correlation of their smooth parts; which are the same point)."""
    same = same_inputs(a.inputs, b.inputs) if same is None else same
    # in place: arrays of rows x points are what a long table of shapes takes its time for
    distance = squared_distances(a.inputs, b.inputs, np.array(residual.lengths))
    distance[same] = 0.0
    smooth = matern(np.sqrt(distance, out=distance))
    total = (a.terms * np.array(residual.levels) ** 2) @ b.terms.T
    total += np.multiply(smooth, residual.amplitude**2, out=distance)
    total[same] += residual.white**2
    return total, smooth, same


def local_reduction(
    points: Coordinates, residual: Residual, apart: Array, cross: Array, kinds: NDArray[np.intp]
) -> Array:
    """The reduction of the variance of each row of `cross` [rows, points] by the NEAREST of many points, by covariance;
    all points together would reduce it by no less. `apart`: the points' own variances; `kinds`: `numbered` inputs."""
    which = np.argpartition(-cross, NEAREST - 1, axis=1)[:, :NEAREST]
    inputs = points.inputs / np.array(residual.lengths)
    terms = points.terms * np.array(residual.levels)
    found = np.empty(len(cross))
    for start in range(0, len(cross), LOCAL_CHUNK):
        rows = which[start : start + LOCAL_CHUNK]
        at, kind = inputs[rows], kinds[rows]
        norms = (at**2).sum(axis=2)
        squared = norms[:, :, None] + norms[:, None, :] - 2.0 * (at @ at.transpose(0, 2, 1))
        same = kind[:, :, None] == kind[:, None, :]
        matrix = residual.amplitude**2 * matern(np.sqrt(np.where(same, 0.0, squared).clip(0.0)))
        matrix += terms[rows] @ terms[rows].transpose(0, 2, 1) + residual.white**2 * same
        matrix += apart[rows][:, :, None] * np.eye(NEAREST)
        near = np.take_along_axis(cross[start : start + LOCAL_CHUNK], rows, axis=1)
        found[start : start + LOCAL_CHUNK] = (near * np.linalg.solve(matrix, near[:, :, None])[:, :, 0]).sum(axis=1)
    return found


def numbered(inputs: Array, known: Numbers) -> NDArray[np.intp]:
    """A number for each row of `inputs`[rows, inputs], equal for equal rows. Rows in `known` keep their numbers, new
    ones are added to it. Sorting two thousand takes 14 ms, looking up their bytes 1 ms."""
    plain = np.ascontiguousarray(inputs) + 0.0  # -0.0 and 0.0 are equal, and their bytes then, too
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in plain], np.intp)


def lower_inverse(factor: Array) -> Array:
    """Inverse of a lower triangular matrix by halves: a sixth of the work of a general one, most of it products."""
    size = len(factor)
    if size <= 128:
        return np.asarray(np.linalg.inv(factor))
    half = size // 2
    first, last = lower_inverse(factor[:half, :half]), lower_inverse(factor[half:, half:])
    out = np.zeros_like(factor)
    out[:half, :half], out[half:, half:] = first, last
    out[half:, :half] = -last @ (factor[half:, :half] @ first)
    return out


def solve_positive(matrix: Array, right: Array) -> Array:
    """Solves matrix @ x = right for a symmetric, positive definite matrix by its Cholesky factor: half the time of a
    general solver. Raises LinAlgError where it is not positive definite."""
    factor = np.asarray(np.linalg.cholesky(matrix), np.float64)
    half_way = _solve_lower(factor, right)
    return _solve_lower(factor.T[::-1, ::-1], half_way[::-1])[::-1]  # an upper factor is a lower one read backwards


def _solve_lower(factor: Array, right: Array) -> Array:
    """Solves factor @ x = right for a lower triangular factor by halves."""
    size = len(factor)
    if size <= 128:
        return np.asarray(np.linalg.solve(factor, right))
    half = size // 2
    first = _solve_lower(factor[:half, :half], right[:half])
    last = _solve_lower(factor[half:, half:], right[half:] - factor[half:, :half] @ first)
    return np.concatenate([first, last])


def squared_distances(a: Array, b: Array, lengths: Array) -> Array:
    """Squared scaled distances [rows of a, rows of b], by a product: ten times as fast as differences per input."""
    a, b = a / lengths, b / lengths
    squared = np.add.outer((a**2).sum(axis=1), (b**2).sum(axis=1))
    squared -= np.multiply(both := a @ b.T, 2.0, out=both)
    return np.asarray(np.maximum(squared, 0.0, out=squared))


def same_inputs(a: Array, b: Array) -> NDArray[np.bool_]:
    """Which rows are identical, [rows of a, rows of b]. Exact, unlike distances computed by a product."""
    if len(a) >= MANY:
        numbers = numbered(np.concatenate([a, b]), {})
        return np.asarray(numbers[: len(a), None] == numbers[len(a) :])
    same = np.ones((len(a), len(b)), bool)
    for own, its in zip(a.T, b.T, strict=True):
        same &= own[:, None] == its
    return same


def matern(distance: NDArray[np.float64]) -> Array:
    """Matern 3/2: continuous with a continuous slope, no smoother, as kernels' times are between their
    steps."""
    scaled = np.sqrt(3.0) * distance
    falling = np.exp(-scaled)
    falling *= np.add(scaled, 1.0, out=scaled)
    return np.asarray(falling)
