"""Smooth minimum and maximum of times, medians, the alignment of sizes: what several laws share. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Exponents of the smooth minimum over configurations and of the smooth maximum of matrix and memory time.
# A higher one is nearer to min and max; 60 leaves 4% between one configuration and ten equal ones.
SOFT_MIN, SOFT_MAX, SOFT_STEP = 60.0, 4.0, 6.0


def soft_min(times: Array) -> Array:
    """The smooth minimum over the last axis; relative to the least so that powers neither overflow nor vanish."""
    least = times.min(axis=-1, keepdims=True)
    mass = np.exp(-SOFT_MIN * np.log(times / least)).sum(axis=-1)
    return np.asarray(least[..., 0] * np.exp(-np.log(mass) / SOFT_MIN))


def soft_max(a: Array, b: Array, power: float = SOFT_MAX) -> Array:
    greater = np.maximum(a, b)
    lesser = np.minimum(a, b)
    return np.asarray(greater * (1.0 + (lesser / greater) ** power) ** (1.0 / power))


def median(values: Array) -> Array:
    """The median over the first axis; np.median would import masked arrays (10 ms) to look for NaNs."""
    ordered, half = np.sort(values, axis=0), len(values) // 2
    return np.asarray(ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2.0)


def trailing_zeros(log2_size: Array) -> Array:
    """log2 of the largest power of two that divides the size, at most 7; 7 for sizes above 2^50."""
    size = np.round(np.exp2(np.minimum(log2_size, 50.0))).astype(np.int64)
    power = np.minimum(np.where(size > 0, size & -size, 128), 128)
    return np.asarray(np.frexp(power)[1] - 1.0)
